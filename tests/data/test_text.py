"""Text data sets opened by name, as a run does it, and what a model must beat."""

import math
from pathlib import Path

import pytest
import torch

from gpipe_cli.config.dataset import TextConfig
from gpipe_cli.data.batches import MiniBatches
from gpipe_cli.data.language_model import TextSplit
from gpipe_cli.data.text import open_text, unigram_perplexity
from gpipe_cli.data.translation import PairSplit
from gpipe_cli.data.vocabulary import IGNORED

LOCALES = ("de", "ja", "ru", "sr_Latn")


def test_python_docs(tmp_path: Path) -> None:
    config = TextConfig("python_docs", vocabulary=1000, cache=str(tmp_path))
    train, test = open_text(config, length=128, seed=0)
    again, _ = open_text(config, length=128, seed=5)
    assert isinstance(train, TextSplit)
    assert isinstance(test, TextSplit)
    assert isinstance(again, TextSplit)
    assert torch.equal(again.tokens, train.tokens)  # the seed changes nothing
    assert train.vocabulary.size == 1000
    assert len(train) > 400 > len(test) > 20
    batches = MiniBatches(train.catalogue, batch_size=8, seed=0, shuffle=True)
    indices, lengths = batches.indices(0, 0), batches.lengths(0, 0)
    (inputs,) = train.inputs(0, indices.tolist(), lengths)
    assert inputs.shape == train.targets_of(indices, lengths).shape == (8, 128)
    # A model of single tokens is far better than chance, and far from good.
    assert 50 < unigram_perplexity(train, test) < 500


def test_parallel_text_in_mini_batches_of_tokens(tmp_path: Path) -> None:
    lines = [
        f"{'haus ' * (n % 5 + 1)}{n}\t{'house ' * (n % 5 + 1)}{n}\t{('de', 'nl')[n % 9 == 0]}-en" for n in range(200)
    ]
    file = tmp_path / "all.tsv"
    file.write_text("\n".join(lines))
    config = TextConfig("parallel_text", vocabulary=280, cache=str(tmp_path), root=str(file), temperature=5.0)
    train, test = open_text(config, length=64, seed=0)
    assert isinstance(train, PairSplit)
    assert len(train) + len(test) == 200
    batches = MiniBatches(
        train.catalogue, batch_size=None, batch_tokens=200, seed=0, shuffle=True, temperature=config.temperature
    )
    assert train.catalogue.lengths is not None
    for epoch, position in batches.stream(0, 0, 2):
        indices, lengths = batches.indices(epoch, position), batches.lengths(epoch, position)
        sources, so_far = train.inputs(epoch, indices.tolist(), lengths)
        targets = train.targets_of(indices, lengths)
        assert (sources.shape[1], so_far.shape[1]) == lengths
        assert len(indices) * max(lengths) <= 200
        assert int((targets != IGNORED).sum()) == int(train.catalogue.lengths[indices, 1].sum())


def test_cldr(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Four languages: the vocabulary of all of them takes ten seconds.
    monkeypatch.setattr("babel.localedata.locale_identifiers", lambda: ["de", "en", "ja", "ru", "sr_Latn", "de_AT"])
    config = TextConfig("cldr", vocabulary=2000, cache=str(tmp_path), direction="both", temperature=5.0)
    train, test = open_text(config, length=40, seed=0)
    assert isinstance(train, PairSplit)
    assert isinstance(test, PairSplit)
    assert set(test.pairs.languages) == {f"{code}-en" for code in LOCALES} | {f"en-{code}" for code in LOCALES}
    assert len(train) > 8000
    assert train.vocabulary.size == 2000
    index = next(i for i in range(len(test)) if test.pairs.languages[int(test.pairs.groups[i])] == "en-ja")
    targets = test.targets_of(torch.tensor([index]), (40, 40))[0]
    assert test.vocabulary.decode(targets[targets != IGNORED].tolist()) == test.pairs.references[index]
    (sources, _) = test.inputs(0, [index], (40, 40))
    assert sources[0, 0] == test.vocabulary.symbol("<2ja>")
    assert unigram_perplexity(train, test) > 2


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
