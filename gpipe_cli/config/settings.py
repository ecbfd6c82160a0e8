"""The settings of an experiment: K, M and the schedule (section 2 of the paper) and what is trained (sections 3 to 5).

The YAML in `conf/` holds every default; the dataclasses here hold types and checks. Commands convert Hydra's
configuration into dataclasses immediately, so that no later code has to check whether a key exists. This module does
not import torch: `--help` and `--cfg job` must answer immediately.
"""

import io
import re
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from gpipe_cli.config import groups
from gpipe_cli.config.old_words import update_words
from gpipe_cli.config.pipeline_settings import (
    COURSE,
    FOLDERS,
    INVOCATION,
    KERNELS,
    LAYERS,
    MACHINE,
    SCHEDULE_FILE,
    SECONDS,
    STEP,
    WRITING,
    Affects,
    Partitions,
    PipelineSettings,
)
from gpipe_cli.config.schema import Count, Fraction, NotNegative, Range, parse_config, quote
from gpipe_cli.errors import (
    InputError,
    InvalidSettingError,
    InvalidValueError,
    describe_error,
    error_text,
    format_value,
)
from gpipe_cli.system.files import folders_in, read_text
from gpipe_cli.system.gpus import describe_devices
from gpipe_cli.units import plural

T = TypeVar("T")

_MAX_YAML_BYTES = 2**20  # a hundred times a run's own file; PyYAML takes seconds to parse this much
_MAX_ALIASES = 20  # in a configuration file; each alias can double or triple the expanded text
_LONG_NUMBER = re.compile(r"\b[0-9.][0-9a-fA-FxX_.:]{300}")  # also as 0x... or 1:30:00; a float has up to 309 digits
CONFIG_FILE = "config.yaml"  # a folder that holds this file is a run folder
RESUME_AUTO = "auto"  # resume=auto: resume the run in `run_folder`, or start one if there is none
BACKBONE = "backbone"  # freeze=[backbone]: all but the classifier, even if the classifier's weights are loaded too

Task = Literal["classification", "segmentation", "language_model", "translation"]
TEXT_TASKS: tuple[Task, ...] = ("language_model", "translation")
# the word for an item of the data set
SAMPLE_WORDS: dict[Task, str] = {
    "classification": "sample", "segmentation": "sample", "language_model": "sequence", "translation": "sentence",
}  # fmt: skip
SplitName = Literal["training", "test", "validation"]
Device = Literal["auto", "cpu", "cuda"]
Logger = Literal["tensorboard", "mlflow", "wandb", "csv"]
MemoryFormat = Literal["auto", "contiguous", "channels_last"]
BatchSize = Annotated[int, Range(1, 10_000_000)]
Threads = Annotated[int, Range(1, 1024, why="as no machine has more cores")]
DataWorkers = Annotated[int, Range(0, 64, suggest=8, why="as each is a process")]
MaxRestarts = Annotated[int, Range(0, 1000)]
TimeoutSeconds = Annotated[float, Range(0.1, 604_800, why="which is a week")]
AUTO = ("partitions", "replicas", "micro_batches")  # settings that may be `auto`: the value predicted to be fastest
AUTO_BATCH = ("batch_size", "batch_tokens")  # settings whose `auto` is the largest value that fits the memory
MAX_ACTIONS = 5_000_000  # actions of a schedule; the paper's largest has 200,000


@dataclass(frozen=True, slots=True)
class PartitionConfig:
    balance: tuple[Partitions, ...] | None  # layers of each partition; checked later against the model's layers
    costs: tuple[NotNegative, ...] | None = None  # cost of each layer, in any unit (the paper's c_i)
    method: Literal["exact", "lingvo"] = "exact"

    def __post_init__(self) -> None:
        if self.balance is not None and self.method != "exact":
            why = "partition.balance already sets the cut; remove either"
            raise InvalidSettingError("partition.method", self.method, why)
        if self.costs is not None and not any(self.costs):
            raise InvalidSettingError(
                "partition.costs", self.costs, "at least one must be above 0; use null for our own"
            )

    def with_balance(self, balance: tuple[int, ...]) -> "PartitionConfig":
        return replace(self, balance=balance, method="exact")


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    every_epochs: Annotated[int, Range(0, 10**9)]
    every_steps: Annotated[int, Range(0, 10**9)]
    keep: Count


