"""What a schedule will take before it is run: time (section 2.3 of the paper, the bubble) and kept activations.

The simulator walks the same list as the executor. Where arithmetic is known it is exact. For stages of equal cost and
free transfers, with f and b for a forward and a backward of one micro-batch, a step of `gpipe` takes

    (M + K - 1) (f + b)                 without recomputation, a bubble of (K-1)/(M+K-1)
    (M + K - 1) (f + b) +  M      f     recompute=always
    (M + K - 1) (f + b) + (M - 1) f     recompute=except_last

so that of the M + K - 1 recomputations one might expect on the longest path, K - 1 hide in the wait for the gradient.
Stages that are processes of one machine share its memory and caches and slow each other down; that is simulated too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from gpipe_cli.pipeline.schedule.dependencies import linearize, needs
from gpipe_cli.pipeline.schedule.schedules import Action, Kind, Retain, Schedule, stage_retained
from gpipe_cli.pipeline.schedule.timeline import Event, EventKind, Span, Timeline, gap


@dataclass(frozen=True, slots=True)
class StageCost:
    """Seconds that one micro-batch takes on one stage while no other stage computes."""

    forward_seconds: float  # a forward that keeps nothing but its input
    graph_seconds: float  # a forward that keeps its graph; a recomputation takes as long
    backward_seconds: float
    update_seconds: float = 0.0  # once, after the stage's last action


@dataclass(frozen=True, slots=True)
class EdgeCost:
    """Seconds that one micro-batch takes over one edge, from stage k to k + 1 and back."""

    forward_seconds: float
    backward_seconds: float


@dataclass(frozen=True, slots=True)
class Live:
    """What a stage holds of its micro-batches in flight.

    ``graphs`` counts those with all their activations, the input included; ``inputs`` those with nothing but what came
    over the stage's boundary.
    """

    graphs: int
    inputs: int


def ideal_bubble(partitions: int, micro_batches: int) -> float:
    """The idle share of K equal stages without recomputation: (K-1)/(M+K-1) (section 2.3)."""
    return (partitions - 1) / (micro_batches + partitions - 1)


def simulate(
    schedule: Schedule,
    stages: Sequence[StageCost],
    edges: Sequence[EdgeCost] = (),
    slowdown: Sequence[float] = (),
) -> Timeline:
    """When each action runs, if each starts as soon as its stage is free and what it needs is there.

    The timeline's events are the waiting, the transfers that nothing hides and the updates of each stage; a stage
    that waits for its first action has been free since 0.

    Args:
        stages: K of them. The micro-batches are taken to be of equal size.
        edges: K - 1 of them; transfers take no time if left out. They occupy no stage and do not wait for each other.
        slowdown: ``slowdown[n - 1]`` is by which factor everything that a stage computes, updates included, takes
            longer while n stages compute; the last value also counts for more of them. None if left out.

    Raises:
        ValueError: the schedule deadlocks.
    """
    assert len(stages) == len(schedule), "one cost per stage"
    assert not edges or len(edges) == len(schedule) - 1, "one cost per edge"
    assert min(slowdown, default=1.0) > 0, "a factor is positive"
    run = _Run(schedule, stages, edges, slowdown)
    run.perform()
    if any(len(spans) < len(actions) for spans, actions in zip(run.spans, schedule, strict=True)):
        linearize(schedule)  # raises, with the grid
        raise AssertionError("what can be put in order can be simulated")
    return Timeline(tuple(map(tuple, run.spans)), tuple(map(tuple, run.events)))


def live(schedule: Schedule) -> tuple[tuple[Live, ...], ...]:
    """For each stage, what it holds while each of its actions runs; no times needed, as a stage keeps its order.

    A forward that keeps something holds it from its beginning, a recomputation turns an input into a graph when it
    begins, a backward frees it when it ends.
    """
    return tuple(tuple(_live(actions)) for actions in schedule)


def _live(actions: Sequence[Action]) -> Iterator[Live]:
    graphs = inputs = 0
    for action, retain in stage_retained(actions):
        graphs += retain is Retain.GRAPH
        inputs += (retain is Retain.INPUT) - (action.kind is Kind.R)
        yield Live(graphs, inputs)
        graphs -= action.kind is Kind.B


def peak_bytes(
    schedule: Schedule, graph_bytes: Sequence[Sequence[int]], input_bytes: Sequence[Sequence[int]]
) -> tuple[int, ...]:
    """For each stage, the most bytes held for micro-batches in flight: the paper's O(N + L/K * N/M) (section 2.3).

    Args:
        graph_bytes: per stage and micro-batch, all its activations, the input included.
        input_bytes: per stage and micro-batch, what comes over the boundary.
    """
    assert len(graph_bytes) == len(input_bytes) == len(schedule), "sizes for each stage"
    peaks = []
    for actions, graphs, inputs in zip(schedule, graph_bytes, input_bytes, strict=True):
        held = peak = 0
        for action, retain in stage_retained(actions):
            m = action.micro_batch
            if action.kind is Kind.R:
                held -= inputs[m]
            held += graphs[m] if retain is Retain.GRAPH else inputs[m] if retain is Retain.INPUT else 0
            peak = max(peak, held)
            if action.kind is Kind.B:
                held -= graphs[m]
        peaks.append(peak)
    return tuple(peaks)


@dataclass(slots=True)
class _Result:
    """What comes of one kind of action on one stage, by micro-batch: when it ended, and who waits for it."""

    ended: dict[int, float]
    waiting: dict[int, list[int]]


class _Run:
    """One simulation, from one end of an action or arrival of a tensor to the next.

    All stages that compute slow each other down by the same factor, which changes whenever one of them starts or ends.
    So ends are kept on a virtual clock that stands for undisturbed work: there they are known when an action starts.
    Arrivals of tensors are on the real clock. (A constant factor for each stage is no substitute: two stages that take
    turns on one core take 2 M (f + b) for a step, and with a factor of 2 would be said to take 2 (M + 1) (f + b).)
    """

    def __init__(
        self, schedule: Schedule, stages: Sequence[StageCost], edges: Sequence[EdgeCost], slowdown: Sequence[float]
    ) -> None:
        self.spans: list[list[Span]] = [[] for _ in schedule]
        self.events: list[list[Event]] = [[] for _ in schedule]
        self._schedule, self._stages, self._edges, self._slowdown = schedule, stages, edges, slowdown
        self._graphs = [
            {a.micro_batch for a, retain in stage_retained(actions) if a.kind is Kind.F and retain is Retain.GRAPH}
            for actions in schedule
        ]
        self._now = self._virtual = 0.0  # one and the same without slowdown
        self._free = [0.0] * len(schedule)  # since when
        self._started = [0.0] * len(schedule)
        self._computing: list[tuple[float, int]] = []  # heap: virtual end, stage
        self._arriving: list[tuple[float, int]] = []  # heap: when what a stage waits for is there, stage
        self._results = {(kind, k): _Result({}, {}) for kind in Kind for k in range(len(schedule))}
        self._sources = {at: self._sources_of(*at) for at in self._results}

    def perform(self) -> None:
        for stage in range(len(self._schedule)):
            self._begin(stage)
        computing, arriving, slowdown = self._computing, self._arriving, self._slowdown
        while computing or arriving:
            factor = slowdown[min(len(computing), len(slowdown)) - 1] if slowdown and computing else 1.0
            if computing:
                virtual = computing[0][0]
                end = self._now + max(0.0, virtual - self._virtual) * factor if slowdown else virtual
                if not arriving or end <= arriving[0][0]:
                    self._now, self._virtual = end, virtual
                    self._finish(heappop(computing)[1])
                    continue
            arrival, stage = heappop(arriving)
            self._virtual = self._virtual + (arrival - self._now) / factor if slowdown else arrival
            self._now = arrival
            self._begin(stage)

    def _begin(self, stage: int) -> None:
        """Start what comes next on a stage that is free, now or when it is woken up again."""
        actions, position = self._schedule[stage], len(self.spans[stage])
        if position == len(actions):
            if self._stages[stage].update_seconds > 0:
                self._compute(stage, self._stages[stage].update_seconds)
            return
        action = actions[position]
        sent = None
        for result, transfer in self._sources[action.kind, stage]:
            ended = result.ended.get(action.micro_batch)
            if ended is None:
                result.waiting.setdefault(action.micro_batch, []).append(stage)
                return
            if transfer is None:  # from the stage itself
                continue
            sent = ended
            if ended + transfer > self._now:
                heappush(self._arriving, (ended + transfer, stage))
                return
        if self._now > self._free[stage]:
            self.events[stage] += gap(action, self._free[stage], self._now, sent)
        self._compute(stage, self._seconds(action))

    def _compute(self, stage: int, seconds: float) -> None:
        self._started[stage] = self._now
        heappush(self._computing, (self._virtual + seconds, stage))

    def _finish(self, stage: int) -> None:
        actions, spans, now = self._schedule[stage], self.spans[stage], self._now
        self._free[stage] = now
        if len(spans) == len(actions):
            self.events[stage].append(Event(EventKind.UPDATE, self._started[stage], now, None))
            return
        action = actions[len(spans)]
        spans.append(Span(action, self._started[stage], now))
        result = self._results[action.kind, stage]
        result.ended[action.micro_batch] = now
        self._begin(stage)
        for other in result.waiting.pop(action.micro_batch, ()):
            self._begin(other)

    def _seconds(self, action: Action) -> float:
        cost = self._stages[action.stage]
        if action.kind is Kind.B:
            return cost.backward_seconds
        if action.kind is Kind.R or action.micro_batch in self._graphs[action.stage]:
            return cost.graph_seconds
        return cost.forward_seconds

    def _sources_of(self, kind: Kind, stage: int) -> list[tuple[_Result, float | None]]:
        """What an action waits for, and how long that is under way from another stage; None: from its own."""
        sources: list[tuple[_Result, float | None]] = []
        for needed, other in needs(kind, stage, len(self._schedule)):
            seconds = None if other == stage else 0.0
            if self._edges and other != stage:
                edge = self._edges[min(stage, other)]
                seconds = edge.forward_seconds if other < stage else edge.backward_seconds
            sources.append((self._results[needed, other], seconds))
        return sources
