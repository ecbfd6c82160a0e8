"""Windows of a text for a language model (paper, Section 2.2: sequences of 1,024 tokens).

The first stage needs the tokens, the last one the next tokens, and they may live in different processes: each is made
from the stream by itself.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gpipe_cli.data.batches import SPLITS, Catalogue, Key
from gpipe_cli.data.cache import cached_tensors, digest_of
from gpipe_cli.data.vocabulary import END, IGNORED, PAD, Vocabulary, saved_vocabulary, train_vocabulary


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
        return Catalogue(len(self), fixed_lengths=(self.length,))

    @property
    def vocabulary_size(self) -> int:
        """Ids are 0 .. vocabulary_size - 1."""
        return self.vocabulary.size

    def inputs(self, keys: Sequence[Key], lengths: tuple[int, ...]) -> tuple[Tensor, ...]:
        """One int64 (n, length): the tokens of windows `keys`."""
        return (self._windows(torch.tensor([index for _, index in keys]), lengths, first=0, padding=PAD),)

    def targets_of(self, indices: Tensor, lengths: tuple[int, ...]) -> Tensor:
        """int64 (n, length): the token after each input."""
        return self._windows(indices, lengths, first=1, padding=IGNORED)

    def predicted(self) -> Tensor:
        """int64 (tokens,): all targets that count, in order."""
        return self.tokens[1:].long()

    def _windows(self, indices: Tensor, lengths: tuple[int, ...], first: int, padding: int) -> Tensor:
        assert lengths == (self.length,), (lengths, self.length)
        positions = indices[:, None] * self.length + torch.arange(self.length)
        beyond = positions >= len(self.tokens) - 1  # nothing comes after the last token
        return self.tokens[(positions + first).masked_fill_(beyond, 0)].long().masked_fill_(beyond, padding)


def open_documents(
    train: Sequence[str],
    test: Sequence[str],
    *,
    length: int,
    vocabulary: int,
    cache: Path,
    pieces: bytes | None = None,
) -> tuple[TextSplit, TextSplit]:
    """Learn `vocabulary` ids from the training documents, or take those of `pieces`, and encode both; kept in `cache`.

    Raises ValueError for a vocabulary that the text does not support, and a text shorter than a window.
    """
    if pieces is None:
        learned = train_vocabulary(_lines(train), vocabulary, word_prefix=False, cache=cache)
    else:
        learned = saved_vocabulary(pieces, vocabulary)
    name = digest_of("documents", [len(train), len(test)], [*train, *test, learned.model])
    streams = cached_tensors(
        cache, f"documents-{name}", lambda: {"train": _encode(train, learned), "test": _encode(test, learned)}
    )
    for split, stream in streams.items():
        if len(stream) <= length:
            raise ValueError(
                f"model.length={length}: the {SPLITS[split]} text has only {len(stream)} tokens, and a window needs "
                f"one more than its length; use model.length={len(stream) - 1} or less, or a longer text"
            )
    return TextSplit(streams["train"], length, learned), TextSplit(streams["test"], length, learned)


def _lines(documents: Iterable[str]) -> list[str]:
    """What the vocabulary is learned from; a line's end is a byte of its own and need not be learned."""
    return [line for document in documents for line in document.split("\n") if line.strip()]


def _encode(documents: Sequence[str], vocabulary: Vocabulary) -> Tensor:
    ends = np.array([END], dtype=np.int32)
    parts = [part for ids in vocabulary.encode(documents) for part in (np.asarray(ids, dtype=np.int32), ends)]
    return torch.from_numpy(np.concatenate(parts))
