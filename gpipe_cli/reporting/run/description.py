"""A run before it begins, as its reports describe it.

Section 2 of the paper describes a run by K, M and the partitions; this is that description with what a reader needs to
repeat it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from gpipe_cli.reporting.run.task_words import Task

if TYPE_CHECKING:  # they import torch, which takes seconds: tables of runs do without
    from gpipe_cli.planner.model_flops import StepFlops
    from gpipe_cli.planner.stage_memory import StageMemory

Status = Literal["running", "completed", "failed", "interrupted", "dry_run"]
# contended: other programs had the cores of the stages; one_device: stages shared a device or cores with each other
SpeedKind = Literal["measured", "measured_contended", "measured_one_device"]
Command = Literal["train", "bench"]

WARM_UP_STEPS = 3  # of a training: they allocate memory and choose algorithms


@dataclass(frozen=True)
class PartitionDescription:
    """One of the K partitions, in order."""

    layers: tuple[str, ...]  # names
    parameters: int
    cost_share: float | None  # of the computation, as the partitioner counts it, 0 to 1; None: unknown
    device: str  # `cpu`, `cuda:0`
    # Of each layer, forward and backward of one micro-batch as predicted; in a run without a prediction they only
    # show which layers cost more. (): unknown.
    layer_seconds: tuple[tuple[float, float], ...] = ()
    memory: "StageMemory | None" = None  # predicted, without libraries; None: unknown


@dataclass(frozen=True)
class Setting:
    """One key that the configuration of some run may have, though not that of this one, if it has another model."""

    key: str  # `model.filters`
    kind: Literal["number", "switch", "text"]  # text: also what may be null, a list or one of several kinds
    choices: tuple[str, ...] = ()  # of a text that can be nothing else


@dataclass(frozen=True)
class Prediction:
    """What was predicted of an optimizer step before the run began."""

    source: str  # of the seconds, one phrase: `hardware=cpu figures`, `measured layers`
    measured: bool  # of the layers themselves
    step_seconds: float
    breakdown: Mapping[str, float]  # timeline_values.SHARES -> share of stage-time, 0 to 1
    memory_bytes: tuple[int, ...]  # per stage, in all
    activation_bytes: tuple[int, ...]  # per stage, of all micro-batches in flight


@dataclass(frozen=True)
class RunDescription:
    """A run before its first step."""

    model_name: str
    dataset_name: str
    train_samples: int | None  # None, as the two others: a dry run has not opened the data
    test_samples: int | None
    partitions: tuple[PartitionDescription, ...]
    micro_batch_sizes: tuple[int, ...]  # samples of each of the M micro-batches of one replica; () with batch_tokens
    schedule: str
    recompute: str
    executor: str
    ideal_bubble: float  # share of stage-time, 0 to 1
    epochs: int
    steps_per_epoch: int | None
    learning_rate: float  # of the first step
    warm_up: tuple[int, float] | None  # its steps, and the learning rate behind it; None: this run has none before it
    config: dict[str, Any]  # resolved; plain values only
    config_yaml: str
    speed_kind: SpeedKind  # as far as it is known before the run
    threads: int  # of each process
    max_steps: int | None = None  # the run stops after this many steps
    resumed_from: str | None = None  # run folder
    first_step: int = 0  # steps done before this run began: above 0 only for one that was resumed
    gpu_names: tuple[str, ...] = ()
    task: Task = "classification"
    preset: str | None = None  # name of the settings that it began with
    notes: tuple[tuple[str, str], ...] = ()  # more lines of the banner: label, fact
    prediction: Prediction | None = None
    settings: tuple[Setting, ...] = ()  # of all runs, so that they are in one table; (): those of `config`
    flops: "StepFlops | None" = None
    command: Command = "train"
    warm_up_steps: int = WARM_UP_STEPS  # first ones, that do not count to the speed
    # Text only.
    vocabulary: int | None = None  # tokens in it
    languages: int | None = None  # of a translation
    length: int | None = None  # tokens of a sequence of a language model
    unigram_perplexity: float | None = None  # of a model of the test set that knows how frequent tokens are, no more
    batch_tokens: int | None = None  # of one replica's mini-batch at most, where they are cut by tokens, not samples
    micro_batches: int | None = None  # M, where micro_batch_sizes is ()

    @property
    def parameters(self) -> int:
        return sum(partition.parameters for partition in self.partitions)

    @property
    def micro_batch_count(self) -> int:
        """M."""
        count = len(self.micro_batch_sizes) or self.micro_batches
        assert count, "neither micro_batch_sizes nor micro_batches"
        return count

    @property
    def global_batch(self) -> int | None:
        """Samples of one optimizer step; None where mini-batches are cut by tokens."""
        return None if self.batch_tokens is not None else sum(self.micro_batch_sizes)

    @property
    def global_batch_tokens(self) -> int | None:
        """As ``global_batch``, in tokens; None where mini-batches are cut by samples."""
        return None if self.batch_tokens is None else self.batch_tokens

    @property
    def total_steps(self) -> int:
        """Steps of the whole run, those before it was resumed included."""
        assert self.steps_per_epoch is not None, "a dry run has no steps"
        steps = self.epochs * self.steps_per_epoch
        return steps if self.max_steps is None else min(steps, self.max_steps)
