"""How well the model translates (paper, Section 5 and Figure 3): sentences decoded without sight of their references.

BLEU is the paper's measure, chrF counts letters and suits names and short sentences better. Both come from sacreBLEU,
whose signatures say exactly how, because BLEU scores of different tokenizations cannot be compared. Beside them is what
sources score that are taken for translations: between related languages, and for names, that is far from 0.
"""

from collections.abc import Callable, Sequence

from gpipe_cli.assembly.build import greatest_lengths
from gpipe_cli.config.settings import DecodeConfig, TrainConfig
from gpipe_cli.data.translation import PairSplit
from gpipe_cli.distributed.control_group import ControlGroup
from gpipe_cli.planner.step_schedule import mini_batch_samples
from gpipe_cli.training.data_feed import Reading
from gpipe_cli.training.engine import Engine
from gpipe_cli.training.events import Translation, TranslationScores
from gpipe_cli.training.translation.decode import Search, decode

EXAMPLES = 20  # translations in a result
WATCHED = DecodeConfig(1, 8, 0.0)  # a few sentences, greedily: at each evaluation of a training, for people to look at


def choose(samples: int, wanted: int) -> list[int]:
    """`wanted` of `samples` test sentences, evenly spaced from the first on; all of them if there are no more.

    >>> choose(10, 4)
    [0, 2, 5, 7]
    """
    wanted = min(samples, wanted)
    return [place * samples // wanted for place in range(wanted)]


def translate(
    config: TrainConfig,
    settings: DecodeConfig,
    engine: Engine,
    control: ControlGroup,
    test: Reading,
    on_decoded: Callable[[int, int], None] = lambda done, of: None,
) -> list[Translation]:
    """Some sentences of the test set, or all; none where there is nothing to translate, and in all processes but the
    first. Called in every process, inside `engine.evaluating`; `on_decoded` is called with how many sentences of how
    many are done.
    """
    if config.task != "translation" or config.dataset.name == "synthetic_text":
        return []
    samples, split, length = test.batches.samples, test.split, greatest_lengths(config)[-1]
    assert split is None or isinstance(split, PairSplit)
    # as many sentences share a mini-batch as a mini-batch of the longest has
    sentences = mini_batch_samples(config, (length,))
    search = Search(settings.beam, settings.length_penalty, sentences, config.micro_batches, length)
    indices = choose(samples, samples if settings.sentences is None else settings.sentences)
    decoded = decode(engine, control, search, split, indices, lambda done: on_decoded(done, len(indices)))
    return [] if split is None or not control.leads else shown(split, indices, decoded)


def score_translations(translations: Sequence[Translation], *, of: int, beam: int, seconds: float) -> TranslationScores:
    """The scores of translations (at least one) of a test set `of` so many pairs, with sacreBLEU's defaults.

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
        examples=tuple(translations[at] for at in choose(len(translations), EXAMPLES)),
    )


def shown(split: PairSplit, indices: Sequence[int], decoded: Sequence[Sequence[int]]) -> list[Translation]:
    """The pairs `indices` as text, with what they were decoded to, in order."""
    pairs, rows = split.pairs, []
    for index, tokens in zip(indices, decoded, strict=True):
        languages = pairs.languages[int(pairs.groups[index])]
        written = split.vocabulary.decode(tokens)
        rows.append(Translation(languages, pairs.sources[index], pairs.references[index], written))
    return rows
