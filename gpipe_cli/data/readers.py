"""Readers of image data sets: files, or a library's data, become samples of a training and a test split.

The paper trains on ImageNet and transfers to CIFAR-10, CIFAR-100 and five sets of photographs (Table 4). Before the
first step, each reader checks what a user can get wrong, without decoding an image.
"""

import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset

from gpipe_cli.config.groups import ImagesConfig
from gpipe_cli.data.batches import derive_seed
from gpipe_cli.data.cache import file_lock
from gpipe_cli.data.splits import Splits, divide, split_names
from gpipe_cli.errors import InputError, InvalidSettingError, error_text, format_value
from gpipe_cli.system.files import folders_in, open_regular

if TYPE_CHECKING:
    from PIL.Image import Image
    from torchvision.datasets import CIFAR10


# Endings of image files: torchvision's (torchvision.datasets.folder), and others that every Pillow decodes.
IMAGE_SUFFIXES = (
    ".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp", ".gif", ".jfif", ".jpe",
)  # fmt: skip
# Pillow looks at a file's bytes, not at its ending: for EPS it would start Ghostscript, with a program from the file
_FORMATS = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP", "GIF")
# Pillow's modes of images
_MODE_NAMES = {
    "1": "1-bit", "L": "8-bit grey", "LA": "8-bit grey", "I;16": "16-bit grey (scaled to 8)", "P": "palette",
    "RGB": "8-bit RGB", "RGBA": "8-bit RGB", "CMYK": "CMYK",
}  # fmt: skip
_UNKNOWN_RANGE = ("I", "F")  # modes of 32 bits
_ORIENTATION = 0x0112  # the EXIF tag
_DESCRIBED_FILES = 300  # about this many files are opened for the banner


class Pixels(Protocol):
    """Pixels by index, (3, H, W), uint8 or float32 in [0, 1]: a tensor (n, 3, H, W), files, or a formula."""

    def __getitem__(self, index: int, /) -> Tensor: ...


class Masks(Protocol):
    """Targets by index: the mask of each image, the classes of its pixels, int64 (n, S, S)."""

    def __len__(self) -> int: ...

    def __getitem__(self, indices: Tensor, /) -> Tensor: ...

    def select(self, indices: Tensor) -> "Masks":
        """The masks `indices`, int64 (n,), in that order."""
        ...


@dataclass(frozen=True, eq=False)
class Samples:
    """One split: pixels, targets, class names, which the targets index, () if the data names no classes, and how many
    other files of each ending, neither images nor hidden, were found there."""

    pixels: Pixels
    targets: Tensor | Masks  # a Tensor: the class of each image, int64 (n,)
    class_names: tuple[str, ...]
    skipped: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of_files(
        cls, listed: Sequence[tuple[str, int]], class_names: tuple[str, ...], skipped: Counter[str] | None = None
    ) -> "Samples":
        """Samples from (path, target) of each image file."""
        targets = torch.tensor([target for _, target in listed], dtype=torch.int64)
        return cls(ImageFiles(tuple(path for path, _ in listed)), targets, class_names, skipped or Counter())

    def split_off(self, setting: str, share: float, seed: int) -> tuple["Samples", "Samples"]:
        """The samples that stay, and those that `setting` takes out: the fraction `share` of each class, with masks of
        all samples. Raises InvalidSettingError."""
        strata = self.targets if isinstance(self.targets, Tensor) else len(self.targets)
        kept, held_out = divide(strata, setting, share, seed)
        # files that were skipped are counted once
        return self.select(kept), replace(self.select(held_out), skipped=Counter())

    def select(self, indices: Tensor) -> "Samples":
        """The samples `indices`, int64 (n,), in that order."""
        places = indices.tolist()
        if isinstance(self.pixels, ImageFiles):
            pixels: Pixels = ImageFiles(tuple(self.pixels.paths[place] for place in places))
        else:
            pixels = Subset(self.pixels, places)  # type: ignore[arg-type]  # anything with an index
        targets = self.targets[indices] if isinstance(self.targets, Tensor) else self.targets.select(indices)
        return replace(self, pixels=pixels, targets=targets)


