"""What an action waits for, and what follows: the order in which one process can perform a schedule, whether it can run
at all, and its picture on a unit clock.

The clock is that of Figure 2(c) of the paper: every action takes one tick. The grid drawn on it is the same
everywhere, in comments, tests, errors and plans.
"""

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from heapq import heappop, heappush

from gpipe_cli.pipeline.schedule.schedules import Action, Kind, Retain, Schedule, stage_retained


def source(action: Action, stages: int) -> Action | None:
    """The action of another stage whose result ``action`` waits for, if any. The only place that says so.

    A forward waits for the stage before, a backward for the stage after. A recomputation waits for nothing outside its
    stage, which is why it may start before the gradient arrives (section 2.3). Beyond that, a stage performs its own
    actions in the order of its list.
    """
    kind, stage, micro_batch = action
    if kind is Kind.F and stage > 0:
        return Action(kind, stage - 1, micro_batch)
    if kind is Kind.B and stage < stages - 1:
        return Action(kind, stage + 1, micro_batch)
    return None


def linearize(schedule: Schedule, turns: Sequence[int] = ()) -> tuple[Action, ...]:
    """The actions of a checked schedule in an order in which one process can perform them, by a unit clock.

    With a device for each stage `0F0`, `1F0 0F1`, `2F0 1F1 0F2`, ...: what a clock tick holds does not depend on
    itself, so a process that launches work on several devices in this order keeps all of them busy. Where stages have
    the same number in `turns`, their process or device, it performs one action a tick: of those that could be next the
    one that is nearest to what it sends on, so that neighbours get work as early as from one large stage. Any stages
    picked out of the order keep one that is safe against deadlock. Raises ValueError on a deadlock.
    """
    order: list[Action] = []
    for tick in _ticks(schedule, turns):
        # within a tick forwards come first, and senders before their receivers: receives are posted by this order
        order += sorted(tick, key=lambda a: (a.kind is not Kind.F, a.stage if a.kind is Kind.F else -a.stage))
    return tuple(order)


def _ticks(schedule: Schedule, turns: Sequence[int]) -> Iterator[list[Action]]:
    """What `linearize` performs in each tick."""
    stages = range(len(schedule))
    turns = turns or stages
    left = [deque(actions) for actions in schedule]
    ready: list[list[tuple[int, int, Action]]] = [[] for _ in range(1 + max(turns))]  # of each device, the best first
    offered: set[int] = set()  # stages whose next action is in there
    ended: set[Action] = set()
    changed = set(stages)
    while changed:
        for stage in changed - offered:
            if left[stage] and ((needed := source(left[stage][0], len(stages))) is None or needed in ended):
                action = left[stage][0]
                offered.add(stage)
                heappush(ready[turns[stage]], (*_sooner(action), action))
        tick = [heappop(actions)[2] for actions in ready if actions]
        yield tick
        for action in tick:
            left[action.stage].popleft()
        ended.update(tick)
        offered.difference_update(action.stage for action in tick)
        changed = {k for action in tick for k in (action.stage - 1, action.stage, action.stage + 1) if k in stages}
    if any(left):
        raise _deadlock(schedule, _clock(schedule)[1])


def _sooner(action: Action) -> tuple[int, int]:
    """Of actions that a device could perform next, the least comes first: what ends a micro-batch's way through its
    stages, and a backward before what only makes room for more."""
    return (Kind.B, Kind.R, Kind.F).index(action.kind), -action.stage if action.kind is Kind.F else action.stage


def linearize_retained(schedule: Schedule, turns: Sequence[int] = ()) -> list[tuple[Action, Retain]]:
    """`linearize`, with what the stage of each action retains of the micro-batch after it."""
    retained = {action: retain for actions in schedule for action, retain in stage_retained(actions)}
    return [(action, retained[action]) for action in linearize(schedule, turns)]


