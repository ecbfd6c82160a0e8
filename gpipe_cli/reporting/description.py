"""What the reporter is told: a run before it begins, then its steps and evaluations.

Section 2 of the paper describes a run by K, M and the partitions; this is that description with what a reader needs to
repeat it. Messages are plain dictionaries because they travel between processes.
"""

from dataclasses import dataclass
from typing import Any, Literal, TypedDict

Status = Literal["running", "completed", "failed", "interrupted", "dry_run"]
SpeedKind = Literal["measured", "measured_one_device"]


@dataclass(frozen=True)
class PartitionDescription:
    """One of the K partitions, in order."""

    layers: tuple[str, ...]  # names
    parameters: int
    cost_share: float | None  # of the computation, as the partitioner counts it, 0 to 1; None: unknown
    device: str  # `cpu`, `cuda:0`


@dataclass(frozen=True)
class RunDescription:
    """A run before its first step."""

    model_name: str
    dataset_name: str
    train_samples: int | None  # None, as the two others: a dry run has not opened the data
    test_samples: int | None
    partitions: tuple[PartitionDescription, ...]
    micro_batch_sizes: tuple[int, ...]  # samples of each of the M micro-batches of one replica
    schedule: str
    recompute: str
    executor: str
    ideal_bubble: float  # share of stage-time, 0 to 1
    epochs: int
    steps_per_epoch: int | None
    learning_rate: float  # of the first step
    config: dict[str, Any]  # resolved; plain values only
    config_yaml: str
    speed_kind: SpeedKind  # measured_one_device: all stages of the run share one device
    threads: int  # of each process
    replicas: int = 1
    max_steps: int | None = None  # the run stops after this many steps
    resumed_from: str | None = None  # run folder
    first_step: int = 0  # steps done before this run began: above 0 only for one that was resumed
    gpu_names: tuple[str, ...] = ()

    @property
    def parameters(self) -> int:
        return sum(partition.parameters for partition in self.partitions)

    @property
    def global_batch(self) -> int:
        """Samples of one optimizer step, over all replicas."""
        return self.replicas * sum(self.micro_batch_sizes)

    @property
    def total_steps(self) -> int:
        """Steps of the whole run, those before it was resumed included."""
        assert self.steps_per_epoch is not None, "a dry run has no steps"
        steps = self.epochs * self.steps_per_epoch
        return steps if self.max_steps is None else min(steps, self.max_steps)


class StepMessage(TypedDict):
    """One optimizer step, after it was done. Loss and shares are means over the samples of its mini-batch."""

    step: int  # steps done, this one included: the first is 1
    epoch: int  # the first is 1
    position: int  # steps done in this epoch, this one included: the last is steps_per_epoch
    samples: int
    seconds: float
    loss: float  # what was minimized: with label smoothing and the auxiliary head
    cross_entropy: float
    top1: float  # share, 0 to 1
    top5: float | None
    learning_rate: float
    gradient_norm: float | None  # over all stages, before clipping
    memory_bytes: list[int]  # peak of each stage so far


class EvaluationMessage(TypedDict):
    """The test set after some step; one evaluation for a step."""

    step: int
    epoch: int
    loss: float  # cross-entropy, mean over the samples
    top1: float
    top5: float | None
    averaged: bool  # whether the weights were the moving average
    is_best: bool
