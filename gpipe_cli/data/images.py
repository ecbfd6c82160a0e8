"""Image data sets, opened by name (paper, Section 4: ImageNet and the transfer sets)."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Subset

from gpipe_cli.config.dataset import ImagesConfig
from gpipe_cli.config.typed import RefusedError
from gpipe_cli.data.augmentation import build_transform
from gpipe_cli.data.batches import SPLITS, Catalogue
from gpipe_cli.data.photographs import read_photographs
from gpipe_cli.data.readers import Pixels, Samples, read_cifar, read_digits, read_folders, read_noise
from gpipe_cli.data.seeds import seed_of, seeded


@dataclass(frozen=True, eq=False)
class ImageSplit:
    """The training or the test split, a `Split`.

    `split[epoch, index]` is float32 (3, image_size, image_size) in [-1, 1]. In the training split the same
    (seed, epoch, index) gives the same tensor in every process; in the test split the epoch changes nothing.
    """

    samples: Samples
    transform: Callable[[Tensor], Tensor]
    seed: int | None  # None: nothing is random

    def __len__(self) -> int:
        return len(self.samples.targets)

    @property
    def catalogue(self) -> Catalogue:
        return Catalogue(len(self))

    def inputs(self, epoch: int, indices: Sequence[int], lengths: tuple[int, ...] = ()) -> tuple[Tensor, ...]:
        """One float32 (n, 3, image_size, image_size)."""
        return (torch.stack([self[epoch, index] for index in indices]),)

    def targets_of(self, indices: Tensor, lengths: tuple[int, ...] = ()) -> Tensor:
        """int64 (n,): classes."""
        return self.samples.targets[indices]

    def __getitem__(self, key: tuple[int, int]) -> Tensor:
        epoch, index = key
        image = self.samples.pixels[index]
        if self.seed is None:
            return self.transform(image)
        with seeded(seed_of("augmentation", self.seed, epoch, index)):
            return self.transform(image)


def open_images(dataset: ImagesConfig, seed: int) -> tuple[ImageSplit, ImageSplit]:
    """Open a data set and return its training and its test split.

    `seed` is of the augmentation, which is for the training split only, and of synthetic images. With
    `dataset.classes` there are only samples of these classes, which become 0, 1, … in the given order, e.g.
    (0, 1, 2, 3, 4) to learn five digits and (5, 6, 7, 8, 9) to transfer to the others.

    Raises ValueError (one line) for missing, empty or damaged data, and a wrong number of classes.
    """
    name, root = dataset.name, Path(dataset.root or "")  # whatever is read from disk has one
    match name:
        case "digits":
            train, test = read_digits()
        case "cifar10" | "cifar100":
            from torchvision.datasets import CIFAR10, CIFAR100

            train, test = read_cifar(CIFAR10 if name == "cifar10" else CIFAR100, root, download=dataset.download)
        case "synthetic_images":
            train, test = read_noise(dataset, seed)
        case "image_folder":
            expected = f"expected '{root}/train/<class>/*.jpg' and '{root}/test/<class>/*.jpg' (or '{root}/val')"
            train, test = read_folders(root, expected)
        case _:
            train, test = read_photographs(name, root, download=dataset.download, partial=dataset.partial)
    if train.class_names != test.class_names:
        odd = sorted(set(train.class_names) ^ set(test.class_names))
        why = f"training and test images must have the same classes in the same order, but {len(odd)} differ"
        raise RefusedError("dataset.root", root, f"{why} ({', '.join(odd[:3])}); complete them, or remove some")
    names = train.class_names
    if dataset.num_classes != len(names):
        why = f"{name} has {len(names)} classes ({', '.join(names[:3])}{', …' if len(names) > 3 else ''})"
        raise RefusedError("dataset.num_classes", dataset.num_classes, f"{why}; use dataset.num_classes={len(names)}")
    if dataset.classes is not None:
        train, test = _choose(dataset.classes, name, train, test)
    # The single centre crop of test images: the TPU code's share for ImageNet and for folders. The transfer sets
    # are "resized to 480x480", so nothing is cut away on purpose: the whole shorter side. Departs from the paper: the
    # aspect ratio is kept, so the ends of the longer side are lost (the paper does not say whether it squeezes).
    centre_share = 0.875 if name in ("image_folder", "imagenet") else 1.0
    return (
        ImageSplit(train, build_transform(dataset.image_size, centre_share, dataset.augmentation), seed),
        ImageSplit(test, build_transform(dataset.image_size, centre_share, None), None),
    )


def _choose(classes: tuple[int, ...], name: str, *splits: Samples) -> Iterator[Samples]:
    """Only the samples of `classes`, in their old order; class classes[i] gets the number i.

    Raises ValueError for classes that do not exist, twice the same, fewer than two, or without an image.
    """
    names = splits[0].class_names
    if len(set(classes)) < max(2, len(classes)) or not all(0 <= number < len(names) for number in classes):
        why = f"must be 2 or more different classes of {name}, from 0 to {len(names) - 1}"
        raise RefusedError("dataset.classes", classes, f"{why}; use dataset.classes=null for all")
    new_number = torch.full((len(names),), -1, dtype=torch.int64)
    new_number[list(classes)] = torch.arange(len(classes))
    for split, samples in zip(SPLITS, splits, strict=True):
        targets = new_number[samples.targets]
        kept = (targets >= 0).nonzero().flatten()
        if len(kept) == 0:
            why = f"{name} has no {split} image of these classes; choose others or complete it"
            raise RefusedError("dataset.classes", classes, why)
        pixels: Pixels = Subset(samples.pixels, kept.tolist())  # type: ignore[arg-type]  # anything with an index
        yield Samples(pixels, targets[kept], tuple(names[number] for number in classes))
