"""Sentence pairs for a translation model (paper, Section 5): tokens for the encoder, the decoder and the loss.

One vocabulary serves all languages and both sides. The first token of a source names the language to translate into,
as the group's multilingual papers do it; the GPipe paper itself does not say.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from gpipe_cli.data.batches import SPLITS, Catalogue, Key
from gpipe_cli.data.cache import cached_tensors, digest_of
from gpipe_cli.data.pairs import Pairs, target_language
from gpipe_cli.data.ragged import Ragged
from gpipe_cli.data.vocabulary import BEGIN, END, IGNORED, PAD, UNKNOWN, Vocabulary, saved_vocabulary, train_vocabulary


@dataclass(frozen=True, eq=False)
class PairSplit:
    """The training or the test pairs; the epoch changes nothing.

    sources: [target language] + pieces + [end]. answers: pieces + [end]; the decoder sees [begin] + pieces.
    dropped: how many pairs were left out because they are too long for the model.
    """

    pairs: Pairs
    sources: Ragged
    answers: Ragged
    vocabulary: Vocabulary
    dropped: int = 0

    def __len__(self) -> int:
        return len(self.pairs)

    @property
    def languages(self) -> tuple[str, ...]:
        """Names of the language pairs, such as `de-en`; `catalogue.groups` are their numbers."""
        return self.pairs.languages

    @property
    def vocabulary_size(self) -> int:
        """Ids are 0 .. vocabulary_size - 1."""
        return self.vocabulary.size

    @cached_property
    def catalogue(self) -> Catalogue:
        """How many pairs there are, their lengths (source, target) and languages."""
        lengths = torch.stack([self.sources.lengths, self.answers.lengths], dim=1).to(torch.int32)
        return Catalogue(len(self), lengths=lengths, groups=self.pairs.groups)

    def inputs(self, keys: Sequence[Key], lengths: tuple[int, ...]) -> tuple[Tensor, ...]:
        """Two int64: sources (n, S) and targets so far (n, T) of the pairs `keys`."""
        indices = torch.tensor([index for _, index in keys])
        answers = self.answers.padded(indices, lengths[1], PAD)
        so_far = torch.cat([torch.full((len(keys), 1), BEGIN), answers[:, :-1]], dim=1)
        # The end is there to be predicted; nothing comes after it. No text encodes to its id.
        return self.sources.padded(indices, lengths[0], PAD), so_far.masked_fill_(so_far == END, PAD)

    def targets_of(self, indices: Tensor, lengths: tuple[int, ...]) -> Tensor:
        """int64 (n, T): the token after each of the targets so far."""
        return self.answers.padded(indices, lengths[1], IGNORED)

    def texts(self, index: int) -> tuple[str, str]:
        """(source, reference) of a pair."""
        return self.pairs.sources.text(index), self.pairs.references.text(index)

    def predicted(self) -> Tensor:
        """int64 (tokens,): all targets that count, in order."""
        return self.answers.values.long()


def open_pairs(
    train: Pairs,
    test: Pairs,
    *,
    length: int,
    vocabulary: int,
    drop_long: bool,
    cache: Path,
    pieces: bytes | None = None,
) -> tuple[PairSplit, PairSplit]:
    """Learn `vocabulary` ids from both sides of the training pairs, or take those of `pieces`, and encode both splits;
    kept in `cache`.

    length: the most tokens of a source or a target that the model takes, special ones included. drop_long: leave longer
    pairs out of their split and count them, instead of refusing them.

    Raises ValueError for a vocabulary that the text does not support, and for a pair that is too long.
    """
    symbols = [f"<2{code}>" for code in sorted({target_language(pair) for pair in train.languages})]
    if pieces is None:
        # Every text once: in a corpus with many languages the same English sentence comes back for each.
        texts = dict.fromkeys([*train.sources.texts(), *train.references.texts()])
        learned = train_vocabulary(texts, vocabulary, symbols=symbols, word_prefix=True, cache=cache)
    else:
        learned = saved_vocabulary(pieces, vocabulary)
        if missing := [symbol for symbol in symbols if learned.symbol(symbol) == UNKNOWN]:
            raise ValueError(
                f"dataset.root: the pairs translate into languages that the vocabulary of that run does not know "
                f"({', '.join(symbol[2:-1] for symbol in missing[:4])}); leave them out, or train from the beginning"
            )
    whole = {"train": train, "test": test}
    name = digest_of("pairs", train.languages, [learned.model, *_content(train), *_content(test)])
    tensors = cached_tensors(cache, f"pairs-{name}", lambda: _encode(whole, learned))
    splits = [
        PairSplit(
            pairs, Ragged.stored(tensors, f"{split}.sources"), Ragged.stored(tensors, f"{split}.answers"), learned
        )
        for split, pairs in whole.items()
    ]
    if not drop_long:
        _check_lengths(splits, length)
    shortened = [_without_long(split, length) for split in splits]
    for key, kept in zip(whole, shortened, strict=True):
        if len(kept) == 0:
            raise ValueError(
                f"model.length={length}: every {SPLITS[key]} pair is longer; use a larger model.length, or "
                "shorter sentences"
            )
    return shortened[0], shortened[1]


def _content(pairs: Pairs) -> list[bytes]:
    """All that the tokens are made from."""
    parts = (pairs.sources.values, pairs.sources.ends, pairs.references.values, pairs.references.ends, pairs.groups)
    return [part.numpy().tobytes() for part in parts]


def _encode(splits: dict[str, Pairs], vocabulary: Vocabulary) -> dict[str, Tensor]:
    """Tokens of both sides of both splits, named for the cache."""
    tensors: dict[str, Tensor] = {}
    for split, pairs in splits.items():
        into = [vocabulary.symbol(f"<2{target_language(name)}>") for name in pairs.languages]
        encoded = zip(pairs.groups.tolist(), vocabulary.encode(pairs.sources.texts()), strict=True)
        sources = [[into[group], *ids, END] for group, ids in encoded]
        answers = [[*ids, END] for ids in vocabulary.encode(pairs.references.texts())]
        tensors |= Ragged.of_tokens(sources).to_store(f"{split}.sources")
        tensors |= Ragged.of_tokens(answers).to_store(f"{split}.answers")
    return tensors


def _check_lengths(splits: list[PairSplit], length: int) -> None:
    """ValueError that names the longest pair of all where it is too long."""
    split = max(splits, key=lambda split: int(_longer(split).max()))
    longest, index = int(_longer(split).max()), int(_longer(split).argmax())
    if longest > length:
        many = sum(int((_longer(split) > length).sum()) for split in splits)
        raise ValueError(
            f"model.length={length}: {split.pairs.where(index)} has {longest} tokens, and {many} pairs are too long; "
            f"use model.length={longest} or more, or dataset.drop_long=true"
        )


def _without_long(split: PairSplit, length: int) -> PairSplit:
    kept = (_longer(split) <= length).nonzero().flatten()
    if len(kept) == len(split):
        return split
    return replace(
        split,
        pairs=split.pairs.chosen(kept),
        sources=split.sources.chosen(kept),
        answers=split.answers.chosen(kept),
        dropped=len(split) - len(kept),
    )


def _longer(split: PairSplit) -> Tensor:
    """int64 (n,): the larger of source's and target's length, special tokens included."""
    return torch.maximum(split.sources.lengths, split.answers.lengths)
