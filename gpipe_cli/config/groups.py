"""The settings of the groups that offer choices: model=, dataset=, optimizer=, learning_rate=, hardware=.

In each group, `name` identifies the choice. Models: the paper's of sections 3 to 5, timm's and Hugging
Face, and the user's own. Data sets: the paper's images (section 4) and text (sections 2.2 and 5), and the user's own.
Optimizers and learning rates: the paper's RMSProp with its decay, and what its Transformers and today's models use.
Hardware: what a plan needs of an accelerator and its link to the next (the paper's: TPUs, and GPUs without a fast
interconnect, 3 and 3.2).
"""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from gpipe_cli.config.schema import MIN_FLOAT, Count, Fraction, NotNegative, Positive, Range
from gpipe_cli.errors import InvalidSettingError

# --- model

Layers = Annotated[int, Range(1, 10_000)]
Channels = Annotated[int, Range(1, 1_000_000)]
Heads = Annotated[int, Range(1, 10_000)]
Tokens = Annotated[int, Range(2, 1_000_000)]  # tokens in a sequence
TARGET = "model.target"  # the only setting that names code
_TARGET = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


@dataclass(frozen=True, slots=True)
class AmoebaNetConfig:
    name: Literal["amoebanet"]
    variant: Literal["b", "d"]
    normal_cells: Annotated[int, Range(3, 1000)]
    filters: Annotated[int, Range(1, 65_536)]
    auxiliary_head: bool
    auxiliary_weight: NotNegative
    dropout: Fraction
    drop_path: Fraction
    batch_norm_epsilon: Positive
    batch_norm_momentum: Annotated[float, Range(MIN_FLOAT, 1)]
    stem: Literal["auto", "imagenet", "small"]


@dataclass(frozen=True, slots=True)
class ResNetConfig:
    name: Literal["resnet"]
    depth: Literal[18, 34, 50, 101, 152]
    dropout: Fraction
    drop_path: Fraction


@dataclass(frozen=True, slots=True)
class UNetConfig:
    """U-Net (B, C) of torchgpipe's benchmarks."""

    name: Literal["unet"]
    depth: Annotated[int, Range(1, 10)]
    num_convs: Annotated[int, Range(1, 1000)]  # B
    base_channels: Annotated[int, Range(2, 65_536)]  # C
    dropout: Fraction


@dataclass(frozen=True, slots=True)
class CustomConfig:
    """A function of the user's that returns the layers."""

    name: Literal["custom"]
    target: str  # package.module:function
    arguments: dict[str, Any] | None
    length: Tokens | None  # tokens of a sequence at most; for text only

    def __post_init__(self) -> None:
        if not _TARGET.fullmatch(self.target):
            why = "not of the form package.module:function; use e.g. my_models:build"
            raise InvalidSettingError(TARGET, self.target, why)


@dataclass(frozen=True, slots=True)
class TimmConfig:
    """Any of timm's models that is a chain of layers; `name` is timm's name for it."""

    name: str
    pretrained: bool
    weights: str | None
    dropout: Fraction
    drop_path: Fraction


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """Low-rank adapters (Hu et al. 2021), which are trained instead of a model's weights."""

    rank: Annotated[int, Range(1, 100_000)]
    alpha: Annotated[int, Range(1, 1_000_000)] = 16  # adapters are multiplied by alpha / rank
    target_modules: tuple[str, ...] | None = None  # names of the linear modules that get adapters; None: peft's choice


@dataclass(frozen=True, slots=True)
class HuggingFaceConfig:
    """A model of Hugging Face's transformers that is a chain of layers."""

    name: str  # a folder with config.json, or a name on the hub
    pretrained: bool
    config: dict[str, Any] | None  # settings that replace config.json's
    attention: Literal["eager", "sdpa"]
    length: Tokens  # tokens of a sequence at most; for text only
    lora: LoraConfig | None = None


