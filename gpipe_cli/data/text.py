"""Text data sets, opened by name: for language models (paper, Section 2.2) and for translation (Section 5)."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from gpipe_cli.config.dataset import TextConfig
from gpipe_cli.data.batches import Catalogue
from gpipe_cli.data.cache import cache_folder
from gpipe_cli.data.cldr import read_cldr
from gpipe_cli.data.corpora import read_python_docs, read_text_files
from gpipe_cli.data.language_model import TextSplit, open_documents
from gpipe_cli.data.pairs import read_parallel_text
from gpipe_cli.data.seeds import seed_of
from gpipe_cli.data.translation import PairSplit, open_pairs
from gpipe_cli.data.vocabulary import BEGIN, UNKNOWN


@dataclass(frozen=True)
class SyntheticText:
    """Random tokens, for speed and memory experiments: the paper's tables of sizes and speeds need no text.

    Windows for a language model, or pairs for a translation model, all `length` tokens long; made from (seed, index),
    so that any number of sequences of any length costs no disk and no vocabulary is learned.
    """

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


TextSplits = tuple[TextSplit, TextSplit] | tuple[PairSplit, PairSplit] | tuple[SyntheticText, SyntheticText]


def open_text(
    dataset: TextConfig, *, length: int, seed: int, pairs: bool = False, pieces: bytes | None = None
) -> TextSplits:
    """Open a data set and return its training and its test split.

    length: tokens of a window, or the most of a source or a target. seed: of `synthetic_text` only; the others are
    split once and for all. pairs: whether `synthetic_text` has pairs. pieces: the vocabulary of an earlier run, as
    SentencePiece stores it, in place of a new one.

    Raises ValueError (one line) for missing, empty or damaged data, and settings that do not fit it.
    """
    root = Path(dataset.root or "")  # what is read from files has one
    match dataset.name:
        case "synthetic_text":
            assert dataset.train_samples, "a number, by the settings"
            assert dataset.test_samples, "a number, by the settings"
            seeds = seed_of("text train_samples", seed), seed_of("text test_samples", seed)
            train = SyntheticText(dataset.train_samples, length, dataset.vocabulary, seeds[0], pairs)
            return train, SyntheticText(dataset.test_samples, length, dataset.vocabulary, seeds[1], pairs)
        case "python_docs":
            return open_documents(*read_python_docs(), dataset, length, pieces)
        case "text_files":
            return open_documents(*read_text_files(root), dataset, length, pieces)
        case "cldr":
            assert dataset.direction is not None
            return open_pairs(*read_cldr(dataset.direction, cache_folder(dataset.cache)), dataset, length, pieces)
        case "parallel_text":
            return open_pairs(*read_parallel_text(root), dataset, length, pieces)


def unigram_perplexity(train: TextSplit | PairSplit, test: TextSplit | PairSplit) -> float:
    """The perplexity, over exactly the tokens that the test predicts, of a model that knows only how often each token
    is predicted in training (plus one): what a model must beat to have learned anything from the order."""
    counts = torch.bincount(train.predicted(), minlength=train.vocabulary.size).double() + 1
    surprise = -(counts / counts.sum()).log()[test.predicted()]
    return float(surprise.mean().exp())
