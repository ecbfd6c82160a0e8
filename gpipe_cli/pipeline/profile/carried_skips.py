"""Long skips in the costs of layers, as if each layer between a `Stash` and its `Pop` handed them on untouched.

Then a cut knows what crosses it, and what a stage keeps of a tensor is counted once, whoever keeps it. Which stages
really get a skip is decided by the routes of a cut (`pipeline/runtime/routes.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from gpipe_cli.models.skips import Skip
from gpipe_cli.pipeline.profile.layer_cost import LayerCost, SavedMemory
from gpipe_cli.pipeline.runtime.boundary import Boundary, BoundaryTensor


def carry_skips_through(costs: Sequence[LayerCost], inputs: Boundary, skips: Sequence[Skip]) -> tuple[LayerCost, ...]:
    """The costs with skips among the outputs of layers, behind what the next layer gets; `inputs` are those of the
    first layer. In `costs`, a `Stash` returns its input twice, and a `Pop` is given the skip behind its other inputs.
    """
    if not skips:
        return tuple(costs)
    stashed = {skip.stash: skip.name for skip in skips}
    popped = {skip.pop: skip.name for skip in skips}
    extended = []
    main, carried = inputs, tuple[BoundaryTensor, ...]()
    for at, cost in enumerate(costs):
        name = popped.get(at)
        passed_on = tuple(tensor for tensor in carried if tensor.skip != name)
        returned = cost.outputs
        new = tuple[BoundaryTensor, ...]()
        if at in stashed:
            half = len(returned) // 2
            new = tuple(replace(tensor, skip=stashed[at]) for tensor in returned[half:])
            returned = returned[:half]
        # positions of the layer's inputs and outputs among all tensors that come in and go out
        in_positions = [*range(len(main)), *(len(main) + n for n, tensor in enumerate(carried) if tensor.skip == name)]
        out_positions = [
            *range(len(returned)),
            *range(len(returned) + len(passed_on), len(returned) + len(passed_on) + len(new)),
        ]
        untouched = [len(main) + n for n, tensor in enumerate(carried) if tensor.skip != name]
        # position at which an untouched tensor of a skip goes out -> position at which it comes in
        passthrough = dict(enumerate(untouched, start=len(returned)))
        forward = partial(_remap, in_positions=in_positions, out_positions=out_positions, passthrough=passthrough)
        backward = partial(
            _remap,
            in_positions=out_positions,
            out_positions=in_positions,
            passthrough={incoming: out for out, incoming in passthrough.items()},
        )
        split = cost.split_backward
        if split is not None:
            saved_inputs, saved_gradients = forward(split.saved_inputs), backward(split.saved_gradients)
            split = replace(split, saved_inputs=saved_inputs, saved_gradients=saved_gradients)
        extended.append(
            replace(cost, outputs=(*returned, *passed_on, *new), saved=forward(cost.saved), split_backward=split)
        )
        main, carried = returned, (*passed_on, *new)
    return tuple(extended)


def _remap(
    memory: SavedMemory, in_positions: Sequence[int], out_positions: Sequence[int], passthrough: Mapping[int, int]
) -> SavedMemory:
    """`memory` of a layer, with positions among all tensors that come in, then all that go out. The layer's own come in
    at `in_positions` and go out at `out_positions`; those that go out where `passthrough` says are others that came in,
    untouched."""
    others = len(in_positions) + len(passthrough)
    places = [*in_positions, *(others + at for at in out_positions)]
    same_memory = dict(passthrough)
    for at, other in zip(out_positions, memory.same_memory, strict=False):  # () says that all memory is new
        if other is not None:
            same_memory[at] = places[other]
    return replace(
        memory,
        tensors=tuple(places[position] for position in memory.tensors),
        same_memory=tuple(same_memory.get(at) for at in range(len(out_positions) + len(passthrough))),
    )
