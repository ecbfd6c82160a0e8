"""Text data sets opened by name, as a run does it, and what a model must beat."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gpipe_cli.data.language_model import TextSplit
from gpipe_cli.data.synthetic_text import SyntheticText
from gpipe_cli.data.text import open_text, unigram_perplexity
from gpipe_cli.data.token_batches import TokenBatches
from gpipe_cli.data.translation import PairSplit
from gpipe_cli.data.vocabulary import IGNORED

LOCALES = ("de", "ja", "ru", "sr_Latn")


def test_importing_the_text_rooms_does_not_import_torch() -> None:
    code = (
        "import sys, gpipe_cli.data.text, gpipe_cli.data.token_batches; "
        "heavy = {'torch', 'numpy', 'babel', 'sentencepiece', 'safetensors', 'pydoc_data.topics'} & set(sys.modules); "
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_python_docs(tmp_path: Path) -> None:
    train, test = open_text("python_docs", length=128, vocabulary=1000, seed=0, cache=str(tmp_path))
    assert isinstance(train, TextSplit)
    assert train.vocabulary_size == test.vocabulary_size == 1000
    assert len(train) > 400 > len(test) > 20
    again, _ = open_text("python_docs", length=128, vocabulary=1000, seed=5, cache=str(tmp_path))
    assert isinstance(again, TextSplit)
    assert torch.equal(again.tokens, train.tokens)  # the seed changes nothing
    batches = TokenBatches(train.catalogue, batch_size=8, batch_tokens=None, seed=0, shuffle=True, temperature=None)
    indices, lengths = batches.indices(0, 0), batches.lengths(0, 0)
    (inputs,) = train.inputs([(0, index) for index in indices.tolist()], lengths)
    assert inputs.shape == train.targets_of(indices, lengths).shape == (8, 128)
    # A model of single tokens is far better than chance, and far from good.
    assert 50 < unigram_perplexity(train, test) < 500


def test_text_files(tmp_path: Path) -> None:
    for name, count in (("train", 40), ("test", 4)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text("".join(f"line {number} of a text\n" for number in range(count)))
    train, test = open_text(
        "text_files", root=tmp_path, length=8, vocabulary=282, seed=0, cache=str(tmp_path / "cache")
    )
    assert isinstance(test, TextSplit)
    assert test.vocabulary.decode(test.tokens.tolist()) == (tmp_path / "test" / "a.txt").read_text()
    assert len(train) > len(test)


def test_parallel_text_in_token_batches(tmp_path: Path) -> None:
    lines = [
        f"{'haus ' * (n % 5 + 1)}{n}\t{'house ' * (n % 5 + 1)}{n}\t{('de', 'nl')[n % 9 == 0]}-en" for n in range(200)
    ]
    (tmp_path / "all.tsv").write_text("\n".join(lines))
    train, test = open_text(
        "parallel_text", root=tmp_path / "all.tsv", length=64, vocabulary=280, seed=0, cache=str(tmp_path / "cache")
    )
    assert isinstance(train, PairSplit)
    assert len(train) + len(test) == 200
    batches = TokenBatches(train.catalogue, batch_size=None, batch_tokens=200, seed=0, shuffle=True, temperature=5.0)
    assert train.catalogue.lengths is not None
    for epoch, position in batches.stream(0, 0, 2):
        indices, lengths = batches.indices(epoch, position), batches.lengths(epoch, position)
        sources, so_far = train.inputs([(epoch, index) for index in indices.tolist()], lengths)
        targets = train.targets_of(indices, lengths)
        assert (sources.shape[1], so_far.shape[1]) == lengths
        assert len(indices) * max(lengths) <= 200
        assert int((targets != IGNORED).sum()) == int(train.catalogue.lengths[indices, 1].sum())


def test_cldr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Four languages: the vocabulary of all of them takes ten seconds.
    monkeypatch.setattr("babel.localedata.locale_identifiers", lambda: ["de", "en", "ja", "ru", "sr_Latn", "de_AT"])
    train, test = open_text("cldr", length=40, vocabulary=2000, seed=0, cache=str(tmp_path), direction="both")
    assert isinstance(test, PairSplit)
    assert set(test.languages) == {f"{code}-en" for code in LOCALES} | {f"en-{code}" for code in LOCALES}
    assert len(train) > 8000
    assert train.vocabulary_size == 2000
    index = next(i for i in range(len(test)) if test.languages[int(test.pairs.groups[i])] == "en-ja")
    targets = test.targets_of(torch.tensor([index]), (40, 40))[0]
    assert test.vocabulary.decode(targets[targets != IGNORED].tolist()) == test.texts(index)[1]
    (sources, _) = test.inputs([(0, index)], (40, 40))
    assert sources[0, 0] == test.vocabulary.symbol("<2ja>")
    assert unigram_perplexity(train, test) > 2


def test_synthetic_text() -> None:
    splits = open_text("synthetic_text", length=8, vocabulary=20, seed=0, pairs=True, train_samples=4, test_samples=2)
    assert all(isinstance(split, SyntheticText) for split in splits)
    assert [len(split) for split in splits] == [4, 2]


def test_unigram_perplexity_in_closed_form() -> None:
    """Stream 4 4 4 5 predicts 4, 4, 5: counts plus one over 3 + 6 ids are 3/9 and 2/9; an unseen id has 1/9."""

    class SixIds:
        size = 6

    def split(*tokens: int) -> TextSplit:
        return TextSplit(torch.tensor(tokens, dtype=torch.int32), 2, SixIds())  # type: ignore[arg-type]

    train = split(4, 4, 4, 5)
    assert math.isclose(unigram_perplexity(train, split(0, 4)), 9 / 3)
    assert math.isclose(unigram_perplexity(train, split(0, 5)), 9 / 2)
    assert math.isclose(unigram_perplexity(train, split(5, 4, 5, 0)), (3 * 4.5 * 9) ** (1 / 3))


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("wikitext", {}, r"dataset=wikitext: unknown; use python_docs, .* or synthetic_text"),
        ("text_files", {}, r"dataset\.root=null: text_files is read from disk; .*"),
        ("parallel_text", {}, r"dataset\.root=null: parallel_text is read from disk; .*"),
        ("cldr", {"direction": "up"}, r"dataset\.direction=up: unknown; .*"),
        ("python_docs", {"length": 0}, r"model\.length=0: must be 1 token or more"),
    ],
)
def test_settings_that_mean_nothing(tmp_path: Path, name: str, settings: dict[str, object], message: str) -> None:
    arguments = {"length": 8, "vocabulary": 300, "seed": 0, "cache": str(tmp_path)} | settings
    with pytest.raises(ValueError, match=rf"\A{message}\Z"):
        open_text(name, **arguments)  # type: ignore[arg-type]
