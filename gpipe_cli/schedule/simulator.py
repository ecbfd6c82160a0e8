"""Predicts when each action of a schedule will run (section 2.3 of the paper: the bubble).

The simulator performs the same list of actions as the executor, and agrees exactly with known closed forms. For stages
of equal cost and free transfers, with f and b for a forward and a backward of a micro-batch, a step of `gpipe` takes

    (M + K - 1) (f + b)                 without recomputation, a bubble of (K-1)/(M+K-1)
    (M + K - 1) (f + b) +  M      f     recompute=always
    (M + K - 1) (f + b) + (M - 1) f     recompute=except_last

so that of the M + K - 1 recomputations to be expected on the critical path, K - 1 hide in the wait for the gradient.
Also simulated: stages that share a device, in the order in which their process performs them, and processes that slow
each other down as they share the memory and caches of a machine.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from heapq import heappop, heappush
from itertools import pairwise
from typing import NamedTuple

from gpipe_cli.schedule.dependencies import in_device_order, topological_order
from gpipe_cli.schedule.schedule import Action, Kind, Retain, Schedule
from gpipe_cli.schedule.timeline import Event, EventKind, Span, Timeline, gap


class StageCost(NamedTuple):
    """Seconds that a micro-batch takes on a stage, or on a layer, while no other device computes."""

    forward_seconds: float  # a forward that saves nothing but its input
    graph_seconds: float  # a forward that saves its graph; a recomputation takes as long
    backward_seconds: float
    inputs_seconds: float = 0.0  # the first half of a split backward (I); 0 if backwards are not split
    weights_seconds: float = 0.0  # the second half (W)
    update_seconds: float = 0.0  # to update its weights, once, after the last action of its device
    sum_seconds: float = 0.0  # to sum its gradients over replicas, once, after its last action

    def seconds(self, kind: Kind, retain: Retain) -> float:
        """Seconds of an action of this `kind`, after which the stage retains `retain` of the micro-batch."""
        match kind:
            case Kind.B:
                return self.backward_seconds
            case Kind.I:
                return self.inputs_seconds
            case Kind.W:
                return self.weights_seconds
        return self.graph_seconds if retain is Retain.ACTIVATIONS else self.forward_seconds


class EdgeCost(NamedTuple):
    """Seconds of a micro-batch's transfers from a stage to a later one: activations, and their gradients back."""

    forward_seconds: float
    backward_seconds: float


class TieCost(NamedTuple):
    """A weight that several `stages` have (their indices): all of them have the sum of its gradients `seconds` after
    the last of them has its own, and only then update their weights."""

    stages: tuple[int, ...]
    seconds: float


# (sender, receiver) -> cost: of all neighbours, and of skips from a stage past others
Edges = Mapping[tuple[int, int], EdgeCost]
FREE_TRANSFERS: Edges = {}  # transfers take no time


class LinkQueues:
    """The links between devices in a simulation: each carries one micro-batch at a time in each direction."""

    def __init__(self, edges: Edges, device_of_stage: Sequence[int]) -> None:
        self._edges, self._device_of_stage = edges, device_of_stage
        self._free_at: dict[tuple[int, int], float] = {}  # (sender, receiver) -> when the link is free

    def arrival(self, sender: int, receiver: int, sent_seconds: float) -> float:
        """When a micro-batch that stage `sender` sends at `sent_seconds` arrives at its neighbour `receiver`; the link
        is occupied until then, or the end of a skip. Transfers within a device, or without `edges`, take no time."""
        if not self._edges or self._device_of_stage[sender] == self._device_of_stage[receiver]:
            return sent_seconds
        cost = self._edges[min(sender, receiver), max(sender, receiver)]
        seconds = cost.forward_seconds if sender < receiver else cost.backward_seconds
        arrival = max(sent_seconds, self._free_at.get((sender, receiver), 0.0)) + seconds
        self._free_at[sender, receiver] = arrival
        return arrival


def ideal_bubble(devices: int, micro_batches: int) -> float:
    """The idle share of K equal stages without recomputation, with a device for each: (K-1)/(M+K-1) (section 2.3).
    Several stages that share a device count as a single stage."""
    return (devices - 1) / (micro_batches + devices - 1)


