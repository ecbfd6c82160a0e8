"""One direction of one edge of the pipeline: tensors from a process to the one of the next stage, or back.

Each has a process group of its own. NCCL runs what a process gives to a group one after another, and a send ends only
when its receive runs: with groups that several edges share, a receive that waits holds up the send that would free it.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol, TypeAlias

import torch
import torch.distributed as dist

from gpipe_cli.pipeline.schedule.schedules import Kind

Edge: TypeAlias = tuple[Kind, int]
"""What travels, activations for an F or gradients for a B, and the stage that receives it."""


class Work(Protocol):
    """A send or a receive on its way."""

    def wait(self, timeout: timedelta = ...) -> object:
        """Raises RuntimeError if it fails, or is not done in this time."""

    def is_completed(self) -> bool: ...


class Link(Protocol):
    """What is sent arrives in the same order; each call is answered by one at the other end with as many tensors."""

    peer: int  # the process at the other end

    def send(self, tensors: Sequence[torch.Tensor]) -> Sequence[Work]: ...

    def receive(self, tensors: Sequence[torch.Tensor]) -> Sequence[Work]: ...


@dataclass(frozen=True)
class Links:
    """The links of a process to those of neighbouring stages, and how long it waits for these.

    Inside of `waits` the process waits for another one, for `timeout_seconds` at most; for its first message to a GPU,
    of which nobody sees whether it waits, for `connect_seconds`.
    """

    of_edge: Mapping[Edge, Link]
    timeout_seconds: float
    connect_seconds: float
    waits: Callable[[], AbstractContextManager[object]] = nullcontext


class GroupLink:
    """A link over a process group of two; several tensors are one operation where the backend can."""

    def __init__(self, group: dist.ProcessGroup, peer: int) -> None:
        self.peer, self._group = peer, group

    def send(self, tensors: Sequence[torch.Tensor]) -> Sequence[Work]:
        return self._start(dist.isend, tensors)

    def receive(self, tensors: Sequence[torch.Tensor]) -> Sequence[Work]:
        return self._start(dist.irecv, tensors)

    def _start(self, operation: Callable[..., dist.Work | None], tensors: Sequence[torch.Tensor]) -> Sequence[Work]:
        # a batch also of one: NCCL would make another communicator for what is not in a batch
        operations = [dist.P2POp(operation, tensor, self.peer, self._group) for tensor in tensors]
        return dist.batch_isend_irecv(operations) if operations else []


class ThreadedLink(GroupLink):
    """A link whose sends have a thread of their own: Gloo writes to the socket in the thread that sends."""

    def __init__(self, group: dist.ProcessGroup, peer: int) -> None:
        super().__init__(group, peer)
        self._thread = ThreadPoolExecutor(1, "gpipe-send")

    def send(self, tensors: Sequence[torch.Tensor]) -> Sequence[Work]:
        return [_Sending(self._thread.submit(super().send, tensors))]


class _Sending:
    """A send that another thread begins."""

    def __init__(self, works: Future[Sequence[Work]]) -> None:
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> None:  # as for torch: no limit
        for work in self._works.result():
            work.wait(timeout)

    def is_completed(self) -> bool:
        works = self._works
        return works.done() and works.exception() is None and all(work.is_completed() for work in works.result())
