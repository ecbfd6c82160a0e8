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
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

SCHEDULES = ("gpipe", "1f1b")
RECOMPUTE = ("always", "except_last", "never")


class Kind(StrEnum):
    """What an action does; the letter is how it is written."""

    F = "F"  # forward
    R = "R"  # recompute: the forward once more, to get its activations back
    B = "B"  # backward


class Retain(StrEnum):
    """What a stage retains of a micro-batch after an action, until the backward of the same micro-batch."""

    NOTHING = "nothing"  # the backward is over, or none will come: evaluation
    INPUT = "input"  # only what came over the stage's boundary; the rest is recomputed
    GRAPH = "graph"  # every activation inside the stage


@dataclass(frozen=True, slots=True)
class Action:
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
    """The training schedule called ``name`` (``gpipe`` or ``1f1b``).

    ``recompute`` is ``always`` (what the paper describes), ``never`` or ``except_last``: a micro-batch keeps its
    activations exactly when its backward directly follows its forward on that stage, because then nothing would be
    gained by dropping them. Or it is, for each stage, the set of micro-batches that are recomputed there.

    Raises:
        ValueError: an unknown name or recomputation mode, fewer than one partition or micro-batch.
    """
    match name:
        case "gpipe":
            return gpipe(partitions, micro_batches, recompute)
        case "1f1b":
            return one_forward_one_backward(partitions, micro_batches, recompute)
    raise ValueError(f"schedule={name}: unknown; use one of {', '.join(SCHEDULES)}")


def gpipe(partitions: int, micro_batches: int, recompute: Recompute) -> Schedule:
    """All forwards, then all backwards from the last micro-batch to the first, as Figure 2(c) draws them.

    ``recompute`` as for :func:`build`: under this schedule ``except_last`` keeps the last micro-batch and no other.
    """
    stages = _passes(partitions, micro_batches)
    return _with_recomputation([forwards + backwards[::-1] for forwards, backwards in stages], recompute)


def one_forward_one_backward(partitions: int, micro_batches: int, recompute: Recompute) -> Schedule:
    """Backward as soon as possible, so that stage k never has more than K - k micro-batches in flight.

    Departs from the paper: the paper knows only ``gpipe``. This is the synchronous form of the order of PipeDream
    (Harlap et al. 2018): the same step time on stages of equal cost (with ``always`` or ``never``), less memory.
    Backward runs from micro-batch 0 to M - 1 on every stage, which fixes the order in which gradients are summed.
    ``recompute`` as for :func:`build`: ``except_last`` here keeps every micro-batch on the last stage, where each
    backward directly follows its forward, and none elsewhere (unless M = 1, which is kept everywhere).
    """
    stages = []
    for stage, (forwards, backwards) in enumerate(_passes(partitions, micro_batches)):
        warm_up = min(partitions - 1 - stage, micro_batches)  # forwards until the first gradient can have come back
        actions = forwards[:warm_up]
        for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
            actions += [forward, backward]
        actions += backwards[micro_batches - warm_up :]
        stages.append(actions)
    return _with_recomputation(stages, recompute)


def forward_only(partitions: int, micro_batches: int) -> Schedule:
    """The forwards alone, for evaluation; nothing is kept."""
    return tuple(tuple(forwards) for forwards, _ in _passes(partitions, micro_batches))


def retained(schedule: Schedule) -> dict[Action, Retain]:
    """What the stage retains of a micro-batch after each action, see :func:`stage_retained`."""
    return {action: retain for actions in schedule for action, retain in stage_retained(actions)}


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


def _passes(partitions: int, micro_batches: int) -> list[tuple[list[Action], list[Action]]]:
    """For each stage its forwards and its backwards, both from micro-batch 0 to M - 1."""
    for setting, value in (("partitions", partitions), ("micro_batches", micro_batches)):
        if value < 1:
            raise ValueError(f"{setting}={value}: must be at least 1; use {setting}=1 to do without")
    forwards, backwards = (
        [[Action(kind, k, m) for m in range(micro_batches)] for k in range(partitions)] for kind in (Kind.F, Kind.B)
    )
    return list(zip(forwards, backwards, strict=True))


def _with_recomputation(stages: Sequence[list[Action]], recompute: Recompute) -> Schedule:
    """Put an ``R`` directly before each ``B`` that needs one: there it fills the wait for the gradient."""
    if isinstance(recompute, str):
        recompute = tuple(_recomputed(actions, recompute) for actions in stages)
    assert len(recompute) == len(stages), "one set of micro-batches per stage"
    schedule = []
    for actions, recomputed in zip(stages, recompute, strict=True):
        assert recomputed <= {a.micro_batch for a in actions}, "only what ran forward can be recomputed"
        result: list[Action] = []
        for a in actions:
            if a.kind is Kind.B and a.micro_batch in recomputed:
                result.append(Action(Kind.R, a.stage, a.micro_batch))
            result.append(a)
        schedule.append(tuple(result))
    return tuple(schedule)


def _recomputed(actions: Sequence[Action], mode: str) -> frozenset[int]:
    """The micro-batches of a stage that a mode recomputes; ``actions`` are its F and B."""
    everything = {a.micro_batch for a in actions}
    match mode:
        case "always":
            return frozenset(everything)
        case "except_last":
            return frozenset(everything - backward_follows_forward(actions))
        case "never":
            return frozenset()
    raise ValueError(f"recompute={mode}: unknown; use one of {', '.join(RECOMPUTE)}")