def simulate(
    schedule: Schedule,
    stages: Sequence[StageCost],
    edges: Edges = FREE_TRANSFERS,
    slowdown: Sequence[float] = (),
    device_of_stage: Sequence[int] = (),
    ties: Sequence[TieCost] = (),
) -> Timeline:
    """When each action runs, if it starts as soon as its device is free and its inputs have arrived.

    The timeline's events are each stage's waits, exposed transfers and updates; a device that waits for its first
    action has been free since 0.

    `stages` has K costs, for micro-batches of equal size, and `edges` K - 1, in addition to skips. Transfers overlap
    with computation, one at a time over each edge and direction; within a device, and without `edges`, they take no
    time. ``slowdown[n - 1]`` is the factor by which all computation takes longer while n devices compute; the last
    value also holds for more devices. Stages with the same number in `device_of_stage` share a device, in the order of
    :func:`topological_order`, even if another stage's next action could start earlier; without it each row has its own
    device. Raises ScheduleError if the schedule deadlocks.
    """
    assert len(stages) == len(schedule.stages), "a cost per stage"
    assert not edges or edges.keys() >= set(pairwise(range(len(stages)))), "a cost per edge"
    assert min(slowdown, default=1.0) > 0, "a factor is positive"
    assert not device_of_stage or len(device_of_stage) == len(stages), "a device per stage"
    devices = tuple(device_of_stage) or schedule.row_of_stage
    run = _Run(schedule, stages, edges, slowdown, devices, ties)
    run.process_events()
    shared = len(set(devices)) < len(devices)
    return Timeline(tuple(map(tuple, run.spans)), tuple(map(tuple, run.events)), devices if shared else ())


