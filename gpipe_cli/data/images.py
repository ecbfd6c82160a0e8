"""Image data sets, opened by name, and the transforms from their pixels to a model's input (paper, Section 4).

The ImageNet runs used Inception preprocessing, which in the authors' TPU code is a random crop of 10-100 % of the area,
a random flip and values scaled to [-1, 1]; evaluation is on a central 87.5 % crop. The transfer runs used a random
flip and cutout. The steps are torchvision's, except cutout, which torchvision does not have, and the digits' steps:
they are written here, with the bits of torchvision, whose import would take longer than the first steps. Pretrained
weights determine a mean, a deviation and an interpolation.

Departs from the paper: no colour distortion; a random crop that does not fit is tried 10 times (torchvision), not 100.
"""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial, reduce
from importlib import import_module
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import interpolate, pad

from gpipe_cli.config.groups import AugmentationConfig, ImagesConfig
from gpipe_cli.data.batches import NO_OUTPUT_LABELS, OutputLabels, SplitIndex, derive_seed
from gpipe_cli.data.cache import cache_folder, compute_digest
from gpipe_cli.data.fine_grained import FINE_GRAINED, read_fine_grained
from gpipe_cli.data.masks import VOID, MaskFiles, read_ellipses, read_masks
from gpipe_cli.data.readers import (
    ImageFiles,
    Samples,
    header_fault,
    read_cifar,
    read_digits,
    read_image_folder,
    read_random_images,
)
from gpipe_cli.data.splits import Splits
from gpipe_cli.data.vocabulary import IGNORED
from gpipe_cli.errors import InputError, InvalidSettingError
from gpipe_cli.system.accelerator import to_device
from gpipe_cli.system.files import write_atomic
from gpipe_cli.system.status_line import phase
from gpipe_cli.units import first_few, plural

_MAX_HEADERS = 100_000  # headers read before a training, about; they take some seconds
_HEADER_THREADS = 16  # they mostly wait for the disk
_MAX_NAMED = 20  # files in one report
_WORDNET_ID = re.compile(r"n[0-9]{8}(?= |$)")


