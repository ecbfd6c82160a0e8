"""Image data sets for segmentation, whose targets are masks: the class of every pixel, or VOID.

The GPipe paper has none: they are what a U-Net is trained on.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from gpipe_cli.config.groups import ImagesConfig
from gpipe_cli.data.batches import derive_seed
from gpipe_cli.data.readers import ImageFiles, Samples, is_image, open_image
from gpipe_cli.data.splits import Splits, split_names
from gpipe_cli.data.vocabulary import IGNORED
from gpipe_cli.errors import InputError, InvalidSettingError, error_text

VOID = 255  # in a mask file: a pixel that is not learned, as in Pascal VOC
_SAMPLED_MASKS = 16  # masks, evenly from a split, that are read before the others
SHAPES = 4  # ellipses in a synthetic image


@dataclass(frozen=True, eq=False)
class Ellipses:
    """Noise with ellipses, each in the colour of its class; all of it a function of (seed, index). Class 0 is the
    background."""

    seed: int
    image_size: int
    colours: Tensor  # (classes, 3), 0 to 1

    def mask(self, index: int) -> Tensor:
        """int64 (S, S)."""
        generator = torch.Generator().manual_seed(derive_seed("shapes", self.seed, index))
        mask = torch.zeros(self.image_size, self.image_size, dtype=torch.int64)
        places = torch.arange(self.image_size) / self.image_size
        for _ in range(SHAPES):
            y, x = torch.rand(2, generator=generator)
            height, width = torch.rand(2, generator=generator) / 4 + 0.05
            inside = ((places - y) / height)[:, None] ** 2 + ((places - x) / width) ** 2 < 1
            mask[inside] = torch.randint(1, len(self.colours), (), generator=generator)
        return mask

    def __getitem__(self, index: int) -> Tensor:
        """float32 (3, S, S) in [0, 1]: half of each value is noise."""
        generator = torch.Generator().manual_seed(derive_seed("noise", self.seed, index))
        noise = torch.rand(3, self.image_size, self.image_size, generator=generator)
        return (self.colours[self.mask(index)].permute(2, 0, 1) + noise) / 2


@dataclass(frozen=True, eq=False)
class EllipseMasks:
    """The targets of images with ellipses."""

    images: Ellipses
    numbers: Tensor  # int64 (n,): indices of the images

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, indices: Tensor) -> Tensor:
        return torch.stack([self.images.mask(number) for number in self.numbers[indices].tolist()])

    def select(self, indices: Tensor) -> "EllipseMasks":
        return replace(self, numbers=self.numbers[indices])


@dataclass(frozen=True, eq=False)
class MaskFiles:
    """A file with the mask of each image: of a single channel, of any number of bits, or with a palette; the value of a
    pixel is its class. Image and mask are turned by their EXIF tags."""

    images: tuple[str, ...]
    masks: tuple[str, ...]
    image_size: int
    classes: int

    def __len__(self) -> int:
        return len(self.masks)

    def __getitem__(self, indices: Tensor) -> Tensor:
        """int64 (n, S, S), scaled and cut as the images are. Raises InputError, naming the file, for a damaged mask,
        for another size than its image's, and for other classes."""
        return torch.stack([self._read(index) for index in indices.tolist()])

    def select(self, indices: Tensor) -> "MaskFiles":
        images, masks = (tuple(paths[index] for index in indices.tolist()) for paths in (self.images, self.masks))
        return replace(self, images=images, masks=masks)

    def _read(self, index: int) -> Tensor:
        path = self.masks[index]
        try:
            with open_image(path) as image:
                size, mode = image.size, image.mode
                values = np.asarray(image).astype(np.int64)
            with open_image(self.images[index]) as image:
                needed_size = image.size
        except Exception as error:  # whatever Pillow raises for damaged bytes
            raise InputError(f"mask '{path}': cannot be read ({error_text(error)}); replace or delete it") from error
        if size != needed_size or values.ndim > 2 or mode == "F":
            mask_form = f"{size[0]} x {size[1]} pixels of mode {mode}"
            needed = f"{needed_size[0]} x {needed_size[1]} of one whole number"
            why = f"{mask_form}; its image, turned by its EXIF tag, needs {needed}"
            raise InputError(f"mask '{path}': has {why}; save it in that form")
        # with the bits of torchvision, whose import takes seconds
        lengths = [int(self.image_size * length / min(size)) for length in values.shape]
        resized = interpolate(torch.from_numpy(values).float()[None, None], lengths, mode="nearest")[0, 0].long()
        top, left = (round((length - self.image_size) / 2) for length in lengths)
        mask = resized[top : top + self.image_size, left : left + self.image_size]
        mask = mask.masked_fill(mask == VOID, IGNORED)
        if (max_class := int(mask.max())) >= self.classes:
            allowed = f"classes are 0 to {self.classes - 1} (dataset.num_classes={self.classes}), {VOID} is nothing"
            raise InputError(f"mask '{path}': has class {max_class}; {allowed}")
        return mask


