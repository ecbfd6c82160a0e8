"""When two layers are equal, so that one of them need not be traced: a Transformer of 1663 layers has three kinds.

It must hold for anybody's layers. So a layer is described by all that its forward can look at, and where that is not
plain data, by the very object: a layer that owns something unknown is equal to none.
"""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

import torch
from torch import nn

_PLAIN = frozenset((int, str, type(None), bytes))
_TYPED = frozenset((bool, float, complex, torch.dtype, torch.device, torch.memory_format, torch.Size))
_DICTS = frozenset((dict, OrderedDict))
# What belongs to how a module is saved and loaded, not to what it computes.
_ELSEWHERE = frozenset(
    (
        "_parameters",
        "_buffers",
        "_modules",
        "_non_persistent_buffers_set",
        "_state_dict_hooks",
        "_state_dict_pre_hooks",
        "_load_state_dict_pre_hooks",
        "_load_state_dict_post_hooks",
    )
)


def signature(layer: nn.Module) -> Hashable:
    """Equal for layers that do the same to inputs of the same shapes, as long as both live.

    Of every module inside: its type, its attributes, its parameters and buffers (shape, strides, type, whether trained,
    and which are one object). Numbers, strings and what is made of them compare by value; functions, tensors, hooks and
    other objects by identity.
    """
    return _Describer().module(layer)


class _Describer:
    def __init__(self) -> None:
        self._seen: dict[int, int] = {}  # modules, parameters and buffers by identity, numbered as they are met

    def module(self, module: nn.Module | None) -> Hashable:
        if module is None:
            return None
        if (known := self._seen.get(id(module))) is not None:
            return ("again", known)
        self._seen[id(module)] = len(self._seen)
        parts: list[Any] = [type(module)]
        for name, value in module.__dict__.items():
            if name in _ELSEWHERE:
                continue
            kind = type(value)
            if kind in _PLAIN:
                parts += (name, value)
            elif kind not in _DICTS or value:  # most are empty: every module has a dozen for hooks
                parts += (name, _value(value))
        for group in (module._parameters, module._buffers):
            if group:
                parts.append(tuple((name, self._tensor(tensor)) for name, tensor in group.items()))
            else:
                parts.append(())
        parts.append(tuple((name, self.module(child)) for name, child in module._modules.items()))
        return tuple(parts)

    def _tensor(self, tensor: torch.Tensor | None) -> Hashable:
        if tensor is None:
            return None
        if (known := self._seen.get(id(tensor))) is not None:
            return ("again", known)
        self._seen[id(tensor)] = len(self._seen)
        strange = bool(tensor.__dict__) or tensor._backward_hooks is not None
        own = id(tensor) if strange else None
        return (type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad, own)


def _value(value: Any) -> Any:
    """What is equal only for values that mean the same; 1, 1.0 and True do not."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind in _TYPED:
        return kind, value
    if kind is list or (isinstance(value, tuple) and not hasattr(value, "__dict__")):  # named tuples too
        return (kind, *map(_value, value))
    if kind in _DICTS:
        return (kind, *((_value(key), _value(inner)) for key, inner in value.items()))
    if kind in (set, frozenset):
        return kind, frozenset(map(_value, value))
    return "itself", id(value)