@dataclass(frozen=True, slots=True)
class TransformerLMConfig:
    """The Transformer-L of the paper's Table 1."""

    name: Literal["transformer_lm"]
    layers: Layers
    width: Channels
    hidden: Channels
    heads: Heads
    length: Tokens
    dropout: Fraction
    attention_dropout: Fraction
    tie_embeddings: bool = False  # also in runs of earlier versions, which had no such setting


@dataclass(frozen=True, slots=True)
class TransformerNMTConfig:
    """T(L, H, A) of the paper's section 5: L is `layers`, H `hidden` and A `heads`."""

    name: Literal["transformer_nmt"]
    layers: Layers
    hidden: Channels
    heads: Heads
    width: Channels
    head_width: Annotated[int, Range(1, 10_000)]
    length: Tokens
    dropout: Fraction
    attention_dropout: Fraction
    depth_scaled: bool
    logit_clip: NotNegative
    shared_embedding: bool
    tie_embeddings: bool = False  # as in TransformerLMConfig
    share_vocabularies: bool = False

    def __post_init__(self) -> None:
        if self.share_vocabularies and self.shared_embedding:
            why = "shared_embedding=true has one matrix for both languages already; use model.shared_embedding=false"
            raise InvalidSettingError("model.share_vocabularies", True, why)


ModelConfig = (
    AmoebaNetConfig
    | ResNetConfig
    | UNetConfig
    | TransformerLMConfig
    | TransformerNMTConfig
    | CustomConfig
    | TimmConfig
    | HuggingFaceConfig
)


def model_name(model: ModelConfig) -> str:
    """The model's name as the paper writes it: AmoebaNet-D (18, 256)."""
    match model:
        case AmoebaNetConfig():
            return f"AmoebaNet-{model.variant.upper()} ({model.normal_cells}, {model.filters})"
        case ResNetConfig():
            return f"ResNet-{model.depth}"
        case UNetConfig():
            return f"U-Net ({model.num_convs}, {model.base_channels})"
        case TransformerLMConfig():
            return f"Transformer-{model.layers}" + _width(model.width, 2048)
        case TransformerNMTConfig():
            return f"Transformer T({model.layers}, {model.hidden}, {model.heads})" + _width(model.width, 1024)
        case CustomConfig():
            return model.target
        case TimmConfig():
            return f"{model.name} (timm)"
        case HuggingFaceConfig():
            return f"{model.name} (Hugging Face)"


def _width(width: int, paper_width: int) -> str:
    """The suffix for a width other than the paper's, which also changes the model's size."""
    return "" if width == paper_width else f" of width {width}"


def group_choice(config: Any) -> str:
    """The choice, a file name in `conf/GROUP/` without its suffix, that a group's settings came from."""
    match config:
        case TimmConfig():
            return "timm"
        case HuggingFaceConfig():
            return "hf"
    return str(config.name)


# --- dataset

Pixels = Annotated[int, Range(0, 16_384)]
Samples = Annotated[int, Range(1, 100_000_000)]
Vocabulary = Annotated[int, Range(5, 10_000_000)]
_Area = Annotated[float, Range(MIN_FLOAT, 1)]
HeldOut = Annotated[float, Range(MIN_FLOAT, 1, exclusive_max=True, suggest=0.1)]  # a share of a set
Validation = HeldOut | Literal["val"] | None  # a share of the training set, or the data's own validation set
_Mean = Annotated[float, Range(0, 1, suggest=0.5, why="as pixels count from 0 to 1")]
_Deviation = Annotated[float, Range(MIN_FLOAT, 1, suggest=0.5, why="as pixels count from 0 to 1")]


