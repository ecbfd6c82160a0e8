"""What captured graphs take for granted: where it has changed before a step, `stage_graphs.py` drops the graphs.

Python runs while a graph is captured, and never in a replay: what it reads keeps its value. Compared are the addresses
of weights, the attributes of modules and what these consist of, as pickle sees it (dicts, lists, objects), and the
variables that a `forward` itself names, global and enclosing ones, if they are plain data. Not compared is what changes
within a step, what other functions read, attributes of classes, and objects in global variables.
"""

import inspect
import io
import pickle
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

_MAX_COMPARED_BYTES = 1 << 20  # of an attribute's content, which is compared before each step
_SCALARS = (bool, int, float, str, type(None), tuple)
_DATA = frozenset((*_SCALARS, complex, bytes, list, dict, set))
_CODE = type, ModuleType, FunctionType, BuiltinFunctionType
_MODULE_ATTRIBUTES = vars(nn.Module()).keys()  # attributes that every module has


class UncapturableError(Exception):
    """A layer cannot be captured, or would be wrong when it is replayed."""


class Guards:
    """What the graphs of a module take for granted. Raises UncapturableError for an attribute or variable that cannot
    be compared."""

    def __init__(self, module: nn.Module) -> None:
        named = [(f"layer {name.partition('.')[0]}: ", inner) for name, inner in module.named_modules()]
        self._modules = [inner for _, inner in named]
        self._values = [
            (values, key, value, layer + key)
            for layer, inner in named
            for values in (vars(inner), inner._modules, inner._parameters, inner._buffers)
            for key, value in values.items()
            if values is not vars(inner) or key not in _MODULE_ATTRIBUTES
        ]
        self._tensors = [*module.parameters(), *module.buffers()]
        self._registered = set(map(id, (*self._modules, *self._tensors)))
        self._states = self._current_state()
        read = {
            id(value): (name, value)
            for _, key, value, name in self._values
            # the engine's own forward has a state
            if key != "forward" and id(value) not in self._registered and not _is_constant(value)
        }
        for layer, inner in named:
            forward = inspect.unwrap(type(inner).forward)
            if isinstance(forward, FunctionType):
                read.setdefault(id(forward), (f"{layer}a variable that its forward reads", forward))
        self._read = [(*named_value, self._describe(named_value[1])) for named_value in read.values()]
        for name, _, described in self._read:
            if isinstance(described, str):
                raise UncapturableError(f"{name} {described}")

    def find_change(self) -> str:
        """The name of the first value that was replaced, moved or modified; "" if there is none."""
        for values, key, value, name in self._values:
            current = values.get(key)
            if current is not value and not (
                isinstance(value, _SCALARS) and type(current) is type(value) and bool(current == value)
            ):
                return name
        if self._current_state() != self._states:
            return "where its weights are"
        return next((name for name, value, was in self._read if self._describe(value) != was), "")

    def _describe(self, value: Any) -> bytes | str:
        """The content of an object, with code, tensors and modules of the stage by identity; or, as text, why it cannot
        be compared."""
        described = io.BytesIO()
        pickler = _Describer(described, protocol=5)
        pickler.registered = self._registered
        try:
            pickler.dump(_variables(value) if isinstance(value, FunctionType) else value)
        except Exception:  # an object's __reduce__ may raise anything
            return "cannot be compared from step to step"
        too_large = described.tell() > _MAX_COMPARED_BYTES
        return "is too large to be compared in each step" if too_large else described.getvalue()

    def _current_state(self) -> list[Any]:
        """The address of each tensor and whether it is trained, and the mode of each module."""
        tensors = ((tensor.data_ptr(), tensor.requires_grad) for tensor in self._tensors)
        return [*tensors, *(inner.training for inner in self._modules)]


class _Describer(pickle.Pickler):
    registered: set[int]

    def persistent_id(self, value: Any) -> Any:
        if type(value) in _DATA:
            return None
        if isinstance(value, _CODE) or id(value) in self.registered:
            return id(value)
        if not isinstance(value, torch.Tensor):
            return None
        # a graph of a GPU has captured the value of a tensor on the CPU
        return id(value), value.data_ptr(), value._version if value.device.type == "cpu" else 0


def hooked_layer(module: nn.Module) -> str:
    """The first layer with a hook on its modules or parameters, which no replay calls; "" if there is none."""
    hooks = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
    for name, layer in module._modules.items():
        to_visit = [layer]
        while to_visit:  # four times as fast as `modules`, which builds all names
            inner = to_visit.pop()
            if inner is None:
                continue
            attributes = vars(inner)
            if any(attributes[kind] for kind in hooks):
                return name
            for parameter in attributes["_parameters"].values():
                if parameter is not None and (parameter._backward_hooks or parameter._post_accumulate_grad_hooks):
                    return name
            to_visit += attributes["_modules"].values()
    return ""


def _is_constant(value: Any) -> bool:
    return all(isinstance(part, _SCALARS[:-1]) for part in (value if isinstance(value, tuple) else (value,)))


def _variables(function: FunctionType) -> dict[str, Any]:
    """The global and enclosing variables that a function names: plain data by value, others by identity."""
    values = {key: function.__globals__.get(key) for key in function.__code__.co_names}
    enclosing = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    values |= {key: cell.cell_contents for key, cell in enclosing}
    return {key: value if type(value) in _DATA else id(value) for key, value in values.items()}
