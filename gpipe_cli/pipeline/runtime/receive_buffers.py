"""The receiving end of one direction of one edge: receives posted ahead, into a ring of buffers that is made once.

GPipe keeps the inputs of all micro-batches until their backward (paper section 2.3), so the ring for activations has a
place for each in flight; gradients are used as they come, and two places are enough for one to arrive while another is
used.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
import torch.distributed as dist

from gpipe_cli.pipeline.runtime.boundary import Boundary, BoundaryTensor, as_sent, layout_strides
from gpipe_cli.pipeline.runtime.transport import PeerLostError


@dataclass
class _Post:
    """A receive that has been posted: for which micro-batch, into which tensors, and what to wait for."""

    micro_batch: int
    works: list[dist.Work]
    tensors: list[torch.Tensor]


class ReceiveBuffers:
    """What is received from process `peer` over `group`; `described` are the tensors of one micro-batch."""

    def __init__(
        self,
        peer: int,
        group: dist.ProcessGroup,
        device: torch.device,
        memory_format: torch.memory_format,
    ) -> None:
        self.peer = peer
        self.described: Boundary = ()
        self._group, self._device, self._memory_format = group, device, memory_format
        self._sizes: Sequence[int] = ()
        self._lengths: Sequence[int] = ()
        self._coming: deque[int] = deque()  # micro-batches not posted yet, in the order they are sent
        self._posted: deque[_Post] = deque()
        self._free: list[int] = []
        self._held: dict[int, int] = {}  # micro-batch -> place in the ring
        self._buffers: dict[tuple[int, int], torch.Tensor] = {}  # (place, tensor) -> memory, which only ever grows

    @property
    def expects_more(self) -> bool:
        """Whether a place that becomes free will be received into at once."""
        return bool(self._coming)

    def begin_step(self, order: Sequence[int], sizes: Sequence[int], lengths: Sequence[int], depth: int) -> None:
        """Micro-batches will come in this order; post as many as the ring has places, at most `depth`."""
        assert not self._posted, "a step begins with nothing on its way"
        self._coming, self._sizes, self._lengths = deque(order), sizes, lengths
        self._free = list(range(min(depth, len(order))))
        self._held.clear()
        self._post()

    def take(self, micro_batch: int) -> tuple[list[dist.Work], list[torch.Tensor]]:
        """The next ones that were posted: what to wait for, and where they arrive."""
        post = self._posted.popleft()
        assert post.micro_batch == micro_batch, f"expected micro-batch {post.micro_batch}, not {micro_batch}"
        return post.works, post.tensors

    def memory_of(self, micro_batch: int) -> set[int]:
        """Addresses of the buffers that hold this micro-batch."""
        place = self._held.get(micro_batch)
        return {memory.data_ptr() for (owner, _), memory in self._buffers.items() if owner == place}

    def release(self, micro_batch: int) -> None:
        """Its place in the ring is free for the next one."""
        place = self._held.pop(micro_batch, None)
        if place is not None:
            self._free.append(place)
            self._post()

    def finish_step(self) -> None:
        assert not self._posted, f"never received: {[post.micro_batch for post in self._posted]}"
        assert not self._coming, f"never posted: {list(self._coming)}"

    def _post(self) -> None:
        while self._coming and self._free:
            micro_batch, place = self._coming.popleft(), self._free.pop()
            self._held[micro_batch] = place
            post = _Post(micro_batch, [], [])
            for position, described in enumerate(self.described):
                tensor = self._buffer(place, position, described, self._sizes[micro_batch])
                try:
                    work = dist.irecv(as_sent(tensor, self._memory_format), src=self.peer, group=self._group)
                except RuntimeError as error:
                    raise PeerLostError(f"could not receive from process {self.peer}: {error}") from error
                assert work is not None
                post.works.append(work)
                post.tensors.append(tensor)
            self._posted.append(post)

    def _buffer(self, place: int, position: int, described: BoundaryTensor, samples: int) -> torch.Tensor:
        shape = described.shape(samples, self._lengths)
        elements = prod(shape)
        memory = self._buffers.get((place, position))
        if memory is None or memory.numel() < elements or memory.dtype is not described.dtype:
            memory = torch.empty(elements, dtype=described.dtype, device=self._device)
            self._buffers[place, position] = memory
        return memory.as_strided(shape, layout_strides(shape, self._memory_format))
