"""Which samples make up which mini-batch (the paper's N, Section 2.2), and what they are padded to.

A function of (seed, epoch) and the catalogue and nothing else, so that the process with the first stage (inputs) and
the one with the last stage (targets) agree without a message, and a resumed run goes on with exactly the samples it had
not seen.

The paper's translation batches are counted in tokens (Section 5: 260K to 4M), and its small languages are seen more
often than their share (`temperature.py`).
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from gpipe_cli.data.seeds import seed_of
from gpipe_cli.data.temperature import TemperatureSampler

SPLITS = {"train": "training", "test": "test"}  # as messages call them

Key = tuple[int, int]
"""(epoch, index): which sample, and how it is varied this time."""


@dataclass(frozen=True, eq=False)
class Catalogue:
    """What every process of a run must know of a split to agree on its mini-batches: no samples, only how many and how
    long. Images have no lengths at all."""

    samples: int
    lengths: Tensor | None = None  # int32 (n, d): tokens of each sample along each dimension that varies
    groups: Tensor | None = None  # int32 (n,): the language of each sample, for temperature sampling
    fixed_lengths: tuple[int, ...] = ()  # where all samples have the same: the window of a language model


class Split(Protocol):
    """The training or the test split of images or text.

    Inputs and targets are asked for separately, because the first and the last stage may be in different processes, and
    in whole mini-batches, because the padding of a sentence depends on the others.
    """

    @property
    def catalogue(self) -> Catalogue:
        """What mini-batches are made from."""
        ...

    def __len__(self) -> int: ...

    def inputs(self, keys: Sequence[Key], lengths: tuple[int, ...]) -> tuple[Tensor, ...]:
        """The first layer's inputs for the samples `keys`, (n, ...) each; sentences are padded to `lengths`."""
        ...

    def targets_of(self, indices: Tensor, lengths: tuple[int, ...]) -> Tensor:
        """int64 (n,) classes, or (n, last of lengths) tokens, IGNORED where there is nothing to predict."""
        ...


@dataclass(frozen=True, eq=False)
class _Plan:
    """An epoch: mini-batch p is order[starts[p] : ends[p]], padded to widths[p]."""

    order: Tensor  # int64 (draws,)
    starts: list[int]
    ends: list[int]
    widths: list[tuple[int, ...]]


