"""What a parent sends to its workers, and their last messages; light, so that a start costs no imports."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpipe_cli.config.settings import DecodeConfig, TrainConfig
    from gpipe_cli.planner.placement import Placement
    from gpipe_cli.verify.differences import ReferenceDone, Variant


@dataclass(frozen=True)
class Bench:
    """What is measured of a training: so many steps, after so many that do not count. Nothing is evaluated, and no
    checkpoint is written."""

    warm_up_steps: int
    steps: int


@dataclass(frozen=True)
class Training:
    """Train from the first step to the last, or from the checkpoint `source` on, or with its weights."""

    config_yaml: str
    folder: Path
    bench: Bench | None = None
    source: Path | None = None


@dataclass(frozen=True)
class Evaluation:
    """Score the test set with a checkpoint."""

    checkpoint: Path
    decode: "DecodeConfig"


@dataclass(frozen=True)
class Measuring:
    """Time the layers for a micro-batch of `samples`, in `segments` that fit a device one after another, each for about
    so many `seconds`."""

    segments: "Placement"
    samples: int
    seconds: float


@dataclass(frozen=True)
class Checking:
    """Run one mini-batch in each of the variants and compare it with what `references` left, by schedule.

    Gradients are left in `folder`, as they are too large for messages; weights are taken from the checkpoint `source`,
    if there is one.
    """

    placements: "dict[int, Placement]"  # by partitions
    variants: "tuple[Variant, ...]"
    references: "dict[str, ReferenceDone]"
    folder: Path
    source: Path | None


Task = Training | Evaluation | Measuring | Checking


@dataclass(frozen=True)
class Job:
    """What a worker is sent: the task, which is the same for all of them, and its number."""

    config: "TrainConfig"
    placement: "Placement"
    task: Task
    process: int
    rendezvous: str  # a file for those of this machine; under torchrun, the name of this start


@dataclass(frozen=True)
class Done:
    """A worker's last message: its task is done."""


class Reason(StrEnum):
    """Why a process ended before its task was done."""

    KILLED = "killed"
    SILENT = "silent"
    USER = "user"  # other settings would mend it
    DIVERGED = "diverged"
    UNWRITTEN = "unwritten"  # a checkpoint
    ERROR = "error"
    PEER = "peer"  # another process of the run has ended


@dataclass(frozen=True)
class Failure:
    """Why a process ended; a worker's last message, or what its parent has seen."""

    process: int
    reason: Reason
    text: str  # one line
    details: str  # the traceback
    seconds: float  # time.time() of it

    @property
    def rank(self) -> tuple[bool, float]:
        """The least of several failures is the cause: never a lost peer if there is another; then the earliest."""
        return (self.reason is Reason.PEER, self.seconds)
