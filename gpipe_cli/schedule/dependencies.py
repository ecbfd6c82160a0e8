"""What follows from the dependencies of actions: an order in which a process can perform a schedule, whether the
schedule can run at all, and its picture on a unit clock.

As in Figure 2(c) of the paper, every action takes one tick. Comments, tests, errors and plans draw the same grid.
"""

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Sequence
from heapq import heappop, heappush

from gpipe_cli.errors import InputError
from gpipe_cli.schedule.schedule import SENDS_GRADIENT, Action, Kind, Retain, Schedule, with_saved_state


class ScheduleError(InputError):
    """An invalid schedule: `what` is wrong and how to fix it, and the grid (`drawn`) if it shows where."""

    def __init__(self, what: str, drawn: str = "") -> None:
        super().__init__(what, drawn)
        self.what, self.drawn = what, drawn

    def __str__(self) -> str:
        return f"schedule: {self.what}\n{self.drawn}".rstrip("\n")


def topological_order(schedule: Schedule, device_of_stage: Sequence[int] = ()) -> tuple[Action, ...]:
    """The actions of a checked schedule in an order in which a process can perform them, by a unit clock.

    With a device for each stage: `0F0`, `1F0 0F1`, `2F0 1F1 0F2`, ... Actions of the same tick do not depend on each
    other, so a process that launches work on several devices in this order keeps all of them busy. Stages with the same
    number in `device_of_stage` (their process or device) share it, an action per tick. The ready action closest to a
    send to another device goes first, so that neighbours get work as early as from a single large stage. The order
    restricted to any of the stages is also safe against deadlock. Raises ScheduleError on a deadlock.
    """
    ticks, stuck = _clock(schedule, device_of_stage)
    if stuck:
        raise _deadlock_error(schedule, stuck)
    order: list[Action] = []
    for tick in ticks:
        # within a tick forwards come first, and senders before their receivers: receives are posted in this order
        actions = (action for action, _ in tick)
        order += sorted(actions, key=lambda a: (a.kind is not Kind.F, a.stage if a.kind is Kind.F else -a.stage))
    return tuple(order)


def _clock(
    schedule: Schedule, device_of_stage: Sequence[int] = ()
) -> tuple[list[list[tuple[Action, int]]], dict[Action, Action | None]]:
    """The actions that run in each tick, with their rows; and for each row that is stuck, its next action and the
    action that this waits for. Without `device_of_stage` every row has its own device."""
    remaining = [deque(row) for row in schedule]
    ready: dict[int, list[tuple[int, int, Action, int]]] = defaultdict(list)  # device -> heap of its ready actions
    waiting: dict[Action, list[int]] = defaultdict(list)  # the action waited for -> the rows that wait
    ended: set[Action] = set()
    ticks = []
    changed = [*range(len(schedule))]  # rows whose next action is new, or may have become ready
    while changed:
        for row in changed:
            if remaining[row]:
                action = remaining[row][0]
                needed = schedule.source(action)
                if needed is None or needed in ended:
                    device = device_of_stage[action.stage] if device_of_stage else row
                    heappush(ready[device], (*_priority(action), action, row))
                else:
                    waiting[needed].append(row)
        tick = [heappop(actions)[2:] for actions in ready.values() if actions]
        ticks.append(tick)
        ended.update(action for action, _ in tick)
        changed = [row for action, acting in tick for row in (acting, *waiting.pop(action, ()))]
        for _, row in tick:
            remaining[row].popleft()
    return ticks, {row[0]: schedule.source(row[0]) for row in remaining if row}


def _priority(action: Action) -> tuple[int, int]:
    """The sort key of a device's ready actions: backwards first and W last; among actions of the same kind, first
    the action closest to leaving the device's stages."""
    kinds = (Kind.B, Kind.I, Kind.R, Kind.F, Kind.W)
    return kinds.index(action.kind), -action.stage if action.kind is Kind.F else action.stage


def order_with_saved_state(schedule: Schedule, device_of_stage: Sequence[int] = ()) -> list[tuple[Action, Retain]]:
    """`topological_order`, with what the stage of each action retains of the micro-batch after it."""
    retained = [with_saved_state(actions) for actions in schedule.stages]  # stages keep their order
    return [next(retained[action.stage]) for action in topological_order(schedule, device_of_stage)]


def in_device_order(schedule: Schedule, device_of_stage: Sequence[int]) -> Iterable[tuple[Action, Retain]]:
    """All actions, in the order of each device, each with what its stage retains afterwards. Raises ScheduleError on a
    deadlock, unless every row has its own device."""
    pairs = {*zip(schedule.row_of_stage, device_of_stage, strict=True)}
    if len(pairs) == len(set(device_of_stage)) == len(schedule):
        retained = [with_saved_state(actions) for actions in schedule.stages]
        return (next(retained[action.stage]) for row in schedule for action in row)
    return order_with_saved_state(schedule, device_of_stage)


