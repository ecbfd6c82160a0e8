"""A link sends tensors in one direction between the processes of two neighbouring stages.

Each link has a separate process group. NCCL runs the operations of a group in order, and a send ends only when its
receive runs: in a shared group, a receive that was posted early could block the send that would free it, and every
receive would delay the sends behind it.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Protocol, TypeAlias
from weakref import finalize

import torch
import torch.distributed as dist

from gpipe_cli.schedule.schedule import Kind
from gpipe_cli.system.accelerator import is_accelerator

Edge: TypeAlias = tuple[Kind, int, int]
"""What is sent (F: activations, B: gradients), and the indices of the stages that send and receive it."""
_SMALL_BYTES = 64 << 10  # of a send that the calling thread makes itself
_SENDS_PER_BATCH = 16  # small sends that are waited for together: at most 1 MiB is released later than it could be


class Work(Protocol):
    """A send or a receive in flight."""

    def wait(self, timeout: timedelta = ...) -> object:
        """Raises RuntimeError if the operation fails or takes longer than `timeout`."""

    def is_completed(self) -> bool: ...


@dataclass(frozen=True)
class Links:
    """The links of a process, by edge, and how long it waits for a message: at most `timeout_seconds`, or
    `connect_seconds` for the first message between GPUs, which also connects them. The context `waits` is active during
    waits."""

    by_edge: "Mapping[Edge, GroupLink]"
    timeout_seconds: float
    connect_seconds: float
    waits: Callable[[], AbstractContextManager[object]] = nullcontext


class GroupLink:
    """A link over a process group of two; several tensors are a single operation if the backend batches them. Tensors
    arrive in the order they are sent; each `send` needs a `receive` of as many tensors at the other end."""

    def __init__(self, group: dist.ProcessGroup, peer: int) -> None:
        """`peer`: the rank of the process at the other end."""
        self.peer, self._group = peer, group

    def send(self, tensors: list[torch.Tensor]) -> Sequence[Work]:
        """Begin to send. The link may empty the list as soon as the tensors are sent."""
        return self._start(dist.isend, tensors)

    def receive(self, tensors: Sequence[torch.Tensor]) -> Sequence[Work]:
        return self._start(dist.irecv, tensors)

    def close(self) -> None:
        dist.destroy_process_group(self._group)

    def _start(self, operation: Callable[..., dist.Work | None], tensors: Sequence[torch.Tensor]) -> Sequence[Work]:
        # a batch even for a single tensor: NCCL would make another communicator for an unbatched operation
        operations = [dist.P2POp(operation, tensor, self.peer, self._group) for tensor in tensors]
        return dist.batch_isend_irecv(operations) if operations else []


class GlooLink(GroupLink):
    """A link over Gloo, with a sending thread: Gloo writes to the socket in the calling thread, and a send is complete,
    so that its tensors may be released, only once a thread has waited for it.

    Passing a send to the other thread takes longer than writing a few KiB. While all tensors of a link are that small,
    the calling thread sends them, which never blocks, as Gloo queues what the peer has not received; the other thread
    then waits for several sends together.
    """

    def __init__(self, group: dist.ProcessGroup, peer: int) -> None:
        super().__init__(group, peer)
        self._rank = dist.get_group_rank(group, peer)
        self._sends = SimpleQueue["list[_Send] | None"]()
        # a daemon, as a failing program must not wait at its end for a peer that no longer receives
        self._thread = Thread(target=_finish_sends, args=(self._sends,), name="gpipe-send", daemon=True)
        self._thread.start()
        finalize(self, self._sends.put, None)
        self._are_small = True
        self._queued: list[_Send] = []  # not handed over yet

    def send(self, tensors: list[torch.Tensor]) -> Sequence[Work]:
        send = _Send(tensors, partial(self._group.send, tag=0), self._rank)
        # never True again, as tensors must arrive in order
        self._are_small = self._are_small and sum(tensor.nbytes for tensor in tensors) < _SMALL_BYTES
        if self._are_small:
            send.begin()
        self._queued.append(send)
        if not self._are_small or len(self._queued) == _SENDS_PER_BATCH:
            self._queued = [queued for queued in self._queued if not queued.is_completed()]
            for queued in self._queued:
                queued.hand_over()
            self._sends.put(self._queued)
            self._queued = []
        return [send]

    def receive(self, tensors: Sequence[torch.Tensor]) -> Sequence[Work]:
        return [self._group.recv([tensor], self._rank, 0) for tensor in tensors]

    def close(self) -> None:
        self._sends.put(None)
        self._thread.join()  # the last reference to the group must not be a daemon's, which may end with Python
        super().close()


class _Send:
    """A send over a GlooLink."""

    def __init__(self, tensors: list[torch.Tensor], function: Callable[..., Work], rank: int) -> None:
        self._tensors, self._function, self._rank = tensors, function, rank
        self._works: list[Work] | None = None  # None before it has begun
        self._finished: Future[None] | None = None  # of the thread that it was handed over to

    def begin(self) -> None:
        self._works = [self._function([tensor], self._rank) for tensor in self._tensors]

    def hand_over(self) -> None:
        self._finished = Future()

    def finish(self, timeout: timedelta = timedelta(0)) -> None:
        """Wait for the send, and release its tensors. A second wait for Gloo's work would never return."""
        if self._works is None:
            self.begin()
        while self._works:
            self._works.pop().wait(timeout)
        self._tensors.clear()

    def finish_in_thread(self) -> None:
        assert self._finished is not None
        try:
            self.finish()
            self._finished.set_result(None)
        except Exception as error:
            self._finished.set_exception(error)

    def wait(self, timeout: timedelta = timedelta(0)) -> None:  # 0: no limit, as in torch
        if self._finished is None:
            self.finish(timeout)
            return
        try:
            self._finished.result(timeout.total_seconds() or None)
        except TimeoutError as error:
            raise RuntimeError(f"nothing was received for {timeout.total_seconds():g} s") from error

    def is_completed(self) -> bool:
        if self._finished is None:
            return self._works == []
        return self._finished.done() and self._finished.exception() is None


def _finish_sends(sends: "SimpleQueue[list[_Send] | None]") -> None:
    while (handed_over := sends.get()) is not None:
        for send in handed_over:
            send.finish_in_thread()


def wait_for(works: Sequence[Work], device: torch.device, timeout: timedelta) -> None:
    """Wait for operations on tensors of `device`. On an accelerator later kernels of the current stream wait, not this
    thread; else raises RuntimeError for an operation that takes longer than `timeout` (0: no limit)."""
    for work in works:
        if is_accelerator(device):
            work.wait()
        else:
            work.wait(timeout)


def await_first(works: Sequence[Work], device: torch.device, seconds: float) -> None:
    """On an accelerator, wait until the first operations of a group, which also connect its processes, are done. Raises
    RuntimeError if that takes longer than `seconds`."""
    until = time.monotonic() + seconds
    while is_accelerator(device) and not all(work.is_completed() for work in works):
        if time.monotonic() > until:
            raise RuntimeError(
                f"nothing arrived for {seconds:g} s; with NCCL_P2P_DISABLE=1 GPUs do not "
                "reach into each other's memory, which a machine may forbid"
            )
        time.sleep(0.001)
