"""The data sets themselves: what is on disk (or in a library) becomes samples of a training and a test split.

The paper trains on ImageNet and transfers to CIFAR-10, CIFAR-100 and six sets of photographs (Table 4); anybody's own
photographs arrive as folders. The handwritten digits are not in the paper: they need no download and teach a small
model in minutes. Each reader checks what a user can get wrong before the first step, without decoding an image.
"""

from __future__ import annotations

import fcntl
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gpipe_cli.data.seeds import seed_of
from gpipe_cli.data.sources import Files, Noise, Source, Stored

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from torchvision.datasets import CIFAR10

__all__ = [
    "Chosen",
    "Samples",
    "choose_classes",
    "one_process_at_a_time",
    "read_cifar",
    "read_digits",
    "read_folders",
    "read_noise",
]


@dataclass(frozen=True, eq=False)
class Samples:
    """One split: pixels, targets int64 (n,), and the name of each class."""

    source: Source
    targets: Tensor
    class_names: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Chosen:
    """Some of the samples of another source, in the order of `indices`, int64 (n,)."""

    source: Source
    indices: Tensor

    def read(self, index: int) -> Tensor:
        """(3, H, W) of the sample that has number `index` here."""
        return self.source.read(int(self.indices[index]))


def choose_classes(samples: Samples, classes: tuple[int, ...]) -> Samples:
    """The samples of `classes` only, in their old order; class classes[i] gets the number i."""
    import torch

    new_number = torch.full((len(samples.class_names),), -1, dtype=torch.int64)
    new_number[list(classes)] = torch.arange(len(classes))
    targets = new_number[samples.targets]
    indices = (targets >= 0).nonzero().squeeze(1)
    names = tuple(samples.class_names[number] for number in classes)
    return Samples(Chosen(samples.source, indices), targets[indices], names)


def read_digits() -> tuple[Samples, Samples]:
    """scikit-learn's 1,797 handwritten digits (8x8, grey levels 0..16), 1,437 to train on and 360 to test on.

    The split is fixed, whatever the run's seed: scikit-learn's own, stratified, with random state 0.
    """
    import torch
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    images = torch.from_numpy(digits.images).to(torch.float32).div(16).unsqueeze(1).repeat(1, 3, 1, 1)
    targets = torch.from_numpy(digits.target).to(torch.int64)
    train, test = train_test_split(range(len(targets)), test_size=0.2, stratify=digits.target, random_state=0)
    names = tuple(str(name) for name in digits.target_names)
    return Samples(Stored(images[train]), targets[train], names), Samples(Stored(images[test]), targets[test], names)


def read_cifar(reader: type[CIFAR10], *, root: Path, download: bool) -> tuple[Samples, Samples]:
    """CIFAR-10 or CIFAR-100 (50,000 / 10,000 images, 32x32) through torchvision's reader, which checks each file's MD5.

    Raises ValueError where files are missing or damaged and `download` is false, or the download fails.
    """
    import torch

    folder = root / reader.base_folder
    try:
        if download:
            with one_process_at_a_time(root):
                reader(str(root), download=True)
        splits = [reader(str(root), train=train) for train in (True, False)]
    except (RuntimeError, OSError) as error:
        reason = " ".join(str(error).split())
        if download:
            raise ValueError(
                f"dataset.download=true: could not download {reader.url} to '{root}' ({reason}); "
                f"check the network, or unpack the archive so that '{folder}' exists"
            ) from error
        found = "are damaged or incomplete (MD5)" if folder.is_dir() else "are missing"
        raise ValueError(
            f"dataset.root={root}: the files of '{folder}' {found}; set dataset.download=true, or dataset.root to the "
            f"folder that holds '{reader.base_folder}'"
        ) from error
    train, test = (
        Samples(
            Stored(torch.from_numpy(split.data).permute(0, 3, 1, 2).contiguous()),
            torch.tensor(split.targets, dtype=torch.int64),
            tuple(split.classes),
        )
        for split in splits
    )
    return train, test