@dataclass(frozen=True, slots=True)
class AugmentationConfig:
    random_resized_crop: tuple[_Area, _Area] | None  # smallest and largest share of the image's area
    horizontal_flip: bool
    cutout: Pixels  # side of the masked square; 0: off
    shift: Pixels  # most pixels up, down, left or right; 0: off

    def __post_init__(self) -> None:
        key = "dataset.augmentation.random_resized_crop"
        crop = self.random_resized_crop
        if crop is not None and crop[0] > crop[1]:
            raise InvalidSettingError(key, crop, f"must be two ascending shares, above 0 to 1; use {key}=[0.1,1.0]")


@dataclass(frozen=True)
class DatasetOptions:
    """Which optional settings a data set has. A set that `data/images.py` or `data/text.py` does not know by name is
    read by `data/NAME.py`, whose `read` returns the training and the test data: `Samples` from `read(dataset, seed)` of
    images, documents or `Pairs` from `read(dataset)` of text."""

    root: bool = True  # the data are read from dataset.root
    synthetic: bool = False  # the settings give the number of samples
    folders: bool = False  # the splits are folders or files, and there may be another, the validation set
    download: bool = False  # this and the next two: of images
    partial: bool = False
    masks: bool = False  # a target is the class of every pixel
    pairs: bool = False  # documents are pairs of sentences, for translation
    direction: bool = False

    @property
    def tokenizer(self) -> bool:
        """Whether a tokenizer may take the place of a learned vocabulary: pairs need symbols that none has."""
        return not (self.pairs or self.synthetic)


IMAGE_DATASETS = {
    "digits": DatasetOptions(root=False),
    "cifar10": DatasetOptions(download=True),
    "cifar100": DatasetOptions(download=True),
    "image_folder": DatasetOptions(folders=True),
    "synthetic_images": DatasetOptions(root=False, synthetic=True),
    "imagenet": DatasetOptions(partial=True),
    "stanford_cars": DatasetOptions(partial=True),
    "oxford_pets": DatasetOptions(download=True, partial=True),
    "food101": DatasetOptions(download=True, partial=True),
    "fgvc_aircraft": DatasetOptions(download=True, partial=True),
    "birdsnap": DatasetOptions(partial=True),
    "synthetic_masks": DatasetOptions(root=False, synthetic=True, masks=True),
    "image_masks": DatasetOptions(masks=True, folders=True),
}
TEXT_DATASETS = {
    "python_docs": DatasetOptions(root=False),
    "text_files": DatasetOptions(folders=True),
    "cldr": DatasetOptions(root=False, pairs=True, direction=True),
    "parallel_text": DatasetOptions(pairs=True, folders=True),
    "synthetic_text": DatasetOptions(root=False, synthetic=True),
}
if TYPE_CHECKING:
    ImagesName = str
    TextName = str
else:
    ImagesName, TextName = Literal[tuple(IMAGE_DATASETS)], Literal[tuple(TEXT_DATASETS)]


PREPROCESSING_KEYS = ("mean", "std", "interpolation")  # settings of images that weights were trained with, and keep


@dataclass(frozen=True, slots=True)
class ImagesConfig:
    """An image data set. Fields with a default are settings that only some sets have: their YAML has them."""

    name: ImagesName
    image_size: Annotated[int, Range(8, 16_384)]  # pixels of each side
    num_classes: Annotated[int, Range(2, 10_000_000)]
    augmentation: AugmentationConfig | None = None
    root: str | None = None
    download: bool = False
    partial: bool = False
    classes: tuple[int, ...] | None = None  # these classes only, renumbered in this order
    train_samples: Samples | None = None
    test_samples: Samples | None = None
    validation: Validation = None
    test: HeldOut | None = None  # the share of root/<class> that is the test set
    drop_last: bool = False  # leave out the last mini-batch of an epoch if it is not full
    # x -> (x - mean) / std of each channel of pixels in [0, 1]; by default to [-1, 1], as in the TPU code
    mean: tuple[_Mean, _Mean, _Mean] = (0.5, 0.5, 0.5)
    std: tuple[_Deviation, _Deviation, _Deviation] = (0.5, 0.5, 0.5)
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"

    def __post_init__(self) -> None:
        has = IMAGE_DATASETS[self.name]
        needed = {"root": has.root, "train_samples": has.synthetic, "test_samples": has.synthetic}
        needed["augmentation"] = not has.masks
        optional = {"download": has.download, "partial": has.partial, "classes": not has.masks}
        _check_settings(self, needed, optional | {"test": self.name == "image_folder"})
        _check_validation(self, folders=has.folders)
        for key in ("cutout", "shift"):
            if (pixels := getattr(self.augmentation, key, 0)) >= self.image_size:
                use = f"use {self.image_size - 1} or less, or 0 to switch it off"
                why = f"the images are only {self.image_size} pixels wide; {use}"
                raise InvalidSettingError(f"dataset.augmentation.{key}", pixels, why)

    @property
    def model_classes(self) -> int:
        """The number of classes that a model distinguishes."""
        return self.num_classes if self.classes is None else len(self.classes)

    @property
    def masks(self) -> bool:
        """Whether a target is a mask, the class of every pixel, and not the class of an image."""
        return IMAGE_DATASETS[self.name].masks


