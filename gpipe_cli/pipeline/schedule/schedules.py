"""The schedule of one training step as data (section 2.2 and Figure 2(c) of the paper).

Everything that runs, predicts, checks or draws a step reads the value built here; none of it knows where the order
came from. A schedule says, for each stage, which actions it performs and in which order. ``2F0`` is the forward of
micro-batch 0 on stage 2. GPipe with K = 3 partitions and M = 4 micro-batches, without recomputation, on a unit clock:

    stage 0 | F0 F1 F2 F3 .  .  .  .  B3 B2 B1 B0
    stage 1 | .  F0 F1 F2 F3 .  .  B3 B2 B1 B0
    stage 2 | .  .  F0 F1 F2 F3 B3 B2 B1 B0

Communication is not written down, it follows: an ``F`` receives from the stage before and sends to the one after, a
``B`` the other way round. Whether a forward keeps its activations follows too: it does unless there is an ``R``.
"""

from collections.abc import Iterator, Sequence
from enum import StrEnum
from functools import lru_cache
from itertools import chain, pairwise
from typing import NamedTuple

SCHEDULES = ("gpipe", "1f1b")
RECOMPUTE = ("always", "except_last", "never")


class Kind(StrEnum):
    """What an action does; the letter is how it is written."""

    F = "F"  # forward
    R = "R"  # recompute: the forward once more, to get its activations back
    B = "B"  # backward

    __hash__ = str.__hash__  # actions are looked up by the hundred thousand, and an enum's own hash is slow


class Retain(StrEnum):
    """What a stage retains of a micro-batch after an action, until the backward of the same micro-batch."""

    NOTHING = "nothing"  # the backward is over, or none will come: evaluation
    INPUT = "input"  # only what came over the stage's boundary; the rest is recomputed
    GRAPH = "graph"  # every activation inside the stage


class Action(NamedTuple):
    """One forward, recomputation or backward of one micro-batch on one stage; ``str`` writes it ``2F0``."""

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.micro_batch}"


Schedule = tuple[tuple[Action, ...], ...]
"""``schedule[k]`` is what stage k does, in order."""

Recompute = str | tuple[frozenset[int], ...]
"""A mode (one of ``RECOMPUTE``), or for each stage the micro-batches that it recomputes."""


def build(name: str, partitions: int, micro_batches: int, recompute: Recompute) -> Schedule:
    """The training schedule called ``name``.

    ``gpipe``: all forwards, then all backwards from the last micro-batch to the first, as Figure 2(c) draws them.

    ``1f1b``: backward as soon as possible, so that stage k never has more than K - k micro-batches in flight.
    Departs from the paper: the paper knows only ``gpipe``. This is the synchronous form of the order of PipeDream
    (Harlap et al. 2018): the same step time on stages of equal cost (with ``always`` or ``never``), less memory.
    Backward runs from micro-batch 0 to M - 1 on every stage, which fixes the order in which gradients are summed.

    ``recompute`` is ``always`` (what the paper describes), ``never`` or ``except_last``: a micro-batch keeps its
    activations exactly when its backward directly follows its forward on that stage, because then nothing would be
    gained by dropping them. Or it is, for each stage, the set of micro-batches that are recomputed there.

    Raises:
        ValueError: an unknown name or recomputation mode, fewer than one partition or micro-batch.
    """
    assert isinstance(recompute, str) or len(recompute) == partitions, "one set of micro-batches per stage"
    schedule = []
    passes = (_passes(kind, partitions, micro_batches) for kind in (Kind.F, Kind.B))
    for stage, (forwards, backwards) in enumerate(zip(*passes, strict=True)):
        match name:
            case "gpipe":
                actions = forwards + backwards[::-1]
            case "1f1b":
                warm_up = min(partitions - 1 - stage, micro_batches)  # until the first gradient can have come back
                pairs = zip(forwards[warm_up:], backwards, strict=False)
                actions = [*forwards[:warm_up], *chain(*pairs), *backwards[micro_batches - warm_up :]]
            case _:
                raise ValueError(f"schedule={name}: unknown; use one of {', '.join(SCHEDULES)}")
        recomputed = _recomputed(actions, recompute) if isinstance(recompute, str) else recompute[stage]
        assert recomputed <= {a.micro_batch for a in actions}, "only what ran forward can be recomputed"
        schedule.append(tuple(_with_recomputation(actions, recomputed)))
    return tuple(schedule)


