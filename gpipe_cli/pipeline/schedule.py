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

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

SCHEDULES = ("gpipe", "1f1b")
RECOMPUTE = ("always", "except_last", "never")


class Kind(StrEnum):
    """What an action does; the letter is how it is written."""

    F = "F"  # forward
    R = "R"  # recompute: the forward once more, to get its activations back
    B = "B"  # backward


class Keep(StrEnum):
    """What a forward leaves behind on its stage until the backward of the same micro-batch."""

    NOTHING = "nothing"  # evaluation: no backward will come
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


def build(name: str, partitions: int, micro_batches: int, recompute: str) -> Schedule:
    """The training schedule called ``name`` (``gpipe`` or ``1f1b``).

    Raises:
        ValueError: an unknown name or recomputation mode, fewer than one partition or micro-batch.
    """
    match name:
        case "gpipe":
            return gpipe(partitions, micro_batches, recompute)
        case "1f1b":
            return one_forward_one_backward(partitions, micro_batches, recompute)
    raise ValueError(f"schedule={name}: unknown; use one of {', '.join(SCHEDULES)}")


def gpipe(partitions: int, micro_batches: int, recompute: str) -> Schedule:
    """All forwards, then all backwards from the last micro-batch to the first, as Figure 2(c) draws them.

    ``recompute`` is ``always`` (what the paper describes), ``never`` or ``except_last``: a micro-batch keeps its
    activations exactly when its backward directly follows its forward on that stage, because then nothing would be
    gained by dropping them. Under this schedule that is the last micro-batch and no other.
    """
    stages = _passes(partitions, micro_batches)
    return tuple(_with_recomputation(forwards + backwards[::-1], recompute) for forwards, backwards in stages)


def one_forward_one_backward(partitions: int, micro_batches: int, recompute: str) -> Schedule:
    """Backward as soon as possible, so that stage k never has more than K - k micro-batches in flight.

    Departs from the paper: the paper knows only ``gpipe``. This is the synchronous form of the order of PipeDream
    (Harlap et al. 2018): the same step time on stages of equal cost (with ``always`` or ``never``), less memory.
    Backward runs from micro-batch 0 to M - 1 on every stage, which fixes the order in which gradients are summed.
    ``recompute`` as for :func:`gpipe`: ``except_last`` here keeps every micro-batch on the last stage, where each
    backward directly follows its forward, and none elsewhere (unless M = 1, which is kept everywhere).
    """
    stages = []
    for stage, (forwards, backwards) in enumerate(_passes(partitions, micro_batches)):
        warm_up = min(partitions - 1 - stage, micro_batches)  # forwards until the first gradient can have come back
        actions = forwards[:warm_up]
        for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
            actions += [forward, backward]
        actions += backwards[micro_batches - warm_up :]
        stages.append(_with_recomputation(actions, recompute))
    return tuple(stages)


def forward_only(partitions: int, micro_batches: int) -> Schedule:
    """The forwards alone, for evaluation; nothing is kept."""
    return tuple(tuple(forwards) for forwards, _ in _passes(partitions, micro_batches))


def dependencies(action: Action, schedule: Schedule) -> tuple[Action, ...]:
    """The actions that must have ended before ``action`` can start; the only place that says so.

    A forward waits for the stage before, a backward for the stage after and for its own forward. A recomputation
    waits for nothing outside its stage, which is why it may start before the gradient arrives (section 2.3).
    Beyond these, a stage performs its own actions in the order of its list: so a backward also follows its ``R``.
    """
    kind, stage, micro_batch = action.kind, action.stage, action.micro_batch
    match kind:
        case Kind.F:
            return (Action(Kind.F, stage - 1, micro_batch),) if stage > 0 else ()
        case Kind.R:
            return (Action(Kind.F, stage, micro_batch),)
        case Kind.B:
            own = Action(Kind.F, stage, micro_batch)
            return (own, Action(Kind.B, stage + 1, micro_batch)) if stage < len(schedule) - 1 else (own,)