# One device that takes the mini-batch whole and recomputes nothing, with all threads of the machine.
ONE_DEVICE: dict[str, Any] = {
    "partitions": 1, "micro_batches": 1, "replicas": 1, "schedule": "gpipe", "recompute": "never", "executor": "auto",
    "stages_per_process": None, "placement": None, "threads": None,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig(PipelineSettings):
    """The settings of `gpipe train`; `conf/train.yaml` explains them. Raises InputError if two contradict each other.

    A field with a default is missing from `config.yaml` of older runs; the default reproduces their behaviour.
    """

    partition: PartitionConfig = field(metadata=STEP)
    preset: str | None = field(metadata=LAYERS)
    batch_size: BatchSize | None = field(metadata=STEP)  # N, samples of the whole mini-batch
    batch_tokens: Count | None = field(metadata=STEP)  # most tokens of a mini-batch; for text, instead of batch_size
    epochs: Count = field(metadata=COURSE)
    max_steps: Count | None = field(metadata=INVOCATION)
    gradient_clipping: NotNegative = field(metadata=STEP)  # 0: off
    label_smoothing: Fraction = field(metadata=SECONDS)
    ema_decay: Fraction = field(metadata=SECONDS)  # 0: off
    init_from: str | None = field(metadata=LAYERS)
    init_head: Literal["auto", "keep", "new"] = field(metadata=LAYERS)
    freeze: tuple[str, ...] | None = field(metadata=SECONDS)  # shell patterns; checked later against the model
    evaluate_every_epochs: Count = field(metadata=COURSE)
    check_layers: bool = field(metadata=COURSE)
    device: Device = field(metadata=KERNELS)
    deterministic: bool = field(default=True, metadata=SECONDS)
    memory_format: MemoryFormat = field(metadata=KERNELS)
    threads: Threads | None = field(metadata=MACHINE)
    data_workers: DataWorkers | None = field(metadata=MACHINE)
    timeout_seconds: TimeoutSeconds = field(metadata=MACHINE)
    output: str = field(metadata=FOLDERS)
    logger: tuple[Logger, ...] = field(default=("tensorboard",), metadata=MACHINE)
    run_folder: str | None = field(metadata=FOLDERS)
    resume: str | None = field(metadata=FOLDERS)
    max_restarts: MaxRestarts = field(default=0, metadata=FOLDERS)
    dry_run: bool = field(metadata=INVOCATION)
    quiet: bool = field(default=False, metadata=INVOCATION)
    cost: Literal["datasheet", "profile", "reprofile"] = field(metadata=MACHINE)
    checkpoint: CheckpointConfig = field(metadata=WRITING)
    hardware: groups.HardwareConfig = field(metadata=STEP)
    model: groups.ModelConfig = field(metadata=SECONDS)
    dataset: groups.DatasetConfig = field(metadata=SECONDS)
    optimizer: groups.OptimizerConfig = field(metadata=SECONDS)
    learning_rate: groups.LearningRateConfig = field(metadata=STEP)

    def __post_init__(self) -> None:
        self._check_task()
        self._check_mini_batch()
        self._check_fine_tuning()
        self._check_schedule()
        self._check_compile()
        if self.resume == RESUME_AUTO and self.run_folder is None:
            why = "starts in run_folder, or resumes the run there, and run_folder=null; add run_folder=FOLDER"
            raise InvalidSettingError("resume", self.resume, why)

    def _check_compile(self) -> None:
        """Raises InputError for layers that would be compiled again and again."""
        if not self.compile:
            return
        if groups.has_pairs(self.dataset):
            why = f"every length of a sentence is compiled by itself, and dataset={self.dataset.name} has many"
            raise InvalidSettingError("compile", True, f"{why}; use compile=false")
        if isinstance(self.model, groups.AmoebaNetConfig) and self.model.drop_path:
            why = f"model.drop_path={self.model.drop_path:g} grows in every step, which would be compiled again"
            raise InvalidSettingError("compile", True, f"{why}; use model.drop_path=0 or compile=false")

    def _check_fine_tuning(self) -> None:
        """Raises InputError for a setting that means nothing without `init_from`."""
        if self.init_from is not None:
            return
        if self.init_head != "auto":
            why = "no weights are taken, as init_from=null; give init_from=..."
            raise InvalidSettingError("init_head", self.init_head, why)
        model = self.model
        has_weights = getattr(model, "pretrained", False) or getattr(model, "weights", None) is not None
        if BACKBONE in (self.freeze or ()) and not has_weights:
            why = "nothing is taken, as init_from=null; give init_from=..., or name layers"
            raise InvalidSettingError("freeze", self.freeze, why)

    @property
    def task(self) -> Task:
        """The task that the model and the data set imply; `_check_task` ensures that they agree."""
        if isinstance(self.dataset, groups.ImagesConfig):
            return "segmentation" if self.dataset.masks else "classification"
        if isinstance(self.model, groups.TransformerNMTConfig) or groups.has_pairs(self.dataset):
            return "translation"
        return "language_model"

    @property
    def has_top5(self) -> bool:
        """Whether top-5 is counted: of five classes or fewer it is always 100 %, and of masks nobody gives it."""
        dataset = self.dataset
        return isinstance(dataset, groups.ImagesConfig) and not dataset.masks and dataset.model_classes > 5

    @property
    def text(self) -> bool:
        """Whether mini-batches are of tokens, not of images."""
        return self.task in TEXT_TASKS

    def _check_task(self) -> None:
        """Raises InputError if the model cannot learn from the data set."""
        name, pairs = f"dataset={self.dataset.name}", groups.has_pairs(self.dataset)
        match self.model, self.dataset:
            case (
                (groups.AmoebaNetConfig() | groups.ResNetConfig() | groups.TimmConfig() | groups.UNetConfig()),
                groups.TextConfig(),
            ):
                why = f"takes images, and {name} is text; use model={'transformer_nmt' if pairs else 'transformer_lm'}"
            case (
                (groups.AmoebaNetConfig() | groups.ResNetConfig() | groups.TimmConfig()),
                groups.ImagesConfig(masks=True),
            ):
                why = f"predicts a class for each image, and {name} has one for each pixel; use model=unet"
            case groups.UNetConfig(), groups.ImagesConfig(masks=False):
                why = f"predicts a class for each pixel, and {name} has one for each image; use dataset=synthetic_masks"
            case groups.TransformerLMConfig(), groups.ImagesConfig():
                why = f"takes text, and {name} has images; use dataset=python_docs"
            case groups.TransformerNMTConfig(), groups.ImagesConfig():
                why = f"takes text, and {name} has images; use dataset=cldr"
            case groups.TransformerLMConfig(), groups.TextConfig() if pairs:
                why = f"continues text, and {name} has pairs; use model=transformer_nmt"
            case groups.TransformerNMTConfig(), groups.TextConfig() if not (pairs or self.dataset.train_samples):
                why = f"translates, and {name} has no pairs; use model=transformer_lm, or dataset=cldr"
            case groups.CustomConfig(length=None), groups.TextConfig():
                why = "text needs the most tokens of a sequence; give model.length=..."
                raise InvalidSettingError("model.length", None, why)
            case _:
                return
        raise InvalidSettingError("model", self.model.name, why)

    def _check_mini_batch(self) -> None:
        """Raises InputError if the mini-batch size is missing, given twice, or incompatible with other settings."""
        tokens, samples = self.batch_tokens, self.batch_size
        m, r = self.micro_batches, self.replicas
        if tokens is not None and not self.text:
            raise InvalidSettingError("batch_tokens", tokens, "images have no tokens; remove it and use batch_size")
        if (samples is None) == (tokens is None):
            why = "both are given; add batch_tokens=null or batch_size=null"
            why = why if samples else "neither is given, so a mini-batch has no size; add batch_size=32"
            raise InputError(f"batch_size={format_value(samples)}, batch_tokens={format_value(tokens)}: {why}")
        if tokens is not None and self.dataset.drop_last:
            why = f"mini-batches of batch_tokens={tokens} differ in size, and none is short; remove it"
            raise InvalidSettingError("dataset.drop_last", True, why)
        if tokens is not None and self.learning_rate.name == "paper":
            why = f"is so much per sample, and batch_tokens={tokens} counts tokens; use learning_rate=inverse_sqrt"
            raise InvalidSettingError("learning_rate", "paper", why)
        if samples is not None and r * m > samples >= m:
            use = f"use replicas={samples // m} or fewer, micro_batches={max(1, samples // r)} or batch_size={r * m}"
            why = f"with micro_batches={m} of at least a sample each they need {r * m}, and batch_size={samples}"
            raise InvalidSettingError("replicas", r, f"{why}; {use}")
        if samples is not None and m > samples:
            use = f"use micro_batches={samples} or fewer, or batch_size={m} or more"
            raise InvalidSettingError("micro_batches", m, f"a mini-batch has only batch_size={samples} samples; {use}")
        if (actions := 3 * self.partitions * m) > MAX_ACTIONS:
            use = f"use micro_batches={MAX_ACTIONS // 3 // self.partitions} or fewer"
            why = f"with partitions={self.partitions} a step has {actions} actions, more than {MAX_ACTIONS}; {use}"
            raise InvalidSettingError("micro_batches", m, why)


def settings_affecting(what: Affects) -> tuple[str, ...]:
    return tuple(setting.name for setting in fields(TrainConfig) if what in setting.metadata["affects"])


def settings_not_affecting(what: Affects) -> tuple[str, ...]:
    return tuple(setting.name for setting in fields(TrainConfig) if what not in setting.metadata["affects"])


PER_INVOCATION = settings_not_affecting(Affects.RUN)


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """How a test set is translated: by `gpipe evaluate` and, for a few sentences, at each evaluation of a training."""

    beam: Annotated[int, Range(1, 1000)]
    sentences: Annotated[int, Range(0, 10**9)] | None
    length_penalty: Annotated[float, Range(-100, 100)]


@dataclass(frozen=True, slots=True)
class EvaluateSettings:
    """The keys of `conf/evaluate.yaml` that do not override a setting of the run."""

    run: str
    checkpoint: Literal["best", "last"]
    decode: DecodeConfig
    output: str


Format = Literal["safetensors", "torch", "onnx", "hf"]


@dataclass(frozen=True, slots=True)
class ExportSettings:
    """The keys of `conf/export.yaml` that do not override a setting of the run."""

    run: str
    checkpoint: Literal["best", "last"]
    format: Format
    file: str | None
    overwrite: bool
    averages: bool | None
    evaluate: bool
    output: str


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """What `conf/bench.yaml` adds to the settings of `gpipe train`."""

    warm_up_steps: Annotated[int, Range(0, 1_000_000)]
    steps: Annotated[int, Range(1, 1_000_000)]
    rounds: Annotated[int, Range(1, 1000)]


@dataclass(frozen=True, slots=True)
class CheckSettings:
    """What `conf/check.yaml` adds to the settings of `gpipe train`."""

    against: Literal["torch", "torchgpipe"] | None  # the other program; None: pipelines of ours
    against_steps: Annotated[int, Range(1, 1_000_000)]
    against_rounds: Annotated[int, Range(1, 1000)]


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """What `conf/plan.yaml` adds to the settings of `gpipe train`."""

    solve: Literal["max_model"] | None
    write_schedule: str | None  # a file that does not exist yet
    verbose: bool


# Key -> the only command that takes it; the others refuse it on the command line. In a recipe they ignore it: one file
# serves bench, plan and train, so that all three run the same job.
COMMAND_ONLY = {
    "recipe": "reproduce",
    **{field.name: "plan" for field in fields(PlanSettings)},
    **{field.name: "check" for field in fields(CheckSettings)},
    **{field.name: "bench" for field in fields(BenchSettings)},
}


def single_device_baseline(config: TrainConfig) -> TrainConfig:
    """What a pipeline has to beat: the same training by ONE_DEVICE."""
    return replace(config, partition=replace(config.partition, balance=None), **ONE_DEVICE)


def key_of(setting: str) -> str:
    """The key of a command-line setting: `model.filters` of `++model.filters=16`."""
    return setting.lstrip("+~").partition("=")[0]


def only_command_of(setting: str) -> str | None:
    """The only command that takes `setting`, such as `steps=5`; None if several take it."""
    return COMMAND_ONLY.get(key_of(setting).partition(".")[0])


def overridden_batch_key(given: Mapping[str, object]) -> str | None:
    """Which of `batch_size` and `batch_tokens` is overridden by the other; None if both or neither were given."""
    size, tokens = (given.get(key) is not None for key in ("batch_size", "batch_tokens"))
    return None if size == tokens else "batch_tokens" if size else "batch_size"


def from_cfg(kind: type[T], cfg: DictConfig) -> T:
    """Converts Hydra's configuration into the dataclass `kind` and those nested in it. Raises InputError for
    invalid settings, and for an interpolation that cannot be resolved."""
    return from_values(kind, to_plain_dict(cfg))


def from_values(kind: type[T], values: dict[str, Any]) -> T:
    """Converts plain values into the dataclass `kind` and those nested in it. Counts the class folders of
    dataset=image_folder, once per run. Raises InputError for invalid settings."""
    if isinstance(dataset := values.get("dataset"), dict) and dataset.get("name") == "image_folder":
        _count_classes(dataset)
    try:
        return parse_config(kind, values)
    except InvalidValueError as error:
        if error.key != "device":
            raise
        raise InvalidValueError(error.key, error.value, f"{error.why}; this machine has {describe_devices()}") from None


def _count_classes(dataset: dict[str, Any]) -> None:
    """Sets `num_classes`, if null, to the number of class folders. Raises InvalidSettingError if they cannot be read or
    there are fewer than two."""
    root = dataset.get("root")
    if dataset.get("num_classes", 0) is not None or not isinstance(root, str) or root == "???":
        return  # num_classes is given, or `parse_config` will refuse the root
    train = Path(root, "train")
    if dataset.get("test") is not None and not train.is_dir():  # with both, the data are refused
        train = Path(root)
    try:
        folders = len(folders_in(train))
    except OSError as error:
        use = (
            "give the folder that holds train/ and test/, or dataset.test=0.2 for one that holds the classes, or "
            "dataset.num_classes=... where the images are not here"
        )
        raise InvalidSettingError(
            "dataset.root", root, f"'{train}' cannot be read ({error.strerror}); {use}"
        ) from error
    if folders < 2:
        why = f"'{train}' has {plural(folders, 'class folder')}; put the images of each class into a folder there"
        raise InvalidSettingError("dataset.root", root, why)
    dataset["num_classes"] = folders


def to_plain_dict(cfg: DictConfig | ListConfig) -> dict[str, Any]:
    """Hydra's configuration as plain values. Raises InputError if an interpolation cannot be resolved."""
    return dict(resolve_value(cfg))


def resolve_value(value: Any) -> Any:
    """A value of Hydra's configuration as a plain value. Raises InputError if an interpolation such as `${output}`
    cannot be resolved."""
    try:
        return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
    except OmegaConfBaseException as error:
        raise InputError(f"configuration: {error_text(error)}") from error


def to_yaml(config: TrainConfig) -> str:
    """The configuration as YAML, with every setting; `read_config` reads it back."""
    return OmegaConf.to_yaml(OmegaConf.create(asdict(config)))


def fallback_values(config: TrainConfig) -> dict[str, Any]:
    """The settings by dotted keys, to be taken where `read_config` finds no valid ones in the file of another run."""
    return dict(flatten(plain_values(OmegaConf.create(asdict(config)))))


def plain_values(cfg: DictConfig) -> dict[str, Any]:
    """A configuration as plain values, with interpolations such as `${oc.env:HOME}` as they are written."""
    values: Any = OmegaConf.to_container(cfg)
    return dict(values)


def load_yaml(file: Path) -> DictConfig:
    """The settings in a YAML file. Raises InputError if it cannot be read, has more than 1 MiB, holds no settings, or
    has more than 20 aliases: a few lines of them can expand to more than fits in memory."""
    try:
        text = read_text(file, _MAX_YAML_BYTES)
        yaml.compose(text)  # an immediate RecursionError for deep nesting, which `parse` takes minutes for
        if sum(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text)) > _MAX_ALIASES:
            raise yaml.YAMLError(f"more than {_MAX_ALIASES} aliases, *name; write the values in their place")
        if _LONG_NUMBER.search(text):
            raise yaml.YAMLError("a number of more than 300 digits")
        cfg = OmegaConf.load(io.StringIO(text))
        if not isinstance(cfg, DictConfig):
            raise yaml.YAMLError("a list")
    except Exception as error:  # PyYAML evaluates tags, which can raise any exception
        why = _why_unreadable(error)
        raise InputError(f"{file}: holds no settings ({why}); write lines key: value, in UTF-8") from error
    return cfg


