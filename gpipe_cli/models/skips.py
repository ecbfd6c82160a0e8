"""Long skips in a sequence of layers: a tensor that a layer takes up again many layers later, as in a U-Net.

    Sequence(stem, Stash("high"), down, ..., up, Pop("high"), head)

A sequence hands each layer's output to the next one only. `Stash` keeps its input under a name as well, and `Pop`
takes it up again and joins it to what comes to it. Wherever the sequence is cut, a pipeline sends the tensor straight
from the stage of the `Stash` to that of the `Pop`, and not through the stages between. (torchgpipe's `@skippable` did
so, too.)
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from gpipe_cli.errors import InputError


class Stash(nn.Module):
    """Hands its input, a tensor or a tuple of tensors, on to the next layer, and keeps it for the `Pop` of its name."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, value: Any) -> Any:
        return value

    def extra_repr(self) -> str:
        return repr(self.name)


class Pop(nn.Module):
    """Joins the previous layer's output and what the `Stash` of its name has kept.

    join: `cat`, along dimension 1, for (N, C, ...) and (N, D, ...) -> (N, C + D, ...); `add`, for equal shapes; or a
    module or function that is called with both, and returns a tensor or a tuple of tensors. The tensors of a tuple are
    arguments of their own: first those of the previous layer, then those that were kept.
    """

    def __init__(self, name: str, join: Literal["cat", "add"] | Callable[..., Any] = "cat") -> None:
        super().__init__()
        self.name, self.join = name, join
        if join not in ("cat", "add") and not callable(join):
            raise InputError(f'Pop("{name}"): join={join!r} must be "cat", "add", a module or a function')

    def forward(self, values: tuple[Tensor, ...]) -> Any:
        match self.join:
            case "cat":
                return torch.cat(values, dim=1)
            case "add":
                first, *others = values
                return sum(others, start=first)
            case join:
                return join(*values)

    def extra_repr(self) -> str:
        return repr(self.name) if isinstance(self.join, nn.Module) else f"{self.name!r}, join={self.join!r}"


class Sequence(nn.Sequential):
    """An `nn.Sequential` that can be called although it has skips; a pipeline takes either."""

    def forward(self, value: Any) -> Any:
        kept: dict[str, tuple[Tensor, ...]] = {}
        for layer in self:
            if isinstance(layer, Stash):
                kept[layer.name] = _as_tuple(value)
            else:
                value = layer((*_as_tuple(value), *kept.pop(layer.name)) if isinstance(layer, Pop) else value)
        return value


def _as_tuple(value: Any) -> tuple[Tensor, ...]:
    return (value,) if isinstance(value, Tensor) else tuple(value)


@dataclass(frozen=True)
class Skip:
    """A tensor, or several, that layer number `stash` keeps and layer number `pop` takes up again."""

    name: str
    stash: int
    pop: int


def find_skips(model: nn.Sequential) -> tuple[Skip, ...]:
    """The skips of a sequence, in the order of their stashes. Raises InputError, which names the layer, if one is
    stashed or popped twice, popped before it is stashed, or never popped; or if it is not a layer of the sequence."""
    open_: dict[str, tuple[int, str]] = {}
    found: dict[str, Skip] = {}
    for number, (layer, module) in enumerate(model.named_children()):
        if not isinstance(module, Stash | Pop):
            for path, inner in module.named_modules():
                if isinstance(inner, Stash | Pop):
                    raise InputError(
                        f"layer {layer}.{path} is a {type(inner).__name__} inside a layer, which no stage would see; "
                        "make it a layer of the sequence itself"
                    )
            continue
        name, what = module.name, f'layer {layer}: {type(module).__name__}("{module.name}")'
        if isinstance(module, Stash):
            if name in open_ or name in found:
                raise InputError(f"{what} is the second Stash of this name; give each a name of its own")
            open_[name] = number, layer
        elif name in open_:
            found[name] = Skip(name, open_.pop(name)[0], number)
        elif name in found:
            raise InputError(f"{what} is the second Pop of this name; stash it again under another name")
        else:
            raise InputError(f'{what} comes before any Stash("{name}"); put that Stash before it')
    for name, (_, layer) in open_.items():
        raise InputError(f'layer {layer}: Stash("{name}") is never popped; add a Pop("{name}") behind it, or remove it')
    return tuple(sorted(found.values(), key=lambda skip: skip.stash))
