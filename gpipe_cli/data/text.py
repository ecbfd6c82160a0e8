"""Text data sets, opened by name: windows for a language model (paper, Section 2.2: sequences of 1,024 tokens), random
tokens, and sentence pairs (Section 5)."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpipe_cli.config.groups import TEXTS, TextConfig
from gpipe_cli.config.typed import RefusedError
from gpipe_cli.data.batches import SPLITS, Catalogue, seed_of
from gpipe_cli.data.cache import cache_folder, cached_tensors, digest_of
from gpipe_cli.data.corpora import read_cldr, read_parallel_text, read_python_docs, read_text_files
from gpipe_cli.data.pretrained_tokenizer import PretrainedTokenizer
from gpipe_cli.data.translation import PairSplit, open_pairs
from gpipe_cli.data.vocabulary import BEGIN, IGNORED, PAD, UNKNOWN, Vocabulary, make_vocabulary


@dataclass(frozen=True, eq=False)
class TextSplit:
    """The training or the test text, cut into windows that do not overlap, the same in every epoch.

    tokens: int32 (stream,), all documents concatenated, each with an end token. length: tokens of a window. Every token
    but the first of the stream is predicted exactly once; the last window is padded.
    """

    tokens: Tensor
    length: int
    vocabulary: Vocabulary | PretrainedTokenizer

    @property
    def catalogue(self) -> Catalogue:
        return Catalogue.of_windows(-(-(len(self.tokens) - 1) // self.length), (self.length,))

    @property
    def full_windows(self) -> int:
        """The number of windows without padding."""
        return (len(self.tokens) - 1) // self.length

    def inputs(self, epoch: int, indices: Sequence[int], lengths: tuple[int, ...]) -> tuple[Tensor, ...]:
        """A single tensor: int64 (n, length)."""
        return (self._windows(torch.tensor(indices), first=0, padding=PAD),)

    def targets_of(self, epoch: int, indices: Tensor, lengths: tuple[int, ...]) -> Tensor:
        """int64 (n, length): the token that follows each input token; IGNORED where there is none."""
        return self._windows(indices, first=1, padding=IGNORED)

    def predicted(self) -> Tensor:
        """int64 (tokens,): all target tokens in order, without padding."""
        return self.tokens[1:].long()

    def _windows(self, indices: Tensor, first: int, padding: int) -> Tensor:
        positions = indices[:, None] * self.length + torch.arange(self.length)
        beyond = positions >= len(self.tokens) - 1  # no token follows the last token
        return self.tokens[(positions + first).masked_fill_(beyond, 0)].long().masked_fill_(beyond, padding)


def open_documents(
    train: Sequence[str], test: Sequence[str], dataset: TextConfig, length: int, pieces: bytes | None = None
) -> tuple[TextSplit, TextSplit]:
    """Take the tokenizer or the vocabulary of `pieces`, or learn a vocabulary from the training documents; encode both
    splits. Raises InputError."""
    cache = cache_folder(dataset.cache)
    if dataset.tokenizer is not None:
        vocabulary: Vocabulary | PretrainedTokenizer = PretrainedTokenizer(dataset.tokenizer)
        if vocabulary.size > dataset.vocabulary:
            why = f"dataset.tokenizer has {vocabulary.size} tokens; use dataset.vocabulary={vocabulary.size} or more"
            raise RefusedError("dataset.vocabulary", dataset.vocabulary, why)
    else:
        # A line end is encoded as its byte and need not be learned.
        lines = [line for document in train for line in document.split("\n") if line.strip()]
        vocabulary = make_vocabulary(lines, dataset.vocabulary, cache, word_prefix=False, pieces=pieces)
    splits = [TextSplit(_encoded(documents, vocabulary, cache), length, vocabulary) for documents in (train, test)]
    for name, split in zip(SPLITS, splits, strict=True):
        if len(split.tokens) <= length:
            why = f"the {name} text has only {len(split.tokens)} tokens, and a window needs one more than its length"
            use = f"use model.length={len(split.tokens) - 1} or less, or a longer text"
            raise RefusedError("model.length", length, f"{why}; {use}")
    return splits[0], splits[1]


def _encoded(documents: Sequence[str], vocabulary: Vocabulary | PretrainedTokenizer, cache: Path) -> Tensor:
    """The tokens of all documents, int32 (stream,), kept in `cache`."""

    def encode() -> dict[str, Tensor]:
        parts = [np.array([*ids, vocabulary.end], dtype=np.int32) for ids in vocabulary.encode(documents)]
        return {"tokens": torch.from_numpy(np.concatenate(parts))}

    name = digest_of("documents", list(documents), [vocabulary.model])
    return cached_tensors(cache, f"documents-{name}", encode)["tokens"]


@dataclass(frozen=True)
class SyntheticText:
    """Random tokens made from (seed, index), for speed and memory experiments: windows for a language model, or pairs
    for a translation model, all `length` tokens long."""

    samples: int
    length: int
    vocabulary_size: int
    seed: int
    pairs: bool

    @property
    def catalogue(self) -> Catalogue:
        return Catalogue.of_windows(self.samples, (self.length,) * (2 if self.pairs else 1))

    @property
    def full_windows(self) -> int:
        return self.samples

    def inputs(self, epoch: int, indices: Sequence[int], lengths: tuple[int, ...]) -> tuple[Tensor, ...]:
        """int64 (n, length): windows; for pairs two of that shape, encoder and decoder input."""
        sequences = self._sequences(indices)
        tokens = sequences[:, : self.length]
        if not self.pairs:
            return (tokens,)
        return tokens, torch.cat([torch.full((len(indices), 1), BEGIN), sequences[:, self.length : -1]], dim=1)

    def targets_of(self, epoch: int, indices: Tensor, lengths: tuple[int, ...]) -> Tensor:
        """int64 (n, length): the token that follows each token of the (decoder) input; none is IGNORED."""
        return self._sequences(indices.tolist())[:, -self.length :]

    def _sequences(self, indices: Sequence[int]) -> Tensor:
        """(n, tokens), uniform over the ids that are not special: a window and its next token, or source and target."""
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
    """The training and the test split of a data set.

    length: tokens of a window, or at most of a source or a target. seed, and pairs (whether to make pairs): for
    `synthetic_text` only. pieces: the vocabulary of an earlier run, as SentencePiece stores it, in place of a new one.

    Raises InputError for missing, empty or damaged data, and settings that do not fit it.
    """
    root = Path(dataset.root or "")  # a data set read from files has a root
    read: Any  # documents or pairs, of both splits
    match dataset.name:
        case "synthetic_text":
            counts = dataset.train_samples or 0, dataset.test_samples or 0
            seeds = seed_of("text train_samples", seed), seed_of("text test_samples", seed)
            train, test = (
                SyntheticText(count, length, dataset.vocabulary, split_seed, pairs)
                for count, split_seed in zip(counts, seeds, strict=True)
            )
            return train, test
        case "python_docs":
            read = read_python_docs()
        case "text_files":
            read = read_text_files(root)
        case "cldr":
            read = read_cldr(str(dataset.direction), cache_folder(dataset.cache))
        case "parallel_text":
            read = read_parallel_text(root)
        case _:
            read = import_module(f"gpipe_cli.data.{dataset.name}").read(dataset)
    training, tested = read
    if TEXTS[dataset.name].pairs:
        return open_pairs(training, tested, dataset, length, pieces)
    return open_documents(training, tested, dataset, length, pieces)


def unigram_perplexity(train: TextSplit | PairSplit, test: TextSplit | PairSplit) -> float:
    """The test perplexity of a model that knows only the tokens' counts in training (plus 1): the baseline that a
    model must beat to have learned anything from their order."""
    counts = torch.bincount(train.predicted(), minlength=train.vocabulary.size).double() + 1
    surprise = -(counts / counts.sum()).log()[test.predicted()]
    return float(surprise.mean().exp())
