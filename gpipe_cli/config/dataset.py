"""The data sets of an experiment: the paper's images (section 4) and text (sections 2.2 and 5), and one's own."""

from dataclasses import dataclass
from typing import Annotated, Literal

from gpipe_cli.config.typed import SMALLEST, RefusedError, Within

Pixels = Annotated[int, Within(0, 16_384)]
Samples = Annotated[int, Within(1, 100_000_000)]
Vocabulary = Annotated[int, Within(5, 10_000_000)]
_Area = Annotated[float, Within(SMALLEST, 1)]


@dataclass(frozen=True, slots=True)
class AugmentationConfig:
    random_resized_crop: tuple[_Area, _Area] | None  # least and most share of the area
    horizontal_flip: bool
    cutout: Pixels  # of a side
    shift: Pixels

    def __post_init__(self) -> None:
        key, crop = "dataset.augmentation.random_resized_crop", self.random_resized_crop
        if crop is not None and crop[0] > crop[1]:
            raise RefusedError(key, crop, f"must be two ascending shares, above 0 to 1; use {key}=[0.1,1.0]")


@dataclass(frozen=True, slots=True)
class ImagesConfig:
    """A set of images. The settings with a default are those that only some sets have; their YAML says which."""

    name: Literal[
        "digits", "cifar10", "cifar100", "image_folder", "synthetic_images",
        "imagenet", "stanford_cars", "oxford_pets", "food101", "fgvc_aircraft", "birdsnap",
    ]  # fmt: skip
    image_size: Annotated[int, Within(8, 16_384)]  # pixels of a side
    num_classes: Annotated[int, Within(2, 10_000_000)]
    augmentation: AugmentationConfig
    root: str | None = None
    download: bool = False
    partial: bool = False
    classes: tuple[int, ...] | None = None  # these classes only, numbered anew in this order
    train_samples: Samples | None = None
    test_samples: Samples | None = None
    drop_last: bool = False  # leave out the last mini-batch of an epoch if it is not full

    def __post_init__(self) -> None:
        synthetic, on_disk = self.name == "synthetic_images", self.name not in ("digits", "synthetic_images")
        _check_needed(self, root=on_disk, train_samples=synthetic, test_samples=synthetic)
        if self.download and self.name not in ("cifar10", "cifar100", "oxford_pets", "food101", "fgvc_aircraft"):
            raise RefusedError("dataset.download", True, f"dataset={self.name} cannot be downloaded; leave it out")
        if self.partial and self.name in ("digits", "cifar10", "cifar100", "image_folder", "synthetic_images"):
            raise RefusedError("dataset.partial", True, f"dataset={self.name} has no such setting; leave it out")

    @property
    def model_classes(self) -> int:
        """The classes that a model distinguishes."""
        return self.num_classes if self.classes is None else len(self.classes)


@dataclass(frozen=True, slots=True)
class TextConfig:
    """Text for a language model, or pairs of sentences for translation."""

    name: Literal["python_docs", "text_files", "cldr", "parallel_text", "synthetic_text"]
    vocabulary: Vocabulary  # ids
    cache: str | None = None
    root: str | None = None
    direction: Literal["to_english", "from_english", "both"] | None = None
    temperature: Annotated[float, Within(1, 1000)] | None = None
    drop_long: bool = False
    train_samples: Samples | None = None
    test_samples: Samples | None = None
    drop_last: bool = False  # as for images

    def __post_init__(self) -> None:
        synthetic, pairs = self.name == "synthetic_text", self.name in ("cldr", "parallel_text")
        files = self.name in ("text_files", "parallel_text")
        _check_needed(self, root=files, train_samples=synthetic, test_samples=synthetic, temperature=pairs)
        _check_needed(self, direction=self.name == "cldr")
        if self.drop_long and not pairs:
            raise RefusedError("dataset.drop_long", True, f"dataset={self.name} has no such setting; leave it out")


DatasetConfig = ImagesConfig | TextConfig


def _check_needed(config: DatasetConfig, **needed: bool) -> None:
    """Raises ValueError for a setting that the data set needs and does not have, or has and does not need."""
    for key, is_needed in needed.items():
        value = getattr(config, key)
        if value is None and is_needed:
            raise RefusedError(f"dataset.{key}", None, f"dataset={config.name} needs a value; give dataset.{key}=...")
        if value is not None and not is_needed:
            raise RefusedError(f"dataset.{key}", value, f"dataset={config.name} has no such setting; leave it out")
