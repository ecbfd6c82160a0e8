"""Long skips in the costs of layers, as if each layer between a `Stash` and its `Pop` handed them on untouched.

Then a cut knows what crosses it, and what a stage keeps of a tensor is counted once, whoever keeps it. Which stages
really get a skip is decided by the routes of a cut (`pipeline/runtime/routes.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from gpipe_cli.models.skips import Skip
from gpipe_cli.pipeline.profile.layer_cost import KeptMemory, LayerCost
from gpipe_cli.pipeline.runtime.boundary import Boundary, BoundaryTensor


def with_skips(costs: Sequence[LayerCost], inputs: Boundary, skips: Sequence[Skip]) -> tuple[LayerCost, ...]:
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
        coming = [*range(len(main)), *(len(main) + n for n, tensor in enumerate(carried) if tensor.skip == name)]
        going = [
            *range(len(returned)),
            *range(len(returned) + len(passed_on), len(returned) + len(passed_on) + len(new)),
        ]
        untouched = [len(main) + n for n, tensor in enumerate(carried) if tensor.skip != name]
        # position at which an untouched tensor of a skip goes out -> position at which it comes in
        passing = dict(enumerate(untouched, start=len(returned)))
        forward = partial(_moved, coming=coming, going=going, passing=passing)
        backward = partial(
            _moved, coming=going, going=coming, passing={incoming: out for out, incoming in passing.items()}
        )
        halves = cost.halves
        if halves is not None:
            kept_inputs, kept_gradients = forward(halves.kept_inputs), backward(halves.kept_gradients)
            halves = replace(halves, kept_inputs=kept_inputs, kept_gradients=kept_gradients)
        extended.append(replace(cost, outputs=(*returned, *passed_on, *new), saved=forward(cost.saved), halves=halves))
        main, carried = returned, (*passed_on, *new)
    return tuple(extended)


def _moved(kept: KeptMemory, coming: Sequence[int], going: Sequence[int], passing: Mapping[int, int]) -> KeptMemory:
    """`kept` of a layer, with positions among all tensors that come in, then all that go out. The layer's own come in
    at `coming` and go out at `going`; those that go out where `passing` says are others that came in, untouched."""
    others = len(coming) + len(passing)
    places = [*coming, *(others + at for at in going)]
    same_memory = dict(passing)
    for at, other in zip(going, kept.same_memory, strict=False):  # () says that all memory is new
        if other is not None:
            same_memory[at] = places[other]
    return replace(
        kept,
        tensors=tuple(places[position] for position in kept.tensors),
        same_memory=tuple(same_memory.get(at) for at in range(len(going) + len(passing))),
    )