@lru_cache
def forward_only(partitions: int, micro_batches: int) -> Schedule:
    """The forwards alone, for evaluation; nothing is kept."""
    return tuple(map(tuple, _passes(Kind.F, partitions, micro_batches)))


def stage_retained(stage_actions: Sequence[Action]) -> Iterator[tuple[Action, Retain]]:
    """The actions of one stage in order, with what it retains of the micro-batch after each, read off the schedule.

    After a forward with neither ``B`` nor ``R`` nothing, with an ``R`` the input, with only a ``B`` the graph. After a
    recomputation the graph, after a backward nothing.
    """
    backward = {a.micro_batch for a in stage_actions if a.kind is Kind.B}
    recomputed = {a.micro_batch for a in stage_actions if a.kind is Kind.R}
    for a in stage_actions:
        if a.kind is Kind.B or a.micro_batch not in backward:
            yield a, Retain.NOTHING
        else:
            yield a, Retain.INPUT if a.kind is Kind.F and a.micro_batch in recomputed else Retain.GRAPH


def in_flight(stage_actions: Sequence[Action]) -> int:
    """The most micro-batches of one stage whose forward has begun and whose backward has not finished.

    M for ``gpipe``, min(K - k, M) for ``1f1b``. A micro-batch without a backward leaves when its forward ends.
    """
    returning = {a.micro_batch for a in stage_actions if a.kind is Kind.B}
    now = most = 0
    for a in stage_actions:
        if a.kind is Kind.F:
            most = max(most, now + 1)
            now += a.micro_batch in returning
        elif a.kind is Kind.B:
            now -= 1
    return most


def backward_follows_forward(stage_actions: Sequence[Action]) -> frozenset[int]:
    """The micro-batches of one stage whose backward directly follows their forward: recomputing them gains nothing.

    A recomputation does not count as standing between. The last one under ``gpipe``; all of the last stage under
    ``1f1b``.
    """
    order = [a for a in stage_actions if a.kind is not Kind.R]
    # In a list of only F and B, the F just before a B of the same micro-batch can only be its own forward.
    return frozenset(b.micro_batch for a, b in pairwise(order) if a.micro_batch == b.micro_batch)


def _passes(kind: Kind, partitions: int, micro_batches: int) -> list[list[Action]]:
    """For each stage its forwards or its backwards, from micro-batch 0 to M - 1."""
    for setting, value in (("partitions", partitions), ("micro_batches", micro_batches)):
        if value < 1:
            raise ValueError(f"{setting}={value}: must be at least 1; use {setting}=1 to do without")
    return [[Action(kind, k, m) for m in range(micro_batches)] for k in range(partitions)]


def _with_recomputation(actions: Sequence[Action], recomputed: frozenset[int]) -> Iterator[Action]:
    """An ``R`` directly before each ``B`` that needs one: there it fills the wait for the gradient."""
    for a in actions:
        if a.kind is Kind.B and a.micro_batch in recomputed:
            yield Action(Kind.R, a.stage, a.micro_batch)
        yield a


def _recomputed(actions: Sequence[Action], mode: str) -> frozenset[int]:
    """The micro-batches of a stage that a mode recomputes; ``actions`` are its F and B."""
    everything = frozenset(a.micro_batch for a in actions)
    match mode:
        case "always":
            return everything
        case "except_last":
            return everything - backward_follows_forward(actions)
        case "never":
            return frozenset()
    raise ValueError(f"recompute={mode}: unknown; use one of {', '.join(RECOMPUTE)}")