def check(schedule: Schedule) -> None:
    """Check that a schedule can run and computes a whole step.

    Raises ScheduleError, which ends with the grid, for a stage in two rows; a duplicate or missing action; a backward
    before its forward; an edge on which micro-batches are sent and received in different orders; a deadlock.
    """
    if not schedule.stages:
        raise ScheduleError("is empty: it needs at least one stage and one forward")
    row_of_stage: dict[int, int] = {}  # the row of each stage
    for number, row in enumerate(schedule):
        for a in row:
            if a.micro_batch < 0:
                raise _error(schedule, f"{a}: micro-batches count from 0", [a])
            if row_of_stage.setdefault(a.stage, number) != number:
                raise _error(schedule, f"{a} is in row {number}, and stage {a.stage} in row {row_of_stage[a.stage]}; "
                             "put all actions of a stage into one row", [a])  # fmt: skip
    for stage, actions in enumerate(schedule.stages):
        _check_stage(schedule, stage, actions)
    for stage in range(len(schedule.stages) - 1):
        for direction, kinds, sender, receiver in (
            (Kind.F, (Kind.F,), stage, stage + 1),
            (Kind.B, SENDS_GRADIENT, stage + 1, stage),
        ):
            sent, received = ([a for a in schedule.stages[k] if a.kind in kinds] for k in (sender, receiver))
            for s, r in zip(sent, received, strict=True):
                if s.micro_batch != r.micro_batch:
                    raise _error(schedule, f"stage {sender} sends after {s} when stage {receiver} receives for {r}; "
                                 f"give both stages the same order of {direction.value}", [s, r])  # fmt: skip
    if stuck := _clock(schedule)[1]:
        raise _deadlock_error(schedule, stuck)


# for each kind of action, the kind that must precede it on its stage for the same micro-batch
_NEEDS = {Kind.F: None, Kind.R: Kind.F, Kind.B: Kind.F, Kind.I: Kind.F, Kind.W: Kind.I}


def _check_stage(schedule: Schedule, stage: int, actions: Sequence[Action]) -> None:
    seen: dict[Kind, set[int]] = {kind: set() for kind in Kind}  # micro-batches
    for a in actions:
        kind, m = a.kind, a.micro_batch
        if m in seen[kind]:
            raise _error(schedule, f"{a} is there twice; remove one", [a])
        if m in seen[Kind.B] or (kind is not Kind.W and m in seen[Kind.I]):
            if kind is Kind.R:
                raise _error(schedule, f"{a} comes after the backward it is for; put it before", [a])
            other = Action(Kind.I if m in seen[Kind.I] else Kind.B, stage, m)
            raise _error(schedule, f"{a} and {other} are two backwards of one micro-batch; remove one", [a, other])
        needed = _NEEDS[kind]
        if needed is not None and m not in seen[needed]:
            first = Action(needed, stage, m)
            raise _error(schedule, f"{a} comes before {first}, which it needs; put {first} first", [a, first])
        seen[kind].add(m)
    for kind in (Kind.F, Kind.B, Kind.W) if schedule.trains else (Kind.F,):
        for m in range(schedule.micro_batches):
            done = m in seen[kind] or (kind is Kind.B and m in seen[Kind.I]) or (kind is Kind.W and m in seen[Kind.B])
            if not done:
                missing = Action(kind, stage, m)
                raise _error(schedule, f"{missing} is missing; add it to stage {stage}", [missing])


def grid(
    schedule: Schedule, mark: Collection[Action] = (), width: int = 120, device_of_stage: Sequence[int] = ()
) -> str:
    """The schedule as text, with a line per row and a column per tick of a clock on which every action takes one tick.
    A row is a stage, or a device with several stages, whose actions are then written in full (`2F0`).

    Stages with the same number in ``device_of_stage`` share a device, as in `topological_order`; a schedule that
    deadlocks is also drawn. ``!`` follows an action in ``mark``, and ``>`` replaces ``|`` in its row, even if the
    action is missing there. A grid wider than ``width`` characters continues in further blocks of rows.
    """
    ticks = clock(schedule, device_of_stage)
    marked = set(mark)
    row_of_stage = {a.stage: number for number, row in enumerate(schedule) for a in row}
    absent = {row_of_stage.get(a.stage, a.stage) for a in marked.difference(*schedule)}  # the rows of missing actions
    several = any(stage != number for stage, number in row_of_stage.items())  # rows are devices
    labels, rows = [], []
    for number, actions in enumerate(schedule):
        pointed = number in absent or any(a in marked for a in actions)
        what = "device" if several else "stage"
        labels.append(f"{what} {number:<{len(str(len(schedule) - 1))}} {'>' if pointed else '|'} ")
        row: list[str] = []
        for i, a in enumerate(actions):  # an action that can never start has no tick and is still shown
            row += ["."] * (ticks[number][i] - len(row) if i < len(ticks[number]) else 0)
            text = str(a) if several else f"{a.kind.value}{a.micro_batch}"
            row.append(text + "!" * (a in marked))
        rows.append(row)
    cell = max((len(text) for row in rows for text in row), default=1)
    columns = max(1, (width - len(labels[0]) + 1) // (cell + 1)) if labels else 1
    blocks = []
    for first in range(0, max(map(len, rows), default=0), columns):
        cells = (" ".join(f"{text:<{cell}}" for text in row[first : first + columns]) for row in rows)
        blocks.append("\n".join((label + row).rstrip() for label, row in zip(labels, cells, strict=True)))
    return "\n\n".join(blocks)


def clock(schedule: Schedule, device_of_stage: Sequence[int] = ()) -> list[list[int]]:
    """The tick of each action of each row on the unit clock; an action that can never run has no tick."""
    ticks_of_rows: list[list[int]] = [[] for _ in schedule]
    for tick, performed_actions in enumerate(_clock(schedule, device_of_stage)[0]):
        for _, row in performed_actions:
            ticks_of_rows[row].append(tick)
    return ticks_of_rows


def _deadlock_error(schedule: Schedule, stuck: dict[Action, Action | None]) -> ScheduleError:
    waits = "; ".join(f"{action} waits for {blocker}" for action, blocker in stuck.items())
    return _error(schedule, f"deadlock ({waits}); reorder the marked actions", stuck)


def _error(schedule: Schedule, what: str, mark: Collection[Action]) -> ScheduleError:
    blocks = grid(schedule, mark).split("\n\n")
    shown = [block for block in blocks if "!" in block] or blocks[-1:]  # a missing action may belong anywhere
    return ScheduleError(what, "\n\n".join(shown))
