"""What a layer costs (paper section 2.1: the cost estimate c_i), what crosses its boundary, and what a stage keeps.

The figures come from shapes alone (`tracing.py`), so that every process arrives at the same ones without a handshake,
and hold for micro-batches of any size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from gpipe_cli.pipeline.runtime.boundary import Boundary
from gpipe_cli.schedule.held import Held

Layers: TypeAlias = int | NDArray[np.int64]  # a layer's number, or an array of them


@dataclass(frozen=True)
class KeptMemory:
    """The memory that is kept for a layer's backward, described so that no tensor counts twice where layers meet;
    parameters and buffers are not counted.

    `tensors` are positions of kept tensors among those that come in, followed by those that go out; all else takes
    `base_bytes + per_sample_bytes * samples` bytes, at the lengths that were traced. `same_memory[i]` is the position
    of the tensor whose memory output i shares; None if its memory is new.
    """

    tensors: tuple[int, ...] = ()
    base_bytes: int = 0
    per_sample_bytes: int = 0
    same_memory: tuple[int | None, ...] = ()


class OperationKind(StrEnum):
    """Kernels by what their speed depends on: a device has a rate for each."""

    PRODUCT = "product"  # matrix products, attention among them
    CONVOLUTION = "convolution"
    NARROW = "narrow convolution"  # fewer than 16 channels fill no vector register
    DEPTHWISE = "depthwise"  # a convolution of each channel alone
    NORMALIZATION = "normalization"
    POOLING = "pooling"
    RANDOM = "random"  # numbers drawn, as for dropout
    ELEMENTWISE = "elementwise"  # all others


@dataclass(slots=True)
class Operations:
    """Kernels of a kind: `count` of them for a micro-batch of any size; for n samples, `flops * n` FLOPs (a
    multiplication and an addition are two) and `bytes * n + fixed_bytes` bytes moved (weights are fixed bytes)."""

    count: int = 0
    flops: float = 0.0
    bytes: float = 0.0
    fixed_bytes: float = 0.0


@dataclass(frozen=True)
class Work:
    """A layer's operations, forward or backward."""

    by_kind: Mapping[OperationKind, Operations] = field(default_factory=dict)

    @property
    def flops(self) -> float:  # for a sample
        return sum(operations.flops for operations in self.by_kind.values())


@dataclass(frozen=True)
class Halves:
    """A layer's backward in two halves. Their sum is more than the whole: a convolution reads the same data twice.

    Between the halves the stage keeps inputs of products and convolutions (`kept_inputs`), and gradients of their
    outputs (`kept_gradients`). In `kept_gradients` the tensors that come in are the gradients of the layer's outputs,
    and those that go out are the gradients of its inputs.
    """

    inputs: Work = field(default_factory=Work)
    weights: Work = field(default_factory=Work)
    kept_inputs: KeptMemory = field(default_factory=KeptMemory)
    kept_gradients: KeptMemory = field(default_factory=KeptMemory)


@dataclass(frozen=True)
class LayerCost:
    """The cost of a layer. `parameters` counts all its parameters, `trained` the trained ones; `saved` is what
    autograd keeps between forward and backward; `halves` is None if the backward is not split; `foreign` are the
    parameters and buffers of other layers that it reads, by global name."""

    name: str
    parameters: int
    forward: Work
    backward: Work
    outputs: Boundary
    trained: int = 0
    saved: KeptMemory = field(default_factory=KeptMemory)
    halves: Halves | None = None
    foreign: tuple[str, ...] = ()

    @property
    def flops(self) -> float:
        """FLOPs for a sample, forward and backward."""
        return self.forward.flops + self.backward.flops


