"""`schedule=auto`: an order of the actions made for the costs of a model and the memory of its devices.

Orders are placed greedily: a free device takes the most urgent action that is ready: a backward that a neighbour waits
for, then a forward, then the gradients of weights. The best values of the parameters are not known in advance: how many
micro-batches may be in flight, whether backwards are split, how long a wait must be to place a W in it. So all
combinations are simulated, with recomputations moved into waits where that is faster, and the named orders too; the
fastest that fits is taken. Placement follows Qi et al. 2023 (section 3), recomputation in bubbles Mario (PPoPP 2025).

Backwards run from micro-batch 0 to M - 1 on every stage, so that gradients are bitwise equal to `1f1b`'s.
"""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heappop, heappush
from itertools import product

from gpipe_cli.schedule.in_flight_memory import SavedAmounts, changed_bytes, peak_bytes, peaks_of_devices
from gpipe_cli.schedule.named_schedules import ORDERS, SCHEDULES, order
from gpipe_cli.schedule.placement import placement_name, stages_of_devices
from gpipe_cli.schedule.recomputation import DoesNotFitError, find_fewest_recomputations
from gpipe_cli.schedule.schedule import (
    SENDS_GRADIENT,
    Action,
    Kind,
    RecomputePlan,
    Retain,
    Schedule,
    is_recomputing_mode,
    merge_split_backwards,
    with_recomputation,
)
from gpipe_cli.schedule.simulator import Edges, LinkQueues, StageCost, TieCost, simulate
from gpipe_cli.schedule.timeline import Timeline

_TIE_TOLERANCE = 1.001  # an earlier candidate, which is simpler, wins unless a later candidate is faster by more
_MAX_TRIED_ACTIONS = 600_000  # actions of all candidates together, to search for seconds at most


@dataclass(frozen=True)
class Candidate:
    """A candidate order and its simulated step time, which ends with the last update."""

    name: str
    schedule: Schedule
    seconds: float = math.inf  # infinite if the order does not fit the memory

    @property
    def fits(self) -> bool:
        return self.seconds < math.inf

    @property
    def is_named(self) -> bool:
        """Whether this is a named order rather than an order made for the problem."""
        return self.name.partition(",")[0] in SCHEDULES


@dataclass(frozen=True)
class Problem:
    """What an order is made for. Sequences have an entry per stage unless noted."""

    stages: Sequence[StageCost]
    edges: Edges  # as in `simulate`
    slowdown: Sequence[float]  # per number of computing devices, as in `simulate`
    device_of_stage: Sequence[int]  # the device of each stage
    micro_batches: int
    sizes: Sequence[SavedAmounts]  # bytes of the largest micro-batch in each way to hold it
    activation_budget: Sequence[int] | None  # bytes for activations of each device; None without a limit
    recompute: RecomputePlan  # a mode, or `auto`: as few recomputations as fit
    split: bool  # whether backwards may be split into I and W
    ties: Sequence[TieCost] = ()
    # bytes for activations of each stage, if stages of a device cannot share memory, as CUDA graphs have their pools
    stage_budgets: Sequence[int] = ()


def search_order(problem: Problem) -> tuple[Candidate | None, tuple[Candidate, ...]]:
    """The fastest order that fits, None if none does; and all orders that were tried, the fastest first. Every order
    that has a name and is made for this placement is tried, others until all have _MAX_TRIED_ACTIONS actions."""
    tried: list[Candidate] = []
    seen: set[Schedule] = set()
    action_count = 0
    placement = placement_name(problem.device_of_stage)
    for name, candidate in _candidates(problem):
        must_try = name in ORDERS and (ORDERS[name].placement or "neighbours") == placement
        if tried and not must_try and action_count + sum(map(len, candidate)) > _MAX_TRIED_ACTIONS:
            if name in ORDERS:
                continue
            break
        action_count += sum(map(len, candidate))
        if candidate not in seen:
            seen.add(candidate)
            tried.append(_evaluate(problem, name, candidate))
    fastest = sorted(tried, key=lambda result: result.seconds)
    limit_seconds = fastest[0].seconds * _TIE_TOLERANCE
    best = next((result for result in tried if result.fits and result.seconds <= limit_seconds), None)
    return best, tuple(fastest)


def _candidates(problem: Problem) -> Iterator[tuple[str, Schedule]]:
    partitions, micro_batches = len(problem.stages), problem.micro_batches
    devices = 1 + max(problem.device_of_stage)
    for name, named_order in ORDERS.items():
        if (
            name != "gpipe"
            and (problem.split or not named_order.splits)
            and named_order.matches_placement(problem.device_of_stage)
        ):
            yield name, order(name, partitions, micro_batches, devices)
    in_flight_limits = dict.fromkeys(min(limit, micro_batches) for limit in (0, devices, 2 * devices, micro_batches))
    # if few graphs fit, more micro-batches in flight may be worth recomputations
    modes = (
        ("auto", "always")
        if problem.recompute == "auto" and problem.activation_budget is not None
        else (problem.recompute,)
    )
    for mode, limit, split in product(modes, in_flight_limits, (False, True) if problem.split else (False,)):
        name = "greedy for R" if len(modes) > 1 and mode == "always" else "greedy"
        name += f", {limit} in flight" if limit else ", as 1f1b"
        ways = (
            ((0.0, ", W in waits"), (0.5, ", W in waits of W/2"), (1.0, ", W in waits of W")) if split else ((0.0, ""),)
        )
        for patience, way in ways:
            sequence = _Greedy(replace(problem, recompute=mode), limit, split, patience).sequence()
            yield name + way, Schedule(tuple(merge_split_backwards(row)) for row in sequence)


