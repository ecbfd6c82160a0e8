"""Stages in processes of their own, linked to their neighbours over torch.distributed: Gloo on CPUs, NCCL on GPUs.

Three things make it cheap: every shape is known beforehand from the meta device, so nothing is negotiated; receives
are posted before they are needed, into buffers that live as long as the run (`receive_buffers.py`); sends go straight
from the tensor, in a thread of their own, while the stage computes on.
"""

import datetime
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist

from gpipe_cli.pipeline.runtime.boundary import Boundary, as_sent
from gpipe_cli.pipeline.runtime.receive_buffers import ReceiveBuffers
from gpipe_cli.pipeline.runtime.transport import OptionalTensors, PeerLostError
from gpipe_cli.pipeline.schedule.schedules import Action, Kind, Schedule, in_flight

_OTHER = {Kind.F: Kind.B, Kind.B: Kind.F}


@dataclass(frozen=True, eq=False)
class _Sending:
    """A tensor on its way; it must live until it has been sent."""

    tensor: torch.Tensor
    work: Future[dist.Work]

    def is_completed(self) -> bool:
        return self.work.done() and self.work.exception() is None and self.work.result().is_completed()


class P2PTransport:
    """One stage in this process; its neighbours are processes `stage - 1` and `stage + 1` of the pipeline.

    `boundaries[k]` describes what crosses from stage k to stage k + 1. `forward` and `backward` are process groups of
    their own: in one group a waiting send would hold up the receive that frees it. `ranks[k]` is the process of stage
    k. Inside of `waits` this process waits for a neighbour, for `timeout_seconds` at most.
    """

    def __init__(
        self,
        stage: int,
        boundaries: Sequence[Boundary],
        *,
        ranks: Sequence[int],
        forward: dist.ProcessGroup,
        backward: dist.ProcessGroup,
        device: torch.device,
        memory_format: torch.memory_format,
        timeout_seconds: float,
        waits: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._stage = stage
        self._device, self._memory_format = device, memory_format
        self._timeout, self._waits = datetime.timedelta(seconds=timeout_seconds), waits
        self._sends: deque[_Sending] = deque()
        # Gloo writes to the socket in the thread that sends; NCCL launches on that thread's stream and returns at once
        self._sender = ThreadPoolExecutor(1, "gpipe-send") if device.type == "cpu" else None
        self._groups = {Kind.F: forward, Kind.B: backward}
        # activations are received from the stage before, gradients from the stage after
        self._buffers = {
            kind: ReceiveBuffers(ranks[other], self._groups[kind], device, memory_format)
            for kind, other in ((Kind.F, stage - 1), (Kind.B, stage + 1))
            if 0 <= other <= len(boundaries)
        }
        self.describe(boundaries)
        self._connect()

    def describe(self, boundaries: Sequence[Boundary]) -> None:
        """What crosses each edge from now on: in evaluation a model may hand on fewer tensors."""
        self.settle()
        self._boundaries = {
            kind: boundaries[self._stage - 1 if kind is Kind.F else self._stage] for kind in self._buffers
        }
        for kind, buffers in self._buffers.items():
            buffers.described = tuple(t for t in self._boundaries[kind] if kind is Kind.F or t.has_gradient)

    def begin_step(self, schedule: Schedule, sizes: Sequence[int], lengths: Sequence[int] = ()) -> None:
        self.settle()
        actions = schedule[self._stage]
        # gradients are consumed at once: one being used, one on its way; inputs stay as long as they are in flight
        depths = {Kind.F: in_flight(actions) + 1, Kind.B: 2}
        for kind, buffers in self._buffers.items():
            buffers.begin_step([a.micro_batch for a in actions if a.kind is kind], sizes, lengths, depths[kind])

    def send(self, action: Action, tensors: OptionalTensors) -> None:
        if action.kind is Kind.B:
            returning = [described.has_gradient for described in self._boundaries[Kind.F]]
            tensors = tuple(gradient for gradient, returns in zip(tensors, returning, strict=True) if returns)
        for tensor in tensors:
            if tensor is None:
                raise ValueError(
                    f"a tensor that stage {action.stage} received got no gradient, but it did when the model was "
                    "traced: which inputs a layer uses must not depend on the data"
                )
            self._send(action.kind, tensor)

    def receive(self, action: Action) -> OptionalTensors:
        kind, buffers = action.kind, self._buffers[action.kind]
        what = "activation" if kind is Kind.F else "gradient"
        works, tensors = buffers.take(action.micro_batch)
        for work in works:
            self._wait(work, f"receive the {what} of micro-batch {action.micro_batch} from process {buffers.peer}")
        arrived = iter(tensors)
        return tuple(next(arrived) if kind is Kind.F or t.has_gradient else None for t in self._boundaries[kind])

    def release(self, stage: int, micro_batch: int) -> None:
        for buffers in self._buffers.values():
            memory = buffers.memory_of(micro_batch)
            if memory and buffers.expects_more:
                # a layer may have passed its input on: that must have left before the next one is received over it
                for sending in [sending for sending in self._sends if sending.tensor.data_ptr() in memory]:
                    self._sends.remove(sending)  # Gloo's wait consumes the completion: a second one would never return
                    self._wait(sending.work, "finish a send")
            buffers.release(micro_batch)

    def finish_step(self) -> None:
        # what is still being sent may go on meanwhile: a stage that is ahead has its optimizer to run
        for buffers in self._buffers.values():
            buffers.finish_step()

    def settle(self) -> None:
        while self._sends:
            self._wait(self._sends.popleft().work, "finish a send")

    def _connect(self) -> None:
        """One message each way over each edge, in an order that cannot deadlock.

        Connections (for NCCL: communicators) are made at a pair's first message; made lazily, in whatever order
        processes arrive, they can deadlock. It also shows at the start that neighbours agree on their boundary.
        """
        for kind in (Kind.F, Kind.B):
            token = torch.zeros(1, device=self._device)
            try:
                with self._waits():
                    if kind in self._buffers:
                        dist.recv(token, src=self._buffers[kind].peer, group=self._groups[kind])
                    if _OTHER[kind] in self._buffers:
                        dist.send(token, dst=self._target(kind), group=self._groups[kind])
            except RuntimeError as error:
                raise PeerLostError(f"stage {self._stage} could not connect to a neighbour: {error}") from error

    def _target(self, kind: Kind) -> int:
        """The process that activations (F) or gradients (B) are sent to: the one that the other kind comes from."""
        return self._buffers[_OTHER[kind]].peer

    def _send(self, kind: Kind, tensor: torch.Tensor) -> None:
        while self._sends and self._sends[0].is_completed():
            self._sends.popleft()
        flat = as_sent(tensor.detach(), self._memory_format)
        if self._sender is not None:
            work = self._sender.submit(self._isend, flat, kind)
        else:
            work = Future()
            work.set_result(self._isend(flat, kind))
        self._sends.append(_Sending(flat, work))

    def _isend(self, tensor: torch.Tensor, kind: Kind) -> dist.Work:
        target = self._target(kind)
        try:
            work = dist.isend(tensor, dst=target, group=self._groups[kind])
        except RuntimeError as error:
            raise PeerLostError(f"stage {self._stage} could not send to process {target}: {error}") from error
        assert work is not None
        return work

    def _wait(self, waited: dist.Work | Future[dist.Work], what: str) -> None:
        try:
            with self._waits():
                work = waited.result() if isinstance(waited, Future) else waited
                if self._device.type == "cpu":
                    work.wait(self._timeout)
                else:
                    work.wait()
        except RuntimeError as error:
            raise PeerLostError(f"stage {self._stage} could not {what}") from error