def _why_unreadable(error: Exception) -> str:
    match error:
        case OSError(strerror=str(why)):
            return why
        case yaml.MarkedYAMLError(problem=str(problem), problem_mark=yaml.Mark(line=line)):
            return f"line {line + 1}: {problem}"
        case yaml.YAMLError() | ValueError():
            return error_text(error)
        case RecursionError():
            return "it is nested too deeply"
    return describe_error(error)


def flatten(cfg: Mapping[str, Any], prefix: str = "", whole: Container[str] = ()) -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of nested settings; empty groups, and those whose keys are in `whole`, stay values."""
    for name, value in cfg.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value and key not in whole:
            yield from flatten(value, f"{key}.", whole)
        else:
            yield key, value


def set_value(values: dict[str, Any], key: str, value: Any) -> None:
    """Sets the value of a dotted key in nested settings; groups that are missing are added."""
    *groups_above, name = key.split(".")
    for group in groups_above:
        values[group] = values[group] if isinstance(values.get(group), dict) else {}
        values = values[group]
    values[name] = value


def read_config(path: Path, fallbacks: Mapping[str, Any] | None = None) -> TrainConfig:
    """Reads what `to_yaml` wrote, to be looked at: what is to be run is read by `load_run_config`. `path` is the file,
    or the run folder that holds it as `config.yaml`. `fallbacks`: dotted keys, with the values that are taken where an
    older version wrote what this version does not take.

    Raises InputError if the file is missing, is not YAML, or holds other settings that this version does not take.

    The file may come from elsewhere, so interpolations are not resolved: a resolver is any function of this process.
    """
    file = path / CONFIG_FILE if path.is_dir() else path
    values = update_words(plain_values(load_yaml(file)))
    if str(values.get("placement")).endswith(SCHEDULE_FILE):  # in runs of before; the placement changes no bit
        values["placement"] = None
    refusals: dict[str, InvalidSettingError] = {}
    while True:
        try:
            return from_values(TrainConfig, values)
        except InvalidSettingError as error:
            if error.key in (fallbacks or {}) and error.key not in refusals:
                refusals[error.key] = error
                set_value(values, error.key, resolve_value((fallbacks or {})[error.key]))
                continue
            first = refusals.get(error.key, error)
            use = f"give another on the command line, {first.key}=..."
            raise InputError(f"{file}: {first}; {use}") from error
        except InputError as error:
            raise InputError(f"{file}: cannot be read as the configuration of a run: {error}") from error


def format_target_setting(*targets: str) -> str:
    """What users type to name again the functions of a run, or of the runs of a sweep."""
    if not all(map(str.isascii, targets)):  # Hydra's grammar takes such letters in quotes only
        targets = tuple(map(quote, targets))
    setting = f"{groups.TARGET}={','.join(targets)}"
    return ("-m " if len(targets) > 1 else "") + (f'"{setting}"' if "'" in setting else setting)


def target_of(config: TrainConfig) -> str | None:
    """The function that a run calls; None if its model is not the user's own."""
    return config.model.target if isinstance(config.model, groups.CustomConfig) else None


