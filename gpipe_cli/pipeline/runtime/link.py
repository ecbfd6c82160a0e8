"""A link sends tensors in one direction between the processes of two neighbouring stages.

Each link has a process group of its own. NCCL runs the operations of a group in turn, and a send ends only
when its receive runs: in a shared group, a receive that was posted early could block the send that would free it, and
every receive would delay the sends behind it.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
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
_Sends: TypeAlias = "SimpleQueue[tuple[list[torch.Tensor], _Sending] | None]"


class Work(Protocol):
    """A send or a receive in flight."""

    def wait(self, timeout: timedelta = ...) -> object:
        """Raises RuntimeError if the operation fails or takes longer than `timeout`."""

    def is_completed(self) -> bool: ...


class Link(Protocol):
    """Tensors arrive in the order they are sent; each `send` needs a `receive` of as many tensors at the other end."""

    peer: int  # the number of the process at the other end

    def send(self, tensors: list[torch.Tensor]) -> Sequence[Work]:
        """Begin to send. The list is the link's from now on: it may be emptied as soon as they are sent."""

    def receive(self, tensors: Sequence[torch.Tensor]) -> Sequence[Work]: ...


@dataclass(frozen=True)
class Links:
    """The links of a process, by edge, and how long it waits for a message: at most `timeout_seconds`, or
    `connect_seconds` for the first message between GPUs, which also connects them. Waits are inside `waits`."""

    of_edge: Mapping[Edge, Link]
    timeout_seconds: float
    connect_seconds: float
    waits: Callable[[], AbstractContextManager[object]] = nullcontext


class GroupLink:
    """A link over a process group of two; several tensors are a single operation if the backend batches them."""

    def __init__(self, group: dist.ProcessGroup, peer: int) -> None:
        self.peer, self._group = peer, group

    def send(self, tensors: list[torch.Tensor]) -> Sequence[Work]:
        return self._start(dist.isend, tensors)

    def receive(self, tensors: Sequence[torch.Tensor]) -> Sequence[Work]:
        return self._start(dist.irecv, tensors)

    def close(self) -> None:
        dist.destroy_process_group(self._group)

    def _start(self, operation: Callable[..., dist.Work | None], tensors: Sequence[torch.Tensor]) -> Sequence[Work]:
        # a batch even for a single tensor: NCCL would make another communicator for an unbatched operation
        operations = [dist.P2POp(operation, tensor, self.peer, self._group) for tensor in tensors]
        return dist.batch_isend_irecv(operations) if operations else []


class ThreadedLink(GroupLink):
    """A link that sends in a thread of its own: Gloo writes to the socket in the calling thread, and a send counts as
    done only once a thread has waited for it. Tensors are released as soon as they are sent."""

    def __init__(self, group: dist.ProcessGroup, peer: int) -> None:
        super().__init__(group, peer)
        self._sends: _Sends = SimpleQueue()
        # a daemon, as a program that fails must not wait at its end for a peer that receives nothing any more
        arguments = self._sends, GroupLink(group, peer)
        self._thread = Thread(target=_send_each, args=arguments, name="gpipe-send", daemon=True)
        self._thread.start()
        finalize(self, self._sends.put, None)

    def send(self, tensors: list[torch.Tensor]) -> Sequence[Work]:
        sending = _Sending()
        self._sends.put((tensors, sending))
        return [sending]

    def close(self) -> None:
        self._sends.put(None)
        self._thread.join()  # the last reference to the group must not be a daemon's, at whose end Python may end, too
        super().close()


class _Sending(Future[None]):
    """A send by the thread of a ThreadedLink."""

    def wait(self, timeout: timedelta = timedelta(0)) -> None:  # 0: no limit, as in torch
        try:
            self.result(timeout.total_seconds() or None)
        except TimeoutError as error:
            raise RuntimeError(f"nothing was received for {timeout.total_seconds():g} s") from error

    def is_completed(self) -> bool:
        return self.done() and self.exception() is None


def _send_each(sends: _Sends, link: GroupLink) -> None:
    while (asked := sends.get()) is not None:
        tensors, sending = asked
        try:
            wait_for(link.send(tensors), torch.device("cpu"), timedelta(0))
            tensors.clear()
            sending.set_result(None)
        except Exception as error:
            sending.set_exception(error)


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
