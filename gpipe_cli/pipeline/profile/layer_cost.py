"""What a layer costs, what crosses its boundary (paper section 2.1: the cost estimate c_i), and what a stage keeps.

The figures come from shapes alone (`tracing.py`), so that every process arrives at the same ones without a handshake,
and hold for micro-batches of any size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from itertools import accumulate

from gpipe_cli.pipeline.runtime.boundary import Boundary


@dataclass(frozen=True)
class Saved:
    """The memory that the backward of a layer needs, described so that no tensor counts twice where layers meet.

    `tensors` are positions among the tensors that come in, followed by those that go out; what else is saved is
    `base_bytes + per_sample_bytes * samples`, at the lengths that were traced. `same_memory` says of each output whose
    memory it is, as a position of that kind; None if it is new. Parameters and buffers are not counted.
    """

    tensors: tuple[int, ...] = ()
    base_bytes: int = 0
    per_sample_bytes: int = 0
    same_memory: tuple[int | None, ...] = ()

    def inside_bytes(self, samples: int) -> int:
        return self.base_bytes + self.per_sample_bytes * samples


class OperationKind(StrEnum):
    """Kernels by what their speed depends on: a device has a rate for each."""

    PRODUCT = "product"  # of matrices, attention among them
    CONVOLUTION = "convolution"
    NARROW = "narrow convolution"  # of fewer than 16 channels, which fill no vector register
    DEPTHWISE = "depthwise"  # a convolution of each channel alone
    NORMALIZATION = "normalization"
    POOLING = "pooling"
    RANDOM = "random"  # numbers drawn, as for dropout
    ELEMENTWISE = "elementwise"  # all others


@dataclass(slots=True)
class Operations:
    """Kernels of one kind: `count` for a micro-batch of any size, `flops * n` and `bytes * n + fixed_bytes` for one of
    n samples. A multiplication and an addition count as two; weights are fixed bytes."""

    count: int = 0
    flops: float = 0.0
    bytes: float = 0.0
    fixed_bytes: float = 0.0


@dataclass(frozen=True)
class Work:
    """What a layer does in one direction."""

    by_kind: Mapping[OperationKind, Operations] = field(default_factory=dict)

    @property
    def flops(self) -> float:
        """Of one sample."""
        return sum(each.flops for each in self.by_kind.values())


@dataclass(frozen=True)
class Halves:
    """The backward of a layer in two halves. Their sum is more than the whole: a convolution reads the same twice.

    What is kept from the first to the second: `kept_inputs` of its products and convolutions, described as in `Saved`,
    and `kept_gradients` of their outputs. Positions of those are among the gradients of the layer's outputs, which come
    in, followed by those of its inputs, which go out; `same_memory` is that of the latter.
    """

    inputs: Work = field(default_factory=Work)
    weights: Work = field(default_factory=Work)
    kept_inputs: Saved = field(default_factory=Saved)
    kept_gradients: Saved = field(default_factory=Saved)


@dataclass(frozen=True)
class LayerCost:
    """One layer. `trained` is how many of the parameters are; `saved` says what autograd keeps between forward and
    backward; `halves` are None where the backward is not split."""

    name: str
    parameters: int
    forward: Work
    backward: Work
    outputs: Boundary
    trained: int = 0
    saved: Saved = field(default_factory=Saved)
    halves: Halves | None = None

    @property
    def flops(self) -> float:
        """Of one sample, forward and backward."""
        return self.forward.flops + self.backward.flops


@dataclass(slots=True)
class _Tensor:
    """One piece of memory between layers."""

    bytes: int
    first_saver: int | None = None


class ActivationMemory:
    """The bytes of one micro-batch of `samples` on a stage (the paper's L/K * N/M, section 2.3), for any consecutive
    layers of a model.

    They are no sum over layers: a tensor that two layers save is there once, and what comes over the boundary is there
    whether saved or not. So each tensor is charged to the first layer that saves it. Sums over layers then answer for
    any stage, but for the few tensors that cross its first boundary.

    `inputs` describe what the first layer gets, `lengths` are those that the costs were traced with: what a layer keeps
    inside may grow with their square. Tensors that cross the stage's first boundary count one by one, as they are
    received: two that are one tensor in the stage before are two here.
    """

    def __init__(self, costs: Sequence[LayerCost], inputs: Boundary, samples: int, lengths: Sequence[int] = ()) -> None:
        self._samples, self._halves = samples, [cost.halves or Halves() for cost in costs]
        self._kept_inputs, self._kept_gradients = cache(self._inputs_from), cache(self._gradients_to)
        boundaries = [inputs, *(cost.outputs for cost in costs)]
        self._tensor_bytes = [[t.bytes(samples, lengths) for t in boundary] for boundary in boundaries]
        self._input_bytes = list(map(sum, self._tensor_bytes))
        self._has_gradient = [any(t.has_gradient for t in boundary) for boundary in boundaries]
        self._trained = [0, *accumulate(cost.trained for cost in costs)]
        # the tensors that cross each boundary, and for each layer the bytes that it is the first to save
        current = [_Tensor(tensor.bytes(samples, lengths)) for tensor in inputs]
        self._crossing = [tuple(current)]
        charged = [cost.saved.inside_bytes(samples) for cost in costs]
        for at, cost in enumerate(costs):
            made: list[_Tensor] = []
            shared = cost.saved.same_memory or (None,) * len(cost.outputs)
            for described, other in zip(cost.outputs, shared, strict=True):
                new = _Tensor(described.bytes(samples, lengths))
                made.append(new if other is None else [*current, *made][other])
            saved = [[*current, *made][position] for position in cost.saved.tensors]
            for tensor in saved:
                if tensor.first_saver is None:
                    tensor.first_saver = at
                    charged[at] += tensor.bytes
            current = made
            self._crossing.append(tuple(current))
        self._charged = [0, *accumulate(charged)]

    def input_bytes(self, first: int, end: int) -> int:
        """What came over the boundary before layer `first`: all that is kept of a micro-batch to be recomputed."""
        return self._input_bytes[first] if self._has_backward(first, end) else 0

    def graph_bytes(self, first: int, end: int) -> int:
        """All that a stage of layers `first` to `end - 1` keeps of a micro-batch with its graph: its inputs and what
        autograd saves. Takes time proportional to the tensors that cross its first boundary, and grows with `end`.
        """
        if not self._has_backward(first, end):
            return 0
        charged = self._charged[end] - self._charged[first]
        for tensor in _distinct(self._crossing[first]):
            if tensor.first_saver is not None and first <= tensor.first_saver < end:
                charged -= tensor.bytes  # it is there as an input
        return self._input_bytes[first] + charged

    def weights_bytes(self, first: int, end: int) -> int:
        """What the stage keeps of a micro-batch between the two halves of its backward: the inputs of products and
        convolutions, and the gradients of their outputs.

        Of a tensor that crosses a boundary of layers all counts, even if a product reads only a part.
        """
        if not self._has_backward(first, end):
            return 0
        return self._kept_inputs(first)[end - first] + self.gradients_bytes(first, end)

    def gradients_bytes(self, first: int, end: int) -> int:
        """The part of `weights_bytes` that the first half adds to what is there: gradients."""
        return self._kept_gradients(end)[end - first] if self._has_backward(first, end) else 0

    def _inputs_from(self, first: int) -> Sequence[int]:
        """Kept by stages that begin with layer `first` and have 0, 1, ... layers."""
        return self._walked(self._tensor_bytes[first:], [halves.kept_inputs for halves in self._halves[first:]])

    def _gradients_to(self, end: int) -> Sequence[int]:
        """Kept by stages that end before layer `end` and have 0, 1, ... layers: gradients go the other way."""
        kept = [halves.kept_gradients for halves in self._halves[:end]]
        return self._walked(self._tensor_bytes[end::-1], kept[::-1])

    def _walked(self, boundaries: Sequence[Sequence[int]], kept: Sequence[Saved]) -> list[int]:
        """What is kept in the first 0, 1, ... of the layers between `boundaries`, no tensor twice."""
        current, total = [_Tensor(size) for size in boundaries[0]], [0]
        for saved, made in zip(kept, boundaries[1:], strict=True):
            tensors = list(current)
            for size, other in zip(made, saved.same_memory or (None,) * len(made), strict=True):
                tensors.append(_Tensor(size) if other is None else tensors[other])
            found = saved.inside_bytes(self._samples)
            for position in saved.tensors:
                if tensors[position].first_saver is None:
                    tensors[position].first_saver = len(total)
                    found += tensors[position].bytes
            total.append(total[-1] + found)
            current = tensors[len(current) :]
        return total

    def _has_backward(self, first: int, end: int) -> bool:
        """A stage with nothing to train in it or before it has no backward, and keeps nothing."""
        return self._has_gradient[first] or self._trained[end] > self._trained[first]


def _distinct(tensors: Sequence[_Tensor]) -> list[_Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())
