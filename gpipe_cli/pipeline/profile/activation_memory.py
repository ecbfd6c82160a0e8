"""The bytes that any stage keeps for a micro-batch (the paper's L/K * N/M, section 2.3), for every possible cut.

What a stage of layers i to j - 1 keeps is not a sum over its layers: a tensor that two layers save is there once, what
came over the boundary is there whether saved or not, and so is what goes out. So each tensor is charged to the first
layer that saves it. Sums over layers then answer for any stage, but for the few tensors that cross its first boundary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpipe_cli.pipeline.runtime.boundary import Boundary
from gpipe_cli.pipeline.profile.layer_cost import LayerCost


@dataclass(slots=True)
class _Tensor:
    """One piece of memory between layers."""

    bytes: int
    first_saver: int | None = None


class ActivationMemory:
    """The bytes of one micro-batch of `samples` on a stage, for any consecutive layers of a model.

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

    def input_bytes(self, first: int, end: int | None = None) -> int:
        """What came over the boundary before layer `first`: all that is kept of a micro-batch to be recomputed.

        `end`, where the stage ends, matters only where some layers are frozen; left out, it is the model's end.
        """
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

    def _has_backward(self, first: int, end: int | None = None) -> bool:
        """A stage with nothing to train in it or before it has no backward, and keeps nothing."""
        end = self._layers if end is None else end
        return self._has_gradient[first] or self._trained[end] > self._trained[first]


def _distinct(tensors: Sequence[_Tensor]) -> list[_Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())