def load_run_config(
    path: Path,
    target: str | None = None,
    remedy: Callable[[str], str] = format_target_setting,
    fallbacks: Mapping[str, Any] | None = None,
) -> TrainConfig:
    """`read_config` of a run that is to be run, with the function `target`, as the caller has named it, instead of the
    run's own; `remedy`: what a caller has to add who has not; `fallbacks`: as of `read_config`. Raises InputError for
    what `allow_target` refuses, and for a target if the run calls no function."""
    return use_target(read_config(path, fallbacks), path, target, remedy)


def use_target(
    config: TrainConfig, path: Path, target: str | None, remedy: Callable[[str], str] = format_target_setting
) -> TrainConfig:
    """`load_run_config` of a configuration that `read_config` has read."""
    if (saved := target_of(config)) is not None:
        return allow_target(config, target, path, remedy(saved))
    if target is not None:
        why = f"the run in {path} has model={groups.group_choice(config.model)}, which calls no function; remove it"
        raise InvalidSettingError(groups.TARGET, target, why)
    return config


def allow_target(config: TrainConfig, target: str | None, named_in: Path, remedy: str) -> TrainConfig:
    """The configuration, which the files in `named_in` describe, if its code may be run: a file is data, and a function
    that it names is imported and called only if the caller also names it: `target`, which takes its place. Raises
    InvalidSettingError, whose message ends with `remedy`."""
    if not isinstance(config.model, groups.CustomConfig):
        return config
    if target is None:
        why = f"{named_in} names this function, and what a file names is run only if you also name it"
        raise InvalidSettingError(groups.TARGET, config.model.target, f"{why}; if you trust it, add {remedy}")
    return replace(config, model=replace(config.model, target=target))