class MiniBatches:
    """The samples of `catalogue` in mini-batches of `batch_size` samples, or of at most `batch_tokens` tokens; exactly
    one of the two is given. Epochs and positions count from 0.

    shuffle: images, and samples that all have the same lengths, come in a new order each epoch. Others are sorted by
    length, ties in a new order; cut; and the mini-batches are shuffled. Without it they are sorted by length, or stay
    in order, the same each epoch.

    batch_tokens: a mini-batch of n samples, padded to lengths (S, T), counts as n * max(S, T) tokens: the larger of
    what the encoder and the decoder compute.

    drop_last, with batch_size: as many samples as do not fill a mini-batch are left out, others each epoch.

    temperature: None or 1 gives every sample once an epoch. T > 1 draws as many samples an epoch, each language its
    quota by share^(1/T). With batch_tokens the number of mini-batches can then differ a little from epoch to epoch;
    epoch 0 decides: the last ones of a later epoch (in their random order) are left out, or its first ones repeated.

    Raises ValueError for a sample longer than batch_tokens.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        *,
        batch_size: int | None,
        batch_tokens: int | None = None,
        seed: int,
        shuffle: bool,
        temperature: float | None = None,
        drop_last: bool = False,
    ) -> None:
        assert (batch_size is None) != (batch_tokens is None), (batch_size, batch_tokens)
        assert catalogue.samples > 0, catalogue.samples
        assert catalogue.lengths is None or not catalogue.fixed_lengths, "lengths differ or are fixed"
        self.samples = catalogue.samples
        self._catalogue = catalogue
        self._batch_size, self._batch_tokens = batch_size, batch_tokens
        self._seed, self._shuffle, self._drop_last = seed, shuffle, drop_last
        self._sampler: TemperatureSampler | None = None
        if temperature not in (None, 1):
            assert catalogue.groups is not None, "no languages to draw from"
            assert shuffle, "an evaluation sees every sample once"
            self._sampler = TemperatureSampler(catalogue.groups, temperature, seed)
        longest = max(catalogue.fixed_lengths, default=0)
        if catalogue.lengths is not None:
            longest = int(catalogue.lengths.max())
        if batch_tokens is not None and batch_tokens < longest:
            raise ValueError(
                f"batch_tokens={batch_tokens}: the longest sentence has {longest} tokens; use {longest} or more"
            )
        # Two are kept: loading runs ahead into the next epoch while the loss still needs the targets of this one.
        self._plan_of = lru_cache(maxsize=2)(self._make_plan)
        self.steps_per_epoch = 0  # not known before epoch 0 is cut
        self.steps_per_epoch = len(self._plan(0).starts)

    def indices(self, epoch: int, position: int) -> Tensor:
        """int64 (size,): the samples of mini-batch `position` of `epoch`; where lengths differ, the shortest first."""
        plan = self._plan(epoch)
        return plan.order[plan.starts[position] : plan.ends[position]]

    def size(self, epoch: int, position: int) -> int:
        """How many samples the mini-batch has."""
        plan = self._plan(epoch)
        return plan.ends[position] - plan.starts[position]

    def lengths(self, epoch: int, position: int) -> tuple[int, ...]:
        """What its samples are padded to: the longest along each dimension that varies; () for images."""
        return self._plan(epoch).widths[position]

    def stream(self, start_epoch: int, start_position: int, epochs: int) -> Iterator[tuple[int, int]]:
        """(epoch, position) of every step from the starting point to the end of a run of `epochs` epochs in all.

        A start position equal to `steps_per_epoch` is the start of the next epoch.
        """
        assert 0 <= start_position <= self.steps_per_epoch, (start_position, self.steps_per_epoch)
        for epoch in range(start_epoch, epochs):
            for position in range(start_position if epoch == start_epoch else 0, self.steps_per_epoch):
                yield epoch, position

    def _plan(self, epoch: int) -> _Plan:
        assert epoch >= 0, epoch
        return self._plan_of(epoch if self._shuffle else 0)

    def _make_plan(self, epoch: int) -> _Plan:
        lengths, fixed = self._catalogue.lengths, self._catalogue.fixed_lengths
        images = lengths is None and not fixed
        generator = torch.Generator().manual_seed(seed_of("order" if images else "token order", self._seed, epoch))
        order = torch.arange(self.samples) if self._sampler is None else self._sampler.draws(epoch)
        if self._shuffle:
            order = order[torch.randperm(len(order), generator=generator)]
        if self._drop_last and self._batch_size is not None:  # before they are sorted, or it would be the longest ones
            order = order[: len(order) // self._batch_size * self._batch_size]
        if lengths is None:
            starts = list(range(0, len(order), self._batch_size or self._most(max(fixed))))
        else:
            order = order[_by_length(lengths[order])]
            starts = self._cut(lengths[order].amax(dim=1).tolist())
        ends = [*starts[1:], len(order)]
        if lengths is None:
            widths = [fixed] * len(starts)
        else:
            sizes = torch.tensor(ends) - torch.tensor(starts)
            maxima = torch.segment_reduce(lengths[order].double(), "max", lengths=sizes).to(torch.int64)
            widths = [tuple(row) for row in maxima.tolist()]
        if images or not self._shuffle:  # in the order of the samples
            return _Plan(order, starts, ends, widths)
        turns = torch.randperm(len(starts), generator=generator).tolist()
        chosen = [turns[step % len(turns)] for step in range(self.steps_per_epoch or len(turns))]
        return _Plan(order, [starts[p] for p in chosen], [ends[p] for p in chosen], [widths[p] for p in chosen])

    def _cut(self, longest: list[int]) -> list[int]:
        """Where mini-batches start; `longest` is each sample's larger length, ascending. As few as possible."""
        if self._batch_size is not None:
            return list(range(0, len(longest), self._batch_size))
        starts, start, most = [], 0, self._most(1)
        while start < len(longest):
            starts.append(start)
            upper = min(len(longest), start + self._most(longest[start]))
            # The tokens of a mini-batch that ends before `end` grow with `end`: the longest so far comes last.
            ends = range(start + 1, upper + 1)
            start += bisect_right(ends, most, key=lambda end, start=start: longest[end - 1] * (end - start))  # type: ignore[misc]
        return starts

    def _most(self, length: int) -> int:
        """How many samples of this length a mini-batch may have."""
        assert self._batch_tokens is not None
        return self._batch_tokens // length


def _by_length(lengths: Tensor) -> Tensor:
    """int64 (n,): the order by the larger length, then by each length; ties stay as they are. lengths: (n, d)."""
    base = int(lengths.max()) + 1
    key = lengths.amax(dim=1).to(torch.int64)
    for column in lengths.unbind(dim=1):
        key = key * base + column
    return torch.argsort(key, stable=True)
