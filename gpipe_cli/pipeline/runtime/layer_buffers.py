"""Buffers that layers change whenever they run: the running statistics of InstanceNorm, the vectors of spectral norm,
the vectors of a codebook.

A recomputation runs a micro-batch a second time (paper section 2.3). It has to begin with the buffers that the forward
began with, or it computes other values; and it must leave them as they were, or the micro-batch counts twice. So a
forward that will be run again keeps the earlier values of what it changes. Batch norms are not concerned, as their
statistics are deferred. Only buffers are looked at, not other attributes.

Torch counts the writes to a tensor, except through `.data` and by the fused observers of quantization-aware training.
So the first forward also compares values, and where these have changed unseen, all buffers of the module count as
changing: an observer's may keep their values in a micro-batch.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias

import torch
from torch import nn

from gpipe_cli.errors import InputError
from gpipe_cli.pipeline.runtime.boundary import same_bits


class _Entry(NamedTuple):
    """A buffer of a module in `layer`: `buffers[key]`."""

    layer: str
    buffers: dict[str, torch.Tensor | None]
    key: str

    def read(self) -> torch.Tensor | None:
        return self.buffers.get(self.key)


ChangedBuffers: TypeAlias = list[tuple[_Entry, torch.Tensor | None]]
"""The buffers that a forward changes, with their values before it."""


class LayerBuffers:
    """The buffers below `module`, whose children are layers, without those of `deferred` norms. The first forward shows
    which of them change."""

    def __init__(self, module: nn.Module, deferred: Iterable[nn.Module]) -> None:
        norms = {id(norm) for norm in deferred}
        self._all = [
            _Entry(layer, inner._buffers, key)
            for layer, outer in module.named_children()
            for inner in outer.modules()
            if id(inner) not in norms
            for key in inner._buffers
        ]
        self._changing: set[int] | None = None  # positions in `_all`; None before the first forward

    @contextmanager
    def save_changed(self) -> Iterator[ChangedBuffers]:
        """Around a forward that will be run again; afterwards the list has the buffers that it changed. Raises
        InputError for a buffer that changes but did not in the first forward, as its earlier value is lost."""
        compared = range(len(self._all)) if self._changing is None else self._changing
        values = {at: _copy(self._all[at].read()) for at in compared}
        before = self._versions()
        changed: ChangedBuffers = []
        yield changed
        changing = {at for at, pair in enumerate(zip(before, self._versions(), strict=True)) if _differ(*pair)}
        if self._changing is None:
            unseen = {
                id(self._all[at].buffers)
                for at in set(compared) - changing
                if _has_changed(self._all[at].read(), values[at])
            }
            self._changing = changing | {at for at, entry in enumerate(self._all) if id(entry.buffers) in unseen}
        for at in changing - self._changing:
            entry = self._all[at]
            raise InputError(
                f"layer {entry.layer} changes its buffer {entry.key}, but did not in the first forward, and cannot be "
                "recomputed; use recompute=never, or change the buffer from the first micro-batch on"
            )
        changed += [(self._all[at], values[at]) for at in self._changing]

    @contextmanager
    def swap_in(self, changed: ChangedBuffers) -> Iterator[None]:
        """While active, the layers have the buffers that their forward began with."""
        current = [(entry, entry.read()) for entry, _ in changed]
        for entry, value in changed:
            entry.buffers[entry.key] = value  # not in the same memory, which autograd may need for another micro-batch
        try:
            yield
        finally:
            for entry, value in current:
                entry.buffers[entry.key] = value

    def _versions(self) -> list[tuple[torch.Tensor | None, int]]:
        """Each buffer, and how often it was written to."""
        buffers = [entry.read() for entry in self._all]
        return [(tensor, 0 if tensor is None or tensor.is_inference() else tensor._version) for tensor in buffers]


def _differ(before: tuple[torch.Tensor | None, int], after: tuple[torch.Tensor | None, int]) -> bool:
    """Whether a buffer is another tensor, or was written to."""
    return before[0] is not after[0] or before[1] != after[1]


def _has_changed(buffer: torch.Tensor | None, value: torch.Tensor | None) -> bool:
    return buffer is not None and value is not None and not same_bits(buffer, value)


def _copy(buffer: torch.Tensor | None) -> torch.Tensor | None:
    return None if buffer is None else buffer.detach().clone()
