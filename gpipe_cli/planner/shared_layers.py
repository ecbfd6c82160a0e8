"""Finds layers that share something and must stay in the same stage, as a stage owns its layers (paper section 2.1).

Every process allocates its own layers. If two layers in different processes shared a buffer or a module, each process
would change its own copy, without an error. Parameters alone may be shared by any stages
(`pipeline/runtime/tied_weights.py`).

Layers share what torch registers as part of both, whether or not a forward uses it: a module may count its calls. They
also share what any of them is seen to read through functions, hooks, lists or other objects while it is traced.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from torch import nn

from gpipe_cli.errors import InputError
from gpipe_cli.pipeline.profile.layer_cost import LayerCost
from gpipe_cli.pipeline.runtime.saved_activations import storage_id


class Shared(NamedTuple):
    """Layer number `second` shares something with the earlier layer number `first`, described in `text`."""

    first: int
    second: int
    text: str


def find_shared(model: nn.Sequential, setting: str = "model.target") -> tuple[Shared, ...]:
    """The pairs of layers of `model`, which `setting` gave, that share a part, in order, with the first part of each.

    A module at several places of the model stands for layers that share nothing (`build_model`).

    Raises InputError for a parameter in whose memory another tensor begins: a GPU or another memory format separates
    them.
    """
    _check_separate_memory(model, setting)
    owners: dict[int, tuple[int, str]] = {}
    shared: dict[tuple[int, int], Shared] = {}
    for number, (layer, module) in enumerate(model.named_children()):
        for what, part in _parts(module):
            owner, owner_name = owners.setdefault(id(part), (number, layer))
            if owner != number:
                what = what or f"module {layer}"
                shared.setdefault((owner, number), Shared(owner, number, _text(owner_name, layer, what)))
    return tuple(shared.values())


def _parts(layer: nn.Module) -> Iterator[tuple[str, object]]:
    for path, module in layer.named_modules():
        prefix = f"buffer {path}." if path else "buffer "
        buffers = [(f"{prefix}{name}", buffer) for name, buffer in module._buffers.items()]
        # a module of torch or timm without tensors is a function, and a copy of it is as good
        has_tensors = bool(module._parameters or buffers)
        if has_tensors or not type(module).__module__.startswith(("torch.nn.", "timm.layers.")):
            yield path and f"module {path}", module
        yield from ((what, buffer) for what, buffer in buffers if buffer is not None)


def _check_separate_memory(model: nn.Sequential, setting: str) -> None:
    parameters: dict[tuple[int, int], str] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        place = storage_id(tensor), int(tensor.storage_offset())
        first = parameters.get(place, name)
        if isinstance(tensor, nn.Parameter):
            parameters[place] = first
        if first != name:
            raise InputError(
                f"{setting}: {first} and {name} are two tensors in the same memory, which a stage would move apart; "
                "let them be one tensor, or let a layer read the other layer's tensor whenever it is run"
            )


def find_read(*traced: Sequence[LayerCost]) -> Iterator[Shared]:
    """The pairs of layers of which one reads a tensor of the other, in training or evaluation."""
    for costs in traced:
        numbers = {cost.name: number for number, cost in enumerate(costs)}
        for reader, cost in enumerate(costs):
            for name in cost.cross_layer_tensors:
                first, second = sorted((reader, numbers[name.partition(".")[0]]))
                yield Shared(first, second, _text(costs[first].name, costs[second].name, name))


def _text(first: str, second: str, what: str) -> str:
    return f"layers {first} and {second} share {what}: in different stages each would have its own copy"


def _places_of_cuts(shared: Sequence[Shared], layers: int) -> list[int]:
    """The numbers of layers after which a cut keeps together what is shared."""
    return [end for end in range(1, layers) if not any(first < end <= second for first, second, _ in shared)]


def ends_with_shared_layers_together(
    shared: Sequence[Shared], layers: int, partitions: int, furthest: Sequence[Sequence[int]] | None
) -> Sequence[Sequence[int]] | None:
    """`furthest` of :func:`partition` (None: no limit), so that no partition begins between layers that share."""
    if not shared:
        return furthest
    begins = {0, *_places_of_cuts(shared, layers)}
    rows = [[layers] * layers] * partitions if furthest is None else furthest
    return [[end if first in begins else first for first, end in enumerate(row)] for row in rows]


def check_cut(shared: Sequence[Shared], balance: Sequence[int], setting: str = "partition.balance") -> None:
    """Raises InputError if stages with the numbers of layers in `balance` would share something."""
    partitions, layers = len(balance), sum(balance)
    places = _places_of_cuts(shared, layers)
    for end in list(accumulate(balance))[:-1]:
        for first, second, text in shared:
            if not first < end <= second:
                continue
            remedy = f"use partitions={len(places) + 1} or fewer, and a cut that keeps them together"
            if len(places) >= partitions - 1:
                ends = [places[at * len(places) // (partitions - 1)] for at in range(partitions - 1)]
                sizes = [after - before for before, after in pairwise([0, *ends, layers])]
                remedy = f"keep them together, as by {setting}=[{','.join(map(str, sizes))}]"
            raise InputError(f"partitions={partitions}: {text}; {remedy}")