def read_ellipses(dataset: ImagesConfig, seed: int) -> Splits[Samples]:
    """Synthetic images with their masks."""
    colours = torch.rand(dataset.num_classes, 3, generator=torch.Generator().manual_seed(derive_seed("colours", seed)))

    def split(name: str, count: int | None) -> Samples:
        assert count, name
        images = Ellipses(derive_seed(f"masks {name}", seed), dataset.image_size, colours)
        return Samples(images, EllipseMasks(images, torch.arange(count)), ())

    return Splits(split("train", dataset.train_samples), split("test", dataset.test_samples))


def read_masks(root: Path, dataset: ImagesConfig) -> Splits[Samples]:
    """Images in root/train/images and so on (see `split_names`), and their masks, files of the same names before the
    suffix, in root/train/masks. Raises InputError if a folder, or the mask of an image, is missing, or if all training
    masks have only class 0."""
    splits = Splits(*(_read_split(root / name, dataset) for name in split_names(root, dataset.validation)))
    assert isinstance(splits.training.targets, MaskFiles)
    if _have_only_background(splits.training.targets.masks):
        why = f"all training masks have only the values 0 and {VOID}, and {VOID} is not learned"
        raise InvalidSettingError("dataset.root", dataset.root, f"{why}; save them with 1 for the other class")
    return splits


def _read_split(folder: Path, dataset: ImagesConfig) -> Samples:
    skipped = Counter[str]()
    images, masks = _files_in(folder / "images", skipped), _files_in(folder / "masks", skipped)
    if missing := sorted(images.keys() - masks.keys()):
        why = f"'{folder / 'masks'}' has no mask for {len(missing)} of {len(images)} images ({missing[0]}, ...)"
        raise InvalidSettingError("dataset.root", dataset.root, f"{why}; add them, or remove the images")
    names: Sequence[str] = sorted(images)
    if not names:
        raise InvalidSettingError("dataset.root", dataset.root, f"'{folder / 'images'}' has no image; put some there")
    image_paths = tuple(images[name] for name in names)
    targets = MaskFiles(image_paths, tuple(masks[name] for name in names), dataset.image_size, dataset.num_classes)
    return Samples(ImageFiles(image_paths), targets, (), skipped)


def _have_only_background(masks: Sequence[str]) -> bool:
    """Whether the masks have only pixels of class 0 and VOID: the first mask with others, or a damaged one, ends the
    search, which begins with masks from all of the split."""
    values = set[int]()
    stride = -(-len(masks) // _SAMPLED_MASKS)
    for path in chain.from_iterable(masks[start::stride] for start in range(stride)):
        try:
            with open_image(path) as image:
                pixels = np.asarray(image)
        except Exception:  # an error with its name follows when it is needed
            return False
        values.update(np.unique(pixels).tolist())
        if pixels.ndim > 2 or values - {0, VOID}:
            return False
    return values == {0, VOID}


def _files_in(folder: Path, skipped: Counter[str]) -> dict[str, str]:
    """Name without suffix -> path of each image file in a folder; others are counted in `skipped`. Raises
    InvalidSettingError for two files of a name."""
    paths: dict[str, str] = {}
    try:
        for path in sorted(folder.iterdir()):
            if not is_image(str(path), skipped):
                continue
            if path.stem in paths:
                why = f"'{paths[path.stem]}' and '{path}' have the same name; remove or rename one"
                raise InvalidSettingError("dataset.root", str(folder.parent.parent), why)
            paths[path.stem] = str(path)
        return paths
    except OSError as error:
        expected = f"expected {folder.parent / 'images'}/*.jpg and {folder.parent / 'masks'}/*.png of the same names"
        why = f"'{folder}' cannot be read ({error.strerror}); {expected}"
        raise InvalidSettingError("dataset.root", str(folder.parent.parent), why) from error
