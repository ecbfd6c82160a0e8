"""The transport between processes, over torch.distributed: Gloo on CPUs, NCCL on GPUs.

Three things make it cheap: all shapes are known from the meta device, so nothing is negotiated; receives are posted
before they are needed (`schedule/prefetched_receives.py`), into buffers that live as long as the run; tensors are sent
without a copy, while the stage continues to compute.
"""

import datetime
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from math import prod

import torch

from gpipe_cli.errors import InputError
from gpipe_cli.pipeline.runtime.boundary import Boundary, BoundaryTensor, OptionalTensors, as_sent, layout_strides
from gpipe_cli.pipeline.runtime.link import Edge, Links, Work, await_first, wait_for
from gpipe_cli.pipeline.runtime.routes import Boundaries, Routes
from gpipe_cli.pipeline.runtime.saved_activations import storage_id
from gpipe_cli.pipeline.runtime.transport import LocalTransport, waiting_for_peers
from gpipe_cli.schedule.prefetched_receives import PrefetchedReceive, prefetched_receives
from gpipe_cli.schedule.schedule import Action, Kind, Schedule
from gpipe_cli.system.accelerator import current_stream, is_accelerator, new_stream, on_stream
from gpipe_cli.units import plural


class P2PTransport:
    """Moves tensors for the stages of process `rank`, which compute on `device`; `rank_of_stage` has the rank of every
    stage's process. Raises PeerLostError if a neighbour does not connect.

    `post_eagerly`: receives are posted as soon as their buffers are free. Otherwise they are posted so that a GPU may
    block a launch without a deadlock (`schedule/prefetched_receives.py`). The default is eager on a CPU only.
    """

    def __init__(
        self,
        rank: int,
        rank_of_stage: Sequence[int],
        links: Links,
        boundaries: Boundaries,
        device: torch.device,
        post_eagerly: bool | None = None,
    ) -> None:
        self._rank, self._rank_of_stage, self._links = rank, tuple(rank_of_stage), links.by_edge
        self._boundaries = boundaries
        self._routes = Routes()
        self._device, self._memory_format = device, boundaries.memory_format
        self._post_eagerly = not is_accelerator(device) if post_eagerly is None else post_eagerly
        self._timeout = datetime.timedelta(seconds=links.timeout_seconds)
        self._waits = links.waits
        self._local = LocalTransport([device] * len(rank_of_stage), boundaries)  # between two stages of this process
        # sends in flight, with their tensors, which must live until they have been sent
        self._sends: deque[tuple[Sequence[torch.Tensor], Sequence[Work]]] = deque()
        self._buffers: dict[tuple[Edge, int, int], torch.Tensor] = {}  # (edge, buffer, tensor) -> memory, only grows
        self._to_post: deque[PrefetchedReceive] = deque()
        self._posted: dict[tuple[Action, Edge], tuple[Sequence[Work], list[torch.Tensor]]] = {}
        self._launched = 0
        # NCCL starts a receive after all work of the current stream; on this stream it waits for its buffer only
        self._receiving = new_stream(device) if is_accelerator(device) else None
        self._ends: dict[int, torch.Event] = {}  # number of actions launched -> the end of the last one
        self._sizes: Sequence[int] = ()
        self._lengths: Sequence[int] = ()
        # (edge, samples) -> of each tensor that crosses it, in a step like the newest
        self._shapes: dict[tuple[Edge, int], Sequence[tuple[int, ...]]] = {}
        self._connect(links.connect_seconds)

    def begin_step(self, schedule: Schedule, sizes: Sequence[int], lengths: Sequence[int] = ()) -> None:
        self.drain_sends()
        routes = self._boundaries.routes(schedule)
        if routes is not self._routes or lengths != self._lengths:
            self._shapes.clear()
        self._routes, self._sizes, self._lengths = routes, sizes, lengths
        self._local.begin_step(schedule, sizes, lengths)
        self._to_post = deque(
            prefetched_receives(
                schedule, self._rank_of_stage, self._rank, self._routes.pairs, post_eagerly=self._post_eagerly
            )
        )
        self._launched = 0
        self._ends.clear()
        if self._receiving is not None:  # queued work of the previous step may still read the buffers
            self._receiving.wait_stream(current_stream(self._device))
        self._post()

    def send(self, action: Action, tensors: OptionalTensors) -> None:
        for receiver, routed in self._routes.outgoing(action, tensors):
            self._send_to(receiver, action, routed)

    def _send_to(self, receiver: int, action: Action, tensors: OptionalTensors) -> None:
        direction = action.kind.direction
        edge = (direction, action.stage, receiver)
        link = self._links.get(edge)
        if link is None:
            self._local.send_to(receiver, action, tensors)
            return
        sent = []
        shapes = self._shapes_at(edge, self._sizes[action.micro_batch])
        for tensor, described, shape in zip(tensors, self._boundary(edge), shapes, strict=True):
            self._check_as_expected(action, tensor, described, shape)
            if tensor is not None:
                sent.append(as_sent(tensor.detach(), self._memory_format))
        while self._sends and all(work.is_completed() for work in self._sends[0][1]):
            self._sends.popleft()
        with self._waiting(f"send to process {link.peer}"):
            self._sends.append((sent, link.send(sent)))

    def _check_as_expected(
        self, action: Action, tensor: torch.Tensor | None, described: BoundaryTensor, expected: tuple[int, ...]
    ) -> None:
        """Raises InputError for a tensor that is not as the receiver expects it from the trace of the model; `expected`
        is its shape."""
        if action.kind.direction is Kind.B:
            if (tensor is not None) == described.has_gradient:
                return
            returns, returned = ("no gradient", "one") if tensor is None else ("a gradient", "none")
            name = self._boundaries.layer_names[action.stage][0]
            raise InputError(
                f"layer {name} returns {returns} for a tensor that it is given, and returned {returned} when the model "
                "was traced; use the same inputs in every step, if only times 0"
            )
        assert tensor is not None
        if tensor.shape != expected or tensor.dtype != described.dtype:
            name = self._boundaries.layer_names[action.stage][-1]
            samples = plural(self._sizes[action.micro_batch], "sample")
            raise InputError(
                f"layer {name} returns {tuple(tensor.shape)} of {tensor.dtype} for {samples}, and {expected} of "
                f"{described.dtype} by the trace of the model, from which the next process knows what it receives; "
                "sizes must grow evenly with the samples, and types not depend on the data; or use partitions=1"
            )

    def receive(self, action: Action) -> OptionalTensors:
        return self._routes.incoming(action, partial(self._receive_from, action))

    def _receive_from(self, action: Action, sender: int) -> OptionalTensors:
        edge = (action.kind.direction, sender, action.stage)
        if edge not in self._links:
            return self._local.receive_from(action, sender)
        works, tensors = self._posted.pop((action, edge))
        what = f"{'activation' if action.kind is Kind.F else 'gradient'} of micro-batch {action.micro_batch}"
        with self._waiting(f"receive the {what} from process {self._links[edge].peer}"):
            self._wait(works)
        arrived = iter(tensors)
        return tuple(next(arrived) if action.kind is Kind.F or t.has_gradient else None for t in self._boundary(edge))

    def after_action(self) -> None:
        self._launched += 1
        if self._receiving is not None:
            self._ends[self._launched] = current_stream(self._device).record_event()
        self._post()

    def finish_step(self) -> None:
        # does not wait for sends: meanwhile a stage that is ahead runs its optimizer
        self._local.finish_step()
        assert not self._posted, f"never received: {[str(action) for action, _ in self._posted]}"
        assert not self._to_post, f"never posted: {[str(receive.action) for receive in self._to_post]}"

    def drain_sends(self) -> None:
        while self._sends:
            tensors, works = self._sends.popleft()
            self._finish(works)
            del tensors  # not before: the allocator gives their memory to what the current stream does next

    def _post(self) -> None:
        """Post the receives that may be posted by now."""
        while self._to_post and self._to_post[0].after <= self._launched:
            receive = self._to_post.popleft()
            edge = (receive.action.kind.direction, receive.sender, receive.action.stage)
            shapes = self._shapes_at(edge, self._sizes[receive.action.micro_batch])
            described = zip(self._boundary(edge), shapes, strict=True)
            awaited = [(t.dtype, shape) for t, shape in described if t.has_gradient or edge[0] is Kind.F]
            if self._receiving is not None and receive.freed:
                self._receiving.wait_event(self._ends[receive.freed])
            with on_stream(self._receiving):
                tensors = [self._buffer((edge, receive.buffer, i), *tensor) for i, tensor in enumerate(awaited)]
                if receive.freed:
                    self._wait_for_aliasing_sends({storage_id(tensor) for tensor in tensors})
                with self._waiting(f"receive from process {self._links[edge].peer}"):
                    works = self._links[edge].receive([as_sent(tensor, self._memory_format) for tensor in tensors])
            self._posted[receive.action, edge] = works, tensors

    def _wait_for_aliasing_sends(self, storages: set[int]) -> None:
        """Wait for sends from these storages: a layer may have passed on its input, or a part of it, whose receive
        buffer is about to be overwritten."""
        for tensors, works in self._sends:
            if not storages.isdisjoint(map(storage_id, tensors)):
                self._finish(works)  # on a GPU only this stream waits: the tensors must live until the send is done

    def _boundary(self, edge: Edge) -> Boundary:
        kind, sender, receiver = edge
        return self._routes.tensors(sender, receiver) if kind is Kind.F else self._routes.tensors(receiver, sender)

    def _shapes_at(self, edge: Edge, samples: int) -> Sequence[tuple[int, ...]]:
        """The shapes of the tensors that cross an edge for a micro-batch of `samples`."""
        if (edge, samples) not in self._shapes:
            self._shapes[edge, samples] = [t.shape(samples, self._lengths) for t in self._boundary(edge)]
        return self._shapes[edge, samples]

    def _buffer(self, key: tuple[Edge, int, int], dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        memory = self._buffers.get(key)
        if memory is None or memory.numel() < prod(shape) or memory.dtype is not dtype:
            memory = self._buffers[key] = torch.empty(prod(shape), dtype=dtype, device=self._device)
        return memory.as_strided(shape, layout_strides(shape, self._memory_format))

    def _connect(self, seconds: float) -> None:
        """Send a message over each link, in the same order in all processes.

        Backends may connect (NCCL: make communicators) at the first message, and deadlock if processes do so in
        different orders. These messages also show at the start whether neighbours agree on their edges.
        """
        for (_, _, stage), link in sorted(self._links.items()):
            token = [torch.zeros(1, device=self._device)]
            with self._waiting(f"connect to process {link.peer}"):
                works = link.receive(token) if self._rank_of_stage[stage] == self._rank else link.send(token)
                self._wait(works)
                await_first(works, self._device, seconds)

    def _finish(self, works: Sequence[Work]) -> None:
        with self._waiting("finish a send"):
            self._wait(works)

    def _wait(self, works: Sequence[Work]) -> None:
        wait_for(works, self._device, self._timeout)

    def _waiting(self, what: str) -> AbstractContextManager[None]:
        hint = "; NCCL_DEBUG=WARN shows more" if is_accelerator(self._device) else ""
        return waiting_for_peers(self._waits(), f"process {self._rank} could not {what}", hint)
