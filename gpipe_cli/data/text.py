"""Text data sets, opened by name: for language models (paper, Section 2.2) and for translation (Section 5).

A split gives inputs and targets separately and in whole mini-batches, because the padding of a sentence depends on the
mini-batch it comes with, and because the first and the last stage may live in different processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from gpipe_cli.data.batches import Catalogue
from gpipe_cli.data.cache import cache_folder
from gpipe_cli.data.cldr import read_cldr
from gpipe_cli.data.corpora import read_python_docs, read_text_files
from gpipe_cli.data.language_model import open_documents
from gpipe_cli.data.pairs import read_parallel_text
from gpipe_cli.data.synthetic_text import make_synthetic_text
from gpipe_cli.data.translation import open_pairs

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["TextData", "open_text", "unigram_perplexity"]


class TextData(Protocol):
    """The training or the test split; picklable, because loader workers get a copy."""

    @property
    def catalogue(self) -> Catalogue:
        """What mini-batches are made from."""
        ...

    @property
    def vocabulary_size(self) -> int:
        """Ids are 0 .. vocabulary_size - 1."""
        ...

    def __len__(self) -> int: ...

    def inputs(self, keys: Sequence[tuple[int, int]], lengths: tuple[int, ...]) -> tuple[Tensor, ...]:
        """int64 (n, length) for each of `lengths`: what the model sees of the samples `keys`, each (epoch, index)."""
        ...

    def targets_of(self, indices: Tensor, lengths: tuple[int, ...]) -> Tensor:
        """int64 (n, last of lengths): what it must predict; IGNORED where there is nothing."""
        ...

    def predicted(self) -> Tensor:
        """int64 (tokens,): every target that is not IGNORED, once."""
        ...


def open_text(
    name: str,
    *,
    root: str | Path | None = None,
    length: int,
    vocabulary: int,
    direction: str = "to_english",
    seed: int,
    cache: str | None = None,
    drop_long: bool = False,
    pairs: bool = False,
    train_samples: int = 0,
    test_samples: int = 0,
    pieces: bytes | None = None,
) -> tuple[TextData, TextData]:
    """Open the data set `name` and return its training and its test split.

    root: folder of `text_files`; file or folder of `parallel_text`. length: tokens of a window, or the most of a
    source or a target. vocabulary: how many ids. direction: of `cldr`. seed: of `synthetic_text` only; the others are
    split once and for all. cache: where vocabularies and encoded text are kept (`cache_folder`). drop_long: leave out
    pairs that are too long. pairs, train_samples, test_samples: of `synthetic_text`. pieces: the vocabulary of an
    earlier run, as SentencePiece stores it, in place of a new one.

    `python_docs` and `text_files` give a TextSplit each, `cldr` and `parallel_text` a PairSplit.

    Raises ValueError (one line) for an unknown name, missing, empty or damaged data, and settings that do not fit it.
    """
    if length < 1:
        raise ValueError(f"model.length={length}: must be 1 token or more")
    match name:
        case "python_docs" | "text_files":
            documents = read_python_docs() if name == "python_docs" else read_text_files(_root(name, root))
            folder = cache_folder(cache)
            return open_documents(*documents, length=length, vocabulary=vocabulary, cache=folder, pieces=pieces)
        case "cldr" | "parallel_text":
            folder = cache_folder(cache)
            found = read_cldr(direction, folder) if name == "cldr" else read_parallel_text(_root(name, root))
            return open_pairs(
                *found, length=length, vocabulary=vocabulary, drop_long=drop_long, cache=folder, pieces=pieces
            )
        case "synthetic_text":
            return make_synthetic_text(
                length=length,
                vocabulary=vocabulary,
                pairs=pairs,
                train_samples=train_samples,
                test_samples=test_samples,
                seed=seed,
            )
        case _:
            raise ValueError(
                f"dataset={name}: unknown; use python_docs, text_files, cldr, parallel_text or synthetic_text"
            )


def unigram_perplexity(train: TextData, test: TextData) -> float:
    """The perplexity, over exactly the tokens that the test predicts, of a model that knows only how often each token
    is predicted in training (plus one): what a model must beat to have learned anything from the order."""
    import torch

    counts = torch.bincount(train.predicted(), minlength=train.vocabulary_size).double() + 1
    surprise = -(counts / counts.sum()).log()[test.predicted()]
    return float(surprise.mean().exp())


def _root(name: str, root: str | Path | None) -> Path:
    if root is None:
        raise ValueError(f"dataset.root=null: {name} is read from disk; set dataset.root to its folder")
    return Path(root)
