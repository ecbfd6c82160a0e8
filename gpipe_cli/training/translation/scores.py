"""How well the model translates (paper, Section 5 and Figure 3): sentences decoded without sight of their references.

BLEU is the paper's measure, chrF counts letters and suits names and short sentences better. Both come from sacreBLEU,
whose signatures say exactly how, because BLEU scores of different tokenizations cannot be compared. Beside them is what
sources score that are taken for translations: between related languages, and for names, that is far from 0.
"""

import time
from collections.abc import Callable, Sequence

from gpipe_cli.assembly.build import greatest_lengths
from gpipe_cli.config.settings import DecodeConfig, TrainConfig
from gpipe_cli.data.translation import PairSplit
from gpipe_cli.distributed.control_group import ControlGroup
from gpipe_cli.training.data_feed import Reading
from gpipe_cli.training.engine import Engine
from gpipe_cli.training.events import Translation, TranslationScores
from gpipe_cli.training.translation.decode import Search, decode

EXAMPLES = 20  # translations in a result
WATCHED = 8  # sentences that are translated at each evaluation of a training, for people to look at


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
    control: ControlGroup,
    test: Reading,
    on_decoded: Callable[[int, int], None],
) -> TranslationScores | None:
    """The scores of `gpipe evaluate`; None where there is nothing to translate, and in all processes but the first.
    Called in every process, inside `engine.evaluating`; `on_decoded` is called with
    how many sentences of how many are done."""
    indices = _to_decode(config, test, settings.sentences)
    if not indices:
        return None
    search = Search(settings.beam, settings.length_penalty, _batch_sentences(config))
    split, limit = _pairs(test), _limit(config)
    return translate(
        engine,
        control,
        search,
        config.micro_batches,
        limit,
        split,
        indices,
        lambda done: on_decoded(done, len(indices)),
    )


def translated_examples(
    config: TrainConfig, engine: Engine, control: ControlGroup, test: Reading
) -> tuple[Translation, ...]:
    """A few sentences, the same at each evaluation, decoded greedily; none in all processes
    but the first. Called in every process, inside `engine.evaluating`."""
    indices = _to_decode(config, test, WATCHED)
    if not indices:
        return ()
    search = Search(1, 0.0, _batch_sentences(config))
    split = _pairs(test)
    decoded = decode(engine, control, search, config.micro_batches, _limit(config), split, indices)
    if not control.leads:
        return ()
    assert split is not None, "process 0 has the first stage"
    return tuple(shown(split, indices, decoded))


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
    control: ControlGroup,
    search: Search,
    micro_batches: int,
    limit: int,
    split: PairSplit | None,
    indices: Sequence[int],
    on_decoded: Callable[[int], None] = lambda done: None,
) -> TranslationScores | None:
    """Decode the pairs `indices` (at least one) and score them; None in all processes but the first.

    Called as `decode` is, and raises as it does.
    """
    began = time.perf_counter()
    decoded = decode(engine, control, search, micro_batches, limit, split, indices, on_decoded)
    if not control.leads:
        return None
    assert split is not None, "process 0 has the first stage"
    seconds = time.perf_counter() - began
    return score_translations(shown(split, indices, decoded), of=len(split), beam=search.beam, seconds=seconds)


def score_translations(
    translations: Sequence[Translation], *, of: int, beam: int, seconds: float, examples: int = EXAMPLES
) -> TranslationScores:
    """The scores of translations (at least one) of a test set `of` so many pairs, with sacreBLEU's defaults; `examples`
    of them, evenly spaced, are kept.

    BLEU counts up to four words in a row: where no reference has so many, it is 0 whatever the translations.
    """
    from sacrebleu.metrics import BLEU, CHRF

    references = [row.reference for row in translations]
    bleu, chrf = BLEU(force=True), CHRF()  # force: a line that looks tokenized is scored alike, without a warning

    def score(metric: BLEU | CHRF, texts: list[str]) -> float:
        return float(metric.corpus_score(texts, [references]).score)

    written, copied = [row.translation for row in translations], [row.source for row in translations]
    return TranslationScores(
        bleu=score(bleu, written),
        chrf=score(chrf, written),
        bleu_copy=score(bleu, copied),
        chrf_copy=score(chrf, copied),
        sentences=len(translations),
        of=of,
        beam=beam,
        seconds=seconds,
        bleu_signature=str(bleu.get_signature()),
        chrf_signature=str(chrf.get_signature()),
        examples=tuple(translations[at] for at in choose(len(translations), examples)),
    )


def shown(split: PairSplit, indices: Sequence[int], decoded: Sequence[Sequence[int]]) -> list[Translation]:
    """The pairs `indices` as text, with what they were decoded to, in order."""
    pairs, rows = split.pairs, []
    for index, tokens in zip(indices, decoded, strict=True):
        languages = pairs.languages[int(pairs.groups[index])]
        written = split.vocabulary.decode(tokens)
        rows.append(Translation(languages, pairs.sources[index], pairs.references[index], written))
    return rows