@dataclass(frozen=True, slots=True)
class TextConfig:
    """Text for a language model, or pairs of sentences for translation."""

    name: TextName
    vocabulary: Vocabulary  # number of token ids
    tokenizer: str | None = None  # of Hugging Face, a folder or a name; None: a vocabulary is learned
    cache: str | None = None
    root: str | None = None
    direction: Literal["to_english", "from_english", "both"] | None = None
    temperature: Annotated[float, Range(1, 1000)] | None = None
    drop_long: bool = False
    train_samples: Samples | None = None
    test_samples: Samples | None = None
    validation: Validation = None
    drop_last: bool = False  # leave out an epoch's last, smaller mini-batch

    def __post_init__(self) -> None:
        has = TEXT_DATASETS[self.name]
        needed = {"root": has.root, "train_samples": has.synthetic, "test_samples": has.synthetic}
        needed |= {"temperature": has.pairs, "direction": has.direction}
        _check_settings(self, needed, {"drop_long": has.pairs, "tokenizer": has.tokenizer})
        _check_validation(self, folders=has.folders)


DatasetConfig = ImagesConfig | TextConfig


def _check_validation(config: DatasetConfig, *, folders: bool) -> None:
    """Raises InvalidSettingError for a validation set that a data set has not: only `folders` of the user may hold
    it."""
    if config.validation == "val" and not folders:
        why = f"dataset={config.name} has none; use a share of the training set, dataset.validation=0.1"
        raise InvalidSettingError("dataset.validation", config.validation, why)
    if config.validation == "val" and getattr(config, "test", None) is not None:
        why = "a folder of classes without train, test and val has none; use a share, dataset.validation=0.1"
        raise InvalidSettingError("dataset.validation", config.validation, why)


def has_pairs(dataset: DatasetConfig) -> bool:
    """Whether a data set always has sentence pairs; synthetic_text has them only for a translation model."""
    return isinstance(dataset, TextConfig) and TEXT_DATASETS[dataset.name].pairs


def _check_settings(config: DatasetConfig, needed: dict[str, bool], optional: dict[str, bool]) -> None:
    """Raises InvalidSettingError for a setting that the data set does not have, and for a missing setting that it
    needs."""
    for key, is_allowed in (needed | optional).items():
        value = getattr(config, key)
        if is_allowed and value is None and key in needed:
            raise InvalidSettingError(
                f"dataset.{key}", None, f"dataset={config.name} needs a value; give dataset.{key}=..."
            )
        if not is_allowed and value not in (None, False):
            raise InvalidSettingError(f"dataset.{key}", value, f"dataset={config.name} has no such setting; remove it")


# --- learning_rate and optimizer

Epochs = Annotated[float, Range(0, 10**9)]


