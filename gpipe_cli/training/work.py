"""What a parent tells its workers and hears back, and how workers are started; light, so that a start costs no imports.

Workers come out of a fork server: a process that has imported everything once and holds no threads and no CUDA context.
The eighth worker starts as fast as the first, and the server imports while the parent still reads the command line.
"""

import multiprocessing
import signal
from collections.abc import Iterator, MutableSequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpipe_cli.config import DecodeConfig, TrainConfig
    from gpipe_cli.training.differences import Digests, Variant
    from gpipe_cli.training.layout import Layout

# Numbers per process that say what it is doing: kind (1 F, 2 R, 3 B, 0 nothing yet), stage, micro-batch, its samples,
# and what they are padded to along up to two dimensions.
WATCHED = 6


@dataclass(frozen=True)
class Bench:
    """What is measured of a training: so many steps, after so many that do not count. Nothing is evaluated, and no
    checkpoint is written."""

    warm_up_steps: int
    steps: int


@dataclass(frozen=True)
class Training:
    """Train from the first step, or the one that is resumed, to the last."""

    config_yaml: str
    folder: Path
    bench: Bench | None = None


@dataclass(frozen=True)
class Evaluation:
    """Score the test set with a checkpoint."""

    checkpoint: Path
    decode: "DecodeConfig"


@dataclass(frozen=True)
class Measuring:
    """Time the layers for a micro-batch of `samples`, in `segments` that fit a device one after another."""

    segments: "Layout"
    samples: int


@dataclass(frozen=True)
class Checking:
    """Run one mini-batch in each of the variants and compare it with what `references` left, by schedule.

    What is too large to be told lies in `folder`.
    """

    variants: "tuple[Variant, ...]"
    references: "dict[str, Digests]"
    folder: Path


Task = Training | Evaluation | Measuring | Checking


@dataclass(frozen=True)
class Work:
    """What a worker is told: the task, which is the same for all of them, and its place among them."""

    config: "TrainConfig"
    layout: "Layout"
    task: Task
    process: int
    rendezvous: str | None


@dataclass(frozen=True)
class Failure:
    """Why a process ended. `kind`: killed, user (other settings would mend it), diverged, unwritten (a checkpoint),
    error, or peer (another one's fault)."""

    process: int
    kind: str
    text: str
    details: str
    seconds: float

    @property
    def rank(self) -> tuple[int, float]:
        """The smallest is the cause: a lost peer never is if there is anything else; then the earliest."""
        return (1 if self.kind == "peer" else 0, self.seconds)


def begin(job: Work, connection: Connection, watched: MutableSequence[int]) -> None:
    """Where a worker process begins: with its parent's word that it knows of it, and will end it if need be.

    A parent that is interrupted while it starts a worker never hears of that one. Without its word it would go on to
    a rendezvous that nobody else comes to, where it cannot even notice that its parent is gone.
    """
    try:
        connection.recv()
    except EOFError:
        return
    from gpipe_cli.training.worker import work

    work(job, connection, watched)


def workers() -> ForkServerContext:
    """The context that workers are started in."""
    context = multiprocessing.get_context("forkserver")
    # the libraries of the default job too: what is not imported here, every worker imports for itself
    context.set_forkserver_preload(
        ["gpipe_cli.training.worker", "timm.optim.rmsprop_tf", "sklearn.datasets", "sklearn.model_selection"]
    )
    return context


def start_importing() -> None:
    """Start the fork server and return at once; called as early as it is known that there will be workers."""
    from multiprocessing import forkserver, resource_tracker

    workers()
    resource_tracker.ensure_running()  # a helper of the server; it unblocks what is blocked below, so it comes first
    # The server learns to ignore Ctrl-C only once it has imported everything, and would answer with a traceback until
    # then. What is blocked here stays blocked there, and in the workers; this process gets it afterwards.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def interruptible_import() -> Iterator[None]:
    """Inside, Ctrl-C is a KeyboardInterrupt whatever the libraries that are being imported make of it.

    NumPy turns one that comes while it is imported into an ImportError, and torch an ImportError of NumPy into a
    warning; the run would fail with their traceback, or begin.
    """
    interrupted = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except Exception:
        if not interrupted:
            raise
    finally:
        signal.signal(signal.SIGINT, before)
    if interrupted:
        raise KeyboardInterrupt
