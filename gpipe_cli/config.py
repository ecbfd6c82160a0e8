"""The settings of an experiment: K, M and the schedule (section 2 of the paper) and what is trained (sections 3 to 5).

The YAML in `conf/` holds every default; the dataclasses here hold types and checks. Hydra's tree becomes dataclasses
in this file and nowhere else, so that nothing below ever asks whether a key exists. No torch here: `--help` and
`--cfg job` must answer at once.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from gpipe_cli.model_settings import ModelConfig
from gpipe_cli.optimizer_settings import LearningRateConfig, OptimizerConfig
from gpipe_cli.typed import above_zero, at_least, one_line, share, show, typed

T = TypeVar("T")

Executor = Literal["auto", "in_process", "distributed"]
Device = Literal["auto", "cpu", "cuda"]
MemoryFormat = Literal["auto", "contiguous", "channels_last"]


@dataclass(frozen=True, slots=True)
class PartitionConfig:
    balance: tuple[int, ...] | None  # layers of each partition; what fits is checked against the model's layers


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    every_epochs: int
    every_steps: int
    keep: int

    def __post_init__(self) -> None:
        at_least("checkpoint.every_epochs", self.every_epochs, 0)
        at_least("checkpoint.every_steps", self.every_steps, 0)
        at_least("checkpoint.keep", self.keep, 1)


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
class TrainConfig:
    """What `gpipe train` was told. `conf/train.yaml` explains every setting.

    Raises:
        ValueError: a setting is out of range, or two do not fit each other; one line that says how to mend it.
    """

    partitions: int  # K
    micro_batches: int  # M
    schedule: Literal["gpipe", "1f1b"]
    recompute: Literal["always", "except_last", "never"]
    executor: Executor
    partition: PartitionConfig
    batch_size: int  # N, the whole mini-batch
    epochs: int
    max_steps: int | None
    seed: int
    gradient_clipping: float  # 0: off
    label_smoothing: float
    ema_decay: float  # 0: off
    evaluate_every_epochs: int
    device: Device
    memory_format: MemoryFormat
    threads: int | None
    data_workers: int | None
    timeout_seconds: float
    output: str
    run_folder: str | None
    resume: str | None
    dry_run: bool
    checkpoint: CheckpointConfig
    model: ModelConfig
    dataset: ImagesConfig
    optimizer: OptimizerConfig
    learning_rate: LearningRateConfig

    def __post_init__(self) -> None:
        for key in ("partitions", "micro_batches", "batch_size", "epochs", "evaluate_every_epochs", "max_steps"):
            at_least(key, getattr(self, key), 1)
        at_least("threads", self.threads, 1)
        for key in ("seed", "gradient_clipping", "data_workers"):
            at_least(key, getattr(self, key), 0)
        share("label_smoothing", self.label_smoothing)
        share("ema_decay", self.ema_decay)
        above_zero("timeout_seconds", self.timeout_seconds)
        if self.micro_batches > self.batch_size:
            raise ValueError(
                f"micro_batches={self.micro_batches}: a mini-batch has only batch_size={self.batch_size} samples; "
                f"use micro_batches={self.batch_size} or fewer, or batch_size={self.micro_batches} or more"
            )


@dataclass(frozen=True, slots=True)
class EvaluateConfig:
    """What `gpipe evaluate` was told: `training` is the run's own configuration with the given settings replaced."""

    run: str
    checkpoint: Literal["best", "last"]
    training: TrainConfig


@dataclass(frozen=True, slots=True)
class DatasetPlace:
    root: str | None


@dataclass(frozen=True, slots=True)
class EvaluateSettings:
    """The keys of `conf/evaluate.yaml`; None: as the run was trained."""

    run: str
    checkpoint: Literal["best", "last"]
    partitions: int | None
    micro_batches: int | None
    batch_size: int | None
    executor: Executor | None
    device: Device | None
    memory_format: MemoryFormat | None
    threads: int | None
    data_workers: int | None
    timeout_seconds: float | None
    partition: PartitionConfig
    dataset: DatasetPlace
    output: str


def from_tree(kind: type[T], tree: DictConfig) -> T:
    """Turns Hydra's tree into the dataclass `kind`, at every level.

    Raises:
        ValueError: an unknown key (with the nearest known one), a missing value, a wrong type, a value out of range.
    """
    try:
        values = OmegaConf.to_container(tree, resolve=True)
    except OmegaConfBaseException as error:
        raise ValueError(f"configuration: {one_line(error)}") from error
    return typed(kind, values)


def to_yaml(config: TrainConfig) -> str:
    """The configuration as YAML, every setting with its value; `load` reads it back."""
    return OmegaConf.to_yaml(OmegaConf.create(asdict(config)))


def load(path: Path) -> TrainConfig:
    """Reads what `to_yaml` wrote; `path` is the file, or the run folder that holds it as `config.yaml`.

    Raises:
        ValueError: the file is not there, is not YAML, or holds settings that this version does not know.
    """
    file = path / "config.yaml" if path.is_dir() else path
    try:
        tree = OmegaConf.load(file)
        assert isinstance(tree, DictConfig)
        return from_tree(TrainConfig, tree)
    except (OSError, AssertionError, YAMLError, OmegaConfBaseException, ValueError) as error:
        raise ValueError(f"{file}: cannot be read as the configuration of a run: {one_line(error)}") from error


def find_run(key: str, run: str, output: str) -> Path:
    """The folder of a run, given as setting `key`.

    Raises:
        ValueError: there is no run in that folder; the line names the newest ones below `output`.
    """
    folder = Path(run)
    if (folder / "config.yaml").is_file():
        return folder
    # Runs lie in the output folder, those of a sweep one level deeper.
    below = list(folder.glob("*/config.yaml")) if run else []
    found = below or [file for depth in ("*", "*/*") for file in Path(output).glob(f"{depth}/config.yaml")]
    newest = [str(file.parent) for file in sorted(found, key=lambda file: file.stat().st_mtime, reverse=True)[:3]]
    remedy = f"the newest runs {'in it ' if below else ''}are {', '.join(newest)}"
    if not newest:
        remedy = f"there is no run in {output} either"
    raise ValueError(f"{key}={run}: no run there (looked for {folder / 'config.yaml'}); {remedy}")
