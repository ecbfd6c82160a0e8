"""Signatures of layers, so that equal layers are traced only once: a Transformer of 1663 layers has three kinds.

They must also hold for users' layers. So a signature has everything that the layer's forward can read: plain data by
value, other objects by identity; a layer that owns an object of an unknown type equals no other.
"""

import io
import pickle
from collections import OrderedDict
from collections.abc import Iterable
from itertools import count
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import nn

# Described by value. Pickle tells 1, 1.0 and True apart.
_PLAIN = frozenset((int, str, type(None), bytes, bool, float, complex, list, tuple, dict, OrderedDict, set, frozenset))

_OF_BUFFERS = frozenset(("persistent", "_is_buffer"))  # attributes that nn.Buffer gives a tensor
_OFTEN_EMPTY = frozenset((dict, OrderedDict, set))


def signature(layer: nn.Module) -> bytes:
    """Bytes that are equal only for layers that compute the same on inputs of equal shapes, while both layers live.

    They describe every module inside: its type, attributes, parameters and buffers (shape, strides, type, whether
    trained, and which are the same object). Numbers, strings and containers of these compare by value, functions
    without a closure by identity; plain tensor attributes, other functions and other objects are equal to none.

    A layer may say what its forward reads by a method `reads`: a tuple that is described instead of it, and objects
    that may be in it, hold no tensors and never change; they compare by identity.
    """
    reads: Any = getattr(layer, "reads", None)
    read, constants = (layer, ()) if reads is None else reads()
    described = io.BytesIO()
    _Describer(described, constants).dump(read)
    return described.getvalue()


class _Describer(pickle.Pickler):
    """A pickler whose output is never read back: pickle walks plain data fast, and asks here about everything else."""

    _others = count()  # numbers the objects, of all layers, that cannot be compared

    def __init__(self, described: io.BytesIO, constants: Iterable[object]) -> None:
        super().__init__(described, protocol=5)
        self._constants = {id(constant) for constant in constants}
        self.fast = True  # no memo: equal objects are described alike, whether or not they are the same object
        self._seen: dict[int, int] = {}  # modules, parameters and buffers by identity, numbered as they are met
        self._owned: set[int] = set()  # parameters and buffers

    def persistent_id(self, value: Any) -> str | None:
        """How an object is described; None: by what it consists of."""
        if type(value) in _PLAIN or (isinstance(value, tuple) and hasattr(value, "_fields")):
            return None
        if isinstance(value, nn.Module) or id(value) in self._owned:
            if (number := self._seen.get(id(value))) is not None:
                return f"the same as number {number}"
            self._seen[id(value)] = len(self._seen)
            if isinstance(value, nn.Module):
                return None
            strange = not vars(value).keys() <= _OF_BUFFERS or value._backward_hooks is not None
            identity = id(value) if strange else None
            return f"{type(value)} {value.shape} {value.stride()} {value.dtype} {value.requires_grad} {identity}"
        if isinstance(value, torch.dtype | torch.device | torch.memory_format | torch.Size):
            return repr(value)
        # An object that may hold tensors is described differently in every layer, even if two layers share it: its
        # tensor may be the first layer's own weight, and another layer's weight for the second.
        simple = (
            isinstance(value, type | BuiltinFunctionType)
            or (isinstance(value, FunctionType) and value.__closure__ is None)
            or id(value) in self._constants
        )
        return str(id(value)) if simple else f"another {next(self._others)}"

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, nn.Module):
            return NotImplemented
        self._owned.update(id(tensor) for group in (value._parameters, value._buffers) for tensor in group.values())
        # empty dictionaries and sets are left out: every module has a dozen of them for hooks
        attributes = {name: entry for name, entry in vars(value).items() if type(entry) not in _OFTEN_EMPTY or entry}
        return type(value), (), attributes