def _evaluate(problem: Problem, name: str, candidate: Schedule) -> Candidate:
    """The candidate with recomputations added, moved into waits if that is faster and fits."""
    recompute = problem.recompute
    if recompute == "auto":
        try:
            recomputed: tuple[frozenset[int], ...] = ()
            if problem.activation_budget is not None and not _Step(problem, candidate).fits:
                budget, devices = (
                    (problem.stage_budgets, ())
                    if problem.stage_budgets
                    else (problem.activation_budget, problem.device_of_stage)
                )
                recomputed = find_fewest_recomputations(candidate, problem.sizes, budget, devices)
            recompute = recomputed or "never"
        except DoesNotFitError:
            recompute = "except_last"  # a stage over its own share may fit, as another of its device needs less
    schedule = with_recomputation(candidate, recompute)
    step = _Step(problem, schedule)
    if not step.fits:
        return Candidate(name, schedule)
    if any(a.kind is Kind.R for row in schedule for a in row):
        earlier = _Step(problem, _hoist_recomputation(step))
        if earlier.fits and earlier.seconds < step.seconds:
            return Candidate(f"{name}, R in waits", earlier.schedule, earlier.seconds)
    return Candidate(name, schedule, step.seconds)


@dataclass(frozen=True)
class _Step:
    """A step that is simulated."""

    problem: Problem
    schedule: Schedule

    @cached_property
    def timeline(self) -> Timeline:
        problem = self.problem
        return simulate(
            self.schedule, problem.stages, problem.edges, problem.slowdown, problem.device_of_stage, problem.ties
        )

    @property
    def seconds(self) -> float:
        """When the last update has ended."""
        return self.timeline.step_end_seconds

    @property
    def fits(self) -> bool:
        problem = self.problem
        if problem.activation_budget is None:
            return True
        sizes = [[size] * problem.micro_batches for size in problem.sizes]
        if problem.stage_budgets:
            of_stages = peak_bytes(self.schedule, sizes)
            peaks = tuple(sum(of_stages[k] for k in stages) for stages in stages_of_devices(problem.device_of_stage))
        else:
            peaks = peaks_of_devices(self.schedule, sizes, problem.device_of_stage)
        return all(peak <= budget for peak, budget in zip(peaks, problem.activation_budget, strict=True))


def _hoist_recomputation(step: _Step) -> Schedule:
    """The schedule with recomputations moved ahead into the waits that their devices have."""
    rows = []
    costs = step.problem.stages
    starts = {span.action: span.start_seconds for spans in step.timeline.stages for span in spans}
    for row in step.schedule:
        hoistable = deque(a for a in row if a.kind is Kind.R)
        sequence: dict[Action, None] = {}  # its keys are an ordered set
        free = 0.0
        for a in row:
            if a in sequence:
                continue
            wait = starts[a] - free
            if hoistable and hoistable[0] == a:
                hoistable.popleft()
            while hoistable and wait > 0 and hoistable[0]._replace(kind=Kind.F) in sequence:
                seconds = costs[hoistable[0].stage].graph_seconds
                if seconds > 2 * wait:  # more time would be lost than won
                    break
                sequence[hoistable.popleft()] = None
                wait -= seconds
            sequence[a] = None
            free = starts[a] + costs[a.stage].seconds(a.kind, Retain.ACTIVATIONS)
        rows.append(tuple(sequence))
    return Schedule(rows)


def _memory_delta(size: SavedAmounts, *, recomputed: bool) -> dict[Kind, int]:
    """Bytes that an action adds to what a stage saves; a backward includes its recomputation, if any."""
    delta = {key: sum(changes) for key, changes in changed_bytes(size).items()}
    recomputed_bytes = delta[Kind.R, Retain.ACTIVATIONS] if recomputed else 0
    return {
        Kind.F: delta[Kind.F, Retain.INPUT if recomputed else Retain.ACTIVATIONS],
        Kind.B: recomputed_bytes + delta[Kind.B, Retain.NOTHING],
        Kind.I: recomputed_bytes + delta[Kind.I, Retain.WEIGHTS],
        Kind.W: delta[Kind.W, Retain.NOTHING],
    }


_NONE = Action(Kind.F, -1, -1)


