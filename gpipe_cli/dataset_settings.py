"""The data sets of an experiment: the paper's images (section 4) and text (sections 2.2 and 5), and anybody's own.

The settings with a default are those that only some sets have; their YAML says which.
"""

from dataclasses import dataclass
from typing import Literal

from gpipe_cli.typed import at_least, show


@dataclass(frozen=True, slots=True)
class AugmentationConfig:
    random_resized_crop: tuple[float, float] | None  # least and most share of the area
    horizontal_flip: bool
    cutout: int  # pixels of a side
    shift: int  # pixels

    def __post_init__(self) -> None:
        key, crop = "dataset.augmentation.random_resized_crop", self.random_resized_crop
        if crop is not None and not 0 < crop[0] <= crop[1] <= 1:
            raise ValueError(f"{key}={show(crop)}: must be two ascending shares, above 0 to 1; use {key}=[0.1,1.0]")
        at_least("dataset.augmentation.cutout", self.cutout, 0)
        at_least("dataset.augmentation.shift", self.shift, 0)


@dataclass(frozen=True, slots=True)
class ImagesConfig:
    """A set of images. The settings with a default are those that only some sets have; their YAML says which."""

    name: Literal[
        "digits", "cifar10", "cifar100", "image_folder", "synthetic_images",
        "imagenet", "stanford_cars", "oxford_pets", "food101", "fgvc_aircraft", "birdsnap",
    ]  # fmt: skip
    image_size: int  # pixels of a side
    num_classes: int
    augmentation: AugmentationConfig
    root: str | None = None
    download: bool = False
    partial: bool = False
    classes: tuple[int, ...] | None = None  # these classes only, numbered anew in this order
    train_samples: int | None = None
    test_samples: int | None = None
    drop_last: bool = False  # leave out the last mini-batch of an epoch if it is not full

    def __post_init__(self) -> None:
        at_least("dataset.image_size", self.image_size, 8)
        at_least("dataset.num_classes", self.num_classes, 2)
        synthetic, on_disk = self.name == "synthetic_images", self.name not in ("digits", "synthetic_images")
        for key, value, belongs in (
            ("root", self.root, on_disk),
            ("train_samples", self.train_samples, synthetic),
            ("test_samples", self.test_samples, synthetic),
        ):
            if value is None and belongs:
                raise ValueError(f"dataset.{key}=null: dataset={self.name} needs a value; give dataset.{key}=...")
            if value is not None and not belongs:
                raise ValueError(f"dataset.{key}={show(value)}: dataset={self.name} has no such setting; leave it out")
        if self.download and self.name not in ("cifar10", "cifar100", "oxford_pets", "food101", "fgvc_aircraft"):
            raise ValueError(f"dataset.download=true: dataset={self.name} cannot be downloaded; leave it out")
        if self.partial and self.name in ("digits", "cifar10", "cifar100", "image_folder", "synthetic_images"):
            raise ValueError(f"dataset.partial=true: dataset={self.name} has no such setting; leave it out")
        at_least("dataset.train_samples", self.train_samples, 1)
        at_least("dataset.test_samples", self.test_samples, 1)

    @property
    def model_classes(self) -> int:
        """The classes that a model tells apart."""
        return self.num_classes if self.classes is None else len(self.classes)


@dataclass(frozen=True, slots=True)
class TextConfig:
    """Text for a language model, or pairs of sentences for translation."""

    name: Literal["python_docs", "text_files", "cldr", "parallel_text", "synthetic_text"]
    vocabulary: int  # ids
    cache: str | None = None
    root: str | None = None
    direction: Literal["to_english", "from_english", "both"] | None = None
    temperature: float | None = None
    drop_long: bool = False
    train_samples: int | None = None
    test_samples: int | None = None
    drop_last: bool = False  # as for images

    def __post_init__(self) -> None:
        at_least("dataset.vocabulary", self.vocabulary, 5)
        at_least("dataset.temperature", self.temperature, 1)
        synthetic, pairs = self.name == "synthetic_text", self.name in ("cldr", "parallel_text")
        for key, value, belongs in (
            ("root", self.root, self.name in ("text_files", "parallel_text")),
            ("direction", self.direction, self.name == "cldr"),
            ("temperature", self.temperature, pairs),
            ("train_samples", self.train_samples, synthetic),
            ("test_samples", self.test_samples, synthetic),
        ):
            if value is None and belongs:
                raise ValueError(f"dataset.{key}=null: dataset={self.name} needs a value; give dataset.{key}=...")
            if value is not None and not belongs:
                raise ValueError(f"dataset.{key}={show(value)}: dataset={self.name} has no such setting; leave it out")
        if self.drop_long and not pairs:
            raise ValueError(f"dataset.drop_long=true: dataset={self.name} has no such setting; leave it out")
        at_least("dataset.train_samples", self.train_samples, 1)
        at_least("dataset.test_samples", self.test_samples, 1)


DatasetConfig = ImagesConfig | TextConfig
