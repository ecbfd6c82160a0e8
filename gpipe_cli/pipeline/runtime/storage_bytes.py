"""Which memory tensors stand in: what is saved twice, or in part, is counted once and as far as it reaches.

What autograd saves are often views: the same activation flattened for one kernel and transposed for another, or a slice
of the mini-batch. Only the memory behind them tells what a stage really holds.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes `start` to `end` of the storage number `storage`; the number is good as long as the storage lives."""

    storage: int
    start: int
    end: int

    @property
    def bytes(self) -> int:
        return self.end - self.start

    def meets(self, other: "Extent") -> bool:
        return self.storage == other.storage and self.start < other.end and other.start < self.end


def extent_of(tensor: torch.Tensor) -> Extent:
    """From the tensor's first byte to its last; a tensor that is stretched (stride 0) takes no more than it has."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset())
    end = start + reach + 1 if tensor.numel() else start
    width = tensor.dtype.itemsize
    return Extent(storage_of(tensor), start * width, end * width)


def storage_of(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class Extents:
    """The memory behind a set of tensors: for each storage one extent, from the first byte used to the last."""

    def __init__(self, without: Collection[int] = ()) -> None:
        """`without` are storages that do not count: parameters and buffers."""
        self._without = without
        self._extents: dict[int, Extent] = {}
        self.bytes = 0

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            extent = extent_of(tensor)
            if extent.storage in self._without or not extent.bytes:
                continue
            if (known := self._extents.get(extent.storage)) is not None:
                self.bytes -= known.bytes
                extent = Extent(extent.storage, min(known.start, extent.start), max(known.end, extent.end))
            self._extents[extent.storage] = extent
            self.bytes += extent.bytes

    def meets(self, extent: Extent) -> bool:
        known = self._extents.get(extent.storage)
        return known is not None and known.meets(extent)