def keeps(schedule: Schedule) -> dict[Action, Keep]:
    """What each forward and each recomputation keeps, read off the schedule; one look-up per action.

    A forward with neither ``B`` nor ``R`` keeps nothing, one with an ``R`` its input, one with only a ``B`` its
    graph. A recomputation keeps its graph. Backward actions have no entry.
    """
    kept: dict[Action, Keep] = {}
    for actions in schedule:
        backward = {a.micro_batch for a in actions if a.kind is Kind.B}
        recomputed = {a.micro_batch for a in actions if a.kind is Kind.R}
        for a in actions:
            if a.kind is Kind.F and a.micro_batch in recomputed:
                kept[a] = Keep.INPUT
            elif a.kind is not Kind.B:
                kept[a] = Keep.GRAPH if a.micro_batch in backward else Keep.NOTHING
    return kept


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


def linearize(schedule: Schedule) -> tuple[Action, ...]:
    """All actions in one order in which a single process can perform them, breadth first by unit clock.

    ``0F0``, ``1F0 0F1``, ``2F0 1F1 0F2``, ...: what a clock tick holds does not depend on itself, so a process that
    launches work on several devices in this order keeps all of them busy. Any stages picked out of it keep an order
    that is safe against deadlock. Takes time proportional to the number of actions. Raises ValueError on a deadlock.
    """
    ticks, stuck = _clock(schedule)
    if stuck:
        raise _deadlock(schedule, stuck)
    by_tick: list[list[Action]] = [[] for _ in range(max((t[-1] + 1 for t in ticks if t), default=0))]
    for stage in reversed(range(len(schedule))):
        for action, tick in zip(schedule[stage], ticks[stage], strict=True):
            by_tick[tick].append(action)
    return tuple(action for actions in by_tick for action in actions)


def check(schedule: Schedule) -> None:
    """Refuse a schedule that could not run or would compute something else; the error ends with the grid.

    Raises ValueError for an action on the wrong stage, double or missing; a backward before its forward; an edge on
    which micro-batches are sent in another order than they are received; a deadlock.
    """
    if not schedule or not any(schedule):
        raise ValueError("the schedule is empty: it needs at least one stage and one forward")
    everything = [a for actions in schedule for a in actions]
    micro_batches = range(1 + max(a.micro_batch for a in everything))
    trains = any(a.kind is not Kind.F for a in everything)
    for stage, actions in enumerate(schedule):
        seen: set[Action] = set()
        for a in actions:
            f = Action(Kind.F, stage, a.micro_batch)
            if a.stage != stage:
                raise _fault(schedule, f"{a} is in the list of stage {stage}; move it to stage {a.stage}", [a])
            if a.micro_batch < 0:
                raise _fault(schedule, f"{a}: micro-batches count from 0", [a])
            if a in seen:
                raise _fault(schedule, f"{a} is there twice; remove one", [a])
            if a.kind is not Kind.F and f not in seen:
                raise _fault(schedule, f"{a} comes before {f}, which it needs; put {f} first", [a, f])
            if a.kind is Kind.R and Action(Kind.B, stage, a.micro_batch) in seen:
                raise _fault(schedule, f"{a} comes after the backward it is for; put it before", [a])
            seen.add(a)
        for kind in (Kind.F, Kind.B) if trains else (Kind.F,):
            for m in micro_batches:
                if (missing := Action(kind, stage, m)) not in seen:
                    raise _fault(schedule, f"{missing} is missing; add it to stage {stage}", [missing])
    for stage in range(len(schedule) - 1):
        for kind, sender, receiver in ((Kind.F, stage, stage + 1), (Kind.B, stage + 1, stage)):
            sent, received = ([a for a in schedule[k] if a.kind is kind] for k in (sender, receiver))
            for s, r in zip(sent, received, strict=True):
                if s.micro_batch != r.micro_batch:
                    raise _fault(schedule, f"stage {sender} sends after {s} when stage {receiver} receives for {r}; "
                                 f"give both stages the same order of {kind.value}", [s, r])  # fmt: skip
    if stuck := _clock(schedule)[1]:
        raise _deadlock(schedule, stuck)


