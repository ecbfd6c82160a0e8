"""Translating sentences (paper, Section 5 and Figure 3), by greedy and beam search, and how well that was done.

The paper reports BLEU and does not say how it decoded; beam search with a length penalty is its group's way (Wu et al.
2016, Section 7). Each step is one mini-batch for the executor that trains and evaluates: the model runs forward over
every hypothesis that may still grow, and the last stage says which tokens could follow. Keys and values of earlier
tokens are not kept, as that would be a second way to run a model, for sentences that are short. Every process keeps the
same hypotheses: the logits, which only the last stage has, are gathered once a step.

BLEU is the paper's measure, chrF counts letters and suits names and short sentences better. Both come from sacreBLEU,
whose signatures say exactly how, because BLEU scores of different tokenizations cannot be compared. Beside them is what
sources score that are taken for translations: between related languages, and for names, that is far from 0.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from gpipe_cli.assembly.build import greatest_lengths
from gpipe_cli.config.settings import DecodeConfig
from gpipe_cli.data.corpora import target_language
from gpipe_cli.data.micro_batches import share_of
from gpipe_cli.data.translation import PairSplit
from gpipe_cli.data.vocabulary import BEGIN, END, PAD, UNKNOWN
from gpipe_cli.distributed.control_group import Awaited
from gpipe_cli.pipeline.runtime.boundary import Tensors
from gpipe_cli.pipeline.schedule.named_schedules import forward_only
from gpipe_cli.planner.step_schedule import mini_batch_samples
from gpipe_cli.training.data_feed import Reading
from gpipe_cli.training.engine import Engine
from gpipe_cli.training.events import Translation, TranslationScores

EXAMPLES = 20  # translations in a result
WATCHED = DecodeConfig(1, 8, 0.0)  # a few sentences, greedily: at each evaluation of a training, for people to look at


@dataclass(frozen=True)
class Search:
    """How to decode: `beam` hypotheses of a sentence grow at a time, 1 is greedy; `batch_sentences` sentences share a
    mini-batch, which is cut into `micro_batches`.

    A translation has at most min(limit, 2 * source + 10) tokens, the end included, where `source` counts all of the
    source's tokens. Of what has ended, the best one by log-probability / ((5 + length) / 6) ** length_penalty is taken,
    where the length counts the end (Wu et al. 2016, equation 14, without their penalty for coverage). 0 compares
    log-probabilities, more favours long ones.
    """

    beam: int
    length_penalty: float
    batch_sentences: int
    micro_batches: int
    limit: int


@dataclass(frozen=True)
class Hypothesis:
    """The beginning of a translation: tokens without begin and end, and its log-probability."""

    tokens: tuple[int, ...]
    score: float


class Beam:
    """The search for the translation of one sentence, of `most` tokens at most, the end included.

    Candidates rank by log-probability, equal ones by their hypothesis and then
    their token, the lower first. Of the first `beam` candidates those that end have ended, and the first `beam` others
    grow on. It is over once `beam` have ended, once nothing that grows can come to beat the best that has ended, or
    after `most` tokens. With a beam of 1 all this is the greedy search.
    """

    def __init__(self, search: Search, most: int) -> None:
        self.growing = [Hypothesis((), 0.0)]  # all of the same length, the best first
        self._search, self._most = search, most
        self._length, self._ended = 0, 0
        self._best: tuple[float, tuple[int, ...]] | None = None  # score by its length, tokens

    @property
    def over(self) -> bool:
        """Whether the translation is settled."""
        if not self.growing or self._ended >= self._search.beam or self._length == self._most:
            return True
        if self._best is None:
            return False
        # A log-probability only falls. What divides it only grows with the length, or only shrinks (negative penalty):
        # the highest score within reach is that of ending at once or as late as possible.
        ahead = self.growing[0].score
        return self._best[0] >= max(self._by_length(ahead, self._length + 1), self._by_length(ahead, self._most))

    def advance(self, candidates: Sequence[Sequence[tuple[float, float]]]) -> None:
        """One token more. `candidates[h]` are (token, log-probability) of what may follow `growing[h]`: the end, and
        the `beam` most probable others (all, if there are fewer); minus infinity and NaN make no candidate."""
        ranked = sorted(
            (-(hypothesis.score + score), rank, int(token))
            for rank, (hypothesis, row) in enumerate(zip(self.growing, candidates, strict=True))
            for token, score in row
            if score > -math.inf  # false for NaN, too
        )
        self._length += 1
        grown: list[Hypothesis] = []
        for place, (cost, rank, token) in enumerate(ranked):
            tokens = self.growing[rank].tokens
            if token != END:
                if len(grown) < self._search.beam:
                    grown.append(Hypothesis((*tokens, token), -cost))
            elif place < self._search.beam:
                self._ended += 1
                score = self._by_length(-cost, self._length)
                if self._best is None or score > self._best[0]:
                    self._best = score, tokens
        self.growing = grown

    def translation(self) -> list[int]:
        """The best that has ended. If none has, the most probable that was cut off; nothing if no token could follow,
        as when the model returns no numbers."""
        if self._best is not None:
            return list(self._best[1])
        return list(self.growing[0].tokens) if self.growing else []

    def _by_length(self, score: float, length: int) -> float:
        return score / ((5 + length) / 6) ** self._search.length_penalty


class Candidates:
    """What the last stage makes of the logits (n, T, vocabulary): the end and `wanted` tokens that could follow each
    row.

    Only the last position counts, and of the tokens those below `vocabulary`: a model may be made for more than its
    text has. `forbidden` tokens (int64, where the logits are) have a log-probability of minus infinity; of equally
    probable tokens the lower come first.
    """

    def __init__(self, forbidden: torch.Tensor, wanted: int, vocabulary: int) -> None:
        self._forbidden, self._wanted, self._vocabulary = forbidden, wanted, vocabulary
        self._found: list[torch.Tensor] = []

    def loss(self, micro_batch: int, outputs: Tensors) -> torch.Tensor:
        """There is nothing to compare with."""
        return outputs[0].new_zeros(())

    def observe(self, micro_batch: int, outputs: Tensors, loss: torch.Tensor) -> None:
        assert micro_batch == len(self._found), "micro-batches come in order"
        logits = outputs[0][:, -1, : self._vocabulary].float()
        scores = logits.log_softmax(dim=1).index_fill_(1, self._forbidden, -math.inf)
        tokens, values = [torch.full_like(scores[:, END], END, dtype=torch.int64)], [scores[:, END].clone()]
        scores[:, END] = -math.inf
        for _ in range(self._wanted):
            # not topk: which of equal values it finds is not defined, and max finds the first
            value, token = scores.max(dim=1)
            tokens.append(token)
            values.append(value)
            scores.scatter_(1, token[:, None], -math.inf)
        # stays on the device: reading it here would make the pipeline wait for this micro-batch
        self._found.append(torch.stack([torch.stack(tokens, dim=1).double(), torch.stack(values, dim=1).double()], -1))

    def table(self) -> torch.Tensor:
        """float64 (rows, 1 + wanted, 2) on the CPU: token and log-probability, the end first."""
        return torch.cat(self._found).cpu()


def decode(
    engine: Engine,
    search: Search,
    split: PairSplit | None,
    indices: Sequence[int],
    on_decoded: Callable[[int], None] = lambda done: None,
) -> list[list[int]]:
    """The translations of the pairs `indices`, in that order and the same in every process: tokens without begin and
    end.

    Called in every process of the run, inside `engine.evaluating`; `on_decoded` is called with how many sentences are
    done. `split` is needed where the first or the last stage lives. Raises as the executor does.
    """
    if not indices:
        return []
    control, counts, forbidden = engine.control, None, None
    if engine.has_first:
        assert split is not None
        counts = split.sources.lengths[list(indices)].tolist(), split.vocabulary.size
    lengths, vocabulary = next(one for one in control.collect(counts) if one is not None)
    wanted = min(search.beam, vocabulary)
    if engine.has_last:
        assert split is not None
        # text is never unknown: the vocabulary spells in bytes what it has no piece for
        languages = {split.vocabulary.symbol(f"<2{target_language(name)}>") for name in split.pairs.languages}
        forbidden = torch.tensor([PAD, BEGIN, UNKNOWN, *sorted(languages)], device=engine.last_device)
    # sentences of similar lengths need little padding; the longest come first, so that memory runs out soon or never
    order = sorted(range(len(indices)), key=lambda at: -lengths[at])
    translations: list[list[int]] = [[] for _ in indices]
    for start in range(0, len(order), search.batch_sentences):
        chosen = order[start : start + search.batch_sentences]
        sources = None
        if engine.has_first:
            assert split is not None
            where = torch.tensor([indices[at] for at in chosen])
            sources = split.sources.padded(where, lengths[chosen[0]], PAD).to(engine.first_device)
        beams = [Beam(search, min(search.limit, 2 * lengths[at] + 10)) for at in chosen]
        while growing := [at for at, beam in enumerate(beams) if not beam.over]:
            objective = None if forbidden is None else Candidates(forbidden, wanted, vocabulary)
            rows = [(at, hypothesis.tokens) for at in growing for hypothesis in beams[at].growing]
            longest = lengths[chosen[growing[0]]]
            replica = engine.spec.layout.replica_of(control.rank)
            share = share_of(len(rows), search.micro_batches, engine.spec.layout.replicas, replica)
            own, inputs = rows[share.samples], None
            if sources is not None and own:
                where = torch.tensor([at for at, _ in own], device=sources.device)
                so_far = torch.tensor([[BEGIN, *tokens] for _, tokens in own], device=sources.device)
                inputs = sources[where, :longest].contiguous(), so_far
            schedule = forward_only(engine.spec.partitions, len(share.sizes))
            engine.executor.run(schedule, 0, share.sizes, inputs, objective, (longest, 1 + len(rows[0][1])))
            shape = len(rows), 1 + wanted, 2
            known = torch.zeros(shape, dtype=torch.float64)
            if objective is not None and own:
                with control.waits(Awaited.PROCESS):  # a GPU that waits for another process holds up this one here
                    known[share.samples] = objective.table()
            # of each row one process has seen the logits, and the others say 0
            found = iter(torch.stack(control.gather(known.flatten())()).sum(dim=0).view(shape).tolist())
            for at in growing:
                beams[at].advance([next(found) for _ in beams[at].growing])
        for at, beam in zip(chosen, beams, strict=True):
            translations[at] = beam.translation()
        on_decoded(start + len(chosen))
    return translations


def choose(samples: int, wanted: int) -> list[int]:
    """`wanted` of `samples` test sentences, evenly spaced from the first on; all of them if there are no more.

    >>> choose(10, 4)
    [0, 2, 5, 7]
    """
    wanted = min(samples, wanted)
    return [place * samples // wanted for place in range(wanted)]


def translate(
    engine: Engine,
    settings: DecodeConfig,
    test: Reading,
    on_decoded: Callable[[int, int], None] = lambda done, of: None,
) -> list[Translation]:
    """Some sentences of the test set, or all; none where there is nothing to translate, and in all processes but the
    first. Called in every process, inside `engine.evaluating`; `on_decoded` is called with how many sentences of how
    many are done.
    """
    config = engine.config
    if config.task != "translation" or config.dataset.name == "synthetic_text":
        return []
    samples, split, length = test.batches.catalogue.samples, test.split, greatest_lengths(config)[-1]
    assert split is None or isinstance(split, PairSplit)
    # as many sentences share a mini-batch as a mini-batch of the longest has
    sentences = mini_batch_samples(config, (length,))
    search = Search(settings.beam, settings.length_penalty, sentences, config.micro_batches, length)
    indices = choose(samples, samples if settings.sentences is None else settings.sentences)
    decoded = decode(engine, search, split, indices, lambda done: on_decoded(done, len(indices)))
    return [] if split is None or not engine.control.leads else shown(split, indices, decoded)


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
