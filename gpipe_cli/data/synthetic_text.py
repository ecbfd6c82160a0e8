"""Random tokens, for speed and memory experiments: the paper's tables of sizes and speeds need no text (Section 2.2).

Made from (seed, index), so that any number of sequences of any length costs no disk and no vocabulary is learned.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpipe_cli.config.dataset import TextConfig
from gpipe_cli.data.batches import Catalogue, Key
from gpipe_cli.data.seeds import seed_of
from gpipe_cli.data.vocabulary import BEGIN, UNKNOWN


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
        return Catalogue(self.samples, fixed_lengths=(self.length,) * (2 if self.pairs else 1))

    def inputs(self, keys: Sequence[Key], lengths: tuple[int, ...]) -> tuple[Tensor, ...]:
        """int64 (n, length): tokens; or sources and targets so far, each of that shape."""
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

    def _sequences(self, indices: Sequence[int]) -> Tensor:
        """Uniform over the ids that are not special: a window and the token after it, or a source and its target."""
        tokens = 2 * self.length if self.pairs else self.length + 1
        sequences = torch.empty((len(indices), tokens), dtype=torch.int64)
        for row, index in zip(sequences, indices, strict=True):
            generator = torch.Generator().manual_seed(seed_of("tokens", self.seed, index))
            row.random_(UNKNOWN + 1, self.vocabulary_size, generator=generator)
        return sequences


def make_synthetic_text(
    dataset: TextConfig, *, length: int, pairs: bool, seed: int
) -> tuple[SyntheticText, SyntheticText]:
    """The training and the test split."""
    assert dataset.train_samples, "a number, by the settings"
    assert dataset.test_samples, "a number, by the settings"
    return (
        SyntheticText(dataset.train_samples, length, dataset.vocabulary, seed_of("text train_samples", seed), pairs),
        SyntheticText(dataset.test_samples, length, dataset.vocabulary, seed_of("text test_samples", seed), pairs),
    )