def grid(schedule: Schedule, mark: Collection[Action] = (), width: int = 120) -> str:
    """The schedule as text: a row per stage, a column per tick of a clock on which every action takes one tick.

    ``!`` points at an action to ``mark``; its row, also that of one which is missing, has ``>`` for ``|``. What is
    longer than ``width`` characters continues in a further block of rows, like a musical score.
    """
    ticks = _clock(schedule)[0]
    marked = set(mark)
    absent = marked.difference(*schedule)
    labels, rows = [], []
    for stage, actions in enumerate(schedule):
        pointed = any(a in marked for a in actions) or any(a.stage == stage for a in absent)
        labels.append(f"stage {stage:<{len(str(len(schedule) - 1))}} {'>' if pointed else '|'} ")
        row: list[str] = []
        for i, a in enumerate(actions):  # what can never start has no tick, but is shown all the same
            row += ["."] * (ticks[stage][i] - len(row) if i < len(ticks[stage]) else 0)
            text = f"{a.kind.value}{a.micro_batch}" if a.stage == stage else str(a)
            row.append(text + "!" * (a in marked))
        rows.append(row)
    cell = max((len(text) for row in rows for text in row), default=1)
    columns = max(1, (width - len(labels[0]) + 1) // (cell + 1)) if labels else 1
    blocks = []
    for first in range(0, max(map(len, rows), default=0), columns):
        lines = (label + " ".join(f"{text:<{cell}}" for text in row[first : first + columns])
                 for label, row in zip(labels, rows, strict=True))  # fmt: skip
        blocks.append("\n".join(line.rstrip() for line in lines))
    return "\n\n".join(blocks)


def _passes(partitions: int, micro_batches: int) -> list[tuple[list[Action], list[Action]]]:
    """For each stage its forwards and its backwards, both from micro-batch 0 to M - 1."""
    for setting, value in (("partitions", partitions), ("micro_batches", micro_batches)):
        if value < 1:
            raise ValueError(f"{setting}={value}: must be at least 1; use {setting}=1 to do without")
    forwards, backwards = (
        [[Action(kind, k, m) for m in range(micro_batches)] for k in range(partitions)] for kind in (Kind.F, Kind.B)
    )
    return list(zip(forwards, backwards, strict=True))


def _with_recomputation(actions: list[Action], recompute: str) -> tuple[Action, ...]:
    """Put an ``R`` directly before each ``B`` that needs one: there it fills the wait for the gradient."""
    if recompute not in RECOMPUTE:
        raise ValueError(f"recompute={recompute}: unknown; use one of {', '.join(RECOMPUTE)}")
    result: list[Action] = []
    for i, a in enumerate(actions):
        # In a list of only F and B, the F just before a B of the same micro-batch can only be its own forward.
        follows_its_forward = i > 0 and actions[i - 1].micro_batch == a.micro_batch
        if a.kind is Kind.B and (recompute == "always" or (recompute == "except_last" and not follows_its_forward)):
            result.append(Action(Kind.R, a.stage, a.micro_batch))
        result.append(a)
    return tuple(result)


def _clock(schedule: Schedule) -> tuple[list[list[int]], dict[Action, Action]]:
    """The earliest tick of each action; and for each stage that cannot go on, its next action and what that needs."""
    ticks: list[list[int]] = [[] for _ in schedule]
    ended: dict[Action, int] = {}
    waiting: dict[Action, list[int]] = {}  # by the action waited for: the stages to look at again
    ready = list(range(len(schedule)))
    while ready:
        stage = ready.pop()
        own = ticks[stage]
        while len(own) < len(schedule[stage]):
            action = schedule[stage][len(own)]
            needs = dependencies(action, schedule)
            blocker = next((d for d in needs if d not in ended), None)
            if blocker is not None:
                waiting.setdefault(blocker, []).append(stage)
                break
            tick = max(own[-1] + 1 if own else 0, max((ended[d] for d in needs), default=0))
            own.append(tick)
            ended.setdefault(action, tick + 1)
            ready += waiting.pop(action, ())
    return ticks, {schedule[stage][len(ticks[stage])]: b for b, stages in waiting.items() for stage in sorted(stages)}


def _deadlock(schedule: Schedule, stuck: dict[Action, Action]) -> ValueError:
    waits = "; ".join(f"{action} waits for {blocker}" for action, blocker in stuck.items())
    return _fault(schedule, f"deadlock ({waits}); reorder the marked actions", stuck)


def _fault(schedule: Schedule, what: str, mark: Collection[Action]) -> ValueError:
    return ValueError(f"schedule: {what}\n{grid(schedule, mark)}")
