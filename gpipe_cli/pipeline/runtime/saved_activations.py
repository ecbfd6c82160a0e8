"""What a stage really holds of the micro-batches in flight, counted while it runs.

The paper's claim about memory (section 2.3, Table 1) is about these bytes: activations kept between forward and
backward. The peak of an allocator says something else: it also has gradients, workspace and what is cached.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch.autograd.graph import saved_tensors_hooks

from gpipe_cli.pipeline.runtime.storage_bytes import Extents, storage_of


class SavedBytes:
    """Counts, for each micro-batch, the memory behind its inputs, its outputs and what autograd saved for it.

    Of memory that is used in part, as a micro-batch uses a mini-batch, the part counts. Values are not changed.
    """

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._static: set[int] = set()
        self._held: dict[int, Extents] = {}

    def begin_step(self, static: Iterable[torch.Tensor]) -> None:
        """Begin anew. `static` tensors are not counted: parameters, buffers, and what else outlives a micro-batch."""
        self._held.clear()
        self.peak_bytes = 0
        self._static = {storage_of(tensor) for tensor in static}

    @contextmanager
    def recording(self, micro_batch: int, static: Iterable[torch.Tensor] = ()) -> Iterator[None]:
        """Count what is saved in here for a backward of `micro_batch`; `static` tensors are known only now."""
        self._static |= {storage_of(tensor) for tensor in static}
        held = self._held[micro_batch] = Extents(self._static)

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            held.add((tensor,))
            return tensor.detach()  # the tensor itself would own the graph that owns it

        with saved_tensors_hooks(keep, lambda kept: kept):
            yield

    def hold(self, micro_batch: int, *tensors: torch.Tensor) -> None:
        """The stage itself keeps `tensors` of this micro-batch."""
        self._held.setdefault(micro_batch, Extents(self._static)).add(tensors)
        self.peak_bytes = max(self.peak_bytes, sum(extents.bytes for extents in self._held.values()))

    def drop(self, micro_batch: int) -> None:
        """Its backward has ended."""
        self._held.pop(micro_batch, None)
