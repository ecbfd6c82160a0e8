"""What a layer costs, what crosses its boundary (paper section 2.1: the cost estimate c_i), and what a stage keeps.

The figures come from shapes alone (`tracing.py`), so that every process arrives at the same ones without a handshake,
and hold for micro-batches of any size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
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
class LayerCost:
    """One layer. `trained` is how many of the parameters are; `saved` says what autograd keeps between forward and
    backward."""

    name: str
    parameters: int
    forward: Work
    backward: Work
    outputs: Boundary
    trained: int = 0
    saved: Saved = field(default_factory=Saved)

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

    They are no sum over layers: a tensor that two layers save is there once, what comes over the boundary and what goes
    out is there whether saved or not. So each tensor is charged to the first layer that saves it. Sums over layers then
    answer for any stage, but for the few tensors that cross its first boundary.

    `inputs` describe what the first layer gets, `lengths` are those that the costs were traced with: what a layer keeps
    inside may grow with their square. Tensors that cross the stage's first boundary count one by one, as they are
    received: two that are one tensor in the stage before are two here.
    """

    def __init__(self, costs: Sequence[LayerCost], inputs: Boundary, samples: int, lengths: Sequence[int] = ()) -> None:
        self._layers = len(costs)
        boundaries = [inputs, *(cost.outputs for cost in costs)]
        self._input_bytes = [sum(t.bytes(samples, lengths) for t in boundary) for boundary in boundaries]
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
        """All that a stage of layers `first` to `end - 1` keeps of a micro-batch with its graph: its inputs, what
        autograd saves, its outputs. The last stage frees its outputs: it has the loss.

        Takes time proportional to the tensors that cross the two boundaries. Grows with `end`, except where a layer
        neither saves nor hands on its inputs: a stage that ends before that layer holds them.
        """
        if not self._has_backward(first, end):
            return 0
        incoming = set(map(id, self._crossing[first]))
        charged = self._charged[end] - self._charged[first]
        for tensor in _distinct(self._crossing[first]):
            if tensor.first_saver is not None and first <= tensor.first_saver < end:
                charged -= tensor.bytes  # it is there as an input
        if end < self._layers:
            for tensor in _distinct(self._crossing[end]):
                if id(tensor) not in incoming and (tensor.first_saver is None or tensor.first_saver >= end):
                    charged += tensor.bytes
        return self._input_bytes[first] + charged

    def _has_backward(self, first: int, end: int) -> bool:
        """A stage with nothing to train in it or before it has no backward, and keeps nothing."""
        return self._has_gradient[first] or self._trained[end] > self._trained[first]


def _distinct(tensors: Sequence[_Tensor]) -> list[_Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())
