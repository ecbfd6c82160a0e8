"""What the processes of one run send each other outside the pipeline: a few numbers per step, over the CPU.

One gather per step carries everything: the parts of the gradient norm, the loss that only the last stage knows, memory.
Where gradients are clipped, another one carries those parts before the update; and one follows as long as a checkpoint
is being written. In a run of one process the same calls return at once.

Whether a process was asked to stop travels with every gather: as all begin the same gathers, all stop after the same
step.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, fields
from enum import IntEnum
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from gpipe_cli.pipeline.runtime.transport import waiting_for_peers


class Awaited(IntEnum):
    NOTHING = 0
    PROCESS = 1  # another one of the run
    DATA = 2
    DISK = 3  # a checkpoint
    COMPILER = 4  # torch.compile, which may take minutes for a layer
    LAST_CHECKPOINT = 5  # the last checkpoint of a process that has failed


@dataclass(frozen=True)
class Activity:
    """What a process is doing, as numbers in memory that its parent reads: how a process that hangs is found."""

    changes: int  # how often it has begun something
    awaited: int  # Awaited
    # its last action; then its samples, and what they are padded to along up to two dimensions
    kind: int  # 1 F, 2 R, 3 B, 0 none yet
    stage: int
    micro_batch: int
    samples: int
    length_0: int
    length_1: int


ACTIVITY_NUMBERS = len(fields(Activity))  # per process; one more number at the end is not 0 once the run is to stop

Waits = Callable[[Awaited], AbstractContextManager[object]]
Gathered = Callable[[], list[torch.Tensor]]  # waits: a vector of each process, in the order of the stages


class ControlGroup:
    """The processes of a run. `group` is a Gloo group of all of them, or None for a process on its own.

    Inside of `waits` this process waits.
    """

    def __init__(
        self, rank: int, size: int, group: dist.ProcessGroup | None = None, waits: Waits = nullcontext
    ) -> None:
        assert (group is None) == (size == 1)
        self.rank, self.size, self.waits, self._group = rank, size, waits, group
        self.asked: Callable[[], bool] = lambda: False  # whether this process was asked to stop
        self._last: Gathered | None = None
        self.clock_offset_seconds = self._clock_offset()

    @property
    def leads(self) -> bool:
        """Whether this is process 0, which reports and completes checkpoints."""
        return self.rank == 0

    def gather(self, vector: torch.Tensor) -> Gathered:
        """Begin to collect one float64 vector, of the same length everywhere, from every process to every process."""
        vector = torch.cat([vector, vector.new_tensor([self.asked()])])
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

    def stops(self) -> bool:
        """Whether a process was asked to stop before it began the last gather; waits for that, and is the same in all
        processes."""
        return self._last is not None and any(bool(part[-1]) for part in self._last())

    def collect(self, value: Any, *, patient: bool = False) -> list[Any]:
        """One small object of each process, everywhere; waits for all of them, `patient`: however long one takes."""
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

    def _waiting(self) -> AbstractContextManager[None]:
        return waiting_for_peers(self.waits(Awaited.PROCESS), "another process of the run is gone or silent")

    def _clock_offset(self) -> float:
        """How far this process's monotonic clock is ahead of process 0's: 0 on the same machine.

        On another one it is what their looks at the clock after a barrier differ by: to a fraction of a millisecond,
        enough to draw both in one timeline.
        """
        boot = ""  # names the start of a machine, which its clock counts from; untold, machines count as one
        with suppress(OSError):
            boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        if len(set(self.collect(boot))) == 1:
            return 0.0
        differences = []
        for _ in range(9):
            self.barrier()
            seen = self.collect(time.perf_counter())
            differences.append(seen[self.rank] - seen[0])
        return median(differences)


def global_norm(norms: torch.Tensor) -> torch.Tensor:
    """The norm of all parameters together, (), from their norms in global order, float64 (P,): on a CPU in
    that order of summation, whatever the cut."""
    squares = norms.square()
    # one after another on a CPU; on a GPU, whose scans are not repeatable, as `sum` does it
    return (squares.sum() if squares.is_cuda else squares.cumsum(0)[-1:].sum()).sqrt()
