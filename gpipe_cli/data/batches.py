"""Which samples make up which mini-batch (the paper's N, Section 2.2), and what they are padded to.

Mini-batches depend only on (seed, epoch) and the SplitIndex, so that the processes with the first stage (inputs) and
with the last stage (targets) agree without a message, and a resumed run continues with exactly the samples it had not
seen. For the same reason every random number of the data is drawn from a seed that `derive_seed` makes of its purpose
and indices, never from a running generator.

The paper counts its translation batches in tokens (Section 5: 260K to 4M).
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from gpipe_cli.data.micro_batches import Shard, shard_of
from gpipe_cli.data.temperature_sampling import draw_by_temperature
from gpipe_cli.errors import InvalidSettingError


def derive_seed(purpose: str, *numbers: int) -> int:
    """Mix a purpose ("order", "augmentation", …), which keeps uses apart, and numbers into a seed in [0, 2**63)."""
    text = " ".join([purpose, *map(str, numbers)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


@dataclass(frozen=True, eq=False)
class SplitIndex:
    """The number, lengths and languages of a split's samples, from which every process cuts the same mini-batches."""

    samples: int
    lengths: Tensor | None = None  # int32 (n, 1): tokens of each window, (n, 2): of source and target; None: images
    groups: Tensor | None = None  # int32 (n,): language pair of each sample, for temperature sampling

    @classmethod
    def uniform(cls, samples: int, lengths: tuple[int, ...]) -> "SplitIndex":
        """The index of samples that all have the same lengths."""
        return cls(samples, torch.tensor([lengths], dtype=torch.int32).expand(samples, -1))


class OutputLabels(NamedTuple):
    """The tokens or classes that the outputs of an earlier run's weights stand for."""

    vocabulary: bytes | None = None  # SentencePiece's model; None: a vocabulary is learned
    classes: tuple[str, ...] | None = None  # names by output; (): they have none; None: a run of an older version
    required: bool = True  # data with other classes are refused; False: the classifier is then initialized


NO_OUTPUT_LABELS = OutputLabels()


class Split(Protocol):
    """The training or the test split of images or text.

    Inputs and targets are read separately, because the first and the last stage may be in different processes, and
    in whole mini-batches, because the padding of a sentence depends on the others.
    """

    @property
    def split_index(self) -> SplitIndex: ...

    def inputs(self, epoch: int, indices: Sequence[int], lengths: tuple[int, ...]) -> tuple[Tensor, ...]:
        """The first layer's inputs for the samples `indices`, (n, ...) each, of which uint8 images are still to be
        normalized; sentences are padded to `lengths`."""
        ...

    def targets_of(self, epoch: int, indices: Tensor, lengths: tuple[int, ...]) -> Tensor:
        """int64 (n,) classes, (n, lengths[-1]) tokens, or (n, S, S) classes of pixels; IGNORED where there is nothing
        to predict, in the same number of places of a sample in each epoch."""
        ...


