"""Text data sets, opened by name: windows for a language model (paper, Section 2.2: sequences of 1,024 tokens), random
tokens, and sentence pairs (Section 5)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpipe_cli.config.groups import TEXT_DATASETS, TextConfig
from gpipe_cli.data.batches import SplitIndex, derive_seed
from gpipe_cli.data.cache import cache_folder, compute_digest, read_or_make_tensors
from gpipe_cli.data.corpora import Documents, Pairs, read_cldr, read_parallel_text, read_python_docs, read_text_files
from gpipe_cli.data.pretrained_tokenizer import HFTokenizer
from gpipe_cli.data.splits import Splits, divide
from gpipe_cli.data.translation import PairSplit, open_pairs
from gpipe_cli.data.vocabulary import BEGIN, IGNORED, PAD, UNKNOWN, SentencePieceTokenizer, make_tokenizer
from gpipe_cli.errors import InvalidSettingError

_VALIDATION_SETTING = "dataset.validation"


@dataclass(frozen=True, eq=False)
class TextSplit:
    """The training or the test text, cut into windows that do not overlap, the same in every epoch.

    tokens: int32 (stream,), all documents concatenated, each with an end token. length: tokens of a window. windows:
    int64 (n,), ascending, those that belong to the split; None: all. Every token but the first of the stream is
    predicted exactly once; the last window is padded.
    """

    tokens: Tensor
    length: int
    vocabulary: SentencePieceTokenizer | HFTokenizer
    windows: Tensor | None = None

    @property
    def split_index(self) -> SplitIndex:
        return SplitIndex.uniform(len(self._window_indexes), (self.length,))

    @property
    def full_windows(self) -> int:
        """The number of windows without padding; the only other comes last."""
        return int((self._window_indexes < (len(self.tokens) - 1) // self.length).sum())

    @property
    def _window_indexes(self) -> Tensor:
        return torch.arange(-(-(len(self.tokens) - 1) // self.length)) if self.windows is None else self.windows

    def inputs(self, epoch: int, indices: Sequence[int], lengths: tuple[int, ...]) -> tuple[Tensor, ...]:
        """A single tensor: int64 (n, length)."""
        return (self._windows(torch.tensor(indices), first=0, padding=PAD),)

    def targets_of(self, epoch: int, indices: Tensor, lengths: tuple[int, ...]) -> Tensor:
        """int64 (n, length): the token that follows each input token; IGNORED where there is none."""
        return self._windows(indices, first=1, padding=IGNORED)

    def predicted_tokens(self) -> Tensor:
        """int64 (tokens,): all target tokens in order, without padding."""
        if self.windows is None:
            return self.tokens[1:].long()
        targets = self._windows(torch.arange(len(self.windows)), first=1, padding=IGNORED)
        return targets[targets != IGNORED]

    def _windows(self, indices: Tensor, first: int, padding: int) -> Tensor:
        numbers = indices if self.windows is None else self.windows[indices]
        positions = numbers[:, None] * self.length + torch.arange(self.length)
        beyond = positions >= len(self.tokens) - 1  # no token follows the last token
        return self.tokens[(positions + first).masked_fill_(beyond, 0)].long().masked_fill_(beyond, padding)


def open_documents(
    documents: Splits[Documents], dataset: TextConfig, length: int, saved_model: bytes | None = None
) -> Splits[TextSplit]:
    """Take the tokenizer, or the vocabulary `saved_model`, or learn a vocabulary from the training documents; encode
    each split. Raises InputError."""
    cache = cache_folder(dataset.cache)
    if dataset.tokenizer is not None:
        vocabulary: SentencePieceTokenizer | HFTokenizer = HFTokenizer(dataset.tokenizer)
        if vocabulary.size > dataset.vocabulary:
            why = f"dataset.tokenizer has {vocabulary.size} tokens; use dataset.vocabulary={vocabulary.size} or more"
            raise InvalidSettingError("dataset.vocabulary", dataset.vocabulary, why)
    else:
        # A line end is encoded as its byte and need not be learned.
        lines = [line for document in documents.training for line in document.split("\n") if line.strip()]
        vocabulary = make_tokenizer(lines, dataset.vocabulary, cache, add_dummy_prefix=False, saved_model=saved_model)
    splits = documents.map(lambda part: TextSplit(_encode_corpus(part, vocabulary, cache), length, vocabulary))
    for name, split in splits.each():
        if len(split.tokens) <= length:
            why = f"the {name} text has only {len(split.tokens)} tokens, and a window needs one more than its length"
            use = f"use model.length={len(split.tokens) - 1} or less, or a longer text"
            raise InvalidSettingError("model.length", length, f"{why}; {use}")
    return splits


def _encode_corpus(documents: Sequence[str], vocabulary: SentencePieceTokenizer | HFTokenizer, cache: Path) -> Tensor:
    """The tokens of all documents, int32 (stream,), kept in `cache`."""

    def encode() -> dict[str, Tensor]:
        parts = [np.array([*ids, vocabulary.end], dtype=np.int32) for ids in vocabulary.encode(documents)]
        return {"tokens": torch.from_numpy(np.concatenate(parts))}

    name = compute_digest("documents", list(documents), [vocabulary.model])
    return read_or_make_tensors(cache, f"documents-{name}", encode)["tokens"]


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
    def split_index(self) -> SplitIndex:
        return SplitIndex.uniform(self.samples, (self.length,) * (2 if self.pairs else 1))

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
            generator = torch.Generator().manual_seed(derive_seed("tokens", self.seed, index))
            row.random_(UNKNOWN + 1, self.vocabulary_size, generator=generator)
        return sequences


TextSplits = Splits[TextSplit] | Splits[PairSplit] | Splits[SyntheticText]


def open_text(
    dataset: TextConfig, *, length: int, seed: int, pairs: bool = False, saved_model: bytes | None = None
) -> TextSplits:
    """The splits of a data set.

    length: tokens of a window, or at most of a source or a target. seed: chooses the validation set, and the tokens of
    `synthetic_text`; pairs: whether that has pairs. saved_model: the vocabulary of an earlier run, as SentencePiece
    stores it, which is used instead of learning another.

    Raises InputError for missing, empty or damaged data, and settings that do not fit it.
    """
    root = Path(dataset.root or "")  # a data set read from files has a root
    read: Any  # documents or pairs, of each split
    share = dataset.validation if isinstance(dataset.validation, float) else None
    match dataset.name:
        case "synthetic_text":
            return _make_synthetic(dataset, length, seed, pairs)
        case "python_docs":
            read = read_python_docs()
        case "text_files":
            read = read_text_files(root, dataset.validation)
        case "cldr":
            read = read_cldr(str(dataset.direction), cache_folder(dataset.cache))
        case "parallel_text":
            read = read_parallel_text(root, dataset.validation)
        case _:
            read = Splits(*import_module(f"gpipe_cli.data.{dataset.name}").read(dataset))
    if TEXT_DATASETS[dataset.name].pairs:
        return open_pairs(read if share is None else _split_off_pairs(read, share, seed), dataset, length, saved_model)
    splits = open_documents(read, dataset, length, saved_model)
    return splits if share is None else _split_off_windows(splits, share, seed)


def _make_synthetic(dataset: TextConfig, length: int, seed: int, pairs: bool) -> Splits[SyntheticText]:
    counts = {"train_samples": dataset.train_samples or 0, "test_samples": dataset.test_samples or 0}
    if isinstance(dataset.validation, float):  # any other samples will do: all are alike
        kept, held_out = divide(counts["train_samples"], _VALIDATION_SETTING, dataset.validation, seed)
        counts |= {"train_samples": len(kept), "validation_samples": len(held_out)}
    return Splits(
        *(
            SyntheticText(count, length, dataset.vocabulary, derive_seed(f"text {setting}", seed), pairs)
            for setting, count in counts.items()
        )
    )


def _split_off_windows(splits: Splits[TextSplit], share: float, seed: int) -> Splits[TextSplit]:
    """A fraction `share` of the training windows becomes the validation set. Raises InvalidSettingError for none."""
    training = splits.training
    kept, held_out = divide(training.split_index.samples, _VALIDATION_SETTING, share, seed)
    return Splits(replace(training, windows=kept), splits.test, replace(training, windows=held_out))


def _split_off_pairs(pairs: Splits[Pairs], share: float, seed: int) -> Splits[Pairs]:
    """The pairs of a fraction `share` of the targets become the validation set, so that no target is in both sets.
    Raises InvalidSettingError if it is empty."""
    training = pairs.training
    numbers: dict[str, int] = {}
    of_pair = torch.tensor([numbers.setdefault(target, len(numbers)) for target in training.references])
    parts = divide(len(numbers), _VALIDATION_SETTING, share, seed)
    kept, held_out = (training.select(torch.isin(of_pair, part).nonzero().flatten()) for part in parts)
    return Splits(kept, pairs.test, held_out)


def unigram_perplexity(train: TextSplit | PairSplit, test: TextSplit | PairSplit) -> float:
    """The test perplexity of a model that knows only the tokens' counts in training (plus 1): the baseline that a
    model beats once it has learned anything from their order."""
    counts = torch.bincount(train.predicted_tokens(), minlength=train.vocabulary.size).double() + 1
    surprise = -(counts / counts.sum()).log()[test.predicted_tokens()]
    return float(surprise.mean().exp())
