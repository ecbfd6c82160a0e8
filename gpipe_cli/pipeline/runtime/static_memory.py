"""The memory that a stage's captured graphs read and write, at the same addresses in every replay.

The inputs and the pool of activations exist once per micro-batch in flight; outputs, gradients of outputs, gradients of
inputs and gradients of parameters are shared. Graphs for micro-batches of other shapes use the same memory, as nothing
outlives its micro-batch there. So the bytes are those of the largest micro-batch (`planner/stage_memory.py`).
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import torch
from torch import nn

Seeds: TypeAlias = Callable[[int], int]
"""The seed of each layer of the stage, by its place in the stage."""


class StaticMemory:
    """The memory of a stage's graphs. `drop_users` drops the graphs that use a storage, before it is replaced;
    `has_graphs` says whether a pool, given its index, has graphs that are not dropped."""

    def __init__(self, drop_users: Callable[[torch.UntypedStorage], None], has_graphs: Callable[[int], bool]) -> None:
        self._drop_users, self._has_graphs = drop_users, has_graphs
        self._pools: dict[int, object] = {}  # index of a micro-batch in flight -> pool of all that its graphs allocate
        self.gradients: dict[nn.Parameter, torch.Tensor] = {}
        # place in the stage of a layer that draws random numbers -> the state that graphs read when they are replayed
        self.rng_states: dict[int, torch.Generator] = {}
        # (contents, place) -> memory for tensors of all shapes
        self._buffers: dict[tuple[str, int], torch.UntypedStorage] = {}

    def pool(self, index: int, new_pool: Callable[[], object]) -> object:
        """The pool of a micro-batch in flight. Once all graphs of a pool are dropped, the allocator takes no others."""
        if index not in self._pools or not self._has_graphs(index):
            self._pools[index] = new_pool()
        return self._pools[index]

    def buffer(self, contents: str, place: int, like: torch.Tensor) -> torch.Tensor:
        """Memory for tensors of this shape and layout. If what is there is too small, it is replaced."""
        shape, strides = like.shape, like.stride()
        static = torch.empty_strided(shape, strides, dtype=like.dtype, device=like.device)
        storage = self._buffers.get((contents, place))
        if storage is not None and storage.nbytes() >= static.untyped_storage().nbytes():
            return static.set_(storage, 0, shape, strides)
        if storage is not None:
            self._drop_users(storage)
        self._buffers[contents, place] = static.untyped_storage()
        return static

    def seed(self, seeds: Seeds) -> None:
        """Set the random states that the next replay of a forward draws from."""
        for place, rng in self.rng_states.items():
            rng.manual_seed(seeds(place))

    @torch.no_grad()
    def use_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Make the gradients that graphs add to those of the parameters, with the values so far, or else zeros."""
        zeros = []
        for parameter in parameters:
            static = self.gradients[parameter]
            if parameter.grad is None:
                zeros.append(static)
            elif parameter.grad is not static:
                static.copy_(parameter.grad)
            parameter.grad = static
        if zeros:
            torch._foreach_zero_(zeros)

    @contextmanager
    def restoring_gradients(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """Restores the values of gradients that graphs add to, or will: gradients so far become static where they
        can. Their values wait on the host, as plans have no memory for a second set of gradients."""
        before = dict[nn.Parameter, torch.Tensor]()
        for parameter in parameters:
            gradient, static = parameter.grad, self.gradients.get(parameter)
            if gradient is None or gradient.layout is not torch.strided:
                continue
            if static is None and gradient.stride() == parameter.stride():
                static = self.gradients[parameter] = gradient
            if static is gradient:
                before[parameter] = gradient.to("cpu", copy=True)
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, value in before.items():
                    parameter.grad = parameter.grad if parameter.grad is None else parameter.grad.copy_(value)

    def keep_only(
        self,
        indices: Collection[int],
        parameters: Collection[nn.Parameter],
        is_used: Callable[[torch.UntypedStorage], bool],
    ) -> None:
        """Free all but the pools of `indices`, the gradients of `parameters`, and buffers that are used."""
        self._pools = {index: pool for index, pool in self._pools.items() if index in indices}
        self.gradients = {parameter: static for parameter, static in self.gradients.items() if parameter in parameters}
        self._buffers = {at: storage for at, storage in self._buffers.items() if is_used(storage)}

    def free(self) -> None:
        """Free all memory; no graph may be replayed afterwards."""
        self._pools.clear()
        self._buffers.clear()
        self.gradients.clear()


@torch.no_grad()
def copy_into(static: Iterable[torch.Tensor | None], tensors: Iterable[torch.Tensor | None]) -> None:
    """Copy each tensor into static memory, except where that is None."""
    for into, tensor in zip(static, tensors, strict=True):
        if into is not None:
            assert tensor is not None
            into.copy_(tensor)
