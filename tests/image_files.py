"""Image data sets in their real formats on tiny data, for the tests of their readers."""

import functools
import hashlib
import http.server
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from training_runs import SMALL

from gpipe_cli.config.groups import AugmentationConfig, ImagesConfig
from gpipe_cli.data.images import ImageSplit, open_images
from gpipe_cli.data.splits import Splits

PLAIN = AugmentationConfig(None, horizontal_flip=False, cutout=0, shift=0)
EVERYTHING = AugmentationConfig((0.2, 1.0), horizontal_flip=True, cutout=3, shift=2)


def opened(name: str, root: Path | None = None, seed: int = 0, **settings: Any) -> Splits[ImageSplit]:
    """The splits; ten classes of 8 pixels unless told otherwise."""
    given = {"image_size": 8, "num_classes": 10, "augmentation": PLAIN, **settings}
    return open_images(ImagesConfig(name, root=None if root is None else str(root), **given), seed)  # type: ignore[arg-type]


def write_image(path: Path, size: tuple[int, int] = (20, 16), mode: str = "RGB", seed: int = 0) -> None:
    """A random image of (width, height), its format by the file's name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).convert(mode).save(path)


def write_images(folder: Path, *names: str) -> None:
    for seed, name in enumerate(names):
        write_image(folder / name, seed=seed)


def picture_settings(root: Path) -> list[str]:
    """Of trainings on two pictures of each of four classes for each split, which this writes."""
    for split, kind in product(("train", "val", "test"), ("cat", "cow", "dog", "hen")):
        write_images(root / split / kind, "1.jpg", "2.jpg")
    of_data = ("dataset=", "dataset.num_classes", "dataset.train_samples", "dataset.test_samples", "batch_size")
    given = ["dataset=image_folder", "dataset.num_classes=4", "dataset.validation=val", f"dataset.root={root}"]
    small = (setting for setting in SMALL if not setting.startswith(of_data))
    return [*given, *small, "batch_size=2", "micro_batches=2", "checkpoint.every_epochs=0", "epochs=2"]


def md5(content: bytes) -> str:
    """What torchvision knows an archive by."""
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def pack(archive: Path, **content: Path) -> str:
    """Write files and folders into a (compressed) tar archive under other names; returns its MD5."""
    with tarfile.open(archive, "w:gz" if archive.suffix == ".gz" else "w") as tar:
        for name, path in content.items():
            tar.add(path, arcname=name)
    return md5(archive.read_bytes())


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """`folder` over HTTP; yields its address."""
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
