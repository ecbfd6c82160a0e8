"""What a parent sends to its workers, and their last messages. Imports nothing slow, so that a command starts fast."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpipe_cli.errors import InvalidSettingError
    from gpipe_cli.planner.pipeline_spec import PipelineSpec
    from gpipe_cli.training.engine import WorkerProcess


Task = Callable[["WorkerProcess"], None]  # tasks are pickled: no lambda, no closure


@dataclass(frozen=True)
class Job:
    """What a worker is sent: the task and the spec, which are the same for all workers, and its rank."""

    task: Task
    spec: "PipelineSpec"
    rank: int
    rendezvous: str  # path of a file; under torchrun, the name of this start
    timeout_seconds: float  # the longest silence of a process


@dataclass(frozen=True)
class Done:
    """A worker's last message: its task is done."""


class Reason(StrEnum):
    """Why a process ended before its task was done, as far as callers act on it."""

    USER = "user"  # the user can fix it by other settings
    PEER = "peer"  # another process of the run has ended
    ABORTED = "aborted"  # NCCL has ended the process: another one has ended, or its own device failed
    LOST = "lost"  # the process was killed or stopped, or its device failed: a restart of the run may succeed
    OTHER = "other"


@dataclass(frozen=True)
class Failure:
    """Why a process failed: a worker's last message, or what its parent has observed."""

    rank: int
    text: str  # a single line
    seconds: float  # time.time() of the failure
    reason: Reason = Reason.OTHER
    traceback: str = ""  # "" if `text` is enough
    invalid_setting: "InvalidSettingError | None" = None  # names the setting that would fix it; None: not known
