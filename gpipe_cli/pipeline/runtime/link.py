"""A link is one direction of one edge of the pipeline: it takes tensors to the process of the next stage, or back.

Each link has a process group of its own. NCCL runs the operations of a group one after another, and a send ends only
when its receive runs: if several edges shared a group, a waiting receive could hold up the send that would free it.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol, TypeAlias

import torch
import torch.distributed as dist

from gpipe_cli.pipeline.schedule.schedule import Kind

Edge: TypeAlias = tuple[Kind, int]
"""What travels, activations for an F or gradients for a B, and the stage that receives it."""


class Work(Protocol):
    """A send or a receive on its way."""

    def wait(self, timeout: timedelta = ...) -> object:
        """Raises RuntimeError if the operation fails, or is not done within `timeout`."""

    def is_completed(self) -> bool: ...


class Link(Protocol):
    """Tensors arrive in the order in which they are sent; every call of `send` needs one of `receive` at the other end,
    with as many tensors."""

    peer: int  # the process at the other end

    def send(self, tensors: Sequence[torch.Tensor]) -> Sequence[Work]: ...

    def receive(self, tensors: Sequence[torch.Tensor]) -> Sequence[Work]: ...


@dataclass(frozen=True)
class Links:
    """The links of a process to those of neighbouring stages, and how long it waits for their messages:
    `timeout_seconds` at most. The first message between GPUs, which also connects them, may take `connect_seconds`.
    The context `waits` is entered for every wait."""

    of_edge: Mapping[Edge, Link]
    timeout_seconds: float
    connect_seconds: float
    waits: Callable[[], AbstractContextManager[object]] = nullcontext


class GroupLink:
    """A link over a process group of two; several tensors are one operation if the backend supports that."""

    def __init__(self, group: dist.ProcessGroup, peer: int) -> None:
        self.peer, self._group = peer, group

    def send(self, tensors: Sequence[torch.Tensor]) -> Sequence[Work]:
        return self._start(dist.isend, tensors)

    def receive(self, tensors: Sequence[torch.Tensor]) -> Sequence[Work]:
        return self._start(dist.irecv, tensors)

    def _start(self, operation: Callable[..., dist.Work | None], tensors: Sequence[torch.Tensor]) -> Sequence[Work]:
        # a single tensor is a batch, too: NCCL would make another communicator for an operation outside a batch
        operations = [dist.P2POp(operation, tensor, self.peer, self._group) for tensor in tensors]
        return dist.batch_isend_irecv(operations) if operations else []


class ThreadedLink(GroupLink):
    """A link with a thread for its sends, as Gloo writes to the socket in the thread that calls it."""

    def __init__(self, group: dist.ProcessGroup, peer: int) -> None:
        super().__init__(group, peer)
        self._thread = ThreadPoolExecutor(1, "gpipe-send")

    def send(self, tensors: Sequence[torch.Tensor]) -> Sequence[Work]:
        return [_Sending(self._thread.submit(super().send, tensors))]


class _Sending:
    """A send that the thread of a link begins."""

    def __init__(self, works: Future[Sequence[Work]]) -> None:
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> None:  # 0 is no limit, as for torch
        for work in self._works.result():
            work.wait(timeout)

    def is_completed(self) -> bool:
        works = self._works
        return works.done() and works.exception() is None and all(work.is_completed() for work in works.result())
