"""Names in many languages: real names, and none of the test's in training."""

from pathlib import Path

import pytest
import torch
from babel import Locale

from gpipe_cli.data import cldr
from gpipe_cli.data.cldr import read_cldr
from gpipe_cli.data.pairs import Pairs

Rows = set[tuple[str, str, str]]


def rows_of(pairs: Pairs) -> Rows:
    names = [pairs.languages[group] for group in pairs.groups.tolist()]
    return set(zip(pairs.sources, pairs.references, names, strict=True))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def splits(cache: Path) -> tuple[Pairs, Pairs]:
    return read_cldr("to_english", cache)


def test_many_names_in_many_languages(splits: tuple[Pairs, Pairs]) -> None:
    train, test = splits
    assert len(train.languages) >= 200
    assert train.languages == test.languages
    assert {"de-en", "zh-en", "zh_Hant-en", "sr-en", "sr_Latn-en", "ar-en"} <= set(train.languages)
    assert not [name for name in train.languages if name.startswith("en")]
    assert len(train) + len(test) > 150_000
    assert 0.03 < len(test) / (len(train) + len(test)) < 0.07
    # Every language has training names, and most have some for the test.
    assert int(torch.bincount(train.groups, minlength=len(train.languages)).min()) >= 80
    assert len(set(test.groups.tolist())) > 0.9 * len(test.languages)


def test_no_entry_of_the_test_is_in_training(splits: tuple[Pairs, Pairs]) -> None:
    """Neither its English name nor, kind by kind, the code that Babel has for it."""
    train, test = ({" ".join(text.casefold().split()) for text in split.references} for split in splits)
    assert len(test) > 40
    assert not train & test
    train_names, test_names = (set(split.references) for split in splits)
    english = Locale("en")
    for names in (english.territories, english.languages, english.scripts, english.currencies):
        codes = {
            split: {code for code, name in names.items() if name in known}
            for split, known in (("train", train_names), ("test", test_names))
        }
        assert codes["test"]
        assert not codes["train"] & codes["test"]


def test_names_are_what_babel_gives(splits: tuple[Pairs, Pairs]) -> None:
    english = Locale("en")
    codes = {name: entry for entry, name in english.territories.items()}
    rows = rows_of(splits[0]) | rows_of(splits[1])
    for code in ("de", "zh_Hant", "am"):
        locale = Locale.parse(code)
        expected = {
            (name, english.territories[entry], f"{code}-en")
            for entry, name in locale.territories.items()
            if entry in english.territories and name != entry
        }
        if code == "zh_Hant":  # only what is written otherwise than in the usual script
            expected -= {row for row in expected if row[0] == Locale("zh").territories.get(codes[row[1]])}
        assert len(expected) > 100
        assert expected <= rows
    assert {
        ("allemand", "German", "fr-en"),
        ("US-Dollar", "US Dollar", "de-en"),
        ("cyrillique", "Cyrillic", "fr-en"),
    } <= rows


def test_directions_are_read_from_the_cache(
    splits: tuple[Pairs, Pairs], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cldr, "_read_names", None)  # calling it would fail
    assert splits[0].where(0).endswith(f"({splits[0].languages[0]})")
    into = rows_of(splits[1])
    out_of = {(english, name, f"en-{languages.removesuffix('-en')}") for name, english, languages in into}
    assert rows_of(read_cldr("from_english", cache)[1]) == out_of
    train, test = read_cldr("both", cache)
    assert rows_of(test) == into | out_of
    assert len(test) == 2 * len(splits[1])
    assert len(train) == 2 * len(splits[0])
