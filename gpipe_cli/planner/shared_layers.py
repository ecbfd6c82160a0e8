"""What layers share: a stage owns its layers, so what they have in common must not be cut apart (paper section 2.1).

Every process allocates its own layers. Of a parameter, a buffer or a module that two layers share, two processes would
each have a copy and train it separately, without an error.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from torch import nn

from gpipe_cli.errors import InputError

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


class SeparatedError(InputError):
    """The cut lies between layers that share something."""


@dataclass(frozen=True)
class Shared:
    """Layer number `second` has something in common with number `first`, before it."""

    first: int
    second: int
    text: str


def find_shared(model: nn.Sequential) -> tuple[Shared, ...]:
    """The layers of `model` that have something in common, in order, with the first thing of each two.

    Raises InputError for a module that stands at two places of the model: only the first of them would be run.
    """
    places: dict[int, str] = {}
    for name, module in model._modules.items():  # `named_children` leaves out what it has seen before
        if id(module) in places:
            raise InputError(
                f"model.target: layers {places[id(module)]} and {name} are the same module, and a layer has one place; "
                "make a module for each place (they may share parameters)"
            )
        places[id(module)] = name
    owners: dict[int, tuple[int, str]] = {}
    found: dict[tuple[int, int], Shared] = {}
    for number, (layer, module) in enumerate(model.named_children()):
        for what, thing in _parts(module, "", set()):
            owner, owner_name = owners.setdefault(id(thing), (number, layer))
            if owner != number:
                text = f"layers {owner_name} and {layer} share {what or f'module {layer}'}: in different stages each "
                text += "would have its own copy"
                found.setdefault((owner, number), Shared(owner, number, text))
    return tuple(found.values())


def _parts(thing: object, path: str, seen: set[int]) -> Iterator[tuple[str, object]]:
    """What a layer consists of and can have in common with another: parameters, buffers, modules. Those too that it
    holds in lists and other attributes, without torch's knowledge."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    inside: list[tuple[object, object]] = []
    if isinstance(thing, nn.Module):
        owned = (("parameter", thing._parameters), ("buffer", thing._buffers))
        tensors = [
            (f"{kind} {_join(path, name)}", t) for kind, own in owned for name, t in own.items() if t is not None
        ]
        # one of torch's own without tensors is a function: a copy of it is as good
        if tensors or not type(thing).__module__.startswith(("torch.nn.", "timm.layers.")):
            yield path and f"module {path}", thing
        yield from tensors
        inside += thing._modules.items()
        inside += [(name, value) for name, value in vars(thing).items() if name not in _OF_EVERY_MODULE]
    elif isinstance(thing, nn.Parameter):
        yield f"parameter {path}", thing
    elif isinstance(thing, list | tuple | set):
        inside += enumerate(thing)
    elif isinstance(thing, dict):
        inside += thing.items()
    for name, value in inside:
        yield from _parts(value, _join(path, name), seen)


def _join(path: str, name: object) -> str:
    return f"{path}.{name}" if path else str(name)


def check_cut(shared: Sequence[Shared], balance: Sequence[int]) -> None:
    """Raises SeparatedError if the stages, of so many layers each, would share something."""
    partitions, layers = len(balance), sum(balance)
    # after so many layers a cut keeps together what is shared
    places = [end for end in range(1, layers) if not any(one.first < end <= one.second for one in shared)]
    for end in list(accumulate(balance))[:-1]:
        for one in shared:
            if not one.first < end <= one.second:
                continue
            remedy = f"use partitions={len(places) + 1} or fewer, and a cut that keeps them together"
            if len(places) >= partitions - 1:
                ends = [places[at * len(places) // (partitions - 1)] for at in range(partitions - 1)]
                sizes = [after - before for before, after in pairwise([0, *ends, layers])]
                remedy = f"keep them together, as by partition.balance=[{','.join(map(str, sizes))}]"
            raise SeparatedError(f"partitions={partitions}: {one.text}; {remedy}")
