"""Graphs on the CPU, for tests: what is dispatched once is captured, and replayed into the same storages.

A tape has what makes CUDA graphs wrong: Python runs only during the capture, so numbers, flags and hooks freeze;
addresses freeze; what waits for the device (`.item()`) raises an error; outputs are overwritten by the next replay;
memory that was free when a graph was captured may have any content after the replay of another graph of its pool; and a
pool ends with the last of its graphs.
"""

import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

_GARBAGE = 0x7F  # bytes in memory which nothing may read: as floats, huge or no numbers


class RngState:
    def __init__(self) -> None:
        self.seed = 0

    def manual_seed(self, seed: int) -> None:
        self.seed = seed

    def use(self) -> None:
        torch.default_generator.manual_seed(self.seed)


class Tape(TorchDispatchMode):
    """A graph: the operations dispatched inside."""

    def __init__(self, free: Sequence[torch.UntypedStorage]) -> None:
        super().__init__()
        self._calls: list[Any] = []
        self._free = free
        self.replays = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("the host would wait for the device")
        returned = func(*args, **(kwargs or {}))
        # separate tensors, so that the program's live as long as they would without it
        self._calls.append((func, *(tree_map_only(torch.Tensor, _alias, of) for of in (args, kwargs or {}, returned))))
        return returned

    def use_rng_state(self, rng: RngState) -> None:
        rng.use()
        self._calls.append(rng)

    @property
    def launches(self) -> int:
        """The number of operations that launch something on a GPU."""
        return sum(not isinstance(one, RngState) and not one[0].is_view for one in self._calls)

    def tensors(self) -> tuple[list[torch.Tensor], set[int]]:
        """The tape's own tensors, and the storages that its operations have made."""
        own, made, given = list[torch.Tensor](), set[int](), set[int]()
        for one in self._calls:
            if isinstance(one, RngState):
                continue
            taken = [t for t in tree_leaves(one[1:3]) if isinstance(t, torch.Tensor)]
            given |= {storage(tensor) for tensor in taken} - made
            returned = [t for t in tree_leaves(one[3]) if isinstance(t, torch.Tensor)]
            made |= {storage(tensor) for tensor in returned} - given
            own += *taken, *returned
        return own, made

    @torch.no_grad()
    @_disable_current_modes()
    def replay(self) -> None:
        self.replays += 1
        for memory in self._free:  # an allocator would have given it to this graph
            torch.empty(0, dtype=torch.uint8).set_(memory).fill_(_GARBAGE)
        for one in self._calls:
            if isinstance(one, RngState):
                one.use()
                continue
            func, args, kwargs, returned = one
            if func.is_view:
                continue
            for old, new in zip(tree_leaves(returned), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach()


def storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class Graph:
    """What the product has of a tape, which the tests keep."""

    def __init__(self, tape: Tape) -> None:
        self.replay = tape.replay


class Pool:
    """Memory that the graphs of a micro-batch share: a graph gets what is free when it is captured."""

    def __init__(self) -> None:
        self.tapes: list[Tape] = []
        self.graphs: weakref.WeakSet[Graph] = weakref.WeakSet()

    def free(self) -> list[torch.UntypedStorage]:
        """The storages that operations of the pool's graphs have made, and of which only tapes have tensors."""
        own, made = list[torch.Tensor](), set[int]()
        for tape in self.tapes:
            tensors, by_tape = tape.tensors()
            own += tensors
            made |= by_tape
        counts = Counter(map(storage, own))
        memories = {storage(tensor): tensor.untyped_storage() for tensor in own}  # Python's own objects, held here
        return [
            memory
            for number, memory in memories.items()
            if number in made and torch._C._storage_Use_Count(number) <= counts[number] + 1
        ]


def _in_graph(parameter: nn.Parameter) -> bool:
    """Whether a graph of autograd over a parameter is alive, which then has the node that adds up its gradient."""
    get_gradient_edge(parameter).node.metadata["met"] = True
    return get_gradient_edge(parameter).node.metadata.pop("met", False)


class TapeMaker:
    """A `CudaGraphCapturer` for the CPU. As on a GPU, a capture fails while an autograd graph over one of `parameters`
    is alive, whose node belongs to the stream on which it was made."""

    def __init__(self) -> None:
        self.tapes: list[Tape] = []
        self.parameters: Sequence[nn.Parameter] = ()
        self.failed = 0  # captures
        self.capturing: Tape | None = None
        self._stale = False

    def new_pool(self) -> Pool:
        return Pool()

    def new_rng_state(self) -> RngState:
        return RngState()

    def on_capture_stream(self) -> Any:
        self._stale = any(map(_in_graph, self.parameters))
        return nullcontext()

    def forbid_sync(self) -> Any:
        return nullcontext()

    @contextmanager
    def capture(self, pool: Pool, rng: Sequence[RngState]) -> Iterator[Graph]:
        if self._stale:
            self.failed += 1
            raise RuntimeError("a node of autograd belongs to another stream")
        if pool.tapes and not pool.graphs:
            raise RuntimeError("all graphs of the pool are dropped")
        tape = self.capturing = Tape(pool.free())
        graph = Graph(tape)
        try:
            with tape:
                yield graph
        finally:
            self.capturing = None
        pool.tapes.append(tape)
        pool.graphs.add(graph)
        self.tapes.append(tape)

    def use_rng_state(self, rng: RngState | None) -> None:
        assert self.capturing is not None
        if rng is not None:
            self.capturing.use_rng_state(rng)


class Full(TapeMaker):
    """Of a device that has memory for this many graphs."""

    def __init__(self, graphs: int) -> None:
        super().__init__()
        self.left = graphs

    @contextmanager
    def capture(self, pool: Pool, rng: Sequence[RngState]) -> Iterator[Graph]:
        with super().capture(pool, rng) as captured:
            yield captured
        self.left -= 1
        if self.left < 0:
            raise torch.OutOfMemoryError("no memory is left\nfor a graph")


class Memory(TorchDispatchMode):
    """The most bytes of tensors that were alive at once and made inside, without those of a pool and of the host."""

    def __init__(self, maker: TapeMaker) -> None:
        super().__init__()
        self._maker, self._alive = maker, dict[int, int]()
        self.bytes = self.peak_bytes = 0

    def _free(self, number: int) -> None:
        self.bytes -= self._alive.pop(number)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        of_host = func is torch.ops.aten._to_copy.default and args[0].is_floating_point()
        given = {storage(one) for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)}
        for one in tree_leaves(returned):
            if isinstance(one, torch.Tensor) and not of_host and self._maker.capturing is None:
                memory = one.untyped_storage()
                if memory._cdata not in self._alive and memory._cdata not in given:
                    self._alive[memory._cdata] = memory.nbytes()
                    self.bytes += memory.nbytes()
                    weakref.finalize(memory, self._free, memory._cdata)
        self.peak_bytes = max(self.peak_bytes, self.bytes)
        return returned