class ActivationMemory:
    """The bytes that a stage of any consecutive layers holds of a micro-batch of `samples` (the paper's L/K * N/M,
    section 2.3).

    `inputs` describes what the first layer gets; `lengths` are those that the costs were traced with, as what a layer
    keeps inside may grow with their square. Tensors that cross the stage's first boundary count one by one, as they are
    received: two that share memory in the previous stage are two here. A skip counts where it is popped.
    """

    def __init__(self, costs: Sequence[LayerCost], inputs: Boundary, samples: int, lengths: Sequence[int] = ()) -> None:
        boundaries = [inputs, *(cost.outputs for cost in costs)]
        sizes = [[t.bytes(samples, lengths) for t in boundary] for boundary in boundaries]
        halves = [cost.halves or Halves() for cost in costs]
        last_boundary = {
            tensor.skip: at for at, boundary in enumerate(boundaries) for tensor in boundary if tensor.skip
        }
        # per boundary, the layer that a stage must have to be sent each tensor: for a skip, the layer that pops it
        needed = [[last_boundary[tensor.skip] if tensor.skip else -1 for tensor in boundary] for boundary in boundaries]
        self._inputs = _KeptBytes(sizes, [KeptMemory()] * len(costs), samples, needed)
        self._has_gradient = np.array([any(t.has_gradient for t in boundary) for boundary in boundaries])
        self._trained = np.cumsum([0, *(cost.trained for cost in costs)])
        self._graph = _KeptBytes(sizes, [cost.saved for cost in costs], samples, needed)
        self._kept_inputs = _KeptBytes(sizes, [half.kept_inputs for half in halves], samples)
        # gradients flow from the last layer to the first
        self._kept_gradients = _KeptBytes(sizes[::-1], [half.kept_gradients for half in halves[::-1]], samples)

    def held(self, first: int, end: int) -> Held:
        """The bytes that a stage of layers `first` to `end - 1` holds of a micro-batch, in each of the ways of `Held`.

        A stage with nothing to train in it or before it has no backward, and keeps nothing. Between the halves of a
        backward it keeps all of a tensor that crosses a boundary of layers, even if a product reads only a part.
        """
        return Held(*self.of_stages(first, end).tolist())

    def of_stages(self, first: Layers, end: Layers) -> NDArray[np.int64]:
        """`held` as an array (4,) in the order of its fields; for n stages at once, (4, n)."""
        layers = len(self._trained) - 1
        gradients = self._kept_gradients.of(layers - end, layers - first)
        weights = self._kept_inputs.of(first, end) + gradients
        has_backward = self._has_gradient[first] | (self._trained[end] > self._trained[first])
        return np.array([self._graph.of(first, end), self._inputs.of(first, end), gradients, weights]) * has_backward


class _KeptBytes:
    """The bytes that any consecutive layers keep of a micro-batch. `kept` is what each layer keeps, `sizes` are the
    bytes of the tensors that cross each boundary. With `needed`, the tensors that cross a stage's first boundary count
    whether kept or not, if the stage has the layer that `needed` names (-1: any).

    The bytes are not a sum over layers, as a tensor that two layers keep exists once. So each tensor is charged to the
    first layer that keeps it: sums over layers then hold for any stage, up to the few tensors that cross its first
    boundary, which are corrected.
    """

    def __init__(
        self,
        sizes: Sequence[Sequence[int]],
        kept: Sequence[KeptMemory],
        samples: int,
        needed: Sequence[Sequence[int]] | None = None,
    ) -> None:
        never = len(kept)
        charged = [saved.base_bytes + saved.per_sample_bytes * samples for saved in kept]
        # for each boundary: (bytes, layer number): add the bytes for a stage that begins there, if it has that layer
        crossing: list[list[tuple[int, int]]] = [[] for _ in sizes]
        keepers = [never] * len(sizes[-1])  # per tensor that crosses a boundary, the first layer that keeps it
        for at in reversed(range(len(kept))):
            saved = kept[at]
            given = len(sizes[at])
            keepers = [never] * given + keepers  # inputs of the layer, then its outputs
            for position in saved.tensors:
                keepers[position] = at
            for out in reversed(range(len(sizes[at + 1]))):
                size, keeper = sizes[at + 1][out], keepers[given + out]
                other = saved.same_memory[out] if saved.same_memory else None
                if other is not None:
                    keepers[other] = min(keepers[other], keeper)
                elif keeper < never:
                    charged[keeper] += size
                    for boundary in range(at + 1, keeper + 1):  # stages that begin there receive it, see below
                        crossing[boundary].append((-size, keeper))
            keepers = keepers[:given]
            crossing[at] += zip(sizes[at], keepers if needed is None else needed[at], strict=True)
        self._charged = np.cumsum([0, *charged])
        width = max(map(len, crossing))
        rows = [[*terms, *[(0, never)] * (width - len(terms))] for terms in crossing]
        self._crossing = np.array(rows, dtype=np.int64).reshape(len(rows), width, 2)

    def of(self, first: Layers, end: Layers) -> NDArray[np.int64]:
        """The bytes that layers `first` to `end - 1` keep."""
        sizes, keepers = self._crossing[first, :, 0], self._crossing[first, :, 1]
        crossing = (sizes * (keepers < np.asarray(end)[..., None])).sum(axis=-1)
        kept: NDArray[np.int64] = self._charged[end] - self._charged[first] + crossing
        return kept