@dataclass(frozen=True, slots=True)
class RMSPropConfig:
    name: Literal["rmsprop"]
    decay: Fraction
    momentum: Fraction
    epsilon: Positive
    weight_decay: NotNegative


@dataclass(frozen=True, slots=True)
class SGDConfig:
    name: Literal["sgd"]
    momentum: Fraction
    nesterov: bool
    weight_decay: NotNegative

    def __post_init__(self) -> None:
        if self.nesterov and not self.momentum:
            raise InvalidSettingError("optimizer.nesterov", True, "needs a momentum; use optimizer.momentum=0.9")


@dataclass(frozen=True, slots=True)
class AdamConfig:
    name: Literal["adam"]
    beta1: Fraction
    beta2: Fraction
    epsilon: Positive
    weight_decay: NotNegative
    decoupled: bool


@dataclass(frozen=True, slots=True)
class AdafactorConfig:
    name: Literal["adafactor"]
    beta2_decay: Annotated[float, Range(-1, 0, exclusive_max=True, suggest=-0.8)]
    clipping: Positive
    weight_decay: NotNegative


@dataclass(frozen=True, slots=True)
class PaperLearningRateConfig:
    name: Literal["paper"]
    per_sample: Positive  # times batch_size: the initial learning rate
    decay: Annotated[float, Range(MIN_FLOAT, 1)]
    every_epochs: Annotated[float, Range(MIN_FLOAT, 10**9, suggest=3)]
    warmup_epochs: Epochs


@dataclass(frozen=True, slots=True)
class InverseSqrtLearningRateConfig:
    name: Literal["inverse_sqrt"]
    peak: Positive
    warmup_steps: Count


@dataclass(frozen=True, slots=True)
class CosineLearningRateConfig:
    name: Literal["cosine"]
    peak: Positive
    warmup_epochs: Epochs
    final_share: Fraction


@dataclass(frozen=True, slots=True)
class ConstantLearningRateConfig:
    name: Literal["constant"]
    peak: Positive
    warmup_epochs: Epochs


OptimizerConfig = RMSPropConfig | SGDConfig | AdamConfig | AdafactorConfig
LearningRateConfig = (
    PaperLearningRateConfig | InverseSqrtLearningRateConfig | CosineLearningRateConfig | ConstantLearningRateConfig
)


# --- hardware

Precision = Literal["float32", "tf32", "bfloat16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareConfig:
    """A device and its link. None: unknown; with `auto` read from this machine's device. Defaults as in TrainConfig."""

    name: Literal[
        "auto", "cpu", "a100_40", "a100_80", "gh200", "h100", "h200", "l4", "l40s", "p40", "p100_pcie", "rtx_4090",
        "t4", "v100", "tpu_v2", "tpu_v3",
    ]  # fmt: skip
    tflops: Positive | None  # 10^12 floating-point operations per second that layers reach (CPU: on a single thread)
    peak_tflops: Positive | None  # the data sheet's peak of a device (CPU: for all its cores)
    tf32_tflops: Positive | None = None  # the peak with precision=tf32; None: as in float32
    bfloat16_tflops: Positive | None = None  # the peak with precision=bfloat16; None: as in float32
    memory_gib: Positive | None  # memory of a device, which its stages must fit into
    memory_gb_per_second: Positive | None
    operation_microseconds: NotNegative | None  # shortest time from one operation to the next
    link_gb_per_second: Positive | None  # in each direction
    link_microseconds: NotNegative | None  # latency: until the first byte has arrived

    @property
    def is_this_machine(self) -> bool:
        """Whether the figures describe this machine's devices."""
        return self.name == "auto"

    def peak(self, precision: Precision) -> tuple[str, float | None]:
        """Key and value of the peak of products and convolutions in `precision`, or else in float32."""
        reduced = {"tf32": self.tf32_tflops, "bfloat16": self.bfloat16_tflops}.get(precision)
        return ("peak_tflops", self.peak_tflops) if reduced is None else (f"{precision}_tflops", reduced)
