"""What a layer costs (paper section 2.1: the cost estimate c_i), what crosses its boundary, and what a stage saves.

Figures come from shapes alone (`tracing.py`), so that all processes agree, and hold for micro-batches of any size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from gpipe_cli.pipeline.runtime.boundary import Boundary
from gpipe_cli.schedule.in_flight_memory import SavedAmounts

Layers: TypeAlias = int | NDArray[np.int64]  # a layer's number, or an array of them


@dataclass(frozen=True)
class SavedMemory:
    """The memory that is saved for a layer's backward, described so that no tensor counts twice where layers meet;
    parameters and buffers are not counted.

    `tensors` are positions of saved tensors among the layer's inputs, followed by its outputs; all else takes
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


class OperationCounts(dict[OperationKind, Operations]):
    """A layer's operations by kind, forward or backward."""

    @property
    def flops(self) -> float:  # for a sample
        return sum(operations.flops for operations in self.values())


@dataclass(frozen=True)
class SplitBackward:
    """A layer's backward in two halves. Their sum is more than the whole: a convolution reads the same data twice.

    Between the halves the stage saves inputs of products and convolutions (`saved_inputs`), and gradients of their
    outputs (`saved_gradients`). In `saved_gradients` the inputs are the gradients of the layer's outputs, and the
    outputs the gradients of its inputs.
    """

    inputs: OperationCounts = field(default_factory=OperationCounts)
    weights: OperationCounts = field(default_factory=OperationCounts)
    saved_inputs: SavedMemory = field(default_factory=SavedMemory)
    saved_gradients: SavedMemory = field(default_factory=SavedMemory)


@dataclass(frozen=True)
class LayerCost:
    """The cost of a layer. `parameters` counts all its parameters, `trained` the trained ones; `saved` is what autograd
    saves between forward and backward; `split_backward` is None if the backward is not split; `cross_layer_tensors` are
    the parameters and buffers of other layers that it reads, by global name."""

    name: str
    parameters: int
    forward: OperationCounts
    backward: OperationCounts
    outputs: Boundary
    trained: int = 0
    saved: SavedMemory = field(default_factory=SavedMemory)
    split_backward: SplitBackward | None = None
    cross_layer_tensors: tuple[str, ...] = ()

    @property
    def flops(self) -> float:
        """FLOPs for a sample, forward and backward."""
        return self.forward.flops + self.backward.flops


class ActivationMemory:
    """The bytes that a stage of consecutive layers saves of a micro-batch of `samples` (paper section 2.3: L/K * N/M).

    `inputs` describes what the first layer gets; `lengths` are the lengths that the costs were traced with, as what a
    layer saves may grow with their square. Tensors that cross the stage's first boundary count one by one, as they are
    received: two that share memory in the previous stage are two here. A skip counts where it is popped.
    """

    def __init__(self, costs: Sequence[LayerCost], inputs: Boundary, samples: int, lengths: Sequence[int] = ()) -> None:
        boundaries = [inputs, *(cost.outputs for cost in costs)]
        sizes = [[t.bytes(samples, lengths) for t in boundary] for boundary in boundaries]
        splits = [cost.split_backward or SplitBackward() for cost in costs]
        last_boundary = {t.skip: at for at, boundary in enumerate(boundaries) for t in boundary if t.skip}
        # per boundary, the layer that a stage must have to be sent each tensor: for a skip, the layer that pops it
        needed = [[last_boundary[tensor.skip] if tensor.skip else -1 for tensor in boundary] for boundary in boundaries]
        self._inputs = _SavedBytes(sizes, [SavedMemory()] * len(costs), samples, needed)
        self._has_gradient = np.array([any(t.has_gradient for t in boundary) for boundary in boundaries])
        self._trained = np.cumsum([0, *(cost.trained for cost in costs)])
        self._graph = _SavedBytes(sizes, [cost.saved for cost in costs], samples, needed)
        self._saved_inputs = _SavedBytes(sizes, [split.saved_inputs for split in splits], samples)
        # gradients flow from the last layer to the first
        self._saved_gradients = _SavedBytes(sizes[::-1], [split.saved_gradients for split in splits[::-1]], samples)

    def saved_amounts(self, first: int, end: int) -> SavedAmounts:
        """The bytes that a stage of layers `first` to `end - 1` saves of a micro-batch, in the ways of `SavedAmounts`.

        A stage with nothing to train in it or before it has no backward, and saves nothing. Between the halves of a
        backward it saves all of a tensor that crosses a boundary of layers, even if a product reads only a part.
        """
        return SavedAmounts(*self.of_stages(first, end).tolist())

    def of_stages(self, first: Layers, end: Layers) -> NDArray[np.int64]:
        """`held` as an array (4,) in the order of its fields; for n stages, (4, n)."""
        layers = len(self._trained) - 1
        gradients = self._saved_gradients.of(layers - end, layers - first)
        weights = self._saved_inputs.of(first, end) + gradients
        has_backward = self._has_gradient[first] | (self._trained[end] > self._trained[first])
        return np.array([self._graph.of(first, end), self._inputs.of(first, end), gradients, weights]) * has_backward