def load_recipe(file: Path) -> dict[str, Any]:
    """A recipe's own settings, merged over the `family/` files that its defaults list; without gpipe's defaults. Raises
    InputError if it cannot be read, or is not a recipe."""
    try:
        recipe = OmegaConf.load(file)
    except (OSError, yaml.YAMLError) as error:
        why = (isinstance(error, OSError) and error.strerror) or error_text(error)
        raise InputError(f"{file}: cannot be read ({why}); give the file of a recipe, -cd FOLDER -cn NAME") from error
    if not isinstance(recipe, DictConfig) or not {"defaults", "recipe"} <= recipe.keys():
        raise InputError(f"{file}: is not a recipe, as it has no defaults or no node recipe; see gpipe's own")
    families = [entry for entry in recipe.pop("defaults") if isinstance(entry, str) and entry.startswith("family/")]
    merged = OmegaConf.merge(*(_family(file.parent / f"{entry}.yaml") for entry in families), recipe)
    return dict(update_words(to_plain_dict(merged)))


@cache  # 29 recipes share a few files
def _family(file: Path) -> Any:
    return OmegaConf.load(file)


def load_preset(name: str) -> dict[str, Any]:
    """The settings in `conf/presets/<name>.yaml`, merged over the files that its defaults list; {} if there is none."""
    file = Path(str(resources.files("gpipe_cli.conf"))) / "presets" / f"{name}.yaml"
    if not file.is_file():  # a preset of the user's
        return {}
    preset = load_yaml(file)
    return to_plain_dict(OmegaConf.merge(*(load_preset(base) for base in preset.pop("defaults", ())), preset))