def cutout(image: Tensor, side: int) -> Tensor:
    """A copy of (C, H, W) with a square of `side` pixels set to 0, which is the mean (DeVries and Taylor 2017).

    The centre is uniform over the image, so the square may extend over the border, as in that paper.
    """
    top, left = (int(torch.randint(length, ())) - side // 2 for length in image.shape[-2:])
    image = image.clone()
    image[..., max(top, 0) : top + side, max(left, 0) : left + side] = 0
    return image


def resize(image: Tensor, side: int, interpolation: str) -> Tensor:
    """(C, H, W) with a shorter side of `side` pixels."""
    if min(image.shape[-2:]) == side:
        return image
    if not image.is_floating_point():
        from torchvision.transforms.v2 import InterpolationMode, functional

        resized: Tensor = functional.resize(image, [side], InterpolationMode(interpolation))
        return resized
    lengths = [int(side * length / min(image.shape[-2:])) for length in image.shape[-2:]]
    return interpolate(image[None], lengths, mode=interpolation, antialias=True)[0]


def centre_crop(image: Tensor, side: int) -> Tensor:
    """The middle of (C, H, W), `side` pixels high and wide."""
    top, left = (round((length - side) / 2) for length in image.shape[-2:])
    return image[..., top : top + side, left : left + side]


def shift(image: Tensor, max_pixels: int) -> Tensor:
    """(C, H, W), moved by up to `max_pixels` pixels along each axis; uncovered pixels are black."""
    height, width = image.shape[-2:]
    top, left = (int(torch.randint(2 * max_pixels + 1, ())) for _ in range(2))
    return pad(image, [max_pixels] * 4)[..., top : top + height, left : left + width]


def normalize(images: Tensor, dataset: ImagesConfig) -> Tensor:
    """float32 (..., C, H, W): (x - mean) / std of each channel, from x in [0, 1], or from uint8 of which 255 is 1."""
    mean, deviation = (
        to_device(torch.tensor(values).view(-1, 1, 1), images.device) for values in (dataset.mean, dataset.std)
    )
    if images.is_floating_point():
        return images.sub(mean).div_(deviation)
    return images.to(torch.float32).mul_(1 / 255).sub_(mean).div_(deviation)


def build_transform(
    dataset: ImagesConfig, shorter_side: int, augmentation: AugmentationConfig | None
) -> Callable[[Tensor], Tensor]:
    """The steps from (3, H, W), uint8 or float32 in [0, 1], to (3, image_size, image_size): uint8, a quarter of the
    bytes, to be normalized where it is used; or normalized float32, if pixels are stored as float32 or cut out.

    shorter_side: pixels to which an image is scaled, unless a random crop is, before its centre is cut out.
    augmentation: None for evaluation. Random steps use torch's default generator.
    """
    size = dataset.image_size
    settings = augmentation or AugmentationConfig(None, horizontal_flip=False, cutout=0, shift=0)
    steps: list[Callable[[Tensor], Tensor]] = []
    if settings.random_resized_crop is not None:
        from torchvision.transforms import v2

        # Aspect ratio 3/4 to 4/3: torchvision's default and the TPU code's.
        scale, mode = settings.random_resized_crop, v2.InterpolationMode(dataset.interpolation)
        steps.append(v2.RandomResizedCrop(size, scale=scale, interpolation=mode))
    else:
        steps.append(partial(resize, side=shorter_side, interpolation=dataset.interpolation))
        steps.append(partial(centre_crop, side=size))
    if settings.horizontal_flip:
        from torchvision.transforms import v2

        steps.append(v2.RandomHorizontalFlip())
    if settings.shift > 0:
        steps.append(partial(shift, max_pixels=settings.shift))
    normalized = partial(normalize, dataset=dataset)
    if settings.cutout > 0:
        steps += [normalized, partial(cutout, side=settings.cutout)]  # no uint8 value is the mean
    else:
        steps.append(lambda image: normalized(image) if image.is_floating_point() else image)
    return lambda image: reduce(lambda changed, step: step(changed), steps, image)


@dataclass(frozen=True, eq=False)
class ImageSplit:
    """The training or the test split, a `Split`.

    `split[epoch, index]`: what `build_transform` describes; the test split ignores the epoch.
    """

    samples: Samples
    transform: Callable[[Tensor], Tensor]
    seed: int | None  # None: nothing is random

    @property
    def split_index(self) -> SplitIndex:
        return SplitIndex(len(self.samples.targets))

    def inputs(self, epoch: int, indices: Sequence[int], lengths: tuple[int, ...] = ()) -> tuple[Tensor, ...]:
        """A single tensor, (n, 3, image_size, image_size): uint8, still to be normalized, or normalized float32."""
        return (torch.stack([self[epoch, index] for index in indices]),)

    def targets_of(self, epoch: int, indices: Tensor, lengths: tuple[int, ...] = ()) -> Tensor:
        return self.samples.targets[indices]

    def __getitem__(self, key: tuple[int, int]) -> Tensor:
        epoch, index = key
        image = self.samples.pixels[index]
        if self.seed is None:
            return self.transform(image)
        # The transforms draw from the default generator only; its state is restored afterwards.
        with torch.random.fork_rng(devices=[]):
            # `torch.manual_seed` would also seed every accelerator
            torch.default_generator.manual_seed(derive_seed("augmentation", self.seed, epoch, index))
            return self.transform(image)


def open_images(dataset: ImagesConfig, seed: int, output_labels: OutputLabels = NO_OUTPUT_LABELS) -> Splits[ImageSplit]:
    """The splits of a data set. `seed` determines synthetic images, what is held out of the training set, and the
    augmentation, which applies to the training set only. Raises InputError as `find_images`.
    """
    side = shorter_side(dataset)
    training, *others = (samples for _, samples in find_images(dataset, seed, output_labels).each())
    plain, augmented = (build_transform(dataset, side, steps) for steps in (None, dataset.augmentation))
    return Splits(ImageSplit(training, augmented, seed), *(ImageSplit(samples, plain, None) for samples in others))


def find_images(dataset: ImagesConfig, seed: int, output_labels: OutputLabels = NO_OUTPUT_LABELS) -> Splits[Samples]:
    """The samples of each split, whose images are as stored. `seed` determines synthetic images, and which samples are
    held out. Classes of the same names as in `output_labels` have its order.

    Raises InputError for missing, empty or damaged data, a wrong number of classes, and classes other than those that
    `output_labels` requires.
    """
    splits = _read(dataset, seed)
    names = splits.training.class_names
    for split, samples in splits.each():
        if unshared := sorted({*names} ^ {*samples.class_names}):
            differ = f"{len(unshared)} differ ({first_few(unshared)}); complete or remove them"
            why = f"training and {split} images must have the same classes, but {differ}"
            raise InvalidSettingError("dataset.root", dataset.root, why)
    chosen = tuple(range(len(names))) if dataset.classes is None else dataset.classes
    if names and output_labels.classes:
        chosen = _order_classes(output_labels, names, chosen, dataset)
    by_name = output_labels.required and output_labels.classes  # whatever other classes there are
    if names and not by_name and dataset.num_classes != len(names):
        why = f"{dataset.name} has {len(names)} classes ({first_few(names)}); use dataset.num_classes={len(names)}"
        raise InvalidSettingError("dataset.num_classes", dataset.num_classes, why)
    if dataset.classes is not None or chosen != tuple(range(len(names))):
        splits = Splits(*_select_classes(chosen, dataset, splits))
    if isinstance(dataset.validation, float):
        training, validation = splits.training.split_off("dataset.validation", dataset.validation, seed)
        splits = Splits(training, splits.test, validation)
    _check_targets(dataset, splits)
    return splits


def check_headers(dataset: ImagesConfig, splits: Splits[Samples]) -> None:
    """Reads the headers of all image files and masks, or of about _MAX_HEADERS, evenly chosen. Files that were found to
    be images are remembered until one of them changes.

    Raises InvalidSettingError, naming the files that are not images; damage that only decoding shows is not found.
    """
    files = list[tuple[str, bool]]()
    for _, samples in splits.each():
        files += [(path, False) for path in samples.pixels.paths] if isinstance(samples.pixels, ImageFiles) else []
        files += [(path, True) for path in samples.targets.masks] if isinstance(samples.targets, MaskFiles) else []
    files = files[:: -(-len(files) // _MAX_HEADERS) or 1]
    remembered: Path | None = None
    with suppress(OSError, InputError):  # a file that is gone; a user without a home folder
        states = ((path, os.stat(path)) for path, _ in files)
        facts = [(os.path.abspath(path), state.st_size, state.st_mtime_ns, state.st_ctime_ns) for path, state in states]
        remembered = cache_folder(None) / f"{compute_digest('headers', facts)}.headers"
        if not files or remembered.exists():
            return
    phase(f"reading the headers of {plural(len(files), 'file')}")
    with ThreadPoolExecutor(_HEADER_THREADS) as pool:
        faults = list(pool.map(lambda file: header_fault(file[0], mask=file[1]), files))
    broken = [f"{path} ({fault})" for (path, _), fault in zip(files, faults, strict=True) if fault]
    if broken:
        named = [*broken[:_MAX_NAMED], *[f"and {len(broken) - _MAX_NAMED:,} more"][: len(broken) > _MAX_NAMED]]
        why = f"{len(broken):,} of {plural(len(files), 'image file')} cannot be read: {', '.join(named)}"
        use = f"replace or delete {'them' if broken[1:] else 'it'}"
        raise InvalidSettingError("dataset.root", dataset.root, f"{why}; {use}")
    if remembered is not None:
        with suppress(OSError):  # it cannot be remembered
            remembered.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(remembered, "")


def _read(dataset: ImagesConfig, seed: int) -> Splits[Samples]:
    """The samples of all classes, in the data's order."""
    name = dataset.name
    root = Path(dataset.root or "")  # every set that is read from disk has a root
    match name:
        case "digits":
            return read_digits()
        case "cifar10" | "cifar100":
            from torchvision.datasets import CIFAR10, CIFAR100

            return read_cifar(CIFAR10 if name == "cifar10" else CIFAR100, root, download=dataset.download)
        case "synthetic_images":
            return read_random_images(dataset, seed)
        case "synthetic_masks":
            return read_ellipses(dataset, seed)
        case "image_masks":
            return read_masks(root, dataset)
        case "image_folder":
            return read_image_folder(root, dataset, seed)
        case _ if name in FINE_GRAINED:
            return read_fine_grained(name, root, download=dataset.download, partial=dataset.partial)
    return Splits(*import_module(f"gpipe_cli.data.{name}").read(dataset, seed))


def _order_classes(
    output_labels: OutputLabels, names: Sequence[str], chosen: tuple[int, ...], dataset: ImagesConfig
) -> tuple[int, ...]:
    """The indices, in `names`, of the classes that the weights were trained on, in their order; `chosen` if the data
    has other classes and may have them. Raises InvalidSettingError if it may not."""
    saved = [_class_key(name) for name in output_labels.classes or ()]
    numbers = {_class_key(name): number for number, name in enumerate(names)}
    same = {*saved} == {_class_key(names[number]) for number in chosen if 0 <= number < len(names)}
    if same or (output_labels.required and dataset.classes is not None and {*saved} <= numbers.keys()):
        return tuple(numbers[name] for name in saved)
    if not output_labels.required:
        return chosen
    missing, added = [name for name in saved if name not in numbers], [name for name in numbers if name not in saved]
    pairs = (("only there", missing), ("only here", added))
    differences = "; ".join(f"{where}: {first_few(some, 5)}" for where, some in pairs if some)
    why = f"these are not the classes that the run was trained on ({differences})"
    use = "rename the folders of the classes, give the data of the run, or begin a training from it by init_from"
    raise InvalidSettingError("dataset.root", dataset.root, f"{why}; {use}")


def same_classes(names: Sequence[str], others: Sequence[str]) -> bool:
    """Whether two lists name the same classes in the same order."""
    return [*map(_class_key, names)] == [*map(_class_key, others)]


def _class_key(name: str) -> str:
    """The identity of a class: its WordNet id, whatever words follow, or else its name."""
    return name[:9] if _WORDNET_ID.match(name) else name


def _check_targets(dataset: ImagesConfig, splits: Splits[Samples]) -> None:
    """Raises InvalidSettingError for a split in which no target is valid. Masks are read up to the first with a
    class."""
    for name, samples in splits.each():
        targets = samples.targets
        one_by_one = (targets[torch.tensor([index])] for index in range(len(targets)))
        pieces = [targets] if isinstance(targets, Tensor) else one_by_one
        if not any(bool((piece != IGNORED).any()) for piece in pieces):
            key, value = ("dataset", dataset.name) if dataset.root is None else ("dataset.root", dataset.root)
            why = f"where the {name} images are cut, all pixels of their masks are {VOID}, which is not learned"
            use = "give masks with classes"
            if isinstance(dataset.validation, float) and name != "test":
                use += ", or another fraction dataset.validation"
            raise InvalidSettingError(key, value, f"{why}; {use}")


def centre_crop_ratio(dataset: ImagesConfig) -> float:
    """The fraction of a test image's shorter side that its centre crop keeps: 0.875 for ImageNet and folders, as in the
    TPU code; 1 for all other sets, as the paper's transfer images are "resized to 480x480".

    Departs from the paper: the aspect ratio is kept, so the ends of the longer side are lost (the paper does not say
    whether it distorts images).
    """
    return 0.875 if dataset.name in ("image_folder", "imagenet") else 1.0


def shorter_side(dataset: ImagesConfig) -> int:
    """The pixels to which the shorter side of a test image is scaled before its centre is cut out."""
    return max(dataset.image_size, round(dataset.image_size / centre_crop_ratio(dataset)))


def _select_classes(classes: tuple[int, ...], dataset: ImagesConfig, splits: Splits[Samples]) -> Iterator[Samples]:
    """The samples of `classes` in each split, in their old order; classes[i] becomes class i. Raises InputError."""
    name, names = dataset.name, splits.training.class_names
    count = len(names) or dataset.num_classes
    if len(set(classes)) < max(2, len(classes)) or not all(0 <= number < count for number in classes):
        why = f"must be 2 or more different classes of {name}, from 0 to {count - 1}"
        raise InvalidSettingError("dataset.classes", classes, f"{why}; use dataset.classes=null for all")
    new_number = torch.full((count,), -1, dtype=torch.int64)
    new_number[list(classes)] = torch.arange(len(classes))
    for split, samples in splits.each():
        assert isinstance(samples.targets, Tensor), "sets with masks have no dataset.classes"
        targets = new_number[samples.targets]
        kept = (targets >= 0).nonzero().flatten()
        if len(kept) == 0:
            why = f"{name} has no {split} image of these classes; choose others or complete it"
            raise InvalidSettingError("dataset.classes", classes, why)
        selected_names = tuple(names[number] for number in classes) if names else ()
        yield replace(samples, targets=targets, class_names=selected_names).select(kept)
