"""How tensors get from stage to stage: handed over inside a process, or sent between processes.

Communication is never written down (paper section 2.2: primitives are inserted at the boundaries): an F on a later
stage receives what the F before it returned, a B the other way round. Three things make it cheap: every shape is known
beforehand from the meta device, so nothing is negotiated; receives are posted before they are needed, into buffers that
live as long as the run; sends run while the stage computes on, straight from the tensor.
"""

import datetime
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Protocol

import torch
import torch.distributed as dist

from gpipe_cli.pipeline.layer_cost import Boundary, BoundaryTensor
from gpipe_cli.pipeline.micro_batch import Tensors
from gpipe_cli.pipeline.schedule import Kind, Schedule, in_flight
from gpipe_cli.pipeline.stage import layout_strides

Gradients = tuple[torch.Tensor | None, ...]


class PeerLostError(RuntimeError):
    """The process at the other end is gone or silent: a consequence of a failure somewhere else, rarely its cause."""


class Transport(Protocol):
    """Moves the outputs and gradients of micro-batch m over the boundaries of the stages of this process."""

    def begin_step(self, schedule: Schedule, sizes: Sequence[int]) -> None:
        """Before the first action; `sizes` are the samples of each micro-batch."""

    def send_forward(self, stage: int, micro_batch: int, outputs: Tensors) -> None: ...

    def receive_forward(self, stage: int, micro_batch: int) -> Tensors: ...

    def send_backward(self, stage: int, micro_batch: int, gradients: Gradients) -> None: ...

    def receive_backward(self, stage: int, micro_batch: int) -> Gradients: ...

    def release(self, stage: int, micro_batch: int) -> None:
        """Stage `stage` will not look at the inputs of micro-batch m again."""

    def finish_step(self) -> None:
        """After the last action: everything sent has arrived, nothing is left over."""


