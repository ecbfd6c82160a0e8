"""A plan: the cut, what is recomputed, and what a step will take, before anything is allocated (sections 2, 3).

One plan for K, M and a schedule that are given; choosing between several is `search.py`. The run itself begins with
the same plan: what was predicted is what is then measured.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import numpy as np

from gpipe_cli.config.settings import TrainConfig
from gpipe_cli.pipeline.profile.activation_memory import ActivationMemory
from gpipe_cli.pipeline.runtime.micro_batch import micro_batch_sizes
from gpipe_cli.pipeline.schedule.breakdown import Breakdown, breakdown
from gpipe_cli.pipeline.schedule.order import check
from gpipe_cli.pipeline.schedule.partition import NoCutFitsError, check_balance, imbalance, partition
from gpipe_cli.pipeline.schedule.recomputation import DoesNotFitError, fewest_recomputations
from gpipe_cli.pipeline.schedule.schedules import Kind, Recompute, Schedule, build
from gpipe_cli.pipeline.schedule.simulator import Live, StageCost, live, peak_bytes, simulate
from gpipe_cli.pipeline.schedule.timeline import Timeline
from gpipe_cli.planner.cost_model import StepCosts
from gpipe_cli.planner.model_profile import ModelProfile
from gpipe_cli.planner.sharing import check_cut


@dataclass(frozen=True, slots=True)
class StageBytes:
    """What a stage holds at its fullest moment."""

    weights: int  # parameters and buffers
    gradients: int
    optimizer: int  # its state, and the moving average of the weights
    activations: int  # the most held at once for backwards, a recomputed micro-batch's included
    workspace: int  # of one layer's backward

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.workspace


@dataclass(frozen=True)
class Plan:
    """What will be run, and what it is predicted to take. Sequences have an entry per stage."""

    balance: tuple[int, ...]
    recompute: Recompute
    samples: int  # of the largest micro-batch
    micro_batches: int
    costs: StepCosts
    stages: tuple[StageCost, ...]
    schedule: Schedule
    recomputed: tuple[int, ...]  # how many micro-batches are
    timeline: Timeline
    step_seconds: float  # updates and set-up included
    breakdown: Breakdown
    memory: tuple[StageBytes, ...]
    imbalance: float  # slowest stage over the mean, less 1

    @property
    def saved_bytes(self) -> tuple[int, ...]:
        return tuple(stage.activations for stage in self.memory)

    @property
    def ends(self) -> tuple[int, ...]:
        return tuple(accumulate(self.balance))

    @property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """First layer of each stage, and the one behind its last."""
        return tuple((end - size, end) for size, end in zip(self.balance, self.ends, strict=True))


class TooLargeError(ValueError):
    """No cut fits the memory; `stage` of the best cut without a limit is `missing_bytes` over it."""

    def __init__(self, stage: int, missing_bytes: int, limit_bytes: int) -> None:
        super().__init__(f"stage {stage} is {missing_bytes} bytes over the limit of {limit_bytes}")
        self.stage, self.missing_bytes, self.limit_bytes = stage, missing_bytes, limit_bytes


def mini_batch_samples(config: TrainConfig, lengths: Sequence[int]) -> int:
    """N; where mini-batches are cut by tokens, of the longest sentences."""
    if config.batch_size is not None:
        return config.batch_size
    assert config.batch_tokens is not None
    return max(1, config.batch_tokens // max(lengths))


def micro_batches_of(config: TrainConfig, lengths: Sequence[int]) -> tuple[int, float]:
    """M, and the mean samples of a micro-batch.

    Cut by tokens, a mini-batch of short sentences has more samples than are planned for, and so all M micro-batches.
    """
    whole = mini_batch_samples(config, lengths)
    micro_batches = config.micro_batches if config.batch_size is None else min(config.micro_batches, whole)
    return micro_batches, whole / micro_batches


@lru_cache(maxsize=16)  # they can be large
def checked_schedule(name: str, partitions: int, micro_batches: int, recompute: Recompute) -> Schedule:
    """The schedule of a step; a short last mini-batch may have fewer micro-batches than the others."""
    if not isinstance(recompute, str):
        recompute = tuple(frozenset(m for m in stage if m < micro_batches) for stage in recompute)
    schedule = build(name, partitions, micro_batches, recompute)
    check(schedule)
    return schedule


def make_plan(config: TrainConfig, shapes: ModelProfile, costs: StepCosts, limit_bytes: int | None) -> Plan:
    """Cut the model for `config` and simulate a step; `costs` are those of a mean micro-batch.

    Raises:
        TooLargeError: no cut stays below `limit_bytes` on every stage.
        ValueError: a balance that was given does not fit the model.
    """
    partitions, layers = config.partitions, len(shapes.costs)
    sizes = micro_batch_sizes(mini_batch_samples(config, shapes.lengths), config.micro_batches)
    samples, micro_batches = sizes[0], len(sizes)
    memory = _Memory(config, shapes, sizes)
    balance = config.partition.balance
    if balance is None:
        try:
            balance = _cut(config, costs, partitions, memory.furthest(limit_bytes))
        except NoCutFitsError:
            balance = _cut(config, costs, partitions, None)
    check_balance(balance, layers, partitions)
    check_cut(shapes.shared, balance)
    ends = list(accumulate(balance))
    bounds = [(end - size, end) for size, end in zip(balance, ends, strict=True)]
    recompute: Recompute = config.recompute
    if config.recompute == "auto":
        try:
            recompute = memory.fewest(bounds, limit_bytes)
        except DoesNotFitError:
            recompute = "except_last"  # over the limit anyway, as is said below
    schedule = checked_schedule(config.schedule, partitions, micro_batches, recompute)
    held = memory.of(schedule, bounds)
    if limit_bytes is not None:
        over = [(stage.total - limit_bytes, k) for k, stage in enumerate(held)]
        if max(over)[0] > 0:
            raise TooLargeError(max(over)[1], max(over)[0], limit_bytes)
    stages = tuple(
        StageCost(
            sum(seconds.forward for seconds in costs.layers[first:end]),
            sum(seconds.graph for seconds in costs.layers[first:end]),
            sum(seconds.backward for seconds in costs.layers[first:end]),
            sum(costs.updates[first:end]),
        )
        for first, end in bounds
    )
    edges = [costs.edges[end - 1] for end in ends[:-1]]
    timeline = simulate(schedule, stages, edges, costs.slowdown)
    step_seconds = max((event.end_seconds for events in timeline.events for event in events), default=0.0)
    step_seconds = max(step_seconds, timeline.end_seconds) - timeline.start_seconds + costs.set_up / partitions
    return Plan(
        balance=tuple(balance),
        recompute=recompute,
        samples=samples,
        micro_batches=micro_batches,
        costs=costs,
        stages=stages,
        schedule=schedule,
        recomputed=tuple(sum(a.kind is Kind.R for a in actions) for actions in schedule),
        timeline=timeline,
        step_seconds=step_seconds,
        breakdown=breakdown(timeline, micro_batches, step_seconds),
        memory=tuple(held),
        imbalance=imbalance(_work(config, costs), balance, **_sends(costs)),
    )


def saved_bytes(config: TrainConfig, shapes: ModelProfile, plan: Plan, samples: int) -> tuple[int, ...]:
    """As `Plan.saved_bytes`, for a mini-batch of `samples` padded to the lengths of `shapes`."""
    sizes = micro_batch_sizes(samples, config.micro_batches)
    schedule = checked_schedule(config.schedule, len(plan.balance), len(sizes), plan.recompute)
    return _Memory(config, shapes, sizes).saved(schedule, plan.bounds)


def _work(config: TrainConfig, costs: StepCosts) -> list[float]:
    """What a micro-batch takes of a stage, for each layer."""
    again = config.recompute in ("always", "except_last")
    return [s.graph + s.backward + (s.forward if again else 0.0) for s in costs.layers]


def _cut(
    config: TrainConfig, costs: StepCosts, partitions: int, furthest: Sequence[Sequence[int]] | None
) -> tuple[int, ...]:
    return partition(
        _work(config, costs),
        partitions,
        **_sends(costs),
        furthest=furthest,
    )


def _sends(costs: StepCosts) -> dict[str, list[float]]:
    """As the partitioner takes them."""
    return {
        "forward_sends": [edge.forward_seconds for edge in costs.edges],
        "backward_sends": [edge.backward_seconds for edge in costs.edges],
    }


def _fullest(moments: Sequence[Live]) -> tuple[tuple[int, int], ...]:
    """Graphs and inputs at the moments that can be the fullest: those that no other has more of both of."""
    most: list[tuple[int, int]] = []
    for graphs, inputs in sorted({(held.graphs, held.inputs) for held in moments}, reverse=True):
        if not most or inputs > most[-1][1]:
            most.append((graphs, inputs))
    return tuple(most)


class _Memory:
    """What stages hold, for any cut."""

    def __init__(self, config: TrainConfig, shapes: ModelProfile, sizes: Sequence[int]) -> None:
        self._config, self._shapes = config, shapes
        self._micro_batches = sizes  # samples of each, the largest first
        self._of_size = {n: ActivationMemory(shapes.costs, shapes.inputs, n, shapes.lengths) for n in set(sizes)}
        self._activations = self._of_size[sizes[0]]
        layers = range(len(shapes.costs))
        # while a layer runs backward, the gradients of what it has kept come into being
        self._backward = np.array([self._activations.graph_bytes(at, at + 1) for at in layers])
        stored = (w.weight_bytes + w.gradient_bytes + w.optimizer_bytes for w in shapes.weights)
        self._stored = [0, *accumulate(stored)]

    def of(self, schedule: Schedule, bounds: Sequence[tuple[int, int]]) -> list[StageBytes]:
        held = []
        for (first, end), saved in zip(bounds, self.saved(schedule, bounds), strict=True):
            weights = self._shapes.weights[first:end]
            held.append(
                StageBytes(
                    weights=sum(w.weight_bytes for w in weights),
                    gradients=sum(w.gradient_bytes for w in weights),
                    optimizer=sum(w.optimizer_bytes for w in weights),
                    activations=saved,
                    workspace=int(self._backward[first:end].max()),
                )
            )
        return held

    def saved(self, schedule: Schedule, bounds: Sequence[tuple[int, int]]) -> tuple[int, ...]:
        """The most activations held at once on each stage."""
        graphs, inputs = (
            [[known[n] for n in self._micro_batches] for known in stages]
            for stages in (
                [{n: memory.graph_bytes(*span) for n, memory in self._of_size.items()} for span in bounds],
                [{n: memory.input_bytes(*span) for n, memory in self._of_size.items()} for span in bounds],
            )
        )
        return peak_bytes(schedule, graphs, inputs)

    def furthest(self, limit_bytes: int | None) -> list[list[int]] | None:
        """For each stage and each layer that it may begin with, how far it can reach within the limit, as if all
        micro-batches were as large as the largest."""
        if limit_bytes is None:
            return None
        partitions, layers = self._config.partitions, len(self._shapes.costs)
        # `auto` needs no more than this: what is gained by keeping less, it does
        mode = "except_last" if self._config.recompute == "auto" else self._config.recompute
        schedule = checked_schedule(self._config.schedule, partitions, len(self._micro_batches), mode)
        moments = [_fullest(stage) for stage in live(schedule)]
        known: dict[object, list[int]] = {}
        rows = []
        for stage in moments:
            if stage not in known:
                known[stage] = [self._reach(first, layers, stage, limit_bytes) for first in range(layers)]
            rows.append(known[stage])
        return rows

    def fewest(self, bounds: Sequence[tuple[int, int]], limit_bytes: int | None) -> Recompute:
        """As few recomputations as fit; none without a limit."""
        if limit_bytes is None:
            return "never"
        graphs, inputs = self._largest(bounds)
        left = [
            limit_bytes - (self._stored[end] - self._stored[first]) - int(self._backward[first:end].max())
            for first, end in bounds
        ]
        return fewest_recomputations(self._config.schedule, len(bounds), len(self._micro_batches), graphs, inputs, left)

    def _largest(self, bounds: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
        graphs = [self._activations.graph_bytes(first, end) for first, end in bounds]
        return graphs, [self._activations.input_bytes(first, end) for first, end in bounds]

    def _reach(self, first: int, layers: int, moments: Sequence[tuple[int, int]], limit_bytes: int) -> int:
        backward = np.maximum.accumulate(self._backward[first:])

        def needed(end: int) -> int:
            graph, boundary = self._activations.graph_bytes(first, end), self._activations.input_bytes(first, end)
            held = max(graphs * graph + inputs * boundary for graphs, inputs in moments)
            return self._stored[end] - self._stored[first] + held + int(backward[end - first - 1])

        end = bisect_right(range(first + 1, layers + 1), limit_bytes, key=needed) + first
        # a layer that keeps nothing of what it takes makes a stage that ends behind it smaller: look again
        while end > first and needed(end) > limit_bytes:
            end -= 1
        return end
