"""Pairs for a translation model: what encoder, decoder and loss get, token by token."""

from pathlib import Path

import pytest
import torch

from gpipe_cli.config.dataset import TextConfig
from gpipe_cli.data.pairs import Pairs, read_parallel_text
from gpipe_cli.data.translation import PairSplit, open_pairs
from gpipe_cli.data.vocabulary import BEGIN, END, IGNORED, PAD

NUMBERS = {
    "de": ["eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht"],
    "fr": ["un", "deux", "trois", "quatre", "cinq", "six", "sept", "huit"],
    "en": ["one", "two", "three", "four", "five", "six", "seven", "eight"],
}


def pairs_of(folder: Path) -> tuple[Pairs, Pairs]:
    """All pairs of two numbers, German to English and English to French; the last four are the test."""
    lines = []
    for source, target in (("de", "en"), ("en", "fr")):
        for first in range(8):
            for second in range(8):
                sides = [f"{NUMBERS[code][first]} {NUMBERS[code][second]}" for code in (source, target)]
                lines.append("\t".join([*sides, f"{source}-{target}"]))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.tsv").write_text("\n".join(lines[:-4]))
    (folder / "test.tsv").write_text("\n".join(lines[-4:]))
    return read_parallel_text(folder)


def open_tiny(folder: Path, length: int = 30, *, drop_long: bool = False) -> tuple[PairSplit, PairSplit]:
    files = {"root": str(folder), "cache": str(folder / "cache"), "temperature": 1.0}
    dataset = TextConfig("parallel_text", vocabulary=300, drop_long=drop_long, **files)  # type: ignore[arg-type]
    return open_pairs(*pairs_of(folder), dataset, length)


@pytest.fixture(scope="module")
def splits(tmp_path_factory: pytest.TempPathFactory) -> tuple[PairSplit, PairSplit]:
    return open_tiny(tmp_path_factory.mktemp("numbers"))


def texts(split: PairSplit, index: int) -> tuple[str, str]:
    return split.pairs.sources[index], split.pairs.references[index]


def test_catalogue(splits: tuple[PairSplit, PairSplit]) -> None:
    train, test = splits
    assert (len(train), len(test)) == (124, 4)
    assert train.pairs.languages == test.pairs.languages == ("de-en", "en-fr")
    assert train.vocabulary.size == 300
    lengths, groups = train.catalogue.lengths, train.catalogue.groups
    assert lengths is not None
    assert groups is not None
    assert groups.tolist() == [0] * 64 + [1] * 60
    for index in (0, 7, 70, 123):
        source, reference = (train.vocabulary.encode([text])[0] for text in texts(train, index))
        assert lengths[index].tolist() == [len(source) + 2, len(reference) + 1]


def test_tokens_of_a_mini_batch(splits: tuple[PairSplit, PairSplit]) -> None:
    train, _ = splits
    assert train.catalogue.lengths is not None
    vocabulary, indices = train.vocabulary, [3, 100, 17]
    wide, high = (int(length) + 2 for length in train.catalogue.lengths[indices].amax(dim=0))
    sources, so_far = train.inputs(9, indices, (wide, high))
    targets = train.targets_of(torch.tensor(indices), (wide, high))
    for row, (index, into) in enumerate(zip(indices, ("<2en>", "<2fr>", "<2en>"), strict=True)):
        source, reference = (vocabulary.encode([text])[0] for text in texts(train, index))
        real = [vocabulary.symbol(into), *source, END]
        assert sources[row].tolist() == real + [PAD] * (wide - len(real))
        assert so_far[row].tolist() == [BEGIN, *reference] + [PAD] * (high - len(reference) - 1)
        assert targets[row].tolist() == [*reference, END] + [IGNORED] * (high - len(reference) - 1)
        assert vocabulary.decode(targets[row][targets[row] != IGNORED].tolist()) == texts(train, index)[1]
    assert texts(train, 123) == ("eight four", "huit quatre")
    every = train.targets_of(torch.arange(124), (30, 30))
    assert torch.equal(train.predicted(), every[every != IGNORED])


def test_pairs_that_are_too_long(tmp_path: Path) -> None:
    whole, whole_test = open_tiny(tmp_path)
    longest = [split.catalogue.lengths.amax(dim=1) for split in (whole, whole_test)]  # type: ignore[union-attr]
    most = int(max(part.max() for part in longest))
    limit = most - 1
    too_long = [int((part > limit).sum()) for part in longest]
    line = f"line {int(longest[0].argmax()) + 1} has {most} tokens, and {sum(too_long)} pairs are too long; "
    with pytest.raises(ValueError, match=rf"^model\.length={limit}: '\S+/train.tsv' {line}.*=true$"):
        open_tiny(tmp_path, length=limit)
    assert len(open_tiny(tmp_path, length=most)[0]) == 124

    short, short_test = open_tiny(tmp_path, length=limit, drop_long=True)
    assert [short.dropped, short_test.dropped] == too_long
    assert [len(short), len(short_test)] == [124 - too_long[0], 4 - too_long[1]]
    kept = [index for index in range(124) if longest[0][index] <= limit]
    assert [texts(short, index) for index in range(len(short))] == [texts(whole, index) for index in kept]
    assert torch.equal(short.catalogue.lengths, whole.catalogue.lengths[kept])  # type: ignore[index,arg-type]
    assert torch.equal(short.catalogue.groups, whole.catalogue.groups[kept])  # type: ignore[index,arg-type]
    with pytest.raises(ValueError, match=r"^model\.length=2: every training pair is longer; [^\n]*$"):
        open_tiny(tmp_path, length=2, drop_long=True)
