"""Mini-batches of sequences: similar lengths come together, languages are drawn with a temperature (paper, Section 5).

The paper's translation batches are counted in tokens (260K to 4M), and low-resource languages are seen more often than
their share, p ~ share^(1/T) with T = 5. Both are functions of (seed, epoch) and the catalogue and nothing else, for the
reasons that batches.py gives.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpipe_cli.data.batches import Catalogue
from gpipe_cli.data.seeds import seed_of
from gpipe_cli.data.temperature import TemperatureSampler

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["TokenBatches"]


@dataclass(frozen=True, eq=False)
class _Plan:
    """An epoch: mini-batch p is order[starts[p] : ends[p]], padded to widths[p]."""

    order: Tensor  # int64 (draws,)
    starts: list[int]
    ends: list[int]
    widths: list[tuple[int, ...]]


class TokenBatches:
    """The samples of `catalogue` in mini-batches of `batch_size` samples, or of at most `batch_tokens` tokens; exactly
    one of the two is given.

    A mini-batch of n samples, padded to lengths (S, T), counts as n * max(S, T) tokens: the larger of what the encoder
    and the decoder work through. shuffle: the samples are sorted by length, ties in an order from (seed, epoch); cut;
    and the mini-batches take turns in an order from (seed, epoch). Without it they are sorted by length, each epoch the
    same. Samples that are all alike are shuffled freely, or stay in order.

    drop_last, with batch_size: as many samples as do not fill a mini-batch are left out, others each epoch.

    temperature: None or 1 gives every sample once an epoch. T > 1 draws as many samples an epoch, each language its
    quota by share^(1/T). With batch_tokens the number of mini-batches can then differ a little from epoch to epoch;
    epoch 0 decides: the last ones of a later epoch (in their random order) are left out, or its first ones repeated.

    Raises ValueError for settings that mean nothing, and for a sample longer than batch_tokens.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        *,
        batch_size: int | None,
        batch_tokens: int | None,
        seed: int,
        shuffle: bool,
        temperature: float | None,
        drop_last: bool = False,
    ) -> None:
        if (batch_size is None) == (batch_tokens is None):
            raise ValueError(
                f"batch_size={_shown(batch_size)}, batch_tokens={_shown(batch_tokens)}: exactly one of the two must be "
                "a number; set the other to null"
            )
        for setting, value in (("batch_size", batch_size), ("batch_tokens", batch_tokens)):
            if value is not None and value < 1:
                raise ValueError(f"{setting}={value}: must be 1 or more")
        assert catalogue.samples > 0, catalogue.samples
        assert (catalogue.lengths is None) == bool(catalogue.fixed_lengths), "lengths differ or are fixed"
        self.samples = catalogue.samples
        self._catalogue = catalogue
        self._batch_size, self._batch_tokens = batch_size, batch_tokens
        self._seed, self._shuffle, self._drop_last = seed, shuffle, drop_last
        self._sampler = _sampler(catalogue, seed, shuffle, temperature)
        longest = max(catalogue.fixed_lengths, default=0)
        if catalogue.lengths is not None:
            longest = int(catalogue.lengths.max())
        if batch_tokens is not None and batch_tokens < longest:
            raise ValueError(
                f"batch_tokens={batch_tokens}: the longest sentence has {longest} tokens; use {longest} or more"
            )
        self._plans: dict[int, _Plan] = {}
        self.steps_per_epoch = 0  # not known before epoch 0 is cut
        self.steps_per_epoch = len(self._plan(0).starts)

    def indices(self, epoch: int, position: int) -> Tensor:
        """int64 (size,): the samples of mini-batch `position` of `epoch`, the shortest first."""
        plan = self._plan(epoch)
        return plan.order[plan.starts[position] : plan.ends[position]]

    def size(self, epoch: int, position: int) -> int:
        """How many samples the mini-batch has."""
        plan = self._plan(epoch)
        return plan.ends[position] - plan.starts[position]

    def lengths(self, epoch: int, position: int) -> tuple[int, ...]:
        """The longest of the mini-batch along each dimension."""
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
        key = epoch if self._shuffle else 0
        if key not in self._plans:
            # Two are kept: loading runs ahead into the next epoch while the loss still needs the targets of this one.
            while len(self._plans) > 1:
                del self._plans[next(iter(self._plans))]
            self._plans[key] = self._make_plan(key)
        return self._plans[key]

    def _make_plan(self, epoch: int) -> _Plan:
        import torch

        lengths, fixed = self._catalogue.lengths, self._catalogue.fixed_lengths
        draws = torch.arange(self.samples) if self._sampler is None else self._sampler.draws(epoch)
        generator = torch.Generator().manual_seed(seed_of("token order", self._seed, epoch))
        if self._shuffle:
            draws = draws[torch.randperm(len(draws), generator=generator)]
        if self._drop_last and self._batch_size is not None:  # before they are sorted, or it would be the longest ones
            draws = draws[: len(draws) // self._batch_size * self._batch_size]
        if lengths is None:
            starts = list(range(0, len(draws), self._batch_size or self._most(max(fixed))))
        else:
            draws = draws[_by_length(lengths[draws])]
            starts = self._cut(lengths[draws].amax(dim=1).tolist())
        ends = [*starts[1:], len(draws)]
        if lengths is None:
            widths = [fixed] * len(starts)
        else:
            sizes = torch.tensor(ends) - torch.tensor(starts)
            maxima = torch.segment_reduce(lengths[draws].double(), "max", lengths=sizes).to(torch.int64)
            widths = [tuple(row) for row in maxima.tolist()]
        turns = torch.randperm(len(starts), generator=generator).tolist() if self._shuffle else range(len(starts))
        chosen = [turns[step % len(turns)] for step in range(self.steps_per_epoch or len(turns))]
        return _Plan(draws, [starts[p] for p in chosen], [ends[p] for p in chosen], [widths[p] for p in chosen])

    def _cut(self, longest: list[int]) -> list[int]:
        """Where mini-batches start; `longest` is each sample's larger length, ascending. As few as possible."""
        if self._batch_size is not None:
            return list(range(0, len(longest), self._batch_size))
        starts, start, most = [], 0, self._most(1)
        while start < len(longest):
            starts.append(start)
            upper = min(len(longest), start + self._most(longest[start]))
            # The cost of ending before `end` grows with `end`: the longest so far comes last.
            ends = range(start + 1, upper + 1)
            start += bisect_right(ends, most, key=lambda end, start=start: longest[end - 1] * (end - start))  # type: ignore[misc]
        return starts

    def _most(self, length: int) -> int:
        """How many samples of this length a mini-batch may have."""
        assert self._batch_tokens is not None
        return self._batch_tokens // length


def _by_length(lengths: Tensor) -> Tensor:
    """int64 (n,): the order by the larger length, then by each length; ties stay as they are. lengths: (n, d)."""
    import torch

    base = int(lengths.max()) + 1
    key = lengths.amax(dim=1).to(torch.int64)
    for column in lengths.unbind(dim=1):
        key = key * base + column
    return torch.argsort(key, stable=True)


def _sampler(catalogue: Catalogue, seed: int, shuffle: bool, temperature: float | None) -> TemperatureSampler | None:
    """None where every sample is drawn once an epoch."""
    if temperature is None or temperature == 1:
        return None
    if not temperature > 1:
        raise ValueError(f"temperature={temperature}: must be 1 or more; use null to see every sentence once an epoch")
    if catalogue.groups is None:
        raise ValueError(f"temperature={temperature}: this data set has no languages to draw from; use null")
    assert shuffle, "an evaluation sees every sample once"
    return TemperatureSampler(catalogue.groups, temperature, seed)


def _shown(value: int | None) -> str:
    return "null" if value is None else str(value)