@cache
def load_hardware(name: str) -> groups.HardwareConfig:
    """The figures in `conf/hardware/<name>.yaml`."""
    cfg = OmegaConf.create((resources.files("gpipe_cli.conf") / "hardware" / f"{name}.yaml").read_text("utf-8"))
    assert isinstance(cfg, DictConfig)
    return from_cfg(groups.HardwareConfig, cfg)


def find_run(key: str, run: str, output: str) -> Path:
    """The folder `run`, the value of setting `key`. Raises InputError if it holds no run; the message names the newest
    runs in it, or else those in `output`."""
    folder = Path(run)
    if (folder / CONFIG_FILE).is_file():
        return folder
    below = newest_runs(folder) if run else []
    newest = ", ".join(map(str, below or newest_runs(Path(output))))
    remedy = f"the newest runs {'in it ' if below else ''}are {newest}"
    remedy = remedy if newest else f"{output} holds no run either"
    raise InputError(f"{key}={run}: no run there (looked for {folder / CONFIG_FILE}); {remedy}")


def has_checkpoint(run: Path) -> bool:
    return any((run / "checkpoints").glob("step_*/index.json"))


def resume_or_restart(config: TrainConfig, folder: Path) -> TrainConfig:
    """`config` set to resume the run in `folder` from its last checkpoint, or to restart it if it has none."""
    resume = None if config.resume == RESUME_AUTO else config.resume
    return replace(config, run_folder=str(folder), resume=str(folder) if has_checkpoint(folder) else resume)


def run_folders_in(folder: Path) -> list[Path]:
    """The run folders in an output folder, including its sweeps', one level deeper."""
    return [file.parent for depth in ("*", "*/*") for file in folder.glob(f"{depth}/{CONFIG_FILE}")]


def newest_runs(folder: Path) -> list[Path]:
    """The three most recently started runs in an output folder or a sweep, newest first."""
    return sorted(run_folders_in(folder), key=lambda run: (run / CONFIG_FILE).stat().st_mtime, reverse=True)[:3]
