"""The content of result.json, the result of a training or a measurement, perhaps of an earlier version of gpipe."""

from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from gpipe_cli.config.old_words import update_words
from gpipe_cli.config.settings import TEXT_TASKS, Task
from gpipe_cli.errors import InputError
from gpipe_cli.results.dict_conversion import IMAGE_FIELD, TEXT_FIELD, from_dict, to_dict
from gpipe_cli.results.files import RESULT_FILE, read_result, write_result

CONTENDED_SHARE = 0.05  # fraction of a stage's computing time without a core; above, a speed is `measured_contended`
Status = Literal["running", "completed", "failed", "interrupted", "dry_run"]


@dataclass(frozen=True)
class Evaluation:
    """An evaluation on the test or the validation set."""

    step: int = 0  # optimizer steps done
    epoch: int = 0  # counted from 1
    loss: float | None = None  # mean cross-entropy in nats; None if it is not finite
    top1: float | None = field(default=None, metadata=IMAGE_FIELD)
    top5: float | None = field(default=None, metadata=IMAGE_FIELD)
    perplexity: float | None = field(default=None, metadata=TEXT_FIELD)
    token_accuracy: float | None = field(default=None, metadata=TEXT_FIELD)
    averaged: bool = False  # whether the weights were averaged over steps
    tokens: int | None = field(default=None, metadata=TEXT_FIELD)  # tokens that were predicted


@dataclass(frozen=True)
class StageMemory:
    """Peak memory, and its parts, in bytes, of a stage, or of stages that share a device or a process on a CPU."""

    stage: int | str | None  # 1, `0,1`, `0-2`; None: all stages
    libraries: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    other: int  # the rest of the peak; negative if not all parts were in memory at the same time
    peak: int


@dataclass(frozen=True)
class Breakdowns:
    """Shares of the stage-time of a step by name, which add up to 1."""

    measured: dict[str, float] | None = None
    predicted: dict[str, float] | None = None


@dataclass(frozen=True)
class IdleShares:
    """The share of the stage-time of a step in which stages do nothing, whatever the cause."""

    measured: float | None = None
    predicted: float | None = None


@dataclass(frozen=True)
class BubbleShares:
    """The bubble as a share of the stage-time of a step."""

    ideal: float | None = None  # (K-1)/(M+K-1)
    measured: float | None = None
    predicted: float | None = None


@dataclass(frozen=True)
class Prediction:
    """A step as the plan of the run predicted it."""

    source: str  # source of the layers' costs
    measured: bool  # whether the seconds of the layers themselves were measured
    step_seconds: float
    memory_bytes: tuple[int, ...] = ()  # per stage
    activation_bytes: tuple[int, ...] | None = None  # per stage
    step_range: tuple[float, float] | None = None  # between which seconds, where timings of the layers scattered


@dataclass(frozen=True)
class Partition:
    """A stage: what it computes, and where."""

    process: int
    device: str
    layers: tuple[str, ...] = ()
    parameters: int = 0
    cost_share: float | None = None  # share of the model's computation


@dataclass(frozen=True)
class Start:
    """A command that has begun or resumed the run."""

    started: str  # ISO 8601, to the second
    command: str = ""  # the command as it was typed
    ended: str | None = None  # None while the command runs, or if it was killed
    first_step: int = 0  # optimizer steps done before the command
    seconds: float | None = None  # until its results were last written: at an evaluation, and at its end
    code: dict[str, Any] = field(default_factory=dict)  # gpipe, model -> commit, and whether files differ from it
    folder: str = ""  # the working directory, which relative paths start from; "" in a run of an older version


def format_second(moment: datetime) -> str:
    """`moment` in ISO 8601, to the second."""
    return moment.isoformat(timespec="seconds")


@dataclass(frozen=True)
class Restart:
    """An automatic restart of the run after a failure (max_restarts)."""

    why: str  # one line
    step: int  # optimizer steps done in the checkpoint that was resumed; 0 if the run began again
    partitions: int  # number of partitions since the restart