class _Run:
    """One discrete-event simulation. Events are ends of actions and arrivals of tensors.

    All devices that compute slow each other down by the same factor, which changes whenever any of them starts or ends.
    So ends are kept on a virtual clock that counts work without slowdown, where they are known when an action starts.
    Arrivals of tensors are on the real clock. (A constant factor for each stage would not do: two stages that share a
    core take 2 M (f + b) for a step, for which a factor of 2 would predict 2 (M + 1) (f + b).)
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: Sequence[StageCost],
        edges: Edges,
        slowdown: Sequence[float],
        device_of_stage: Sequence[int],
        ties: Sequence[TieCost],
    ) -> None:
        self.spans: list[list[Span]] = [[] for _ in stages]
        self.events: list[list[Event]] = [[] for _ in stages]
        self._stages, self._slowdown, self._device_of_stage = stages, slowdown, device_of_stage
        self._schedule = schedule
        self._remaining_of_stage = list(map(len, schedule.stages))  # number of actions left
        devices = 1 + max(device_of_stage)
        # per device: the actions left, the action that each needs, and its seconds; the first may be running
        self._remaining: list[deque[tuple[Action, Action | None, float]]] = [deque() for _ in range(devices)]
        seconds_of = cache(lambda stage, kind, retain: stages[stage].seconds(kind, retain))
        for action, retain in in_device_order(schedule, device_of_stage):
            seconds = seconds_of(action.stage, action.kind, retain)
            self._remaining[device_of_stage[action.stage]].append((action, schedule.source(action), seconds))
        updated = [stage for stage, cost in enumerate(stages) if cost.update_seconds > 0]
        self._updates = [deque(k for k in updated if device_of_stage[k] == device) for device in range(devices)]
        self._summed_at = [0.0] * devices  # when the gradients of its finished stages are summed over replicas
        # per device: for each tied weight that it shares with other devices, all devices that have it, and the seconds
        self._ties: list[list[tuple[set[int], float]]] = [[] for _ in range(devices)]
        for tie in ties:
            sharing = {device_of_stage[stage] for stage in tie.stages}
            for device in sharing if len(sharing) > 1 else ():
                self._ties[device].append((sharing, tie.seconds))
        self._now = self._virtual = 0.0  # equal without slowdown
        self._free_at = [0.0] * devices  # when each device became free
        self._started_at = [0.0] * devices
        self._computing: list[tuple[float, int]] = []  # heap: virtual end, device
        self._arriving: list[tuple[float, int]] = []  # heap: arrival of what a device waits for, device
        self._ended: dict[Action, float] = {}
        self._arrivals: dict[Action, float] = {}
        self._links = LinkQueues(edges, device_of_stage)
        # stage -> the stages, not neighbours, that send it skips, or gradients of skips
        self._skip_senders = {Kind.F: defaultdict[int, list[int]](list), Kind.B: defaultdict[int, list[int]](list)}
        self._skips = [(sender, receiver) for sender, receiver in edges if receiver > sender + 1]
        for sender, receiver in self._skips:
            self._skip_senders[Kind.F][receiver].append(sender)
            self._skip_senders[Kind.B][sender].append(receiver)
        self._waiting: dict[Action, int] = {}  # the action waited for -> the device that waits

    def process_events(self) -> None:
        for device in range(len(self._remaining)):
            self._start_next(device)
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
            arrival, device = heappop(arriving)
            self._virtual = self._virtual + (arrival - self._now) / factor if slowdown else arrival
            self._now = arrival
            self._start_next(device)
        if any(self._remaining):
            topological_order(self._schedule, self._device_of_stage)  # raises the error that names what waits for what

    def _start_next(self, device: int) -> None:
        """Start the next work of a device that is free, or note what has to happen first."""
        if not self._remaining[device]:
            if self._waits_for_ties(device):
                return  # `_finish` calls again when the last of these devices has its gradients
            if (sums_ready_at := self._ready_at(device)) > self._now:
                first = self._device_of_stage.index(device)
                self.events[first].append(Event(EventKind.TRANSFER, self._now, sums_ready_at, None))
                heappush(self._arriving, (sums_ready_at, device))
            elif self._updates[device]:
                self._compute(device, self._stages[self._updates[device][0]].update_seconds)
            return
        action, needed, seconds = self._remaining[device][0]
        sent = None
        if needed is not None:
            sent = self._ended.get(needed)
            if sent is None:
                self._waiting[needed] = device
                return
            arrival = self._arrivals.get(action)
            if arrival is None:
                arrival = self._links.arrival(needed.stage, action.stage, sent)
                if self._skips:
                    arrival = max(arrival, *self._skip_arrivals(action))
                self._arrivals[action] = arrival
            if arrival > self._now:
                heappush(self._arriving, (arrival, device))
                return
        if self._now > self._free_at[device]:
            self.events[action.stage] += gap(action, self._free_at[device], self._now, sent)
        self._compute(device, seconds)

    def _skip_arrivals(self, action: Action) -> Iterator[float]:
        """When the skips that an action needs, or their gradients, arrive from stages that are not neighbours."""
        yield 0.0
        for sender in self._skip_senders[action.kind.direction][action.stage]:
            sent = Action(action.kind, sender, action.micro_batch)
            if sent not in self._ended and action.kind is not Kind.F:
                sent = Action(Kind.I if action.kind is Kind.B else Kind.B, sender, action.micro_batch)
            yield self._links.arrival(sender, action.stage, self._ended[sent])

    def _ready_at(self, device: int) -> float:
        """When a device has the sums of its gradients, over replicas and all uses of tied weights."""
        tied = [max(self._summed_at[other] for other in sharing) + seconds for sharing, seconds in self._ties[device]]
        return max([self._summed_at[device], *tied])

    def _waits_for_ties(self, device: int) -> bool:
        return any(self._remaining[other] for sharing, _ in self._ties[device] for other in sharing)

    def _compute(self, device: int, seconds: float) -> None:
        self._started_at[device] = self._now
        heappush(self._computing, (self._virtual + seconds, device))

    def _finish(self, device: int) -> None:
        start = self._started_at[device]
        self._free_at[device] = self._now
        if not self._remaining[device]:
            self.events[self._updates[device].popleft()].append(Event(EventKind.UPDATE, start, self._now, None))
            self._start_next(device)
            return
        action, _, _ = self._remaining[device].popleft()
        self.spans[action.stage].append(Span(action, start, self._now))
        self._ended[action] = self._now
        self._remaining_of_stage[action.stage] -= 1
        if not self._remaining_of_stage[action.stage]:
            self._summed_at[device] = max(self._summed_at[device], self._now) + self._stages[action.stage].sum_seconds
        self._start_next(device)
        if action in self._waiting:
            self._start_next(self._waiting.pop(action))
        if not self._remaining[device]:
            others = set().union(*(sharing for sharing, _ in self._ties[device])) - {device}
            for other in sorted(others):
                if not self._remaining[other] and not self._waits_for_ties(other):
                    self._start_next(other)
