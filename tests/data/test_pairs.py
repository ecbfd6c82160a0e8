"""Pairs of sentences or names in several languages: what is read, how it is split, and what a user can get wrong."""

from itertools import product
from pathlib import Path

import pytest
import torch
from babel import Locale, localedata

from gpipe_cli.config.groups import TextConfig
from gpipe_cli.data.corpora import Pairs, read_cldr, read_parallel_text
from gpipe_cli.data.translation import PairSplit, open_pairs
from gpipe_cli.data.vocabulary import BEGIN, END, IGNORED, PAD
from gpipe_cli.errors import InputError


def rows_of(pairs: Pairs) -> list[tuple[str, str, str]]:
    names = [pairs.languages[group] for group in pairs.groups.tolist()]
    return list(zip(pairs.sources, pairs.references, names, strict=True))


def test_a_folder_with_both_files(tmp_path: Path) -> None:
    (tmp_path / "train.tsv").write_bytes("\ufeffHallo Welt\thello world\tde-en\r\n\n ¿Qué? \twhat?\tes-en".encode())
    (tmp_path / "test.tsv").write_bytes("eins\N{LINE SEPARATOR}zwei\tone two\tde-en\nun\tuno\tfr-sr_Latn\n".encode())
    train, test, _ = read_parallel_text(tmp_path)
    assert rows_of(train) == [("Hallo Welt", "hello world", "de-en"), ("¿Qué?", "what?", "es-en")]
    assert rows_of(test) == [("eins\N{LINE SEPARATOR}zwei", "one two", "de-en"), ("un", "uno", "fr-sr_Latn")]
    assert train.languages == test.languages == ("de-en", "es-en", "fr-sr_Latn")
    assert train.groups.dtype == torch.int32
    assert train.origin(1) == f"'{tmp_path / 'train.tsv'}' line 3"
    assert rows_of(train.select(torch.tensor([1]))) == rows_of(train)[1:]
    assert train.select(torch.tensor([1])).origin(0) == train.origin(1)


def test_one_file_is_split_by_target(tmp_path: Path) -> None:
    file = tmp_path / "pairs.tsv"
    lines = [f"Quelle {number}\ttarget {number // 4}\tde-en" for number in range(4000)]
    file.write_text("\n".join(lines))
    train, test, _ = read_parallel_text(file)
    assert sorted(rows_of(train) + rows_of(test)) == sorted(tuple(line.split("\t")) for line in lines)
    assert 130 < len(test) < 280
    assert not set(train.references) & set(test.references)
    assert test.origin(0).endswith(f"line {int(test.sources[0].split()[1]) + 1}")
    # Other lines around it do not move a line to the other split.
    file.write_text("\n".join(lines[2000:]))
    fewer = read_parallel_text(file)[1]
    assert rows_of(fewer) == [row for row in rows_of(test) if int(row[0].split()[1]) >= 2000]


def test_pairs_of_the_same_languages_need_not_name_them(tmp_path: Path) -> None:
    for name in ("train.tsv", "test.tsv"):
        (tmp_path / name).write_text("eins\tone\nzwei\ttwo\n")
    train, test, _ = read_parallel_text(tmp_path)
    assert rows_of(train)[1][:2] == ("zwei", "two")
    assert train.languages == test.languages
    assert len(train.languages) == 1


@pytest.mark.parametrize(
    ("lines", "fault"),
    [
        ("a\tb\tde-en\nc\n", "2 or 3 columns"),
        ("a\tb\nc\t\n", "2 or 3 columns"),
        ("a\tb\tde-en\nc\td\n", "third column"),
    ],
)
def test_a_line_with_other_columns_is_named(tmp_path: Path, lines: str, fault: str) -> None:
    for name in ("train.tsv", "test.tsv"):
        (tmp_path / name).write_text(lines)
    with pytest.raises(InputError, match=rf"^text file '\S+' line 2: .*{fault}"):
        read_parallel_text(tmp_path)


# --- names in many languages