def read_folders(root: Path, test_names: tuple[str, ...] = ("test", "val")) -> tuple[Samples, Samples]:
    """Photographs as root/train/<class>/* and root/test/<class>/* (or root/val); classes in alphabetical order.

    test_names: folders that may hold the test images; the first that is there does.

    Raises ValueError for a folder that is missing or empty, or a class that only one of the splits has.
    """
    expected = f"expected '{root}/train/<class>/*.jpg' and '{root}/{test_names[0]}/<class>/*.jpg'"
    expected += "".join(f" (or '{root / name}')" for name in test_names[1:])
    if not root.is_dir():
        raise ValueError(f"dataset.root={root}: no such folder; {expected}")
    train_folder = root / "train"
    test_folder = next((root / name for name in test_names if (root / name).is_dir()), root / test_names[0])
    for folder in (train_folder, test_folder):
        if not folder.is_dir():
            raise ValueError(f"dataset.root={root}: no folder '{folder}'; {expected}")
    train_classes, test_classes = _class_names(train_folder), _class_names(test_folder)
    for folder, classes in ((train_folder, train_classes), (test_folder, test_classes)):
        if not classes:
            raise ValueError(f"dataset.root={root}: '{folder}' holds no class folder; {expected}")
    if train_classes != test_classes:
        odd = sorted(set(train_classes) ^ set(test_classes))
        owner = train_folder if odd[0] in train_classes else test_folder
        raise ValueError(
            f"dataset.root={root}: '{train_folder}' and '{test_folder}' must hold the same classes, but "
            f"'{odd[0]}' ({len(odd)} differ) is only in '{owner.name}'; add or remove that folder"
        )
    return _folder_samples(train_folder, train_classes), _folder_samples(test_folder, test_classes)


def read_noise(
    *, image_size: int, num_classes: int, train_samples: int, test_samples: int, seed: int
) -> tuple[Samples, Samples]:
    """Random images with random targets, for speed and memory experiments: the speed tables need no data set.

    Raises ValueError where a split would be empty.
    """
    import torch

    splits = []
    for setting, samples in (("train_samples", train_samples), ("test_samples", test_samples)):
        if samples < 1:
            raise ValueError(f"dataset.{setting}={samples}: must be 1 or more")
        generator = torch.Generator().manual_seed(seed_of(f"targets {setting}", seed))
        splits.append(
            Samples(
                Noise(seed_of(f"images {setting}", seed), image_size),
                torch.randint(num_classes, (samples,), generator=generator),
                tuple(f"class {number}" for number in range(num_classes)),
            )
        )
    return splits[0], splits[1]


def _class_names(folder: Path) -> tuple[str, ...]:
    """Names of the class folders; hidden ones (.ipynb_checkpoints) are not classes."""
    return tuple(sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith(".")))


def _folder_samples(folder: Path, classes: tuple[str, ...]) -> Samples:
    """All image files below each class folder, in a fixed order; ValueError for a class without any."""
    import torch
    from torchvision.datasets.folder import IMG_EXTENSIONS, is_image_file, make_dataset

    numbers = {name: number for number, name in enumerate(classes)}
    samples = make_dataset(
        str(folder),
        numbers,
        is_valid_file=lambda path: is_image_file(path) and not Path(path).name.startswith("."),
        allow_empty=True,
    )
    targets = torch.tensor([number for _, number in samples], dtype=torch.int64)
    for name, count in zip(classes, torch.bincount(targets, minlength=len(classes)).tolist(), strict=True):
        if count == 0:
            raise ValueError(
                f"dataset.root={folder.parent}: the class folder '{folder / name}' holds no image "
                f"({' '.join(IMG_EXTENSIONS)}); add images or remove the folder"
            )
    return Samples(Files(tuple(path for path, _ in samples)), targets, classes)


@contextmanager
def one_process_at_a_time(root: Path) -> Iterator[None]:
    """Every process of a run opens the data; only the first may download, the others wait and find the files."""
    root.mkdir(parents=True, exist_ok=True)
    with (root / ".download.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # ends when the file is closed
        yield
