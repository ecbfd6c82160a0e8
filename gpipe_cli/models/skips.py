"""Long skips in a sequence of layers: a tensor that another layer needs many layers later, as in a U-Net.

    SkipSequential(stem, Stash("high"), down, ..., up, Pop("high"), head)

A sequence passes each layer's output only to the next layer. `Stash` also keeps its input under a name, and `Pop` joins
it to the output of the layer before. Wherever the sequence is cut, a pipeline sends the tensor directly from the stage
of the `Stash` to the stage of the `Pop`, not through the stages between (like torchgpipe's `@skippable`).
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from gpipe_cli.errors import InputError


class Stash(nn.Module):
    """Passes its input, a tensor or a tuple of tensors, to the next layer, and keeps it for the `Pop` of its name."""

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
    separate arguments: first the previous layer's, then the kept ones.
    """

    def __init__(self, name: str, join: Literal["cat", "add"] | Callable[..., Any] = "cat") -> None:
        super().__init__()
        self.name, self.join = name, join
        if join not in ("cat", "add") and not callable(join):
            use = '"cat", "add", or a module or function such as torch.mul'
            raise InputError(f'Pop("{name}"): join={join!r} is not a join; use {use}')

    def forward(self, values: tuple[Tensor, ...]) -> Any:
        match self.join:
            case "cat":
                return torch.cat(values, dim=1)
            case "add":
                first, *others = values
                if any(other.shape != first.shape for other in others):
                    raise InputError(f'Pop("{self.name}"): join="add" needs equal shapes; change a layer before it')
                return sum(others, start=first)
            case join:
                return join(*values)

    def extra_repr(self) -> str:
        return repr(self.name) if isinstance(self.join, nn.Module) else f"{self.name!r}, join={self.join!r}"


class SkipSequential(nn.Sequential):
    """An `nn.Sequential` that can be called although it has skips; a pipeline takes either."""

    def forward(self, value: Any) -> Any:
        find_skips(self)
        kept: dict[str, tuple[str, tuple[Tensor, ...]]] = {}
        for name, layer in self.named_children():
            if isinstance(layer, Stash):
                kept[layer.name] = name, _as_tuple(value)
            elif isinstance(layer, Pop):
                with naming_skip_errors(layer, name, *kept[layer.name], _as_tuple(value)):
                    value = layer((*_as_tuple(value), *kept.pop(layer.name)[1]))
            else:
                value = layer(value)
        return value


@contextmanager
def naming_skip_errors(
    pop: Pop, layer: str, stash: str, kept: Iterable[Tensor], inputs: Iterable[Tensor]
) -> Iterator[None]:
    """While active, an error of `pop` becomes an InputError that names the skip, both layers and the shapes."""
    try:
        yield
    except Exception as error:  # torch's, or whatever a user's function raises
        needs = {"add": "equal shapes", "cat": "shapes that differ in dimension 1 only"}.get(str(pop.join), "")
        needs = f"it needs {needs}" if needs else f"its function raises {type(error).__name__}"
        shapes = [", ".join(str(tuple(tensor.shape)) for tensor in tensors) for tensors in (inputs, kept)]
        raise InputError(
            f'layer {layer}: Pop("{pop.name}") cannot join its inputs {shapes[0]} and {shapes[1]}, kept by '
            f"layer {stash}; {needs}: change a layer between the two, or join"
        ) from error


def _as_tuple(value: Any) -> tuple[Tensor, ...]:
    return (value,) if isinstance(value, Tensor) else tuple(value)


class Skip(NamedTuple):
    """A tensor, or several, that layer `stash` keeps for layer `pop`; layers by index."""

    name: str
    stash: int
    pop: int


def find_skips(model: nn.Sequential) -> tuple[Skip, ...]:
    """The skips of a sequence, in the order of their stashes. Raises InputError, which names the layers, if a skip is
    stashed or popped twice, popped before it is stashed, never popped, or within a layer."""
    if not any(isinstance(module, Stash | Pop) for module in model.modules()):
        return ()
    stashes: dict[str, tuple[int, str]] = {}
    pops: dict[str, tuple[int, str]] = {}
    for number, (layer, module) in enumerate(model._modules.items()):  # `named_children` skips duplicates
        if not isinstance(module, Stash | Pop):
            for path, inner in module.named_modules():
                if isinstance(inner, Stash | Pop):
                    raise InputError(
                        f"layer {layer}.{path} is a {type(inner).__name__} within a layer, which no stage would see; "
                        "make it a layer of the sequence itself"
                    )
            continue
        kind = type(module).__name__
        places = stashes if isinstance(module, Stash) else pops
        if module.name in places:
            why = f"is the second {kind} of this name, after layer {places[module.name][1]}"
            raise InputError(f'layer {layer}: {kind}("{module.name}") {why}; give each skip a different name')
        places[module.name] = number, layer
    for name, (number, layer) in pops.items():
        if name not in stashes or stashes[name][0] > number:
            place = f", which is layer {stashes[name][1]}" if name in stashes else ""
            why = f'comes before any Stash("{name}"){place}'
            raise InputError(f'layer {layer}: Pop("{name}") {why}; put that Stash before it')
    for name, (_, layer) in stashes.items():
        if name not in pops:
            raise InputError(
                f'layer {layer}: Stash("{name}") is never popped; add a Pop("{name}") after it, or remove it'
            )
    return tuple(Skip(name, number, pops[name][0]) for name, (number, _) in stashes.items())