class HandOver:
    """All stages in one process: one device, or several driven by asynchronous launches."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = devices
        self._waiting: dict[tuple[Kind, int, int], Gradients] = {}

    def begin_step(self, schedule: Schedule, sizes: Sequence[int]) -> None:
        self._waiting.clear()  # whatever a failed step left

    def send_forward(self, stage: int, micro_batch: int, outputs: Tensors) -> None:
        self._waiting[Kind.F, stage + 1, micro_batch] = self._moved(outputs, stage + 1)

    def receive_forward(self, stage: int, micro_batch: int) -> Tensors:
        received = self._waiting.pop((Kind.F, stage, micro_batch))
        return tuple(tensor for tensor in received if tensor is not None)

    def send_backward(self, stage: int, micro_batch: int, gradients: Gradients) -> None:
        self._waiting[Kind.B, stage - 1, micro_batch] = self._moved(gradients, stage - 1)

    def receive_backward(self, stage: int, micro_batch: int) -> Gradients:
        return self._waiting.pop((Kind.B, stage, micro_batch))

    def release(self, stage: int, micro_batch: int) -> None:
        pass

    def finish_step(self) -> None:
        assert not self._waiting, f"never received: {sorted(self._waiting)}"

    def _moved(self, tensors: Gradients, stage: int) -> Gradients:
        device = self._devices[stage]
        return tuple(None if t is None else t.detach().to(device, non_blocking=True) for t in tensors)


@dataclass
class _Post:
    """A receive that has been posted: for which micro-batch, into which tensors, and what to wait for."""

    micro_batch: int
    tensors: list[torch.Tensor | None]
    works: list[dist.Work]


@dataclass
class _Inbox:
    """One direction of one edge, seen from the receiver: a ring of buffers and the receives posted into them."""

    peer: int
    group: dist.ProcessGroup
    described: Boundary
    order: deque[int] = field(default_factory=deque)
    posted: deque[_Post] = field(default_factory=deque)
    free: list[int] = field(default_factory=list)
    held: dict[int, int] = field(default_factory=dict)
    buffers: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)


class Links:
    """One stage in this process; its neighbours are processes `stage - 1` and `stage + 1` of the pipeline.

    `boundaries[k]` describes what crosses from stage k to stage k + 1. `forward` and `backward` are process groups of
    their own: in one group a waiting send would hold up the receive that frees it. `ranks[k]` is the process of stage
    k.
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
    ) -> None:
        self._stage, self._last = stage, len(boundaries)
        self._device, self._memory_format = device, memory_format
        self._timeout = datetime.timedelta(seconds=timeout_seconds)
        self._sizes: Sequence[int] = ()
        self._sends: deque[tuple[dist.Work, torch.Tensor]] = deque()
        self._groups = {Kind.F: forward, Kind.B: backward}
        self._peers: dict[Kind, int] = {}
        self._inboxes: dict[Kind, _Inbox] = {}
        if stage < self._last:
            self._peers[Kind.F] = ranks[stage + 1]
            returning = tuple(tensor for tensor in boundaries[stage] if tensor.has_gradient)
            self._inboxes[Kind.B] = _Inbox(ranks[stage + 1], backward, returning)
            self._outgoing = boundaries[stage]
        if stage > 0:
            self._peers[Kind.B] = ranks[stage - 1]
            self._inboxes[Kind.F] = _Inbox(ranks[stage - 1], forward, boundaries[stage - 1])
            self._incoming = boundaries[stage - 1]
        self._connect()

    def describe(self, boundaries: Mapping[Kind, Boundary]) -> None:
        """Change what crosses the boundaries, e.g. for evaluation, where a model may hand on fewer tensors."""
        assert not self._sends, "between steps only"
        if Kind.F in self._inboxes:
            self._incoming = self._inboxes[Kind.F].described = boundaries[Kind.F]
        if Kind.B in self._inboxes:
            self._outgoing = boundaries[Kind.B]
            self._inboxes[Kind.B].described = tuple(tensor for tensor in self._outgoing if tensor.has_gradient)

    def begin_step(self, schedule: Schedule, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        actions = schedule[self._stage]
        # gradients are consumed at once: one being used, one on its way; inputs stay as long as they are in flight
        depths = {Kind.F: in_flight(actions) + 1, Kind.B: 2}
        for kind, inbox in self._inboxes.items():
            assert not inbox.posted, "a step begins with nothing on its way"
            inbox.order = deque(a.micro_batch for a in actions if a.kind is kind)
            inbox.free = list(range(min(depths[kind], len(inbox.order))))
            inbox.held.clear()
            self._post(inbox)

    def send_forward(self, stage: int, micro_batch: int, outputs: Tensors) -> None:
        self._send(Kind.F, outputs)

    def receive_forward(self, stage: int, micro_batch: int) -> Tensors:
        return tuple(t for t in self._receive(Kind.F, micro_batch) if t is not None)

    def send_backward(self, stage: int, micro_batch: int, gradients: Gradients) -> None:
        returning = []
        for position, (gradient, described) in enumerate(zip(gradients, self._incoming, strict=True)):
            if described.has_gradient:
                if gradient is None:
                    raise ValueError(
                        f"tensor {position} that stage {stage} received got no gradient, but it did when the model was "
                        "traced: which inputs a layer uses must not depend on the data"
                    )
                returning.append(gradient)
        self._send(Kind.B, returning)

    def receive_backward(self, stage: int, micro_batch: int) -> Gradients:
        received = iter(self._receive(Kind.B, micro_batch))
        return tuple(next(received) if tensor.has_gradient else None for tensor in self._outgoing)

    def release(self, stage: int, micro_batch: int) -> None:
        for kind in self._inboxes:
            self._free(kind, micro_batch)

    def finish_step(self) -> None:
        while self._sends:
            self._wait(self._sends.popleft()[0], "something sent")
        for inbox in self._inboxes.values():
            assert not inbox.posted, f"never received: {inbox.posted}"
            assert not inbox.order, f"never posted: {inbox.order}"

    def _connect(self) -> None:
        """One message each way over each edge, in an order that cannot deadlock.

        Connections (for NCCL: communicators) are made at a pair's first message; made lazily, in whatever order
        processes arrive, they can deadlock. It also shows at the start that neighbours agree on their boundary.
        """
        for kind, towards, origin in ((Kind.F, 1, -1), (Kind.B, -1, 1)):
            source, target = self._stage + origin, self._stage + towards
            token = torch.zeros(1, device=self._device)
            try:
                if 0 <= source <= self._last:
                    dist.recv(token, src=self._inboxes[kind].peer, group=self._groups[kind])
                if 0 <= target <= self._last:
                    dist.send(token, dst=self._peers[kind], group=self._groups[kind])
            except RuntimeError as error:
                raise PeerLostError(f"stage {self._stage} could not connect to a neighbour: {error}") from error

    def _send(self, kind: Kind, tensors: Sequence[torch.Tensor]) -> None:
        while self._sends and self._sends[0][0].is_completed():
            self._sends.popleft()
        for tensor in tensors:
            flat = as_sent(tensor.detach(), self._memory_format)
            try:
                work = dist.isend(flat, dst=self._peers[kind], group=self._groups[kind])
            except RuntimeError as error:
                raise self._lost("could not send to", self._peers[kind], error) from error
            assert work is not None
            self._sends.append((work, flat))  # the tensor must live until it has been sent

    def _receive(self, kind: Kind, micro_batch: int) -> list[torch.Tensor | None]:
        inbox = self._inboxes[kind]
        post = inbox.posted.popleft()
        assert post.micro_batch == micro_batch, f"expected micro-batch {post.micro_batch}, not {micro_batch}"
        what = "activation" if kind is Kind.F else "gradient"
        for work in post.works:
            self._wait(work, f"the {what} of micro-batch {micro_batch}", inbox.peer)
        return post.tensors

    def _post(self, inbox: _Inbox) -> None:
        while inbox.order and inbox.free:
            micro_batch, slot = inbox.order.popleft(), inbox.free.pop()
            inbox.held[micro_batch] = slot
            post = _Post(micro_batch, [], [])
            for position, described in enumerate(inbox.described):
                tensor = self._buffer(inbox, slot, position, described, self._sizes[micro_batch])
                try:
                    work = dist.irecv(as_sent(tensor, self._memory_format), src=inbox.peer, group=inbox.group)
                except RuntimeError as error:
                    raise self._lost("could not receive from", inbox.peer, error) from error
                assert work is not None
                post.works.append(work)
                post.tensors.append(tensor)
            inbox.posted.append(post)

    def _free(self, kind: Kind, micro_batch: int) -> None:
        inbox = self._inboxes[kind]
        slot = inbox.held.pop(micro_batch, None)
        if slot is None:
            return
        inbox.free.append(slot)
        if inbox.order:
            self._wait_for_sends_from(inbox, slot)
            self._post(inbox)

    def _wait_for_sends_from(self, inbox: _Inbox, slot: int) -> None:
        """A layer may have passed its input on: that must have left before the next one is received over it."""
        memory = {tensor.data_ptr() for (owner, _), tensor in inbox.buffers.items() if owner == slot}
        for pending in [pending for pending in self._sends if pending[1].data_ptr() in memory]:
            self._sends.remove(pending)  # Gloo's wait consumes the completion: a second one would never return
            self._wait(pending[0], "something sent")

    def _buffer(self, inbox: _Inbox, slot: int, position: int, described: BoundaryTensor, samples: int) -> torch.Tensor:
        """A view of the right shape of the slot's memory, which only ever grows."""
        shape = described.shape(samples)
        elements = prod(shape)
        flat = inbox.buffers.get((slot, position))
        if flat is None or flat.numel() < elements or flat.dtype is not described.dtype:
            flat = torch.empty(elements, dtype=described.dtype, device=self._device)
            inbox.buffers[slot, position] = flat
        return flat.as_strided(shape, layout_strides(shape, self._memory_format))

    def _wait(self, work: dist.Work, what: str, peer: int | None = None) -> None:
        try:
            if self._device.type == "cpu":
                work.wait(self._timeout)
            else:
                work.wait()
        except RuntimeError as error:
            raise PeerLostError(
                f"stage {self._stage} waited in vain for {what}" + ("" if peer is None else f" from process {peer}")
            ) from error

    def _lost(self, what: str, peer: int, error: Exception) -> PeerLostError:
        return PeerLostError(f"stage {self._stage} {what} process {peer}: {error}")


def as_sent(tensor: torch.Tensor, memory_format: torch.memory_format) -> torch.Tensor:
    """A contiguous view of the same memory: what is sent has no strides of its own, the receiver knows them."""
    if tensor.dim() == 4 and memory_format is torch.channels_last:
        tensor = tensor.permute(0, 2, 3, 1)
    return tensor if tensor.is_contiguous() else tensor.contiguous()