@dataclass(frozen=True, eq=False)
class ImageFiles:
    """One image file per sample, of any size and colour mode: 16 bits become 8, and transparency becomes white."""

    paths: tuple[str, ...]

    def __getitem__(self, index: int) -> Tensor:
        """uint8 (3, H, W) of file `index`. Raises InputError, naming the file, if it cannot be decoded."""
        from PIL import Image
        from torchvision.transforms.v2.functional import pil_to_tensor

        path = self.paths[index]
        try:
            with open_image(path) as image:
                mode = image.mode
                if mode.startswith("I;16"):  # Pillow would cut all values above 255
                    image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
                elif image.has_transparency_data:
                    rgba = image.convert("RGBA")
                    image = Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba)
                pixels: Tensor = pil_to_tensor(image.convert("RGB"))
        except Exception as error:  # damaged bytes make Pillow raise OSError, SyntaxError, ValueError, struct.error, …
            why = f"cannot be read ({error_text(error)}); replace the file"
            raise InputError(f"image file '{path}': {why}") from error
        if mode in _UNKNOWN_RANGE:
            why = f"has 32-bit numbers (Pillow's mode {mode}) of unknown range; save it with 8 bits"
            raise InputError(f"image file '{path}': {why}")
        return pixels

    def describe(self) -> str:
        """The kinds of images, by the headers of some files, evenly chosen: nothing is decoded."""
        sampled = self.paths[:: -(-len(self.paths) // _DESCRIBED_FILES)]
        forms, turned = Counter[str](), 0
        for path in sampled:
            with suppress(Exception), open_header(path) as image:  # refused when read
                form = _MODE_NAMES.get(image.mode[:4], image.mode)  # without the order of bytes
                forms[f"{form} drawn on white" if image.has_transparency_data else form] += 1
                turned += image.getexif().get(_ORIENTATION) in range(2, 9)  # no other value is an orientation
        count = f"{len(sampled):,} of {len(self.paths):,}" if len(sampled) < len(self.paths) else f"{len(sampled):,}"
        kinds = ", ".join(f"{form} {number:,}" for form, number in forms.most_common())
        return f"{count} files: {kinds}" + (f"; {turned:,} turned by their tag" if turned else "")


def header_fault(path: str, *, mask: bool = False) -> str:
    """Why an image file, or a mask, cannot be read, as far as its header shows; "" if it shows no fault."""
    from PIL import UnidentifiedImageError

    try:
        with open_header(path) as image:
            return "" if mask or image.mode not in _UNKNOWN_RANGE else f"32-bit numbers (Pillow's mode {image.mode})"
    except UnidentifiedImageError:
        return "not an image" if os.path.getsize(path) else "empty"
    except Exception as error:  # as in `ImageFiles`
        return error_text(error)


@contextmanager
def open_header(path: str) -> "Iterator[Image]":
    """An image file, of which only the header is read. Raises whatever Pillow raises for damaged bytes."""
    from PIL import Image

    with open_regular(Path(path)) as file, Image.open(file, formats=_FORMATS) as image:
        yield image


@contextmanager
def open_image(path: str) -> "Iterator[Image]":
    """An image file, turned by its EXIF tag. Raises the errors of `open_header`."""
    from PIL import ImageOps

    with open_header(path) as image:
        ImageOps.exif_transpose(image, in_place=True)
        yield image


def is_image(path: str, skipped: Counter[str]) -> bool:
    """Whether a file is an image that is not hidden, by its name; a file without an ending is opened. A file that is
    neither hidden nor an image is counted in `skipped`, by its ending."""
    name = os.path.basename(path)  # a Path would take most of the time of listing a million files
    if name.startswith("."):
        return False
    shown = name.lower().endswith(IMAGE_SUFFIXES)
    if "." not in name:
        from PIL import UnidentifiedImageError

        with suppress(UnidentifiedImageError, OSError), open_header(path):
            shown = True
    if not shown and os.path.isfile(path):
        skipped[Path(path).suffix.lower() or "no ending"] += 1
    return shown


@dataclass(frozen=True)
class RandomImages:
    """Random images, each a function of (seed, index)."""

    seed: int
    image_size: int

    def __getitem__(self, index: int) -> Tensor:
        """uint8 (3, S, S), uniform over 0..255."""
        shape = (3, self.image_size, self.image_size)
        generator = torch.Generator().manual_seed(derive_seed("noise", self.seed, index))
        # Eight pixels from each 64-bit number: a number per pixel would take eight times as long.
        words = torch.empty(-(-math.prod(shape) // 8), dtype=torch.int64).random_(-(2**63), None, generator=generator)
        return words.view(torch.uint8)[: math.prod(shape)].view(shape)


def read_digits() -> Splits[Samples]:
    """scikit-learn's 1,797 handwritten digits (8x8, grey levels 0..16), 1,437 to train on and 360 to test on.

    Its file is read without importing it, which takes over a second. `digits_split.txt` has two lines, the
    numbers of the training and of the test samples, as `train_test_split(test_size=0.2, stratify=target,
    random_state=0)` chooses them.
    """
    (library,) = find_spec("sklearn").submodule_search_locations  # type: ignore[union-attr, misc]  # we depend on it
    rows = np.loadtxt(Path(library, "datasets", "data", "digits.csv.gz"), delimiter=",")
    images = torch.from_numpy(rows[:, :-1]).to(torch.float32).div(16).view(-1, 1, 8, 8).repeat(1, 3, 1, 1)
    targets = torch.from_numpy(rows[:, -1]).to(torch.int64)
    names = tuple(map(str, range(10)))
    lines = resources.files("gpipe_cli.data").joinpath("digits_split.txt").read_text("utf-8").splitlines()
    train, test = (list(map(int, line.split())) for line in lines)
    return Splits(Samples(images[train], targets[train], names), Samples(images[test], targets[test], names))


def read_cifar(reader: "type[CIFAR10]", root: Path, *, download: bool) -> Splits[Samples]:
    """CIFAR-10 or CIFAR-100 (50,000 / 10,000 images, 32x32) through torchvision's reader, which checks each file's MD5.
    Raises InputError if files are missing or damaged."""
    try:
        with file_lock(root / ".download.lock") if download else nullcontext():
            splits = [reader(str(root), train=train, download=download) for train in (True, False)]
    except (RuntimeError, OSError) as error:
        why = f"the files of '{root / reader.base_folder}' are missing or damaged ({error_text(error)})"
        setting: tuple[str, object] = ("dataset.download", True) if download else ("dataset.root", root)
        use = "check the network" if download else "set dataset.download=true"
        raise InvalidSettingError(*setting, f"{why}; {use}, or unpack {reader.url}") from error
    return Splits(
        *(
            Samples(
                torch.from_numpy(split.data).permute(0, 3, 1, 2).contiguous(),
                torch.tensor(split.targets, dtype=torch.int64),
                tuple(split.classes),
            )
            for split in splits
        )
    )


def read_random_images(dataset: ImagesConfig, seed: int) -> Splits[Samples]:
    """Random images with random targets, for speed and memory experiments: speed tables need no data set."""

    def split(setting: str, count: int | None) -> Samples:
        assert count, setting
        generator = torch.Generator().manual_seed(derive_seed(f"targets {setting}", seed))
        targets = torch.randint(dataset.num_classes, (count,), generator=generator)
        return Samples(RandomImages(derive_seed(f"images {setting}", seed), dataset.image_size), targets, ())

    return Splits(split("train_samples", dataset.train_samples), split("test_samples", dataset.test_samples))


def read_image_folder(root: Path, dataset: ImagesConfig, seed: int) -> Splits[Samples]:
    """The user's images in root/train and so on (see `split_names`) or, with a fraction `dataset.test`, in root itself,
    of which `seed` chooses that fraction as the test set. Raises the errors of `read_folders`."""
    expected = f"expected '{root}/train/<class>/*.jpg' and '{root}/test/<class>/*.jpg' (or '{root}/val')"
    if dataset.test is None:
        expected += ", or '<class>/*.jpg' alone with dataset.test=0.2"
        return Splits(*read_folders(root, expected, *split_names(root, dataset.validation)))
    if (root / "train").is_dir():
        why = f"'{root}' has a folder train, so root/test or root/val is the test set"
        raise InvalidSettingError("dataset.test", dataset.test, f"{why}; use dataset.test=null")
    (everything,) = read_folders(root, f"expected '{root}/<class>/*.jpg'", "")
    return Splits(*everything.split_off("dataset.test", dataset.test, seed))


def read_folders(root: Path, expected: str, *names: str) -> list[Samples]:
    """The images in root/<name>/<class>/ for each of the `names`; classes in alphabetical order.

    Raises InputError, with the text `expected`, for a missing folder or a class without an image.
    """
    from torchvision.datasets.folder import make_dataset

    splits = []
    for folder in (root / name for name in names):
        skipped = Counter[str]()
        try:
            numbers = {name: number for number, name in enumerate(folders_in(folder))}
            listed = make_dataset(str(folder), numbers, is_valid_file=partial(_is_visible_image, str(folder), skipped))
        except (OSError, ValueError) as error:  # no folder, no class, or a class without an image
            endings = f"files end in {' '.join(IMAGE_SUFFIXES)}, or have no ending"
            why = f"'{folder}' cannot be read ({error_text(error).partition(' Supported')[0]}); {endings}; {expected}"
            raise InvalidSettingError("dataset.root", root, why) from error
        splits.append(Samples.of_files(listed, tuple(map(format_value, numbers)), skipped))
    return splits


def _is_visible_image(folder: str, skipped: Counter[str], path: str) -> bool:
    # a notebook server keeps copies in hidden folders
    return "/." not in path[len(folder) :] and is_image(path, skipped)
