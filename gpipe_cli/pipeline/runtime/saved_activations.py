"""The bytes that a stage saves for the micro-batches in flight, counted while it runs.

The paper's claim about memory (section 2.3, Table 1) is about these bytes: activations kept between forward and
backward. An allocator's peak is another figure: it includes gradients, workspace and cached memory.

Autograd often saves views: the same activation flattened for one kernel and transposed for another, or the keys of a
tensor that has queries, keys and values. A view keeps its whole storage, so each storage is counted whole, and once. A
stage's inputs are the exception, as they may be slices of the mini-batch or of a receive buffer.
"""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks


class ActivationCounter:
    """Counts, while `on`, the memory behind each micro-batch's inputs and behind all that is kept for its backward.
    Switch it between steps only."""

    def __init__(self) -> None:
        self.on = False
        self.peak_bytes = 0  # the maximum of `bytes` since the step began
        self._uncounted: set[int] = set()  # storages that are not counted
        self._saved: dict[int, StorageBytes] = {}  # by micro-batch
        # not in `_saved`, as a gradient may get memory that autograd frees during the same backward
        self._gradients: dict[int, StorageBytes] = {}

    @property
    def bytes(self) -> int:
        """The bytes saved now."""
        return sum(saved.bytes for saved in (*self._saved.values(), *self._gradients.values()))

    def begin_step(self, module: nn.Module) -> None:
        """Reset all counts. The module's parameters and buffers are not counted."""
        self._saved.clear()
        self._gradients.clear()
        self.peak_bytes = 0
        if self.on:
            self._uncounted = {storage_id(tensor) for tensor in (*module.parameters(), *module.buffers())}

    @contextmanager
    def counting(
        self, micro_batch: int, given: Iterable[torch.Tensor], uncounted: Iterable[torch.Tensor]
    ) -> Iterator[None]:
        """While active, count what autograd saves for the backward of `micro_batch`, whose inputs are `given`.
        `uncounted` tensors, which are known only now, outlive the micro-batch and are not counted. Only for use while
        `on`."""
        self._uncounted |= {storage_id(tensor) for tensor in uncounted}
        saved = self._saved[micro_batch] = StorageBytes(self._uncounted, given)
        with counting_saved(saved):
            yield

    @contextmanager
    def counting_more(self, micro_batch: int) -> Iterator[None]:
        """While active, also count what autograd saves for a micro-batch that is counted already."""
        if not self.on or micro_batch not in self._saved:
            yield
            return
        with counting_saved(self._saved[micro_batch]):
            yield
        self._note_peak()

    def count_replayed(self, micro_batch: int, saved: "StorageBytes", inputs: Iterable[torch.Tensor]) -> None:
        """Count what a graph that was just replayed keeps for the backward of a micro-batch, and its inputs."""
        if self.on:
            self._saved[micro_batch] = saved.copy()
            self._saved[micro_batch].add(inputs)
            self._note_peak()

    def count_replayed_weights(self, micro_batch: int, gradients: "StorageBytes", weights: "StorageBytes") -> None:
        """Count what a graph that was just replayed keeps from I to W, and the gradients that it kept during I."""
        if self.on:
            self._gradients[micro_batch] = gradients
            self._note_peak()
            self.drop(micro_batch)
            self._saved[micro_batch] = weights
            self._note_peak()

    def count(self, micro_batch: int, given: Iterable[torch.Tensor], tensors: Iterable[torch.Tensor]) -> None:
        """Count `tensors` that the stage itself keeps for a micro-batch, whose inputs are `given`."""
        self._add(self._saved, micro_batch, tensors, given)

    def count_gradient(self, micro_batch: int, gradient: torch.Tensor) -> None:
        """Count a gradient that the stage keeps, during the backward that computed it."""
        self._add(self._gradients, micro_batch, (gradient,), ())

    def drop(self, micro_batch: int) -> None:
        """Stop counting a micro-batch, as its backward has ended."""
        self._saved.pop(micro_batch, None)
        self._gradients.pop(micro_batch, None)

    def _add(
        self,
        counted: "dict[int, StorageBytes]",
        micro_batch: int,
        tensors: Iterable[torch.Tensor],
        given: Iterable[torch.Tensor],
    ) -> None:
        if self.on:
            counted.setdefault(micro_batch, StorageBytes(self._uncounted, given)).add(tensors)
            self._note_peak()

    def _note_peak(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self.bytes)


@contextmanager
def counting_saved(counted: "StorageBytes") -> Iterator[None]:
    """While active, adds the memory of every tensor that autograd saves for a backward to `counted`."""

    def save(tensor: torch.Tensor) -> torch.Tensor:
        counted.add((tensor,))
        return tensor.detach()  # the tensor itself refers to the graph that would keep it

    with saved_tensors_hooks(save, lambda saved: saved):
        yield


class ByteRange(NamedTuple):
    """Bytes `start` to `end` of a storage, which `storage` identifies as long as it lives."""

    storage: int
    start: int
    end: int

    @property
    def bytes(self) -> int:
        return self.end - self.start

    def overlaps(self, other: "ByteRange") -> bool:
        return self.storage == other.storage and self.start < other.end and other.start < self.end


def byte_range(tensor: torch.Tensor) -> ByteRange:
    """Bytes from the tensor's first to its last; dimensions of stride 0 add none."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset())
    width = tensor.dtype.itemsize
    end = start + reach + 1 if tensor.numel() else start
    return ByteRange(storage_id(tensor), start * width, end * width)


def _whole_storage(tensor: torch.Tensor) -> ByteRange:
    return ByteRange(storage_id(tensor), 0, int(tensor.untyped_storage().nbytes()))


def storage_id(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class StorageBytes:
    """The memory behind a set of tensors: whole storages, but of a `given` tensor's storage only the range from the
    first byte used to the last."""

    def __init__(self, uncounted: Collection[int] = (), given: Iterable[torch.Tensor] = ()) -> None:
        """`uncounted` are storages that do not count: parameters and buffers."""
        self._uncounted = uncounted
        self._given = {storage_id(tensor) for tensor in given}
        self._ranges: dict[int, ByteRange] = {}
        self.bytes = 0

    def copy(self) -> "StorageBytes":
        copied = copy(self)
        copied._ranges = dict(self._ranges)
        return copied

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        self.add_ranges(byte_range(t) if storage_id(t) in self._given else _whole_storage(t) for t in tensors)

    def add_ranges(self, spans: Iterable[ByteRange]) -> None:
        for span in spans:
            if span.storage in self._uncounted or not span.bytes:
                continue
            if (counted := self._ranges.get(span.storage)) is not None:
                self.bytes -= counted.bytes
                span = ByteRange(span.storage, min(counted.start, span.start), max(counted.end, span.end))
            self._ranges[span.storage] = span
            self.bytes += span.bytes

    def exclude(self, storages: Iterable[int]) -> None:
        """Stop counting these storages, as if `uncounted` had named them."""
        for storage in storages:
            if (span := self._ranges.pop(storage, None)) is not None:
                self.bytes -= span.bytes

    def overlaps(self, span: ByteRange) -> bool:
        counted = self._ranges.get(span.storage)
        return counted is not None and counted.overlaps(span)
