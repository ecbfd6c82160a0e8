"""State that layers change whenever they run: the running statistics of InstanceNorm, the vectors of spectral norm, the
vectors of a codebook.

A recomputation runs a micro-batch a second time (paper section 2.3). It has to begin with the state that the forward
began with, or it computes other values; and it must leave the state as it was, or the micro-batch counts twice. So a
forward that will be run again keeps the earlier values of what it changes. Batch norms are not concerned, as their
statistics are deferred.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import compress
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from gpipe_cli.errors import InputError

_OF_ALL_MODULES = vars(nn.Module()).keys()
_ABSENT = object()


class _Entry(NamedTuple):
    """A buffer or an attribute of a module in `layer`: `entries[key]`."""

    layer: str
    entries: dict[str, Any]
    key: str
    is_buffer: bool

    def read(self) -> Any:
        return self.entries.get(self.key, _ABSENT)

    def write(self, value: Any) -> None:
        if value is _ABSENT:
            self.entries.pop(self.key, None)
        else:
            self.entries[self.key] = value


ChangedValues: TypeAlias = list[tuple[_Entry, Any]]
"""What a forward changes, with the values before it."""


class LayerState:
    """The state below `module`, whose children are layers, without that of `deferred` norms.

    The first forward shows what changes. A buffer that changes only later is noticed, an attribute is not.
    """

    def __init__(self, module: nn.Module, deferred: Iterable[nn.Module]) -> None:
        self._module, self._deferred = module, {id(norm) for norm in deferred}
        self._changing: list[_Entry] | None = None  # None before the first forward
        self._constant: list[_Entry] = []  # buffers

    @contextmanager
    def keeping(self) -> Iterator[ChangedValues]:
        """Inside, a forward runs that will be run again; afterwards the list has what it changed. Raises InputError for
        a buffer that changes although it did not in the first forward, as its earlier value is lost."""
        entries = self._entries() if self._changing is None else self._changing
        values = [(entry, _copy(entry.read())) for entry in entries]
        marks = _marks(entries)
        constant_marks = _marks(self._constant)
        changed: ChangedValues = []
        yield changed
        if self._changing is None:
            changes = _differing(marks, _marks(entries))
            present = {(id(entry.entries), entry.key) for entry in entries}
            added = [entry for entry in self._entries() if (id(entry.entries), entry.key) not in present]
            self._changing = [*compress(entries, changes), *added]
            constant = [entry for entry, differs in zip(entries, changes, strict=True) if not differs]
            self._constant = [entry for entry in constant if entry.is_buffer]
            changed += [*compress(values, changes), *((entry, _ABSENT) for entry in added)]
            return
        changed += values
        for entry in compress(self._constant, _differing(constant_marks, _marks(self._constant))):
            raise InputError(
                f"layer {entry.layer} changes its buffer {entry.key}, which it left as it was at first, and cannot be "
                "recomputed; use recompute=never, or change the buffer from the first micro-batch on"
            )

    @contextmanager
    def restored(self, changed: ChangedValues) -> Iterator[None]:
        """Inside, the layers run again, with the state that their forward began with."""
        current = [(entry, entry.read()) for entry, _ in changed]
        for entry, value in changed:
            entry.write(value)  # not into the same memory, which autograd may need for another micro-batch
        try:
            yield
        finally:
            for entry, value in current:
                entry.write(value)

    def _entries(self) -> list[_Entry]:
        return [
            _Entry(layer, entries, key, entries is inner._buffers)
            for layer, module in self._module.named_children()
            for inner in module.modules()
            if id(inner) not in self._deferred
            for entries in (inner._buffers, vars(inner))
            for key in entries.keys() - (_OF_ALL_MODULES if entries is not inner._buffers else ())
        ]


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _marks(entries: Sequence[_Entry]) -> list[tuple[Any, int]]:
    """Each value, and for a tensor how often it was written to."""
    values = [entry.read() for entry in entries]
    counted = [isinstance(value, torch.Tensor) and not value.is_inference() for value in values]
    return [(value, value._version if counts else 0) for value, counts in zip(values, counted, strict=True)]


def _differing(before: Sequence[tuple[Any, int]], after: Sequence[tuple[Any, int]]) -> list[bool]:
    """Whether each value is another object, or was written to."""
    return [
        old is not new or old_version != new_version
        for (old, old_version), (new, new_version) in zip(before, after, strict=True)
    ]
