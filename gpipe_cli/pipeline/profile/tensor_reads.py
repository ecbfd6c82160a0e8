"""The tensors that a layer reads: memory that its operations use but did not allocate (paper section 2.1).

It does not matter how a layer got a tensor: as a parameter or its view, through a function, a hook or any object.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gpipe_cli.pipeline.runtime.saved_activations import storage_id

# Operations that use only a shape, type or device; `lift_fresh` gets a tensor just made from Python's numbers.
_READ_NOTHING = (
    torch.ops.aten.lift_fresh.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty_strided.default,
    torch.ops.prim.device.default,
)


class Reads(TorchDispatchMode):
    """While active, `tensors` collects a tensor of each storage that operations read but did not allocate."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[int, torch.Tensor] = {}  # storage -> a tensor kept here, so that its storage lives
        self._made: set[int] = set()  # storages that operations allocated, some of them freed by now

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No layer is compiled while active: otherwise torch would spend most of a second to import its compiler."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in _READ_NOTHING:
            self.add(tensors_in((args, *(kwargs or {}).values())))
        result = self.run_operation(func, args, kwargs or {})
        for tensor in tensors_in(result):
            if (storage := storage_id(tensor)) not in self.tensors:
                self._made.add(storage)
        return result

    def run_operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Also count these tensors as read."""
        for tensor in tensors:
            if (storage := storage_id(tensor)) not in self._made:
                self.tensors.setdefault(storage, tensor)


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested tuples and lists; except sparse ones, which have no storage."""
    if isinstance(values, torch.Tensor):
        if values.layout is torch.strided:
            yield values
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from tensors_in(value)
