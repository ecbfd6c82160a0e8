"""Image data sets, opened by name (paper, Section 4: ImageNet and the transfer sets).

A split knows its targets without decoding an image, because in a pipeline the first stage needs only the images and the
last stage only the targets, and they may live in different processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gpipe_cli.data.augmentation import Augmentation, build_transform
from gpipe_cli.data.batches import Catalogue, Key
from gpipe_cli.data.photographs import PHOTOGRAPHS, read_photographs
from gpipe_cli.data.readers import Samples, choose_classes, read_cifar, read_digits, read_folders, read_noise
from gpipe_cli.data.seeds import seed_of, seeded
from gpipe_cli.data.sources import Source

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ImageSplit", "open_images"]


@dataclass(frozen=True, eq=False)
class ImageSplit:
    """The training or the test split: a map-style data set for torch's DataLoader.

    targets: int64 (n,). `split[epoch, index]` is float32 (3, image_size, image_size) in [-1, 1]. In the training split
    the same (seed, epoch, index) gives the same tensor in every process; in the test split the epoch changes nothing.
    """

    source: Source
    targets: Tensor
    class_names: tuple[str, ...]
    image_size: int
    transform: Callable[[Tensor], Tensor]
    seed: int | None  # None: nothing is random

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def num_classes(self) -> int:
        """How many classes there are; targets are 0 .. num_classes - 1."""
        return len(self.class_names)

    @property
    def catalogue(self) -> Catalogue:
        """How many there are; images have no length."""
        return Catalogue(len(self))

    def inputs(self, keys: Sequence[Key], lengths: tuple[int, ...] = ()) -> tuple[Tensor, ...]:
        """One float32 (n, 3, image_size, image_size)."""
        import torch

        return (torch.stack([self[key] for key in keys]),)

    def targets_of(self, indices: Tensor, lengths: tuple[int, ...] = ()) -> Tensor:
        """int64 (n,): classes."""
        return self.targets[indices]

    def __getitem__(self, key: Key) -> Tensor:
        epoch, index = key
        image = self.source.read(index)
        if self.seed is None:
            return self.transform(image)
        with seeded(seed_of("augmentation", self.seed, epoch, index)):
            return self.transform(image)


def open_images(
    name: str,
    *,
    root: str | Path | None = None,
    image_size: int,
    num_classes: int | None = None,
    seed: int,
    augmentation: Augmentation | None = None,
    download: bool = False,
    partial: bool = False,
    classes: tuple[int, ...] | None = None,
    train_samples: int = 0,
    test_samples: int = 0,
) -> tuple[ImageSplit, ImageSplit]:
    """Open the data set `name` and return its training and its test split.

    root: folder of the sets that are read from disk. image_size: side in pixels of what the model sees.
    num_classes: what the model is built for; None takes what the data has (`synthetic_images` needs a number).
    seed: of the augmentation, and of synthetic images. augmentation: for the training split only.
    partial: accept fewer photographs than the paper's sets have. classes: only samples of these classes, which become
    0, 1, … in the given order, e.g. (0, 1, 2, 3, 4) to learn five digits and (5, 6, 7, 8, 9) to transfer to the others;
    `num_classes` stays the number that the data has. train_samples, test_samples: sizes of `synthetic_images`.

    Raises ValueError (one line) for an unknown name, missing, empty or damaged data, a wrong number of classes.
    """
    if image_size < 1:
        raise ValueError(f"dataset.image_size={image_size}: must be 1 pixel or more")
    if num_classes is not None and num_classes < 1:
        raise ValueError(f"dataset.num_classes={num_classes}: must be 1 or more")
    # Digits and CIFAR have no border to cut away: the single centre crop of their test images is the whole image.
    centre_share = 1.0
    match name:
        case "digits":
            train, test = read_digits()
        case "cifar10" | "cifar100":
            from torchvision.datasets import CIFAR10, CIFAR100

            reader = CIFAR10 if name == "cifar10" else CIFAR100
            train, test = read_cifar(reader, root=_folder(name, root), download=download)
        case "image_folder":
            train, test = read_folders(_folder(name, root))
            centre_share = 0.875  # the TPU code's evaluation crop
        case _ if name in PHOTOGRAPHS:
            train, test = read_photographs(name, root=_folder(name, root), download=download, partial=partial)
            # Single crop in the paper. ImageNet: the TPU code's. The transfer sets are "resized to 480x480", so nothing
            # is cut away on purpose: the whole shorter side. Departs from the paper: the aspect ratio is kept, so the
            # ends of the longer side are lost (whether the paper squeezes or crops, it does not say).
            centre_share = 0.875 if name == "imagenet" else 1.0
        case "synthetic_images":
            if num_classes is None:
                raise ValueError("dataset.num_classes=null: synthetic images need a number of classes; use e.g. 1000")
            train, test = read_noise(
                image_size=image_size,
                num_classes=num_classes,
                train_samples=train_samples,
                test_samples=test_samples,
                seed=seed,
            )
        case _:
            known = ", ".join(("digits", "cifar10", "cifar100", *PHOTOGRAPHS, "image_folder"))
            raise ValueError(f"dataset={name}: unknown; use {known} or synthetic_images")
    if num_classes is not None and num_classes != len(train.class_names):
        raise ValueError(
            f"dataset.num_classes={num_classes}: {name} has {len(train.class_names)} classes "
            f"({_some(train.class_names)}); use dataset.num_classes={len(train.class_names)}"
        )
    if classes is not None:
        train, test = _choose(name, train, test, tuple(classes))
    return (
        _split(train, image_size, centre_share, augmentation, seed),
        _split(test, image_size, centre_share, None, None),
    )


def _split(
    samples: Samples, image_size: int, centre_share: float, augmentation: Augmentation | None, seed: int | None
) -> ImageSplit:
    return ImageSplit(
        source=samples.source,
        targets=samples.targets,
        class_names=samples.class_names,
        image_size=image_size,
        transform=build_transform(image_size, centre_share, augmentation),
        seed=seed,
    )


def _choose(name: str, train: Samples, test: Samples, classes: tuple[int, ...]) -> tuple[Samples, Samples]:
    """Only the samples of `classes`; ValueError for classes that do not exist, twice the same, fewer than two."""
    setting = f"dataset.classes=[{','.join(map(str, classes))}]"
    last = len(train.class_names) - 1
    for number in classes:
        if not 0 <= number <= last:
            raise ValueError(f"{setting}: {name} has no class {number}; use numbers from 0 to {last}")
        if classes.count(number) > 1:
            raise ValueError(f"{setting}: class {number} is given more than once; name each class once")
    if len(classes) < 2:
        raise ValueError(f"{setting}: must name 2 classes or more; use dataset.classes=null for all {last + 1}")
    chosen = choose_classes(train, classes), choose_classes(test, classes)
    for split, samples in zip(("training", "test"), chosen, strict=True):
        if len(samples.targets) == 0:
            raise ValueError(f"{setting}: {name} has no {split} image of these classes; choose others or complete it")
    return chosen


def _folder(name: str, root: str | Path | None) -> Path:
    if root is None:
        raise ValueError(f"dataset.root=null: {name} is read from disk; set dataset.root to its folder")
    return Path(root)


def _some(names: tuple[str, ...]) -> str:
    """The first names, for a message."""
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