@dataclass(frozen=True)
class RunResult:
    """The result of a run. All fields but the status have defaults, as results of earlier versions may lack them."""

    status: str  # a Status
    command: str = "train"  # train, bench
    error: str | None = None
    task: Task = "classification"
    model: str | None = None
    dataset: str | None = None
    model_parameters: int | None = None
    epochs: int = 0  # whole epochs done, those before a resume included
    steps: int = 0  # optimizer steps done, those before a resume included
    seconds: float | None = None  # seconds of all starts
    # the last evaluation on the test set or, if there is a validation set, that with the weights that it has chosen
    test: Evaluation | None = None
    best: Evaluation | None = None  # the best evaluation on the test set; None if there is a validation set
    validation: Evaluation | None = None  # the best evaluation on the validation set, which has chosen the weights
    samples_per_second: float | None = None
    samples_per_second_quartiles: tuple[float, float] | None = None
    samples_per_second_kind: str | None = None  # a SpeedKind
    cpu_starved_share: float | None = None  # share of computing time in which the most affected stage had no core
    step_seconds: float | None = None
    speed_includes_warm_up: bool = False  # whether the run had no other steps
    speed_steps: int = 0  # steps in the medians
    warm_up_steps: int = 0  # first steps, left out of the medians
    model_flops: float | None = None  # floating-point operations of a full step
    model_flops_per_second: float | None = None
    peak_flops_per_second: float | None = None  # peak of all devices together
    mfu: float | None = None
    memory_bytes: tuple[int, ...] = ()  # peak of each stage
    memory: tuple[StageMemory, ...] = ()
    global_batch: int | None = None  # samples of a mini-batch
    executor: str | None = None
    ideal_bubble: float | None = None
    breakdown: Breakdowns = Breakdowns()
    idle: IdleShares = IdleShares()
    bubble: BubbleShares = BubbleShares()
    prediction: Prediction | None = None
    activation_bytes: tuple[int, ...] | None = None  # per stage, counted
    predicted_activation_bytes: tuple[int, ...] | None = None  # predicted for the mini-batch in which they were counted
    partitions: tuple[Partition, ...] = ()
    failed_checkpoints: int = 0  # checkpoints that could not be written; the training went on without them
    compiled: dict[str, Any] | None = None
    graphs: dict[str, Any] | None = None
    resumed_from: str | None = None
    starts: tuple[Start, ...] = ()
    restarts: tuple[Restart, ...] = ()
    versions: dict[str, Any] = field(default_factory=dict)  # package -> version
    hardware: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)  # all settings, nested
    tokens_per_second: float | None = field(default=None, metadata=TEXT_FIELD)
    tokens_per_second_quartiles: tuple[float, float] | None = field(default=None, metadata=TEXT_FIELD)
    unigram_perplexity: float | None = field(default=None, metadata=TEXT_FIELD)
    global_batch_tokens: int | None = field(default=None, metadata=TEXT_FIELD)

    @property
    def text(self) -> bool:
        """Whether the run trained on text, so that its speed is counted in tokens."""
        return self.task in TEXT_TASKS

    @property
    def speed(self) -> float | None:
        """Tokens/s of text, samples/s of images."""
        return self.tokens_per_second if self.text else self.samples_per_second

    @property
    def threads(self) -> int | None:
        """Threads of each process."""
        threads: int | None = self.hardware.get("threads_per_process")
        return threads


def write_run(folder: Path, result: RunResult) -> None:
    """Writes result.json. Raises OSError if it cannot be written."""
    write_result(folder, to_dict(result, result.text))


def read_run_result(folder: Path) -> RunResult:
    """Reads result.json. Raises OSError, and InputError if it is not the result of a run."""
    tree = read_result(folder)
    try:
        return from_dict(RunResult, update_words(tree))
    except TypeError as error:
        raise InputError(f"{folder / RESULT_FILE}: {error}, so it is not the result of a run; remove it") from error


def run_result_or_none(folder: Path) -> RunResult | None:
    """The result of a run; None if it is missing or cannot be read."""
    try:
        return read_run_result(folder)
    except (OSError, ValueError):
        return None
