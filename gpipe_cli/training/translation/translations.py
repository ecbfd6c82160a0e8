"""How well the model translates (paper, Section 5 and Figure 3): sentences decoded without sight of their references.

BLEU is the paper's measure, chrF counts letters and suits names and short sentences better. Both come from sacreBLEU,
whose signatures say exactly how, because BLEU scores of different tokenizations cannot be compared. Beside them is what
sources score that are taken for translations: between related languages, and for names, that is far from 0.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpipe_cli.assembly.build import greatest_lengths
from gpipe_cli.config.settings import DecodeConfig, TrainConfig
from gpipe_cli.data.translation import PairSplit
from gpipe_cli.distributed.control_group import ControlGroup
from gpipe_cli.training.data_feed import Reading
from gpipe_cli.training.engine import Engine
from gpipe_cli.training.events import Translation, TranslationResult
from gpipe_cli.training.translation.decode import Search, decode

EXAMPLES = 20  # translations in a result
WATCHED = 8  # sentences that are translated at each evaluation of a training, for people to look at


@dataclass(frozen=True)
class Scores:
    """Of a corpus, 0 to 100; and how they were computed, in sacreBLEU's words."""

    bleu: float
    chrf: float
    bleu_copy: float  # of the sources, taken for translations
    chrf_copy: float
    bleu_signature: str
    chrf_signature: str


def choose(samples: int, wanted: int) -> list[int]:
    """`wanted` of `samples` test sentences, evenly spaced from the first on; all of them if there are no more.

    >>> choose(10, 4)
    [0, 2, 5, 7]
    """
    wanted = min(samples, wanted)
    return [place * samples // wanted for place in range(wanted)]


def translated_test_set(
    config: TrainConfig,
    settings: DecodeConfig,
    engine: Engine,
    team: ControlGroup,
    test: Reading,
    tell: Callable[[int, int], None],
) -> TranslationResult | None:
    """What `gpipe evaluate` says of a translation model; None where there is nothing to translate, and in processes
    that do not speak for the run. Called in every process, inside `engine.evaluating`; `tell` hears how many sentences
    of how many are done."""
    indices = _to_decode(config, test, settings.sentences)
    if not indices:
        return None
    search = Search(settings.beam, settings.length_penalty, _batch_sentences(config))
    split, limit = _pairs(test), _limit(config)
    return translate(
        engine, team, search, config.micro_batches, limit, split, indices, lambda done: tell(done, len(indices))
    )


def translated_examples(config: TrainConfig, engine: Engine, team: ControlGroup, test: Reading) -> list[Translation]:
    """A few sentences, the same at each evaluation, decoded greedily; none in processes that do not speak for the
    run. Called in every process, inside `engine.evaluating`."""
    indices = _to_decode(config, test, WATCHED)
    if not indices:
        return []
    search = Search(1, 0.0, _batch_sentences(config))
    split = _pairs(test)
    decoded = decode(engine, team, search, config.micro_batches, _limit(config), split, indices)
    if not team.leads:
        return []
    assert split is not None, "the process that leads has the first stage"
    return shown(split, indices, decoded)


def _to_decode(config: TrainConfig, test: Reading, wanted: int | None) -> list[int]:
    """Every process comes to the same answer; those in the middle have no sentences, but know how many there are."""
    if config.task != "translation" or config.dataset.name == "synthetic_text" or wanted == 0:
        return []
    samples = test.batches.samples
    return choose(samples, samples if wanted is None else wanted)


def _pairs(test: Reading) -> PairSplit | None:
    assert test.split is None or isinstance(test.split, PairSplit)
    return test.split


def _limit(config: TrainConfig) -> int:
    return greatest_lengths(config)[-1]


def _batch_sentences(config: TrainConfig) -> int:
    """As many sentences as a mini-batch of the longest has."""
    if config.batch_size is not None:
        return config.batch_size
    assert config.batch_tokens is not None
    return max(1, config.batch_tokens // _limit(config))


def translate(
    engine: Engine,
    team: ControlGroup,
    search: Search,
    micro_batches: int,
    limit: int,
    split: PairSplit | None,
    indices: Sequence[int],
    tell: Callable[[int], None] = lambda done: None,
) -> TranslationResult | None:
    """Decode the pairs `indices` (at least one) and score them; None in processes that do not speak for the run.

    Called as `decode` is, and raises as it does.
    """
    began = time.perf_counter()
    decoded = decode(engine, team, search, micro_batches, limit, split, indices, tell)
    if not team.leads:
        return None
    assert split is not None, "the process that leads has the first stage"
    return translation_result(split, indices, decoded, search, time.perf_counter() - began)


def translation_result(
    split: PairSplit,
    indices: Sequence[int],
    decoded: Sequence[Sequence[int]],
    search: Search,
    seconds: float,
    examples: int = EXAMPLES,
) -> TranslationResult:
    """The scores of the pairs `indices`, decoded in `seconds` to the tokens `decoded`; `examples` of them, evenly
    spaced, are shown."""
    translations = shown(split, indices, decoded)
    found = scores(
        [row["source"] for row in translations],
        [row["reference"] for row in translations],
        [row["translation"] for row in translations],
    )
    return {
        "bleu": found.bleu,
        "chrf": found.chrf,
        "bleu_copy": found.bleu_copy,
        "chrf_copy": found.chrf_copy,
        "sentences": len(translations),
        "of": len(split),
        "beam": search.beam,
        "seconds": seconds,
        "bleu_signature": found.bleu_signature,
        "chrf_signature": found.chrf_signature,
        "examples": [translations[at] for at in choose(len(translations), examples)],
    }


def shown(split: PairSplit, indices: Sequence[int], decoded: Sequence[Sequence[int]]) -> list[Translation]:
    """The pairs `indices` as text, with what they were decoded to, in order."""
    groups = split.catalogue.groups
    assert groups is not None
    rows: list[Translation] = []
    for index, tokens in zip(indices, decoded, strict=True):
        source, reference = split.texts(index)
        rows.append(
            {
                "pair": split.languages[int(groups[index])],
                "source": source,
                "reference": reference,
                "translation": split.vocabulary.decode(tokens),
            }
        )
    return rows


def scores(sources: Sequence[str], references: Sequence[str], translations: Sequence[str]) -> Scores:
    """BLEU and chrF of all sentences (at least one) together, with sacreBLEU's defaults.

    BLEU counts up to four words in a row: where no reference has so many, it is 0 whatever the translations.
    """
    from sacrebleu.metrics import BLEU, CHRF

    assert len(sources) == len(references) == len(translations) > 0
    bleu, chrf = BLEU(force=True), CHRF()  # force: a line that looks tokenized is scored alike, without a warning
    bleu_found, bleu_copy, chrf_found, chrf_copy = (
        metric.corpus_score(list(texts), [list(references)]).score
        for metric in (bleu, chrf)
        for texts in (translations, sources)
    )
    return Scores(
        bleu=bleu_found,
        chrf=chrf_found,
        bleu_copy=bleu_copy,
        chrf_copy=chrf_copy,
        bleu_signature=str(bleu.get_signature()),
        chrf_signature=str(chrf.get_signature()),
    )