def check(schedule: Schedule) -> None:
    """Refuse a schedule that could not run or would compute something else; the error ends with the grid.

    Raises ValueError for an action on the wrong stage, double or missing; a backward before its forward; an edge on
    which micro-batches are sent in another order than they are received; a deadlock.
    """
    if not schedule or not any(schedule):
        raise ValueError("the schedule is empty: it needs at least one stage and one forward")
    micro_batches = range(1 + max(a.micro_batch for actions in schedule for a in actions))
    trains = any(a.kind is not Kind.F for actions in schedule for a in actions)
    for stage, actions in enumerate(schedule):
        seen: dict[Kind, set[int]] = {kind: set() for kind in Kind}  # micro-batches
        for a in actions:
            kind, m = a.kind, a.micro_batch
            if a.stage != stage:
                raise _fault(schedule, f"{a} is in the list of stage {stage}; move it to stage {a.stage}", [a])
            if m < 0:
                raise _fault(schedule, f"{a}: micro-batches count from 0", [a])
            if m in seen[kind]:
                raise _fault(schedule, f"{a} is there twice; remove one", [a])
            if kind is not Kind.F and m not in seen[Kind.F]:
                f = Action(Kind.F, stage, m)
                raise _fault(schedule, f"{a} comes before {f}, which it needs; put {f} first", [a, f])
            if kind is Kind.R and m in seen[Kind.B]:
                raise _fault(schedule, f"{a} comes after the backward it is for; put it before", [a])
            seen[kind].add(m)
        for kind in (Kind.F, Kind.B) if trains else (Kind.F,):
            if len(seen[kind]) < len(micro_batches):
                missing = Action(kind, stage, next(m for m in micro_batches if m not in seen[kind]))
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


def grid(schedule: Schedule, mark: Collection[Action] = (), width: int = 120, turns: Sequence[int] = ()) -> str:
    """The schedule as text: a row per stage, a column per tick of a clock on which every action takes one tick.

    Stages with the same number in ``turns`` take turns, as in `linearize`, which a schedule that deadlocks cannot have.
    ``!`` points at an action to ``mark``; its row, also that of one which is missing, has ``>`` for ``|``. A grid
    wider than ``width`` characters continues in further blocks of rows.
    """
    ticks = _clock(schedule)[0]
    if turns:
        at = {action: n for n, tick in enumerate(_ticks(schedule, turns)) for action in tick}
        ticks = [[at[action] for action in actions] for actions in schedule]
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


def _clock(schedule: Schedule) -> tuple[list[list[int]], dict[Action, Action | None]]:
    """The earliest tick of each action; and for each stage that cannot go on, its next action and what that needs."""
    ticks: list[list[int]] = [[] for _ in schedule]
    left = [deque(actions) for actions in schedule]
    ended: dict[Action, int] = {}  # the tick after each action
    waiting: dict[Action, list[int]] = {}  # by the action waited for: the stages that wait
    ready = list(range(len(schedule)))
    while ready:
        stage = ready.pop()
        own = ticks[stage]
        tick = own[-1] + 1 if own else 0
        while left[stage]:
            action = left[stage][0]
            needed = source(action, len(schedule))
            if needed is not None:
                if needed not in ended:
                    waiting.setdefault(needed, []).append(stage)
                    break
                tick = max(tick, ended[needed])
            left[stage].popleft()
            own.append(tick)
            tick += 1
            ended.setdefault(action, tick)
            ready += waiting.pop(action, ())
    return ticks, {actions[0]: source(actions[0], len(schedule)) for actions in left if actions}


def _deadlock(schedule: Schedule, stuck: dict[Action, Action | None]) -> ValueError:
    waits = "; ".join(f"{action} waits for {blocker}" for action, blocker in stuck.items())
    return _fault(schedule, f"deadlock ({waits}); reorder the marked actions", stuck)


def _fault(schedule: Schedule, what: str, mark: Collection[Action]) -> ValueError:
    return ValueError(f"schedule: {what}\n{grid(schedule, mark)}")
