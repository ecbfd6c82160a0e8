"""Windows of a text for a language model (paper, Section 2.2: sequences of 1,024 tokens)."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gpipe_cli.config.dataset import TextConfig
from gpipe_cli.config.typed import RefusedError
from gpipe_cli.data.batches import SPLITS, Catalogue
from gpipe_cli.data.cache import cache_folder, cached_tensors, digest_of
from gpipe_cli.data.vocabulary import END, IGNORED, PAD, Vocabulary, make_vocabulary


@dataclass(frozen=True, eq=False)
class TextSplit:
    """The training or the test text, cut into windows that do not overlap; the epoch changes nothing.

    tokens: int32 (stream,), the documents one after the other, each with an end token. Every token but the first of the
    stream is predicted exactly once; the last window is padded.
    """

    tokens: Tensor
    length: int
    vocabulary: Vocabulary

    def __len__(self) -> int:
        return -(-(len(self.tokens) - 1) // self.length)

    @property
    def catalogue(self) -> Catalogue:
        return Catalogue.of_windows(len(self), (self.length,))

    def inputs(self, epoch: int, indices: Sequence[int], lengths: tuple[int, ...]) -> tuple[Tensor, ...]:
        """One int64 (n, length): the tokens of windows `indices`."""
        return (self._windows(torch.tensor(indices), first=0, padding=PAD),)

    def targets_of(self, indices: Tensor, lengths: tuple[int, ...]) -> Tensor:
        """int64 (n, length): the token after each input."""
        return self._windows(indices, first=1, padding=IGNORED)

    def predicted(self) -> Tensor:
        """int64 (tokens,): all targets that count, in order."""
        return self.tokens[1:].long()

    def _windows(self, indices: Tensor, first: int, padding: int) -> Tensor:
        positions = indices[:, None] * self.length + torch.arange(self.length)
        beyond = positions >= len(self.tokens) - 1  # nothing comes after the last token
        return self.tokens[(positions + first).masked_fill_(beyond, 0)].long().masked_fill_(beyond, padding)


def open_documents(
    train: Sequence[str], test: Sequence[str], dataset: TextConfig, length: int, pieces: bytes | None = None
) -> tuple[TextSplit, TextSplit]:
    """Learn the vocabulary from the training documents, or take that of `pieces`, and encode both.

    Raises ValueError for a vocabulary that the text does not support, and a text shorter than a window.
    """
    cache = cache_folder(dataset.cache)
    # A line's end is a byte of its own and need not be learned.
    lines = [line for document in train for line in document.split("\n") if line.strip()]
    vocabulary = make_vocabulary(lines, dataset.vocabulary, cache, word_prefix=False, pieces=pieces)
    splits = [TextSplit(_encoded(documents, vocabulary, cache), length, vocabulary) for documents in (train, test)]
    for name, split in zip(SPLITS, splits, strict=True):
        if len(split.tokens) <= length:
            why = f"the {name} text has only {len(split.tokens)} tokens, and a window needs one more than its length"
            use = f"use model.length={len(split.tokens) - 1} or less, or a longer text"
            raise RefusedError("model.length", length, f"{why}; {use}")
    return splits[0], splits[1]


def _encoded(documents: Sequence[str], vocabulary: Vocabulary, cache: Path) -> Tensor:
    """int32 (stream,), kept in `cache`."""

    def encode() -> dict[str, Tensor]:
        parts = [np.array([*ids, END], dtype=np.int32) for ids in vocabulary.encode(documents)]
        return {"tokens": torch.from_numpy(np.concatenate(parts))}

    name = digest_of("documents", list(documents), [vocabulary.model])
    return cached_tensors(cache, f"documents-{name}", encode)["tokens"]
