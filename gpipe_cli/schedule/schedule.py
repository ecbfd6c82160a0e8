"""The schedule of a training step as data (section 2.2 and Figure 2(c) of the paper).

A schedule lists the actions that each device performs, in order. All code that runs, predicts, checks or draws a step
reads this list, wherever the order came from (`named_schedules.py`, a search, a file). ``2F0`` is the forward of
micro-batch 0 on stage 2. GPipe with K = 3 partitions and M = 4 micro-batches, without recomputation, on a unit clock:

    stage 0 | F0 F1 F2 F3 .  .  .  .  B3 B2 B1 B0
    stage 1 | .  F0 F1 F2 F3 .  .  B3 B2 B1 B0
    stage 2 | .  .  F0 F1 F2 F3 B3 B2 B1 B0

Communication is implicit: an ``F`` receives from the previous stage and sends to the next, a ``B`` the other way
round. So is whether a forward keeps its activations: it does unless its micro-batch has an ``R``.

A backward may be split in two (Qi et al. 2023, "Zero Bubble Pipeline Parallelism"): ``I`` computes the gradients of
the inputs, which the previous stage waits for, ``W`` the gradients of the weights, needed only when the step ends.
"""

from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from functools import cached_property, partial
from itertools import chain, pairwise
from typing import Literal, NamedTuple, Self, get_args

RecomputeMode = Literal["always", "except_last", "never"]
RECOMPUTE_MODES: tuple[RecomputeMode, ...] = get_args(RecomputeMode)


class Kind(StrEnum):
    """What an action computes; the value is its letter in the written form of an action."""

    F = "F"  # forward
    R = "R"  # recompute: the forward again, to restore its activations
    B = "B"  # backward
    I = "I"  # noqa: E741 (first half of a split backward: gradients of inputs, which the previous stage waits for)
    W = "W"  # second half of a split backward: gradients of weights

    __hash__ = str.__hash__  # actions are looked up by the hundred thousand, and an enum's own hash is slow

    @property
    def direction(self) -> "Kind":
        """Which way results travel: F to the next stage, B (also for I) to the previous stage."""
        return Kind.B if self is Kind.I else self


SENDS_GRADIENT = (Kind.B, Kind.I)  # actions that send gradients back


class Retain(StrEnum):
    """What a stage retains of a micro-batch after an action, until the backward of the same micro-batch."""

    NOTHING = "nothing"  # the backward is done, or there is none (evaluation)
    INPUT = "input"  # only the tensors that came over the stage's boundary; the rest is recomputed
    ACTIVATIONS = "graph"  # every activation inside the stage
    WEIGHTS = "weights"  # what `W` computes the gradients of the weights from

    __hash__ = str.__hash__  # for speed, as in Kind


class Action(NamedTuple):
    """An action of a micro-batch on a stage; ``str`` writes it ``2F0``."""

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.micro_batch}"


def actions(kinds: Iterable[Kind], stages: Iterable[int], micro_batches: Iterable[int]) -> list[Action]:
    """An action of each; for millions of them, as `Action` itself takes twice as long."""
    return list(map(partial(tuple.__new__, Action), zip(kinds, stages, micro_batches, strict=False)))


Row = tuple[Action, ...]


class Schedule(tuple[Row, ...]):
    """``schedule[r]`` lists the actions of row r in order: of a stage, or of several stages of a device. Rows may also
    share a device; :func:`topological_order` then decides the order of their actions.

    The number of stages is read off the actions. A replica without samples has a schedule without actions, so
    `row_of_stage` must be given.
    """

    def __new__(cls, rows: Iterable[Row] = (), row_of_stage: Sequence[int] = ()) -> Self:
        schedule = super().__new__(cls, rows)
        if row_of_stage:
            schedule.row_of_stage = tuple(row_of_stage)
        return schedule

    @cached_property
    def row_of_stage(self) -> tuple[int, ...]:
        """For each stage, the index of the row that has its actions."""
        rows = {a.stage: number for number, row in enumerate(self) for a in row}
        return tuple(rows[stage] for stage in range(len(self.stages)))

    @cached_property
    def stages(self) -> tuple[Row, ...]:
        """The actions of each stage, in order."""
        rows = self.__dict__.get("row_of_stage")
        last = max((a.stage for row in self for a in row), default=-1) if rows is None else len(rows) - 1
        stages: list[list[Action]] = [[] for _ in range(1 + last)]
        for row in self:
            for a in row:
                stages[a.stage].append(a)
        return tuple(map(tuple, stages))

    @cached_property
    def micro_batches(self) -> int:
        """M; 0 for a replica without samples."""
        return 1 + max((a.micro_batch for row in self for a in row), default=-1)

    @cached_property
    def trains(self) -> bool:
        """Whether the schedule has backwards; in evaluation it has none."""
        return any(a.kind is not Kind.F for row in self for a in row)

    @cached_property
    def split(self) -> frozenset[Action]:
        """The first halves (I) of all split backwards."""
        return frozenset(a for row in self for a in row if a.kind is Kind.I)

    def source(self, action: Action) -> Action | None:
        """The action of another stage whose result ``action`` needs, or None: all dependencies between stages.

        ``R`` and ``W`` have none, so a recomputation may start before the gradient arrives (section 2.3).
        """
        kind, stage, micro_batch = action
        if kind is Kind.F and stage > 0:
            return Action(kind, stage - 1, micro_batch)
        if kind in SENDS_GRADIENT and stage < len(self.stages) - 1:
            split = Action(Kind.I, stage + 1, micro_batch)
            return split if split in self.split else Action(Kind.B, stage + 1, micro_batch)
        return None

    def first(self, micro_batches: int) -> "Schedule":
        """This order with only the first `micro_batches`, for a mini-batch that has fewer than M."""
        rows = (tuple(a for a in row if a.micro_batch < micro_batches) for row in self)
        return Schedule(rows, self.row_of_stage)


