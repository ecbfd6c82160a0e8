"""Random tokens, for speed and memory experiments: the paper's tables of sizes and speeds need no text (Section 2.2).

Made from (seed, index), so that any number of sequences of any length costs no disk and no vocabulary is learned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpipe_cli.data.batches import Catalogue
from gpipe_cli.data.seeds import seed_of
from gpipe_cli.data.vocabulary import BEGIN, UNKNOWN

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["SyntheticText", "make_synthetic_text"]


@dataclass(frozen=True)
class SyntheticText:
    """Windows for a language model, or pairs for a translation model: all `length` tokens long, nothing to learn."""

    samples: int
    length: int
    vocabulary_size: int
    seed: int
    pairs: bool

    def __len__(self) -> int:
        return self.samples

    @property
    def catalogue(self) -> Catalogue:
        """All samples are alike."""
        return Catalogue(self.samples, fixed_lengths=(self.length,) * (2 if self.pairs else 1))

    def inputs(self, keys: Sequence[tuple[int, int]], lengths: tuple[int, ...]) -> tuple[Tensor, ...]:
        """int64 (n, length): tokens; or sources and targets so far, each of that shape. keys: (epoch, index)."""
        import torch

        assert lengths == self.catalogue.fixed_lengths, (lengths, self.catalogue.fixed_lengths)
        sequences = self._sequences([index for _, index in keys])
        if not self.pairs:
            return (sequences[:, : self.length],)
        begin = torch.full((len(keys), 1), BEGIN)
        return sequences[:, : self.length], torch.cat([begin, sequences[:, self.length : -1]], dim=1)

    def targets_of(self, indices: Tensor, lengths: tuple[int, ...]) -> Tensor:
        """int64 (n, length): the next tokens; all of them count."""
        assert lengths == self.catalogue.fixed_lengths, (lengths, self.catalogue.fixed_lengths)
        return self._sequences(indices.tolist())[:, -self.length :]

    def predicted(self) -> Tensor:
        """int64 (tokens,): all targets."""
        return self._sequences(range(self.samples))[:, -self.length :].flatten()

    def _sequences(self, indices: Sequence[int]) -> Tensor:
        """Uniform over the ids that are not special: a window and the token after it, or a source and its target."""
        import torch

        tokens = 2 * self.length if self.pairs else self.length + 1
        sequences = torch.empty((len(indices), tokens), dtype=torch.int64)
        for row, index in zip(sequences, indices, strict=True):
            generator = torch.Generator().manual_seed(seed_of("tokens", self.seed, index))
            row.random_(UNKNOWN + 1, self.vocabulary_size, generator=generator)
        return sequences


def make_synthetic_text(
    *, length: int, vocabulary: int, pairs: bool, train_samples: int, test_samples: int, seed: int
) -> tuple[SyntheticText, SyntheticText]:
    """The training and the test split.

    Raises ValueError where a split would be empty, or no id would be left.
    """
    if vocabulary < UNKNOWN + 2:
        raise ValueError(
            f"dataset.vocabulary={vocabulary}: ids 0 to {UNKNOWN} are special; use dataset.vocabulary={UNKNOWN + 2} "
            "or more"
        )
    splits = []
    for setting, samples in (("train_samples", train_samples), ("test_samples", test_samples)):
        if samples < 1:
            raise ValueError(f"dataset.{setting}={samples}: must be 1 or more")
        splits.append(SyntheticText(samples, length, vocabulary, seed_of(f"text {setting}", seed), pairs))
    return splits[0], splits[1]
