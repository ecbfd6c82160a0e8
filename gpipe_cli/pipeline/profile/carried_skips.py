"""Long skips in the costs of layers, as if each layer between a `Stash` and its `Pop` passed them on untouched.

Then a cut knows what crosses it, and what a stage saves of a tensor is counted once, whoever saves it. Which stages
really get a skip is decided by the routes of a cut (`pipeline/runtime/routes.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from gpipe_cli.models.skips import Skip
from gpipe_cli.pipeline.profile.layer_cost import LayerCost, SavedMemory
from gpipe_cli.pipeline.runtime.boundary import Boundary


def carry_skips_through(costs: Sequence[LayerCost], inputs: Boundary, skips: Sequence[Skip]) -> tuple[LayerCost, ...]:
    """The costs with skips among the outputs of layers, after what the next layer gets; `inputs` are the inputs of the
    first layer. In `costs`, a `Stash` returns its input twice, and a `Pop` is given the skip after its other inputs.
    """
    if not skips:
        return tuple(costs)
    stashed = {skip.stash: skip.name for skip in skips}
    popped = {skip.pop: skip.name for skip in skips}
    extended = []
    incoming = inputs
    for at, cost in enumerate(costs):
        untouched = [n for n, tensor in enumerate(incoming) if tensor.skip and tensor.skip != popped.get(at)]
        returned = len(cost.outputs) // (2 if at in stashed else 1)  # number of tensors that the next layer gets
        new = (replace(tensor, skip=stashed[at]) for tensor in cost.outputs[returned:])
        outgoing = (*cost.outputs[:returned], *(incoming[n] for n in untouched), *new)
        passthrough = dict(enumerate(untouched, start=returned))
        positions = Positions(
            inputs=[n for n in range(len(incoming)) if n not in untouched],
            outputs=[n for n in range(len(outgoing)) if n not in passthrough],
            passthrough=passthrough,
        )
        split = cost.split_backward and replace(
            cost.split_backward,
            saved_inputs=positions.remap(cost.split_backward.saved_inputs),
            saved_gradients=positions.reverse().remap(cost.split_backward.saved_gradients),
        )
        extended.append(replace(cost, outputs=outgoing, saved=positions.remap(cost.saved), split_backward=split))
        incoming = outgoing
    return tuple(extended)


class Positions(NamedTuple):
    """Positions of a layer's inputs and outputs among all tensors that come in and go out. The others pass through:
    `passthrough` is the position at which each goes out -> the position at which it comes in."""

    inputs: Sequence[int]
    outputs: Sequence[int]
    passthrough: Mapping[int, int]

    def reverse(self) -> "Positions":
        """The positions for gradients, which come in where tensors go out."""
        return Positions(self.outputs, self.inputs, {incoming: out for out, incoming in self.passthrough.items()})

    def remap(self, memory: SavedMemory) -> SavedMemory:
        """A layer's `memory`, with positions among all tensors that come in, followed by all that go out."""
        total_in, total_out = (len(own) + len(self.passthrough) for own in (self.inputs, self.outputs))
        places = [*self.inputs, *(total_in + at for at in self.outputs)]
        same_memory = dict(self.passthrough)
        for at, other in zip(self.outputs, memory.same_memory, strict=False):  # () says that all memory is new
            if other is not None:
                same_memory[at] = places[other]
        return replace(
            memory,
            tensors=tuple(places[position] for position in memory.tensors),
            same_memory=tuple(same_memory.get(at) for at in range(total_out)),
        )
