"""Random tokens, for speed and memory experiments: the paper's tables of sizes and speeds need no text (Section 2.2).

Made from (seed, index), so that any number of sequences of any length costs no disk and no vocabulary is learned.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpipe_cli.data.batches import Catalogue
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
        return Catalogue.of_windows(self.samples, (self.length,) * (2 if self.pairs else 1))

    def inputs(self, epoch: int, indices: Sequence[int], lengths: tuple[int, ...]) -> tuple[Tensor, ...]:
        """int64 (n, length): tokens; or sources and targets so far, each of that shape."""
        sequences = self._sequences(indices)
        tokens = sequences[:, : self.length]
        if not self.pairs:
            return (tokens,)
        return tokens, torch.cat([torch.full((len(indices), 1), BEGIN), sequences[:, self.length : -1]], dim=1)

    def targets_of(self, indices: Tensor, lengths: tuple[int, ...]) -> Tensor:
        """int64 (n, length): the next tokens; all of them count."""
        return self._sequences(indices.tolist())[:, -self.length :]

    def _sequences(self, indices: Sequence[int]) -> Tensor:
        """Uniform over the ids that are not special: a window and the token after it, or a source and its target."""
        tokens = 2 * self.length if self.pairs else self.length + 1
        sequences = torch.empty((len(indices), tokens), dtype=torch.int64)
        for row, index in zip(sequences, indices, strict=True):
            generator = torch.Generator().manual_seed(seed_of("tokens", self.seed, index))
            row.random_(UNKNOWN + 1, self.vocabulary_size, generator=generator)
        return sequences