class _Greedy:
    """Places action after action, as devices become free.

    `max_in_flight`: maximum number of micro-batches in flight on a stage (0: 1f1b's); `split`: split backwards, and
    place a W where the device would wait for at least `patience` times the duration of the W.
    """

    def __init__(self, problem: Problem, max_in_flight: int, split: bool, patience: float) -> None:
        stages, devices = range(len(problem.stages)), range(1 + max(problem.device_of_stage))
        self._problem, self._split, self._patience = problem, split, patience
        as_1f1b = len(stages) + (len(stages) // len(devices) - 1) * len(devices)
        self._max_in_flight = [max_in_flight or min(problem.micro_batches, as_1f1b - k) for k in stages]
        self._max_delayed = 2 * max(self._max_in_flight)  # the most micro-batches between F and W
        self._stages_of_device = [[k for k in stages if problem.device_of_stage[k] == device] for device in devices]
        self._rows: list[list[Action]] = [[] for _ in devices]
        self._busy = [False for _ in devices]
        self._next = {kind: [0 for _ in stages] for kind in (Kind.F, Kind.B, Kind.W)}  # next micro-batch of each stage
        # (F or B, stage, micro-batch) -> when the inputs of this action arrive
        self._arrivals = {(Kind.F, 0, m): 0.0 for m in range(problem.micro_batches)}
        self._links = LinkQueues(problem.edges, problem.device_of_stage)
        self._saved_bytes = [0 for _ in devices]  # bytes per device, between two actions
        self._memory_deltas = [
            _memory_delta(size, recomputed=is_recomputing_mode(problem.recompute)) for size in problem.sizes
        ]
        # heap: when, whether a device may begin (False, the end of an action, sorts first), device, ended action
        self._events: list[tuple[float, bool, int, Action]] = []

    def sequence(self) -> Schedule:
        for device in range(len(self._rows)):
            self._wake(0.0, device)
        while self._events:
            when, begins, device, action = heappop(self._events)
            if begins:
                if not self._busy[device]:
                    self._start_next(when, device)
            else:
                self._busy[device] = False
                self._finish_action(when, action)
                self._wake(when, device)
        return Schedule(map(tuple, self._rows))

    def _wake(self, when: float, device: int) -> None:
        heappush(self._events, (when, True, device, _NONE))

    def _start_next(self, when: float, device: int) -> None:
        """Start the most urgent action that is ready on a free device, if any."""
        stages = self._stages_of_device[device]
        first_arrival = math.inf
        for kind in (Kind.B, Kind.F):
            for k in reversed(stages):
                if (arrival := self._arrival(kind, k)) <= when:
                    self._start_action(when, device, kind, k)
                    return
                first_arrival = min(first_arrival, arrival)
        delaying = [k for k in stages if self._next[Kind.W][k] < self._next[Kind.B][k]] if self._split else []
        if delaying:
            stage = max(delaying, key=lambda k: self._next[Kind.B][k] - self._next[Kind.W][k])
            if first_arrival - when >= self._patience * self._problem.stages[stage].weights_seconds:
                self._start_action(when, device, Kind.W, stage)

    def _arrival(self, kind: Kind, stage: int) -> float:
        """When the stage can begin its next F or backward; infinity if that is not known yet."""
        if kind is Kind.F and not self._may_start_forward(stage):
            return math.inf
        return self._arrivals.get((kind, stage, self._next[kind][stage]), math.inf)

    def _may_start_forward(self, stage: int) -> bool:
        """Whether the stage may have a further micro-batch in flight. Later stages of its device, which the micro-batch
        reaches next, are left room for it."""
        budget, device = self._problem.activation_budget, self._problem.device_of_stage[stage]
        begun = self._next[Kind.F][stage]
        in_flight = begun - self._next[Kind.B][stage]
        delayed = begun - self._next[Kind.W][stage] if self._split else 0
        if in_flight >= self._max_in_flight[stage] or delayed >= self._max_delayed:
            return False
        if budget is None or in_flight == 0:
            return True
        idle = (
            k for k in self._stages_of_device[device] if k > stage and self._next[Kind.F][k] == self._next[Kind.B][k]
        )
        needed = sum(self._problem.sizes[k].graph for k in (stage, *idle))
        return self._saved_bytes[device] + needed <= budget[device]

    def _start_action(self, when: float, device: int, kind: Kind, stage: int) -> None:
        action = Action(Kind.I if kind is Kind.B and self._split else kind, stage, self._next[kind][stage])
        self._rows[device].append(action)
        self._busy[device] = True
        self._next[kind][stage] += 1
        self._saved_bytes[device] += self._memory_deltas[stage][action.kind]
        seconds = self._problem.stages[stage].seconds(action.kind, Retain.ACTIVATIONS)
        heappush(self._events, (when + seconds, False, device, action))

    def _finish_action(self, when: float, ended: Action) -> None:
        kind, stage, m = ended
        last = len(self._problem.stages) - 1
        if kind is Kind.F:
            receiver, sent = (stage + 1, Kind.F) if stage < last else (stage, Kind.B)
        elif kind in SENDS_GRADIENT and stage > 0:
            receiver, sent = stage - 1, Kind.B
        else:
            return
        arrival = self._links.arrival(stage, receiver, when)
        self._arrivals[sent, receiver, m] = arrival
        self._wake(arrival, self._problem.device_of_stage[receiver])
