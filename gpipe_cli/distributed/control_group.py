"""Messages between the processes of a run outside the pipeline: a few numbers per step, over Gloo on the CPU.

A single all-gather per step carries everything: the gradient norms, the loss (known to the last stage only), memory.
With gradient clipping a second all-gather carries the norms before the update; while a checkpoint is being written,
another follows each step. In a run of a single process the same calls return immediately.

Every gather also carries the sending process's reason to stop, if it has one: as all processes begin the same gathers,
all stop after the same step.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from enum import IntEnum
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from gpipe_cli.pipeline.runtime.transport import waiting_for_peers
from gpipe_cli.system.accelerator import is_accelerator


class BlockedOn(IntEnum):
    NOTHING = 0
    PROCESS = 1  # another process of the run
    DATA = 2  # a mini-batch
    DISK = 3  # a checkpoint to be written
    COMPILER = 4  # torch.compile, which may take minutes for a layer
    LAST_CHECKPOINT = 5  # the last checkpoint of a process that has failed


class Activity(NamedTuple):
    """What a process is doing: int64 numbers in memory shared with its supervisor, which detects a hang by them."""

    progress_counter: int  # incremented when an action begins, a wait ends or a message is sent
    blocked_on: int  # a BlockedOn
    # the last action begun, the samples of its micro-batch, and up to two lengths that the samples are padded to
    kind: int  # 1 F, 2 R, 3 B, 0 none yet
    stage: int
    micro_batch: int
    samples: int
    length_0: int
    length_1: int


ACTIVITY_NUMBERS = len(Activity._fields)  # per process
# The memory's last two numbers: messages of process 0 that the parent has handled, and the signal that has asked the
# run to stop, 0 before.
HANDLED, STOP = -2, -1

BlockedOnContext = Callable[[BlockedOn], AbstractContextManager[object]]
Gathered = Callable[[], list[torch.Tensor]]  # waits, and returns the vector of every process by rank


class Stop(IntEnum):
    """Why a run is to stop after a step, if no signal asks for it, whose number is smaller; a greater reason wins."""

    UNREADABLE = 101  # the next mini-batch cannot be read
    EVALUATION_UNREADABLE = 102  # so that its scores mean nothing


class ControlGroup:
    """The processes of a run. `group`: a Gloo group of all of them; None for a run of a single process.

    The context `blocked_on` is entered for every wait. It raises PeerLostError if a process is gone or silent.
    """

    def __init__(
        self, rank: int, size: int, group: dist.ProcessGroup | None = None, blocked_on: BlockedOnContext = nullcontext
    ) -> None:
        assert (group is None) == (size == 1)
        self.rank, self.size, self.blocked_on, self._group = rank, size, blocked_on, group
        self.reason: Callable[[], int] = lambda: 0  # a signal that asks this process to stop, or a Stop; 0: neither
        self._last: Gathered | None = None
        self.clock_offset_seconds = self._clock_offset()

    @property
    def is_rank_zero(self) -> bool:
        """Whether this is process 0, which reports and completes checkpoints."""
        return self.rank == 0

    def gather(self, vector: torch.Tensor) -> Gathered:
        """Begin an all-gather of a float64 vector (D,), with the same D in every process."""
        vector = torch.cat([vector, vector.new_tensor([self.reason()])])
        parts = [vector] if self._group is None else [torch.empty_like(vector) for _ in range(self.size)]
        work = None
        if self._group is not None:
            with self._waiting():
                work = dist.all_gather(parts, vector, group=self._group, async_op=True)

        @cache
        def wait() -> list[torch.Tensor]:
            if work is not None:
                with self._waiting():
                    work.wait()
            return parts

        self._last = wait
        return lambda: [part[:-1] for part in wait()]

    def any_stop_asked(self) -> int:
        """The greatest reason to stop that any process had when it began the last gather: a signal or a Stop; 0: none.
        Waits for that gather; all processes get the same answer."""
        return 0 if self._last is None else max(int(part[-1]) for part in self._last())

    def collect(self, value: Any, *, patient: bool = False) -> list[Any]:
        """A small object from each process, by rank. `patient`: this waits however long a process takes."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.size
        with self._waiting():
            dist.all_gather_object(values, value, group=dist.group.WORLD if patient else self._group)
        return values

    def barrier(self) -> None:
        if self._group is not None:
            with self._waiting():
                dist.barrier(group=self._group)

    def close(self) -> None:
        """Destroy the group, once all processes have reached this call."""
        self.barrier()
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = self._last = None  # a gather holds the connections of its group

    def _waiting(self) -> AbstractContextManager[None]:
        return waiting_for_peers(self.blocked_on(BlockedOn.PROCESS), "another process of the run is gone or silent")

    def _clock_offset(self) -> float:
        """Seconds by which this process's monotonic clock is ahead of process 0's: 0 if all run on the same machine.

        Otherwise it is the median difference of readings after a barrier, exact to a fraction of a millisecond: enough
        to draw all processes in the same timeline.
        """
        boot = ""  # identifies the boot that the clock counts from; if unknown, all machines count as the same
        with suppress(OSError):
            boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        if len(set(self.collect(boot))) == 1:
            return 0.0
        differences = []
        for _ in range(9):
            self.barrier()
            readings = self.collect(time.perf_counter())
            differences.append(readings[self.rank] - readings[0])
        return median(differences)


def global_norm(norms: torch.Tensor) -> torch.Tensor:
    """The norm () of all parameters' gradients together, from each parameter's, float64 (P,) in global order. On a CPU
    they are summed in that order, so that the partitioning changes no bit."""
    squares = norms.square()
    # on a CPU cumsum adds its terms in order; on a GPU scans are not deterministic, but `sum` is
    return (squares.sum() if is_accelerator(squares.device) else squares.cumsum(0)[-1:].sum()).sqrt()
