"""What a parent sends to its workers, and their last messages; light, so that a start costs no imports."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpipe_cli.config.typed import RefusedError
    from gpipe_cli.planner.pipeline_spec import PipelineSpec
    from gpipe_cli.training.engine import WorkerProcess


Task = Callable[["WorkerProcess"], None]  # a function of a module, or a `partial` of one: it is pickled


@dataclass(frozen=True)
class Job:
    """What a worker is sent: the task, which is the same for all of them, and its number."""

    task: Task
    spec: "PipelineSpec"
    process: int
    rendezvous: str  # a file for those of this machine; under torchrun, the name of this start
    timeout_seconds: float


@dataclass(frozen=True)
class Done:
    """A worker's last message: its task is done."""


class Reason(StrEnum):
    """Why a process ended before its task was done, as far as it matters."""

    USER = "user"  # other settings would mend it
    PEER = "peer"  # another process of the run has ended
    LOST = "lost"  # it was killed or stopped, or its device fails: started again, the run may go on
    OTHER = "other"


@dataclass(frozen=True)
class Failure:
    """Why a process ended; a worker's last message, or what its parent has seen."""

    process: int
    text: str  # one line
    seconds: float  # time.time() of it
    reason: Reason = Reason.OTHER
    traceback: str = ""  # "" if the line says enough
    refused: "RefusedError | None" = None  # the setting that would mend it, where it is known