# su has fewer than 100 names; de_AT is a territory
LOCALES = ["am", "de", "de_AT", "en", "fr", "root", "sr", "sr_Latn", "su", "zh", "zh_Hant"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def splits(cache: Path) -> tuple[Pairs, Pairs]:
    """Of a few languages: all of them take some seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(localedata, "locale_identifiers", lambda: LOCALES)
        return read_cldr("to_english", cache)[:2]


def test_names_in_many_languages(splits: tuple[Pairs, Pairs]) -> None:
    train, test = splits
    assert train.languages == test.languages
    assert train.languages == ("am-en", "de-en", "fr-en", "sr-en", "sr_Latn-en", "zh-en", "zh_Hant-en")
    assert 0.03 < len(test) / (len(train) + len(test)) < 0.07
    assert int(torch.bincount(train.groups).min()) >= 80


def test_no_entry_of_the_test_is_in_training(splits: tuple[Pairs, Pairs]) -> None:
    """Neither its English name nor, kind by kind, the code that Babel has for it."""
    train, test = ({" ".join(text.casefold().split()) for text in split.references} for split in splits)
    assert len(test) > 40
    assert not train & test
    english = Locale("en")
    for names in (english.territories, english.languages, english.scripts, english.currencies):
        trained, tested = ({code for code, name in names.items() if name in split.references} for split in splits)
        assert tested
        assert not trained & tested


def test_directions_are_read_from_the_cache(
    splits: tuple[Pairs, Pairs], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpipe_cli.data.corpora._read_names", None)  # calling it would fail
    assert splits[0].origin(0).endswith(f"({splits[0].languages[0]})")
    into = rows_of(splits[1])
    out_of = [(english, name, f"en-{languages.removesuffix('-en')}") for name, english, languages in into]
    assert sorted(rows_of(read_cldr("from_english", cache)[1])) == sorted(out_of)
    _, test, _ = read_cldr("both", cache)
    assert sorted(rows_of(test)) == sorted(into + out_of)


# --- what encoder, decoder and loss get, token by token


NUMBERS = {
    "de": ["eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht"],
    "fr": ["un", "deux", "trois", "quatre", "cinq", "six", "sept", "huit"],
    "en": ["one", "two", "three", "four", "five", "six", "seven", "eight"],
}


def open_tiny(folder: Path, length: int = 30, *, drop_long: bool = False) -> tuple[PairSplit, PairSplit]:
    """All pairs of two numbers, German to English and English to French; the last four are the test."""
    lines = []
    for (source, target), first, second in product((("de", "en"), ("en", "fr")), range(8), range(8)):
        sides = [f"{NUMBERS[code][first]} {NUMBERS[code][second]}" for code in (source, target)]
        lines.append("\t".join([*sides, f"{source}-{target}"]))
    (folder / "train.tsv").write_text("\n".join(lines[:-4]))
    (folder / "test.tsv").write_text("\n".join(lines[-4:]))
    dataset = TextConfig(
        "parallel_text", vocabulary=300, drop_long=drop_long, root=str(folder), cache=str(folder), temperature=1.0
    )
    return open_pairs(read_parallel_text(folder), dataset, length)[:2]


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> tuple[PairSplit, PairSplit]:
    return open_tiny(tmp_path_factory.mktemp("numbers"))


def texts(split: PairSplit, index: int) -> tuple[str, str]:
    return split.pairs.sources[index], split.pairs.references[index]


def test_tokens_of_a_mini_batch(numbers: tuple[PairSplit, PairSplit]) -> None:
    train, _ = numbers
    assert train.split_index.lengths is not None
    vocabulary, indices = train.vocabulary, [3, 100, 17]
    wide, high = (int(length) + 2 for length in train.split_index.lengths[indices].amax(dim=0))
    sources, so_far = train.inputs(9, indices, (wide, high))
    targets = train.targets_of(0, torch.tensor(indices), (wide, high))
    for row, (index, into) in enumerate(zip(indices, ("<2en>", "<2fr>", "<2en>"), strict=True)):
        source, reference = (vocabulary.encode([text])[0] for text in texts(train, index))
        real = [vocabulary.symbol(into), *source, END]
        assert sources[row].tolist() == real + [PAD] * (wide - len(real))
        assert so_far[row].tolist() == [BEGIN, *reference] + [PAD] * (high - len(reference) - 1)
        assert targets[row].tolist() == [*reference, END] + [IGNORED] * (high - len(reference) - 1)
        assert vocabulary.decode(targets[row][targets[row] != IGNORED].tolist()) == texts(train, index)[1]
    assert texts(train, 123) == ("eight four", "huit quatre")
    every = train.targets_of(0, torch.arange(124), (30, 30))
    assert torch.equal(train.predicted_tokens(), every[every != IGNORED])


def test_pairs_that_are_too_long(tmp_path: Path) -> None:
    whole, whole_test = open_tiny(tmp_path)
    longest = [split.split_index.lengths.amax(dim=1) for split in (whole, whole_test)]  # type: ignore[union-attr]
    most = int(max(part.max() for part in longest))
    limit = most - 1
    too_long = [int((part > limit).sum()) for part in longest]
    line = f"line {int(longest[0].argmax()) + 1} has {most} tokens, and {sum(too_long)} pairs are too long; "
    with pytest.raises(InputError, match=rf"^model\.length={limit}: '\S+/train.tsv' {line}.*=true$"):
        open_tiny(tmp_path, length=limit)
    assert len(open_tiny(tmp_path, length=most)[0].pairs) == 124

    short, short_test = open_tiny(tmp_path, length=limit, drop_long=True)
    assert [short.dropped, short_test.dropped] == too_long
    assert [len(short.pairs), len(short_test.pairs)] == [124 - too_long[0], 4 - too_long[1]]
    kept = [index for index in range(124) if longest[0][index] <= limit]
    assert [texts(short, index) for index in range(len(short.pairs))] == [texts(whole, index) for index in kept]
    assert torch.equal(short.split_index.lengths, whole.split_index.lengths[kept])  # type: ignore[index,arg-type]
    assert torch.equal(short.split_index.groups, whole.split_index.groups[kept])  # type: ignore[index,arg-type]
    with pytest.raises(InputError, match=r"^model\.length=2: every training pair is longer; [^\n]*$"):
        open_tiny(tmp_path, length=2, drop_long=True)