class _SavedBytes:
    """The bytes that any consecutive layers save of a micro-batch. `saved_by_layers` is what each layer saves, `sizes`
    are the bytes of the tensors that cross each boundary. With `needed`, the tensors that cross a stage's first
    boundary count whether saved or not, if the stage has the layer that `needed` names (-1: any).

    A tensor that two layers save exists once, so the bytes are not a sum over layers: `_charge` charges each tensor to
    the first layer that saves it, and `_correct` adds what a stage receives, which no layer of it made. For example,
    layers 1 and 2 save their inputs, and c is a view of b:

        a (1 byte) -> layer 0 -> b (2 bytes) -> layer 1 -> c (2 bytes) -> layer 2

        charge:   2 bytes to layer 1, for b; nothing for c
        correct:  layers 0-2: 2 bytes; layers 0-0: 0 bytes
                  layers 1-2: 2 bytes - 2 for b (charged, but made before) + 2 for b (received) = 2 bytes
                  layer 2:    0 bytes + 2 for c (received) = 2 bytes
    """

    def __init__(
        self,
        sizes: Sequence[Sequence[int]],
        saved_by_layers: Sequence[SavedMemory],
        samples: int,
        needed: Sequence[Sequence[int]] | None = None,
    ) -> None:
        savers, charges = _charge(sizes, saved_by_layers)
        charged = [saved.base_bytes + saved.per_sample_bytes * samples for saved in saved_by_layers]
        for _, saver, size in charges:
            charged[saver] += size
        corrections = _correct(sizes, savers if needed is None else needed, charges)
        self._charged = np.cumsum([0, *charged])
        width = max(map(len, corrections))
        rows = [[*terms, *[(0, 0)] * (width - len(terms))] for terms in corrections]
        self._corrections = np.array(rows, dtype=np.int64).reshape(len(rows), width, 2)

    def of(self, first: Layers, end: Layers) -> NDArray[np.int64]:
        """The bytes that layers `first` to `end - 1` save."""
        sizes, savers = self._corrections[first, :, 0], self._corrections[first, :, 1]
        correction = (sizes * (savers < np.asarray(end)[..., None])).sum(axis=-1)
        saved_bytes: NDArray[np.int64] = self._charged[end] - self._charged[first] + correction
        return saved_bytes


def _charge(
    sizes: Sequence[Sequence[int]], saved_by_layers: Sequence[SavedMemory]
) -> tuple[list[list[int]], list[tuple[int, int, int]]]:
    """For each boundary, the first layer after it that saves each tensor that crosses it (the number of layers if none
    does); and for each saved tensor, the layer that makes it, the first layer that saves it, and its bytes."""
    never = len(saved_by_layers)
    savers, charges = [[never] * len(sizes[-1])], []
    for at in reversed(range(never)):
        saved, given = saved_by_layers[at], len(sizes[at])
        first = [never] * given + savers[-1]  # of the layer's inputs, then its outputs
        for position in saved.tensors:
            first[position] = at
        for out in reversed(range(len(sizes[at + 1]))):
            saver = first[given + out]
            other = saved.same_memory[out] if saved.same_memory else None
            if other is not None:
                first[other] = min(first[other], saver)
            elif saver < never:
                charges.append((at, saver, sizes[at + 1][out]))
        savers.append(first[:given])
    return savers[::-1], charges


def _correct(
    sizes: Sequence[Sequence[int]], savers: Sequence[Sequence[int]], charges: Sequence[tuple[int, int, int]]
) -> list[list[tuple[int, int]]]:
    """For each boundary, pairs (bytes, layer): a stage that begins there has these bytes more if it has that layer."""
    corrections = [list(zip(*boundary, strict=True)) for boundary in zip(sizes, savers, strict=True)]
    for maker, saver, size in charges:
        for boundary in range(maker + 1, saver + 1):  # a stage that begins there receives what it is charged for
            corrections[boundary].append((-size, saver))
    return corrections
