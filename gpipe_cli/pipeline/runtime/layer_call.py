"""Calls a layer, on the meta device or in a stage, and rejects a layer that changes its input in place.

A stage keeps its input and recomputes its layers from it (paper section 2.3). A layer that changes its input in place
would be recomputed from other values, or fail in autograd, depending on the cut. So it is rejected anywhere in the
model. Torch counts a tensor's in-place changes (`_version`), so comparing these counts is enough.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from gpipe_cli.errors import InputError
from gpipe_cli.pipeline.runtime.boundary import Tensors, as_value


class ChangedInputError(InputError):
    """Layer `layer` changes its input in place."""

    def __init__(self, layer: str) -> None:
        super().__init__(
            f"layer {layer} changes its input in place: a stage that begins with it could not run it again from what "
            "it keeps; use inplace=False (for m in model.modules(): m.inplace = False), or let it change a clone"
        )
        self.layer = layer


def call(name: str, layer: Callable[[Any], Any], inputs: Tensors, in_tuple: bool) -> Any:
    """Run a layer and return what it returns. Raises ChangedInputError, and whatever the layer raises."""
    versions = [tensor._version for tensor in inputs]
    try:
        returned = layer(as_value(inputs, in_tuple))
    except RuntimeError as error:
        # autograd raises a plain RuntimeError for an in-place change of a leaf
        if type(error) is RuntimeError and _changes_inputs(layer, inputs, in_tuple):
            raise ChangedInputError(name) from error
        raise
    if [tensor._version for tensor in inputs] != versions:
        raise ChangedInputError(name)
    return returned


def traced_call(
    name: str, layer: Callable[[Any], Any], inputs: Tensors, in_tuple: bool, *, check_in_place: bool
) -> torch.Tensor | Sequence[torch.Tensor]:
    """Run a layer on the meta device and return what it returns. Raises InputError, with the layer's name, if the layer
    raises or returns anything but tensors, and ChangedInputError if it is `check_in_place` and changes its input in
    place."""
    try:
        returned = call(name, layer, inputs, in_tuple) if check_in_place else layer(as_value(inputs, in_tuple))
    except ChangedInputError:
        raise
    except InputError as error:
        raise InputError(f"layer {name} {error}") from error
    except Exception as error:  # a user's layer may raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise InputError(f"layer {name} does not accept inputs of shape {shapes_of(inputs)}: {reason}") from error
    if isinstance(returned, tuple) and type(returned) is not tuple:
        kind = type(returned).__name__
        raise InputError(f"layer {name} returns a {kind}, whose names would be lost between layers; return a tuple")
    parts = returned if isinstance(returned, tuple | list) else (returned,)
    if strange := [type(part).__name__ for part in parts if not isinstance(part, torch.Tensor)]:
        where = f"{type(returned).__name__} with a " if parts is returned else ""
        raise InputError(f"layer {name} returns a {where}{strange[0]}; return a tensor or a tuple of tensors")
    return returned


def shapes_of(tensors: Iterable[torch.Tensor | None]) -> str:
    """The shapes of tensors for a message: `(2, 3), (2,)`."""
    return ", ".join(str(tuple(tensor.shape)) for tensor in tensors if tensor is not None)


@torch.no_grad()
def _changes_inputs(layer: Callable[[Any], Any], inputs: Tensors, in_tuple: bool) -> bool:
    """Whether a layer that raised would change its input in place if autograd allowed it."""
    given = tuple(tensor.clone() for tensor in inputs)
    versions = [tensor._version for tensor in given]
    try:
        layer(as_value(given, in_tuple))
    except Exception:  # the layer raises for another reason
        return False
    return [tensor._version for tensor in given] != versions