RecomputePlan = str | tuple[frozenset[int], ...]
"""A mode (one of ``RECOMPUTE_MODES``), or for each stage the micro-batches that it recomputes."""


def is_recomputing_mode(recompute: RecomputePlan) -> bool:
    """Whether `recompute` is a mode that recomputes; False for sets of micro-batches."""
    return recompute in ("always", "except_last")


def with_recomputation(order: Schedule, recompute: RecomputePlan) -> Schedule:
    """`order` with an ``R`` directly before each backward that needs it, where it fills the wait for the gradient.

    The paper describes ``always``. ``except_last`` keeps the activations of a micro-batch exactly if its backward
    directly follows its forward on the stage, as dropping them would gain nothing. An order that already has
    recomputations is returned unchanged. Raises ValueError for an unknown mode.
    """
    if any(a.kind is Kind.R for row in order for a in row):
        return order
    if isinstance(recompute, str):
        recomputed = [_recomputed_micro_batches(actions, recompute) for actions in order.stages]
    else:
        assert len(recompute) == len(order.stages), "a set of micro-batches per stage"
        pairs = zip(recompute, order.stages, strict=True)
        recomputed = [chosen & {a.micro_batch for a in stage_actions} for chosen, stage_actions in pairs]

    def with_its_recomputation(a: Action) -> Row:
        again = a.kind in SENDS_GRADIENT and a.micro_batch in recomputed[a.stage]
        return (Action(Kind.R, a.stage, a.micro_batch), a) if again else (a,)

    return Schedule((tuple(chain.from_iterable(map(with_its_recomputation, row))) for row in order), order.row_of_stage)


def merge_split_backwards(row: Iterable[Action]) -> list[Action]:
    """`row` with each I that its W directly follows merged into a B on the first stage, where no stage waits for it."""
    merged: list[Action] = []
    for a in row:
        if a.kind is Kind.W and a.stage == 0 and merged[-1] == (Kind.I, 0, a.micro_batch):
            merged[-1] = Action(Kind.B, 0, a.micro_batch)
        else:
            merged.append(a)
    return merged


def with_saved_state(stage_actions: Sequence[Action]) -> Iterator[tuple[Action, Retain]]:
    """The actions of a stage in order, each with what the stage retains of its micro-batch afterwards. A forward
    retains nothing without a backward, the input if there is an ``R``, and otherwise the graph."""
    backward = {a.micro_batch for a in stage_actions if a.kind in SENDS_GRADIENT}
    recomputed = {a.micro_batch for a in stage_actions if a.kind is Kind.R}
    for a in stage_actions:
        if a.kind in (Kind.B, Kind.W) or a.micro_batch not in backward:
            yield a, Retain.NOTHING
        elif a.kind is Kind.I:
            yield a, Retain.WEIGHTS
        else:
            yield a, Retain.INPUT if a.kind is Kind.F and a.micro_batch in recomputed else Retain.ACTIVATIONS


def backward_follows_forward(stage_actions: Sequence[Action]) -> frozenset[int]:
    """The micro-batches of a stage whose backward directly follows their forward: recomputing them gains nothing.

    Under ``gpipe`` the last micro-batch, under ``1f1b`` all of the last stage. An ``R`` in between is ignored.
    """
    pairs = pairwise(a for a in stage_actions if a.kind is not Kind.R)
    return frozenset(
        b.micro_batch for a, b in pairs if b.kind in SENDS_GRADIENT and a == (Kind.F, b.stage, b.micro_batch)
    )


def _recomputed_micro_batches(actions: Sequence[Action], mode: str) -> frozenset[int]:
    """The micro-batches of a stage that `mode` recomputes; ``actions`` must have no ``R``."""
    everything = frozenset(a.micro_batch for a in actions if a.kind in SENDS_GRADIENT)
    match mode:
        case "always":
            return everything
        case "except_last":
            return everything - backward_follows_forward(actions)
        case "never":
            return frozenset()
    raise ValueError(f"recompute={mode}: unknown; use one of {', '.join(RECOMPUTE_MODES)}")