@dataclass(eq=False)
class MiniBatches:
    """The samples of `split_index` in mini-batches of `batch_size` samples, or of at most `batch_tokens` tokens; either
    `batch_size` or `batch_tokens` is given. Epochs and positions count from 0.

    shuffle: each epoch, images come in a new order; text is sorted by length, with ties in a new order, and cut into
    mini-batches, which are shuffled. Otherwise images stay in order and text is sorted by length, in every epoch alike.

    temperature: None or 1 gives every sample once per epoch. T > 1 draws as many samples per epoch, of each language a
    quota by fraction^(1/T). With batch_tokens the number of mini-batches then varies a little between epochs; epoch 0
    decides: of a later epoch the last ones (in their random order) are left out, or the first ones repeated.

    Raises InputError for a sample longer than batch_tokens.
    """

    split_index: SplitIndex
    _: KW_ONLY
    batch_size: int | None
    # n samples padded to lengths (S, T) count as n * max(S, T) tokens: the larger of what encoder and decoder compute
    batch_tokens: int | None = None
    seed: int
    shuffle: bool
    temperature: float | None = None
    drop_last: bool = False  # with batch_size: leave out the last, smaller mini-batch, of other samples each epoch
    micro_batches: int = 1  # M, of each replica
    replicas: int = 1
    replica: int = 0  # the replica whose shard of each mini-batch is read here
    steps_per_epoch: int = field(default=0, init=False)  # 0 until epoch 0 is cut

    def __post_init__(self) -> None:
        assert (self.batch_size is None) != (self.batch_tokens is None), (self.batch_size, self.batch_tokens)
        if self.batch_tokens is not None and self.split_index.lengths is not None:
            longest = int(self.split_index.lengths.max())
            if self.batch_tokens < longest:
                why = f"the longest sentence has {longest} tokens; use {longest} or more"
                raise InvalidSettingError("batch_tokens", self.batch_tokens, why)
        # Two epochs are kept: loading runs into the next epoch while the loss still needs the targets of this epoch.
        self._batches_of = lru_cache(maxsize=2)(self._cut_epoch)
        self.steps_per_epoch = len(self._batches_of(0))

    def indices(self, epoch: int, position: int) -> Tensor:
        """int64 (size,): the samples of mini-batch `position` of `epoch`; where lengths differ, the shortest first."""
        return self._batches_of(epoch if self.shuffle else 0)[position][0]

    def size(self, epoch: int, position: int) -> int:
        return len(self.indices(epoch, position))

    def shard(self, epoch: int, position: int) -> Shard:
        """The part of the mini-batch that this replica gets."""
        return shard_of(self.size(epoch, position), self.micro_batches, self.replicas, self.replica)

    def lengths(self, epoch: int, position: int) -> tuple[int, ...]:
        """Tokens that the mini-batch is padded to, for its longest window, or source and target; () for images."""
        return self._batches_of(epoch if self.shuffle else 0)[position][1]

    def stream(self, start_epoch: int, start_position: int, epochs: int) -> Iterator[tuple[int, int]]:
        """(epoch, position) of every step from the starting point, which may be the end of an epoch, to the end of a
        run of `epochs` epochs in all."""
        for epoch in range(start_epoch, epochs):
            for position in range(start_position if epoch == start_epoch else 0, self.steps_per_epoch):
                yield epoch, position

    def _cut_epoch(self, epoch: int) -> list[tuple[Tensor, tuple[int, ...]]]:
        """The indices and the padded lengths of the samples of each mini-batch of an epoch."""
        lengths = self.split_index.lengths
        purpose = "order" if lengths is None else "token order"
        generator = torch.Generator().manual_seed(derive_seed(purpose, self.seed, epoch))
        order = torch.arange(self.split_index.samples)
        if self.temperature not in (None, 1):
            assert self.split_index.groups is not None, "no languages to draw from"
            order = draw_by_temperature(
                self.split_index.groups, self.temperature, derive_seed("languages", self.seed), epoch
            )
        if self.shuffle:
            order = order[torch.randperm(len(order), generator=generator)]
        if self.drop_last and self.batch_size is not None:  # before sorting, which would always drop the longest ones
            order = order[: len(order) // self.batch_size * self.batch_size]
        if lengths is None:
            assert self.batch_size is not None, "images have no tokens"
            return [(part, ()) for part in order.split(self.batch_size)]
        # lexsort's last key counts first: the larger length, then each length in turn; ties keep their order.
        keys = (*lengths[order].numpy().T[::-1], lengths[order].amax(dim=1).numpy())
        order = order[torch.from_numpy(np.lexsort(keys))]
        parts = order.split(self.batch_size or self._sizes(lengths[order].amax(dim=1).tolist()))
        batches = [(part, tuple(lengths[part].amax(dim=0).tolist())) for part in parts]
        if not self.shuffle:
            return batches
        turns = torch.randperm(len(batches), generator=generator).tolist()
        return [batches[turns[step % len(turns)]] for step in range(self.steps_per_epoch or len(turns))]

    def _sizes(self, longest: list[int]) -> list[int]:
        """Sizes of as few mini-batches as possible; `longest` is each sample's larger length, ascending."""
        assert self.batch_tokens is not None
        sizes = [0]
        for length in longest:
            if length * (sizes[-1] + 1) > self.batch_tokens:
                sizes.append(0)
            sizes[-1] += 1
        return sizes
