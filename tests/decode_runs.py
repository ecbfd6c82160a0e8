"""Tiny translation models with the weights that they begin with, pairs for them, and three ways to decode.

The vocabulary has eight ids: the four special ones, the language, and the pieces of words written with a and b. With so
few, every possible translation can be looked at.
"""

import io
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

import torch
from torch import nn
from training_runs import configure, spec_of

from gpipe_cli.config.settings import TrainConfig
from gpipe_cli.data.corpora import Pairs
from gpipe_cli.data.translation import PairSplit, RaggedTokens
from gpipe_cli.data.vocabulary import BEGIN, END, PAD, UNKNOWN, SentencePieceTokenizer
from gpipe_cli.distributed.control_group import ControlGroup
from gpipe_cli.pipeline.runtime.executor import OnAction, ignore_action
from gpipe_cli.planner.pipeline_spec import PipelineSpec
from gpipe_cli.training.engine import Engine, build_engine
from gpipe_cli.training.translation import DecodingOptions, decode

LANGUAGE = UNKNOWN + 1
FORBIDDEN = (PAD, BEGIN, UNKNOWN, LANGUAGE)
PIECES = (5, 6, 7)
LAYERS = 7  # of the model below, with one embedding for both languages
SOURCES = ("ab", "b", "bbab ab", "a b a", "aa", "ba", "bb ab ba b", "a", "abba", "b b", "aab", "baa a")


@dataclass(frozen=True)
class Case:
    """What to decode, and how."""

    beam: int = 1
    length_penalty: float = 0.6
    batch_sentences: int = 64
    micro_batches: int = 2
    partitions: int = 1
    limit: int = 12
    seed: int = 0
    indices: tuple[int, ...] = tuple(range(len(SOURCES)))

    @property
    def search(self) -> DecodingOptions:
        return DecodingOptions(self.beam, self.length_penalty, self.batch_sentences, self.micro_batches, self.limit)


@lru_cache
def tiny_vocabulary() -> SentencePieceTokenizer:
    from sentencepiece import SentencePieceTrainer

    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(["ab a", "b ba"]),
        model_writer=model,
        vocab_size=8,
        model_type="char",
        pad_id=PAD,
        bos_id=BEGIN,
        eos_id=END,
        unk_id=UNKNOWN,
        control_symbols=["<2en>"],
        normalization_rule_name="identity",
        num_threads=1,
        minloglevel=2,
    )
    vocabulary = SentencePieceTokenizer(model.getvalue())
    assert (vocabulary.size, vocabulary.symbol("<2en>")) == (8, LANGUAGE)
    return vocabulary


@lru_cache
def tiny_split() -> PairSplit:
    """SOURCES in some language, to English; the references are never looked at."""
    vocabulary = tiny_vocabulary()
    tokens = [[LANGUAGE, *ids, END] for ids in vocabulary.encode(SOURCES)]
    pairs = Pairs(SOURCES, SOURCES, torch.zeros(len(SOURCES), dtype=torch.int32), ("xx-en",))
    return PairSplit(pairs, RaggedTokens.of(tokens), RaggedTokens.of([row[1:] for row in tokens]), vocabulary)


@lru_cache
def plan(partitions: int, seed: int) -> tuple[TrainConfig, PipelineSpec]:
    """What the parent of a run decides."""
    config = configure(
        "model=transformer_nmt", "dataset=parallel_text", "dataset.root=nowhere", "dataset.vocabulary=8",
        "model.layers=2", "model.width=16", "model.hidden=32", "model.heads=2", "model.head_width=8", "model.length=40",
        f"partitions={partitions}", "executor=in_process",
        f"seed={seed}", "ema_decay=0", "device=cpu", "threads=1",
    )  # fmt: skip
    return config, spec_of(config)


def engine_of(planned: tuple[TrainConfig, PipelineSpec], on_action: OnAction = ignore_action) -> Engine:
    """All stages, with the weights they begin with, but larger."""
    config, spec = planned
    engine = build_engine(config, spec, ControlGroup(0, 1), on_action=on_action)
    with torch.no_grad():  # opinions strong enough that translations depend on their sources, and most of them end
        for parameters in engine.parameters.values():
            for name, parameter in parameters.items():
                if parameter.dim() == 2 and "embedding" not in name:
                    parameter *= 2
    return engine


def decode_here(case: Case, bias: Mapping[int, float] = MappingProxyType({})) -> list[list[int]]:
    """Decode in this process, all stages of it, with these values in the bias of the logits."""
    engine = engine_of(plan(case.partitions, case.seed))
    with torch.no_grad():
        for token, value in bias.items():
            engine.parameters[case.partitions - 1]["softmax.logits.bias"][token] = value
    with engine.evaluation_mode(averages=False):
        return decode(engine, case.search, tiny_split(), case.indices)


@lru_cache
def _whole_model(seed: int) -> nn.Sequential:
    return engine_of(plan(1, seed)).stages[0].module.eval()


@lru_cache(100_000)
def log_probabilities(seed: int, index: int, tokens: tuple[int, ...]) -> tuple[float, ...]:
    """Of every token, to follow `tokens` in the translation of pair `index`; minus infinity where it must not. The
    model is run as one module, on this sentence alone."""
    with torch.no_grad():
        inputs = torch.tensor([source_tokens(index)]), torch.tensor([[BEGIN, *tokens]])
        scores = _whole_model(seed)(inputs)[0, -1].log_softmax(dim=0).tolist()
    return tuple(-math.inf if token in FORBIDDEN else score for token, score in enumerate(scores))


def source_tokens(index: int) -> list[int]:
    sources = tiny_split().sources
    return sources.pad(torch.tensor([index]), int(sources.lengths[index]), PAD)[0].tolist()


def by_length(score: float, length: int, penalty: float) -> float:
    """Wu et al. 2016, equation 14, without the coverage penalty."""
    return score / ((5 + length) ** penalty / (5 + 1) ** penalty)


def max_tokens(case: Case, index: int) -> int:
    return min(case.limit, 2 * len(source_tokens(index)) + 10)


def patient(case: Case, index: int) -> list[int]:
    """Beam search sentence by sentence, that stops for nothing but enough endings and the limit; of 1 it is greedy."""
    growing: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    ended: list[tuple[float, tuple[int, ...]]] = []
    for length in range(1, max_tokens(case, index) + 1):
        ranked = sorted(
            (-(score + value), rank, token)
            for rank, (score, tokens) in enumerate(growing)
            for token, value in enumerate(log_probabilities(case.seed, index, tokens))
        )
        ended += [
            (by_length(-cost, length, case.length_penalty), growing[rank][1])
            for cost, rank, token in ranked[: case.beam]
            if token == END
        ]
        rest = [(-cost, (*growing[rank][1], token)) for cost, rank, token in ranked if token != END and cost < math.inf]
        growing = rest[: case.beam]
        if len(ended) >= case.beam:
            break
    return list(max(ended, key=lambda found: found[0])[1] if ended else growing[0][1])
