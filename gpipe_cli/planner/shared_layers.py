"""What layers share: a stage owns its layers, so what they have in common must not be cut apart (paper section 2.1).

Every process allocates its own layers. Of a parameter, a buffer or a module that two layers share, two processes would
each have a copy and train it separately, without an error.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


class SeparatedError(ValueError):
    """The cut lies between layers that share something."""


@dataclass(frozen=True)
class Shared:
    """Something that a layer has in common with one before it; layers by number and name."""

    first: int
    second: int
    first_name: str
    second_name: str
    what: str  # as the second one calls it

    @property
    def text(self) -> str:
        return (
            f"layers {self.first_name} and {self.second_name} share {self.what}: in different stages each would have "
            "its own copy"
        )


def find_shared(model: nn.Sequential) -> tuple[Shared, ...]:
    """The layers of `model` that have something in common, in order, with the first thing of each two.

    Raises ValueError for a module that stands at two places of the model: only the first of them would be run.
    """
    places: dict[int, str] = {}
    for name, module in model._modules.items():  # `named_children` leaves out what it has seen before
        if id(module) in places:
            raise ValueError(
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
                found.setdefault((owner, number), Shared(owner, number, owner_name, layer, what or f"module {layer}"))
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
    stages = [stage for stage, size in enumerate(balance) for _ in range(size)]
    for one in shared:
        if stages[one.first] != stages[one.second]:
            remedy = _remedy(len(stages), one.first, one.second, len(balance))
            raise SeparatedError(f"partitions={len(balance)}: {one.text}; {remedy}")


def _remedy(layers: int, first: int, second: int, partitions: int) -> str:
    """The simplest cut that keeps the two together: one partition around them, the others before and behind."""
    before, behind = first, layers - second - 1
    others = partitions - 1
    if others > before + behind:
        return f"use partitions={before + behind + 1} or fewer, and a cut that keeps them together"
    in_front = min(before, others)
    sizes = [*_even(before, in_front), second - first + 1, *_even(behind, others - in_front)]
    if in_front == 0 and before:
        sizes[0] += before
    if others == in_front and behind:
        sizes[-1] += behind
    return f"keep them together, as by partition.balance=[{','.join(map(str, sizes))}]"


def _even(layers: int, parts: int) -> list[int]:
    return [layers // parts + (part < layers % parts) for part in range(parts)]
