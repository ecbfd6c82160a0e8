"""Pairs of sentences or names in several languages: what is read, how it is split, and what a user can get wrong."""

from pathlib import Path

import pytest
import torch
from babel import Locale

from gpipe_cli.data import cldr
from gpipe_cli.data.cldr import read_cldr
from gpipe_cli.data.pairs import Pairs, languages_of, read_parallel_text, target_language


def rows_of(pairs: Pairs) -> list[tuple[str, str, str]]:
    names = [pairs.languages[group] for group in pairs.groups.tolist()]
    return list(zip(pairs.sources, pairs.references, names, strict=True))


def test_a_folder_with_both_files(tmp_path: Path) -> None:
    (tmp_path / "train.tsv").write_bytes("\ufeffHallo Welt\thello world\tde-en\r\n\n ¿Qué? \twhat?\tes-en".encode())
    (tmp_path / "test.tsv").write_bytes("eins\N{LINE SEPARATOR}zwei\tone two\tde-en\nun\tuno\tfr-sr_Latn\n".encode())
    train, test = read_parallel_text(tmp_path)
    assert rows_of(train) == [("Hallo Welt", "hello world", "de-en"), ("¿Qué?", "what?", "es-en")]
    assert rows_of(test) == [("eins\N{LINE SEPARATOR}zwei", "one two", "de-en"), ("un", "uno", "fr-sr_Latn")]
    assert train.languages == test.languages == ("de-en", "es-en", "fr-sr_Latn")
    assert train.groups.dtype == torch.int32
    assert train.where(1) == f"'{tmp_path / 'train.tsv'}' line 3"
    assert rows_of(train.chosen(torch.tensor([1]))) == rows_of(train)[1:]
    assert train.chosen(torch.tensor([1])).where(0) == train.where(1)


def test_one_file_is_split_by_target(tmp_path: Path) -> None:
    file = tmp_path / "pairs.tsv"
    lines = [f"Quelle {number}\ttarget {number // 4}\tde-en" for number in range(4000)]
    file.write_text("\n".join(lines))
    train, test = read_parallel_text(file)
    assert sorted(rows_of(train) + rows_of(test)) == sorted(tuple(line.split("\t")) for line in lines)
    assert 130 < len(test) < 280
    assert not set(train.references) & set(test.references)
    assert test.where(0).endswith(f"line {int(test.sources[0].split()[1]) + 1}")
    # Other lines around it do not move a line to the other split.
    file.write_text("\n".join(lines[2000:]))
    fewer = read_parallel_text(file)[1]
    assert rows_of(fewer) == [row for row in rows_of(test) if int(row[0].split()[1]) >= 2000]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a\tb\tde-en\na\tb\n", r"text file '\S+' line 2: must have 3 columns, .*"),
        ("\na\t \tde-en\n", r"text file '\S+' line 2: must have 3 columns, .*"),
        ("a\tb\tde>en", r"text file '\S+' line 1: must have 3 columns, .*"),
        (" \n\n", r"text file '\S+': an empty corpus; .*"),
        (b"a\tb\tde-en\n\xe4\tb\tde-en\n", r"text file '\S+': line 2 is not UTF-8 \(.*\); convert it"),
        ("a\tb\tde-en", r"dataset\.root=\S+: 1 line in 20 is test text, .* no test line is left; .*"),
    ],
)
def test_one_line_about_what_is_wrong(tmp_path: Path, content: str | bytes, message: str) -> None:
    file = tmp_path / "pairs.tsv"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=rf"\A{message}\Z"):
        read_parallel_text(file)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "train.tsv").write_text("a\tb\tde-en")
    for root, file in ((tmp_path / "none", "none"), (tmp_path, "test.tsv")):
        with pytest.raises(ValueError, match=rf"^text file '{tmp_path / file}': cannot be read .*; see dataset\.root$"):
            read_parallel_text(root)


def test_languages_of_pairs() -> None:
    """Scripts do not make another language."""
    assert [target_language(name) for name in ("de-en", "en-sr_Latn")] == ["en", "sr_Latn"]
    assert languages_of(["de-en", "hi_Latn-en", "hi-en", "en-fr"]) == 4


# --- names in many languages


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
    rows = rows_of(splits[0]) + rows_of(splits[1])

    def of(code: str) -> set[tuple[str, str]]:
        return {(name, english_name) for name, english_name, languages in rows if languages == f"{code}-en"}

    for code in ("de", "am"):
        territories = {
            (name, english.territories[entry])
            for entry, name in Locale(code).territories.items()
            if entry in english.territories and name != entry
        }
        assert len(territories) > 100
        assert territories <= of(code)
    assert {("allemand", "German"), ("cyrillique", "Cyrillic")} <= of("fr")
    assert ("US-Dollar", "US Dollar") in of("de")
    # of another script only what is written otherwise than in the usual one
    assert len(of("zh_Hant")) > 100
    both = {english_name for _, english_name in of("zh_Hant") & of("zh")}
    assert not both & set(english.territories.values())


def test_directions_are_read_from_the_cache(
    splits: tuple[Pairs, Pairs], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cldr, "_read_names", None)  # calling it would fail
    assert splits[0].where(0).endswith(f"({splits[0].languages[0]})")
    into = rows_of(splits[1])
    out_of = [(english, name, f"en-{languages.removesuffix('-en')}") for name, english, languages in into]
    assert sorted(rows_of(read_cldr("from_english", cache)[1])) == sorted(out_of)
    train, test = read_cldr("both", cache)
    assert sorted(rows_of(test)) == sorted(into + out_of)
    assert len(train) == 2 * len(splits[0])
