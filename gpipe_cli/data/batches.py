"""Which samples make up which mini-batch (the paper's N, Section 2.2).

A function of (seed, epoch) and nothing else, so that the process with the first stage (images) and the one with the
last stage (targets) agree without a message, and a resumed run goes on with exactly the samples it had not seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from gpipe_cli.data.seeds import seed_of

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["SPLITS", "Batches", "Catalogue", "Key", "MiniBatches", "Split"]

SPLITS = {"train": "training", "test": "test"}  # as messages call them

Key = tuple[int, int]
"""(epoch, index): which sample, and how it is varied this time."""


@dataclass(frozen=True, eq=False)
class Catalogue:
    """What every process of a run must know of a split to agree on its mini-batches: no samples, only how many and how
    long."""

    samples: int
    lengths: Tensor | None = None  # int32 (n, d): tokens of each sample along each dimension that varies
    groups: Tensor | None = None  # int32 (n,): the language of each sample, for temperature sampling
    fixed_lengths: tuple[int, ...] = ()  # where all samples are alike: the window of a language model


class Split(Protocol):
    """The training or the test split of images or text; picklable, because loader workers get a copy.

    Inputs and targets are asked for separately, because the first and the last stage may live in different processes.
    """

    @property
    def catalogue(self) -> Catalogue:
        """What mini-batches are made from."""
        ...

    def __len__(self) -> int: ...

    def inputs(self, keys: Sequence[Key], lengths: tuple[int, ...]) -> tuple[Tensor, ...]:
        """What the first layer is given of the samples `keys`, (n, ...) each; sentences are padded to `lengths`."""
        ...

    def targets_of(self, indices: Tensor, lengths: tuple[int, ...]) -> Tensor:
        """What must be found: int64 (n,) classes, or (n, last of lengths) tokens, IGNORED where there is nothing."""
        ...


class Batches(Protocol):
    """The mini-batches of a split, epoch by epoch; epochs and positions count from 0."""

    samples: int
    steps_per_epoch: int

    def indices(self, epoch: int, position: int) -> Tensor:
        """int64 (size,): the samples of mini-batch `position` of `epoch`, in order."""
        ...

    def size(self, epoch: int, position: int) -> int:
        """How many samples the mini-batch has."""
        ...

    def lengths(self, epoch: int, position: int) -> tuple[int, ...]:
        """What its samples are padded to along each dimension that varies; () where none does."""
        ...

    def stream(self, start_epoch: int, start_position: int, epochs: int) -> Iterator[tuple[int, int]]:
        """(epoch, position) of every step from the starting point to the end of a run of `epochs` epochs in all."""
        ...


class MiniBatches:
    """`samples` samples in mini-batches of `batch_size`; epochs and positions count from 0.

    shuffle: a new order each epoch, from (seed, epoch). drop_last: leave out a last mini-batch that is not full.

    Raises ValueError where no mini-batch would be left.
    """

    def __init__(self, samples: int, batch_size: int, seed: int, shuffle: bool, drop_last: bool = False) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: must be 1 or more")
        if drop_last and batch_size > samples:
            raise ValueError(
                f"batch_size={batch_size}: there are only {samples} samples and a mini-batch that is not full is "
                f"dropped; use batch_size={samples} or less"
            )
        assert samples > 0, samples
        self.samples = samples
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.steps_per_epoch = samples // batch_size if drop_last else -(-samples // batch_size)
        self._orders: dict[int, Tensor] = {}

    def indices(self, epoch: int, position: int) -> Tensor:
        """int64 (size,): the samples of mini-batch `position` of `epoch`, in order."""
        start = position * self.batch_size
        return self._order(epoch)[start : start + self.size(epoch, position)]

    def size(self, epoch: int, position: int) -> int:
        """How many samples the mini-batch has; only the last of an epoch can be short."""
        assert epoch >= 0, epoch
        assert 0 <= position < self.steps_per_epoch, (position, self.steps_per_epoch)
        return min(self.batch_size, self.samples - position * self.batch_size)

    def lengths(self, epoch: int, position: int) -> tuple[int, ...]:
        """Images have no length."""
        return ()

    def stream(self, start_epoch: int, start_position: int, epochs: int) -> Iterator[tuple[int, int]]:
        """(epoch, position) of every step from the starting point to the end of a run of `epochs` epochs in all.

        A start position equal to `steps_per_epoch` is the start of the next epoch.
        """
        assert 0 <= start_position <= self.steps_per_epoch, (start_position, self.steps_per_epoch)
        for epoch in range(start_epoch, epochs):
            for position in range(start_position if epoch == start_epoch else 0, self.steps_per_epoch):
                yield epoch, position

    def _order(self, epoch: int) -> Tensor:
        import torch

        if epoch not in self._orders:
            # Two are kept: loading runs ahead into the next epoch while the loss still needs the targets of this one.
            while len(self._orders) > 1:
                del self._orders[next(iter(self._orders))]
            if self.shuffle:
                generator = torch.Generator().manual_seed(seed_of("order", self.seed, epoch))
                self._orders[epoch] = torch.randperm(self.samples, generator=generator)
            else:
                self._orders[epoch] = torch.arange(self.samples)
        return self._orders[epoch]
