"""Translating sentences (paper, Section 5 and Figure 3) by greedy and beam search, and scoring the translations.

The paper reports BLEU and does not say how it decoded; beam search with a length penalty follows its group (Wu et al.
2016, Section 7). Each decoding step is a mini-batch of the executor that trains and evaluates: the model runs forward
over every growing hypothesis, and the last stage finds the tokens that may follow. Keys and values of earlier tokens
are not cached: that would be a second way to run a model, and sentences are short. Every process has the same
hypotheses: the candidates, which only the last stage knows, are gathered once per decoding step.

BLEU is the paper's metric, which it plots by language; chrF counts characters and suits names and short sentences
better. Both are sacreBLEU's, with its signatures, because BLEU scores of different tokenizations cannot be compared.
Each target language has the tokenizer that sacreBLEU recommends for it. The sources are also scored as if they were
translations: between related languages, and for names, these scores are far from 0.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from gpipe_cli.assembly.build import max_lengths
from gpipe_cli.config.settings import DecodeConfig
from gpipe_cli.data.corpora import target_language
from gpipe_cli.data.micro_batches import shard_of
from gpipe_cli.data.translation import PairSplit
from gpipe_cli.data.vocabulary import BEGIN, END, PAD, UNKNOWN
from gpipe_cli.distributed.control_group import BlockedOn
from gpipe_cli.pipeline.runtime.boundary import Tensors
from gpipe_cli.planner.step_schedule import mini_batch_samples
from gpipe_cli.schedule.named_schedules import forward_only
from gpipe_cli.training.data_feed import SplitReader
from gpipe_cli.training.engine import Engine
from gpipe_cli.training.events import PairScores, Translation, TranslationScores

if TYPE_CHECKING:
    from sacrebleu.metrics import BLEU

MAX_EXAMPLES = 20  # translations shown in a result
# eight sentences, greedily, at each evaluation of a training: for people to read
PREVIEW_DECODING = DecodeConfig(1, 8, 0.0)


@dataclass(frozen=True)
class DecodingOptions:
    """How to decode: `beam` hypotheses of a sentence grow at a time (1: greedy); `batch_sentences` sentences share a
    mini-batch, which is cut into `micro_batches`.

    A translation has at most min(limit, 2 * source + 10) tokens, the end included, where `source` counts all tokens of
    the source. The best finished hypothesis has the greatest log-probability / ((5 + length) / 6) ** length_penalty,
    where `length` includes the end (Wu et al. 2016, equation 14, without their coverage penalty). With length_penalty 0
    log-probabilities are compared; greater values favour long translations.
    """

    beam: int
    length_penalty: float
    batch_sentences: int
    micro_batches: int
    limit: int


class Hypothesis(NamedTuple):
    """The beginning of a translation: its tokens without begin and end, and its log-probability (`score`)."""

    tokens: tuple[int, ...]
    score: float


class Beam:
    """The search for the translation of a sentence, of at most `max_tokens` tokens, the end included.

    Candidates are ranked by log-probability; ties by hypothesis, then by token, the lower first. Candidates with the
    end token are finished if they are among the first `beam`; the first `beam` without it grow on. The search is over
    once `beam` hypotheses are finished, once no growing hypothesis can beat the best finished, or after `max_tokens`
    tokens.
    """

    def __init__(self, options: DecodingOptions, max_tokens: int) -> None:
        self.growing = [Hypothesis((), 0.0)]  # all of the same length, the best first
        self._options, self._max_tokens = options, max_tokens
        self._length, self._finished_count = 0, 0
        self._best: tuple[float, tuple[int, ...]] | None = None  # of the finished: score by length, tokens

    @property
    def is_final(self) -> bool:
        """Whether the translation is final."""
        if not self.growing or self._finished_count >= self._options.beam or self._length == self._max_tokens:
            return True
        if self._best is None:
            return False
        # A log-probability only falls, and its divisor only grows with the length, or only shrinks (negative penalty):
        # the greatest score within reach is reached by ending now or as late as possible.
        best_score = self.growing[0].score
        return self._best[0] >= max(
            self._by_length(best_score, self._length + 1), self._by_length(best_score, self._max_tokens)
        )

    def advance(self, candidates: Sequence[Sequence[tuple[float, float]]]) -> None:
        """Add a token. `candidates[h]` are the (token, log-probability) that may follow `growing[h]`: the end, and the
        `beam` most probable others (all, if there are fewer); minus infinity and NaN are ignored."""
        ranked = sorted(
            (-(hypothesis.score + score), rank, int(token))
            for rank, (hypothesis, row) in enumerate(zip(self.growing, candidates, strict=True))
            for token, score in row
            if score > -math.inf  # also false for NaN
        )
        self._length += 1
        grown: list[Hypothesis] = []
        for place, (cost, rank, token) in enumerate(ranked):
            tokens = self.growing[rank].tokens
            if token != END:
                if len(grown) < self._options.beam:
                    grown.append(Hypothesis((*tokens, token), -cost))
            elif place < self._options.beam:
                self._finished_count += 1
                score = self._by_length(-cost, self._length)
                if self._best is None or score > self._best[0]:
                    self._best = score, tokens
        self.growing = grown

    def translation(self) -> list[int]:
        """The best finished hypothesis, else the most probable that was cut off; empty if no token could follow,
        as when the model returns NaN."""
        if self._best is not None:
            return list(self._best[1])
        return list(self.growing[0].tokens) if self.growing else []

    def _by_length(self, score: float, length: int) -> float:
        return score / ((5 + length) / 6) ** self._options.length_penalty


class Candidates:
    """The objective of decoding: from logits (n, T, outputs), the end and the `wanted` best tokens to follow each row.

    Only logits of the last position and of tokens below `vocabulary` are used: a model may have more outputs than its
    text has tokens. `forbidden` tokens (int64, on the logits' device) get log-probability minus infinity; of equally
    probable tokens the lower comes first.
    """

    def __init__(self, forbidden: torch.Tensor, wanted: int, vocabulary: int) -> None:
        self._forbidden, self._wanted, self._vocabulary = forbidden, wanted, vocabulary
        self._tables: list[torch.Tensor] = []  # of each micro-batch

    def loss(self, micro_batch: int, outputs: Tensors) -> torch.Tensor:
        """Zero: there are no targets."""
        return outputs[0].new_zeros(())

    def observe(self, micro_batch: int, outputs: Tensors, loss: torch.Tensor) -> None:
        assert micro_batch == len(self._tables), "micro-batches come in order"
        logits = outputs[0][:, -1, : self._vocabulary].float()
        scores = logits.log_softmax(dim=1).index_fill_(1, self._forbidden, -math.inf)
        tokens = [torch.full_like(scores[:, END], END, dtype=torch.int64)]
        values = [scores[:, END].clone()]
        scores[:, END] = -math.inf
        for _ in range(self._wanted):
            # max returns the first of equal values; topk does not define their order
            value, token = scores.max(dim=1)
            tokens.append(token)
            values.append(value)
            scores.scatter_(1, token[:, None], -math.inf)
        # stays on the device: reading it here would make the pipeline wait for this micro-batch
        columns = [torch.stack(tokens, dim=1).double(), torch.stack(values, dim=1).double()]
        self._tables.append(torch.stack(columns, dim=-1))

    def table(self) -> torch.Tensor:
        """float64 (rows, 1 + wanted, 2) on the CPU: tokens and their log-probabilities, the end first."""
        return torch.cat(self._tables).cpu()


def decode(
    engine: Engine,
    options: DecodingOptions,
    split: PairSplit | None,
    indices: Sequence[int],
    on_decoded: Callable[[int], None] = lambda done: None,
) -> list[list[int]]:
    """The translations of the pairs `indices`, in that order: tokens without begin and end, the same in every process.

    Call it in every process of the run, within `engine.evaluation_mode`; `split` is needed with the first or the last
    stage. `on_decoded` gets the number of sentences done so far. Raises the executor's errors.
    """
    if not indices:
        return []
    control = engine.control
    counts = forbidden = None
    if split is not None and engine.has_first:
        counts = split.sources.lengths[list(indices)].tolist(), split.vocabulary.size
    lengths, vocabulary = next(received for received in control.collect(counts) if received is not None)
    wanted = min(options.beam, vocabulary)
    if split is not None and engine.has_last:
        # UNKNOWN is never right: the vocabulary spells in bytes what it has no piece for
        languages = {split.vocabulary.symbol(f"<2{target_language(name)}>") for name in split.pairs.languages}
        forbidden = torch.tensor([PAD, BEGIN, UNKNOWN, *sorted(languages)], device=engine.last_device)
    # sentences of similar lengths need little padding; the longest come first, so that memory runs out early or never
    order = sorted(range(len(indices)), key=lambda at: -lengths[at])
    translations: list[list[int]] = [[] for _ in indices]
    for start in range(0, len(order), options.batch_sentences):
        chosen = order[start : start + options.batch_sentences]
        sources = None
        if split is not None and engine.has_first:
            where = torch.tensor([indices[at] for at in chosen])
            sources = split.sources.pad(where, lengths[chosen[0]], PAD).to(engine.first_device)
        beams = [Beam(options, min(options.limit, 2 * lengths[at] + 10)) for at in chosen]
        while growing := [at for at, beam in enumerate(beams) if not beam.is_final]:
            objective = None if forbidden is None else Candidates(forbidden, wanted, vocabulary)
            rows = [(at, hypothesis.tokens) for at in growing for hypothesis in beams[at].growing]
            longest = lengths[chosen[growing[0]]]
            replica = engine.spec.layout.replica_of(control.rank)
            shard = shard_of(len(rows), options.micro_batches, engine.spec.layout.replicas, replica)
            shard_rows = rows[shard.samples]
            inputs = None
            if sources is not None and shard_rows:
                where = torch.tensor([at for at, _ in shard_rows], device=sources.device)
                so_far = torch.tensor([[BEGIN, *tokens] for _, tokens in shard_rows], device=sources.device)
                inputs = sources[where, :longest].contiguous(), so_far
            schedule = forward_only(engine.spec.partitions, len(shard.sizes))
            engine.executor.run(schedule, 0, shard.sizes, inputs, objective, (longest, 1 + len(rows[0][1])))
            shape = len(rows), 1 + wanted, 2
            table = torch.zeros(shape, dtype=torch.float64)
            if objective is not None and shard_rows:
                # reading from a GPU blocks while it waits for another process
                with control.blocked_on(BlockedOn.PROCESS):
                    table[shard.samples] = objective.table()
            # a single process has the candidates of a row, and all others have 0
            candidates = iter(torch.stack(control.gather(table.flatten())()).sum(dim=0).view(shape).tolist())
            for at in growing:
                beams[at].advance([next(candidates) for _ in beams[at].growing])
        for at, beam in zip(chosen, beams, strict=True):
            translations[at] = beam.translation()
        on_decoded(start + len(chosen))
    return translations


def pick_evenly(samples: int, wanted: int) -> list[int]:
    """The indices of `wanted` of `samples` sentences, evenly spaced from the first; all, if there are fewer.

    >>> pick_evenly(10, 4)
    [0, 2, 5, 7]
    """
    wanted = min(samples, wanted)
    return [place * samples // wanted for place in range(wanted)]


def translate(
    engine: Engine,
    settings: DecodeConfig,
    test: SplitReader,
    on_decoded: Callable[[int, int], None] = lambda done, total: None,
) -> list[Translation]:
    """Translate `settings.sentences` sentences of the test set (None: all). Returns [] in all processes but the first,
    and where there is nothing to translate. Call it in every process, within `engine.evaluation_mode`; `on_decoded`
    gets the number of sentences done and their total."""
    config = engine.config
    if config.task != "translation" or config.dataset.name == "synthetic_text":
        return []
    samples, split = test.batches.split_index.samples, test.split
    length = max_lengths(config)[-1]
    assert split is None or isinstance(split, PairSplit)
    # a mini-batch has as many hypotheses as a mini-batch of the longest sentences has samples in training
    sentences = max(1, mini_batch_samples(config, (length,)) // settings.beam)
    options = DecodingOptions(settings.beam, settings.length_penalty, sentences, config.micro_batches, length)
    indices = pick_evenly(samples, samples if settings.sentences is None else settings.sentences)
    decoded = decode(engine, options, split, indices, lambda done: on_decoded(done, len(indices)))
    return [] if split is None or not engine.control.is_rank_zero else to_translations(split, indices, decoded)


def score_translations(translations: Sequence[Translation], *, of: int, beam: int, seconds: float) -> TranslationScores:
    """The scores of `translations` (not empty) of a test set of `of` pairs, decoded in `seconds`; sacreBLEU's defaults,
    with a tokenizer for each target language.

    BLEU counts n-grams of up to four words: if no reference has four words, it is 0 whatever the translations.
    """
    from sacrebleu.metrics import BLEU, CHRF

    bleus = {language: _bleu_metric(language) for language in {target_language(row.pair) for row in translations}}
    whole, chrf = BLEU(tokenize="none", force=True), CHRF()

    def score(metric: BLEU | CHRF, texts: Sequence[str], references: Sequence[str]) -> float:
        return float(metric.corpus_score(texts, [references]).score)

    def tokenize(texts: Sequence[str]) -> list[str]:
        rows = zip(translations, texts, strict=True)
        return [bleus[target_language(row.pair)].tokenizer(text.rstrip()) for row, text in rows]

    def score_pair(pair: str) -> PairScores:
        rows = [row for row in translations if row.pair == pair]
        texts = [row.translation for row in rows], [row.reference for row in rows]
        bleu = bleus[target_language(pair)]
        scores = score(bleu, *texts), score(chrf, *texts)  # before the signature, which counts the references
        return PairScores(pair, len(rows), *scores, str(bleu.get_signature()))

    written, copied = [row.translation for row in translations], [row.source for row in translations]
    references = [row.reference for row in translations]
    tokenizers = sorted({bleu.tokenizer.signature() for bleu in bleus.values()})
    return TranslationScores(
        bleu=score(whole, tokenize(written), tokenize(references)),
        chrf=score(chrf, written, references),
        bleu_copy=score(whole, tokenize(copied), tokenize(references)),
        chrf_copy=score(chrf, copied, references),
        sentences=len(translations),
        of=of,
        beam=beam,
        seconds=seconds,
        bleu_signature=str(whole.get_signature()).replace("tok:none", f"tok:{','.join(tokenizers)}"),
        chrf_signature=str(chrf.get_signature()),
        examples=tuple(translations[at] for at in pick_evenly(len(translations), MAX_EXAMPLES)),
        pairs=tuple(score_pair(pair) for pair in sorted({row.pair for row in translations})),
    )


def _bleu_metric(language: str) -> "BLEU":
    """BLEU with the tokenizer that sacreBLEU recommends for a language, such as `zh_Hant`; with characters instead of
    words for Japanese and Korean if MeCab, which finds their words, is not installed with its dictionary."""
    from sacrebleu.metrics import BLEU

    try:  # force: no warning about lines that look tokenized
        return BLEU(trg_lang=language.partition("_")[0], force=True)
    except (RuntimeError, AssertionError):  # sacreBLEU's, for no MeCab, and for another dictionary
        return BLEU(tokenize="char", force=True)


def to_translations(split: PairSplit, indices: Sequence[int], decoded: Sequence[Sequence[int]]) -> list[Translation]:
    """The pairs `indices` as text, with their translations `decoded`, in order."""
    pairs = split.pairs
    rows = []
    for index, tokens in zip(indices, decoded, strict=True):
        languages = pairs.languages[int(pairs.groups[index])]
        written = split.vocabulary.decode(tokens)
        rows.append(Translation(languages, pairs.sources[index], pairs.references[index], written))
    return rows
