"""What a schedule will take before it is run: time (section 2.3 of the paper, the bubble) and kept activations.

The simulator walks the same list as the executor. Where arithmetic is known it is exact. For stages of equal cost and
free transfers, with f and b for a forward and a backward of one micro-batch, a step of `gpipe` takes

    (M + K - 1) (f + b)                 without recomputation, a bubble of (K-1)/(M+K-1)
    (M + K - 1) (f + b) +  M      f     recompute=always
    (M + K - 1) (f + b) + (M - 1) f     recompute=except_last

so that of the M + K - 1 recomputations one might expect on the longest path, K - 1 hide in the wait for the gradient.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from gpipe_cli.pipeline.schedule import Action, Keep, Kind, Schedule, dependencies, keeps, linearize
from gpipe_cli.pipeline.timeline import Span, Timeline


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
    forward_seconds: Sequence[float],
    backward_seconds: Sequence[float],
    recompute_seconds: Sequence[float] | None = None,
    transfer_seconds: Sequence[float] | None = None,
) -> Timeline:
    """When each action runs, if each starts as soon as its stage is free and what it needs is there.

    Args:
        forward_seconds: per stage, for one micro-batch. The micro-batches are taken to be of equal size.
        backward_seconds: likewise.
        recompute_seconds: likewise; a recomputation is a forward, so it takes as long as one if this is left out.
        transfer_seconds: per edge (stage k to k + 1 and back, K - 1 of them), for one micro-batch; 0 if left out.
            Transfers occupy no stage and do not wait for each other.

    Raises:
        ValueError: the schedule deadlocks.
    """
    stages = len(schedule)
    if recompute_seconds is None:
        recompute_seconds = forward_seconds
    seconds = {Kind.F: forward_seconds, Kind.R: recompute_seconds, Kind.B: backward_seconds}
    transfer = [0.0] * (stages - 1) if transfer_seconds is None else transfer_seconds
    assert all(len(costs) == stages for costs in seconds.values()), "one cost per stage and kind of action"
    assert len(transfer) == stages - 1, "one transfer time per edge"

    ends: dict[Action, float] = {}
    free = [0.0] * stages
    spans: list[list[Span]] = [[] for _ in schedule]
    for action in linearize(schedule):
        stage = action.stage
        start = free[stage]
        for needed in dependencies(action, schedule):
            arrival = ends[needed]
            if needed.stage != stage:
                arrival += transfer[min(needed.stage, stage)]
            start = max(start, arrival)
        end = start + seconds[action.kind][stage]
        ends[action] = free[stage] = end
        spans[stage].append(Span(action, start, end))
    return Timeline(tuple(map(tuple, spans)))


def live(schedule: Schedule) -> tuple[tuple[Live, ...], ...]:
    """For each stage, what it holds while each of its actions runs; no times needed, as a stage keeps its order.

    A forward that keeps something holds it from its beginning, a recomputation turns an input into a graph when it
    begins, a backward lets go when it ends.
    """
    kept = keeps(schedule)
    return tuple(_live_on_stage(actions, kept) for actions in schedule)


def peak_live(schedule: Schedule) -> tuple[Live, ...]:
    """For each stage, the most graphs and the most inputs held; the two need not occur at the same moment."""
    return tuple(Live(max(h.graphs for h in held), max(h.inputs for h in held)) for held in live(schedule))


def peak_bytes(schedule: Schedule, graph_bytes: Sequence[int], input_bytes: Sequence[int]) -> tuple[int, ...]:
    """For each stage, the most bytes held for micro-batches in flight: the paper's O(N + L/K * N/M) (section 2.3).

    Args:
        graph_bytes: per stage, all activations of one micro-batch, the input included.
        input_bytes: per stage, what comes over the boundary for one micro-batch.
    """
    assert len(graph_bytes) == len(input_bytes) == len(schedule), "one size per stage"
    return tuple(
        max(h.graphs * graph + h.inputs * boundary for h in held)
        for held, graph, boundary in zip(live(schedule), graph_bytes, input_bytes, strict=True)
    )


def _live_on_stage(actions: Sequence[Action], kept: dict[Action, Keep]) -> tuple[Live, ...]:
    graphs = inputs = 0
    held = []
    for action in actions:
        keep = kept.get(action)
        graphs += keep is Keep.GRAPH
        if action.kind is Kind.R:
            inputs -= 1
        inputs += keep is Keep.INPUT
        held.append(Live(graphs, inputs))
        if action.kind is Kind.B:
            graphs -= 1
    return tuple(held)
