"""Sentence pairs for a translation model (paper, Section 5): tokens for the encoder, the decoder and the loss.

One vocabulary serves all languages and both sides. The first token of a source names the language to translate into,
as in the group's multilingual papers; the GPipe paper does not specify it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gpipe_cli.config.groups import TextConfig
from gpipe_cli.data.batches import SplitIndex
from gpipe_cli.data.cache import cache_folder, compute_digest, read_or_make_tensors
from gpipe_cli.data.corpora import Pairs, target_language
from gpipe_cli.data.splits import Splits
from gpipe_cli.data.vocabulary import BEGIN, END, IGNORED, PAD, SentencePieceTokenizer, make_tokenizer
from gpipe_cli.errors import InvalidSettingError


@dataclass(frozen=True, eq=False)
class RaggedTokens:
    """Token sequences of any length, concatenated: a list of lists would need a Python object for each token."""

    values: Tensor  # int32 (tokens,)
    lengths: Tensor  # int64 (sequences,)

    @cached_property
    def _starts(self) -> Tensor:
        return self.lengths.cumsum(0) - self.lengths

    @classmethod
    def of(cls, sequences: Sequence[Sequence[int]]) -> "RaggedTokens":
        values = np.fromiter(chain.from_iterable(sequences), dtype=np.int32)
        return cls(torch.from_numpy(values), torch.tensor(list(map(len, sequences)), dtype=torch.int64))

    def pad(self, indices: Tensor, width: int, padding: int) -> Tensor:
        """int64 (n, width): the sequences `indices` (int64 (n,)), none longer than `width`, then `padding`."""
        lengths = self.lengths[indices, None]
        columns = torch.arange(width)
        assert bool((lengths <= width).all()), (lengths, width)
        positions = (self._starts[indices, None] + columns).clamp_(max=len(self.values) - 1)
        return self.values[positions].long().masked_fill_(columns >= lengths, padding)

    def filter(self, kept: Tensor) -> "RaggedTokens":
        """The sequences for which `kept`, bool (sequences,), is true."""
        return RaggedTokens(self.values[kept.repeat_interleave(self.lengths)], self.lengths[kept])


@dataclass(frozen=True, eq=False)
class PairSplit:
    """The tokens of the training or the test pairs, a `Split`; they are the same in every epoch."""

    pairs: Pairs
    sources: RaggedTokens  # [target language] + pieces + [end]
    targets: RaggedTokens  # pieces + [end]; the decoder sees [begin] + pieces
    vocabulary: SentencePieceTokenizer
    dropped: int = 0  # pairs that are too long for the model

    @cached_property
    def split_index(self) -> SplitIndex:
        lengths = torch.stack([self.sources.lengths, self.targets.lengths], dim=1).to(torch.int32)
        return SplitIndex(len(self.pairs), lengths=lengths, groups=self.pairs.groups)

    @property
    def max_length(self) -> Tensor:
        """int64 (n,): tokens of the longer side of each pair, special tokens included."""
        return torch.maximum(self.sources.lengths, self.targets.lengths)

    def inputs(self, epoch: int, indices: Sequence[int], lengths: tuple[int, ...]) -> tuple[Tensor, ...]:
        """Encoder input (n, S) and decoder input (n, T), both int64; `lengths` is (S, T)."""
        chosen = torch.tensor(indices)
        targets = self.targets.pad(chosen, lengths[1], PAD)
        so_far = torch.cat([torch.full((len(indices), 1), BEGIN), targets[:, :-1]], dim=1)
        # END is only predicted, never an input, as nothing follows it. No text encodes to its id.
        return self.sources.pad(chosen, lengths[0], PAD), so_far.masked_fill_(so_far == END, PAD)

    def targets_of(self, epoch: int, indices: Tensor, lengths: tuple[int, ...]) -> Tensor:
        """int64 (n, T): the token that follows each token of the decoder input; IGNORED where there is none."""
        return self.targets.pad(indices, lengths[1], IGNORED)

    def predicted_tokens(self) -> Tensor:
        """int64 (tokens,): all target tokens in order, without padding."""
        return self.targets.values.long()


def open_pairs(
    pairs: Splits[Pairs], dataset: TextConfig, length: int, saved_model: bytes | None = None
) -> Splits[PairSplit]:
    """Learn the vocabulary from both sides of the training pairs, or take `saved_model`, and encode each split.

    length: the most tokens of a source or a target that the model takes, including special tokens. Raises InputError
    for longer pairs; with `dataset.drop_long` drops them and raises InputError if none remains.
    """
    cache = cache_folder(dataset.cache)
    # Each text once: in a corpus of many languages the same English sentence occurs once per language.
    texts = dict.fromkeys(chain(pairs.training.sources, pairs.training.references))
    symbols = sorted({_symbol(pair) for pair in pairs.training.languages})
    vocabulary = make_tokenizer(
        texts, dataset.vocabulary, cache, symbols=symbols, add_dummy_prefix=True, saved_model=saved_model
    )
    splits = pairs.map(lambda part: _encode_pairs(part, vocabulary, cache))
    if not dataset.drop_long:
        _check_lengths([split for _, split in splits.each()], length)
    shortened = splits.map(lambda split: _drop_too_long(split, length))
    for name, split in shortened.each():
        if len(split.pairs) == 0:
            why = f"every {name} pair is longer; use a larger model.length, or shorter sentences"
            raise InvalidSettingError("model.length", length, why)
    return shortened


def _symbol(languages: str) -> str:
    return f"<2{target_language(languages)}>"


def _encode_pairs(pairs: Pairs, vocabulary: SentencePieceTokenizer, cache: Path) -> PairSplit:
    """The tokens of both sides of `pairs`, kept in `cache`."""

    def encode() -> dict[str, Tensor]:
        language_ids = [vocabulary.symbol(_symbol(name)) for name in pairs.languages]
        encoded = zip(pairs.groups.tolist(), vocabulary.encode(pairs.sources), strict=True)
        sources = RaggedTokens.of([[language_ids[group], *ids, END] for group, ids in encoded])
        targets = RaggedTokens.of([[*ids, END] for ids in vocabulary.encode(pairs.references)])
        return {
            "sources": sources.values,
            "source lengths": sources.lengths,
            "answers": targets.values,
            "answer lengths": targets.lengths,
        }

    texts = "\n".join(chain(pairs.sources, pairs.references))  # every sentence is a line
    name = compute_digest("pairs", [pairs.languages, pairs.groups.tolist()], [texts, vocabulary.model])
    stored = read_or_make_tensors(cache, f"pairs-{name}", encode)
    sources = RaggedTokens(stored["sources"], stored["source lengths"])
    return PairSplit(pairs, sources, RaggedTokens(stored["answers"], stored["answer lengths"]), vocabulary)


def _check_lengths(splits: list[PairSplit], length: int) -> None:
    """Raises InputError, naming the longest pair, if it has more than `length` tokens on a side."""
    split = max(splits, key=lambda split: int(split.max_length.max()))
    longest = int(split.max_length.max())
    if longest > length:
        too_long = sum(int((split.max_length > length).sum()) for split in splits)
        pair = split.pairs.origin(int(split.max_length.argmax()))
        why = f"{pair} has {longest} tokens, and {too_long} pairs are too long"
        use = f"use model.length={longest} or more, or dataset.drop_long=true"
        raise InvalidSettingError("model.length", length, f"{why}; {use}")


def _drop_too_long(split: PairSplit, length: int) -> PairSplit:
    kept = split.max_length <= length
    return replace(
        split,
        pairs=split.pairs.select(kept.nonzero().flatten()),
        sources=split.sources.filter(kept),
        targets=split.targets.filter(kept),
        dropped=int((~kept).sum()),
    )
