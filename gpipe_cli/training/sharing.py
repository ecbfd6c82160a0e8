"""Parameters that layers share: a stage owns its layers, so what is shared must not be cut apart (paper section 2.1).

Every process makes its own layers real. Two layers that share a parameter, in two of them, would each train a copy of
their own, and nothing would say so.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn


class SeparatedError(ValueError):
    """The cut lies between layers that share a parameter."""


@dataclass(frozen=True)
class Shared:
    """A parameter that a layer has in common with one before it; layers by number and name."""

    first: int
    second: int
    first_name: str
    second_name: str
    parameter: str  # as the second one calls it

    @property
    def text(self) -> str:
        return (
            f"layers {self.first_name} and {self.second_name} share parameter {self.parameter}: in different stages "
            "each would train its own copy"
        )


def shared_parameters(model: nn.Sequential) -> tuple[Shared, ...]:
    """The parameters that two layers of `model` have in common, in order.

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
    found = []
    for number, (layer, module) in enumerate(model.named_children()):
        for parameter, tensor in module.named_parameters():
            owner, owner_name = owners.setdefault(id(tensor), (number, layer))
            if owner != number:
                found.append(Shared(owner, number, owner_name, layer, parameter))
    return tuple(found)


def check_cut(shared: Sequence[Shared], balance: Sequence[int]) -> None:
    """Raises SeparatedError if the stages, of so many layers each, would share a parameter."""
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
