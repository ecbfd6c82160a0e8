"""The simulator is exact where arithmetic is known, and equals an event simulation where it is not."""

import itertools
import random
from collections.abc import Sequence

import pytest

from gpipe_cli.pipeline.schedule import RECOMPUTE, SCHEDULES, Action, Kind, Schedule, build, forward_only, gpipe
from gpipe_cli.pipeline.simulator import Live, ideal_bubble, live, peak_bytes, peak_live, simulate

SHAPES = list(itertools.product(range(1, 7), range(1, 14)))
COSTS = [(1, 2), (1, 1), (2, 1), (3, 7), (1, 5)]  # (forward, backward)


def step(schedule: Schedule, forward: int, backward: int) -> float:
    stages = len(schedule)
    return simulate(schedule, [forward] * stages, [backward] * stages).step_seconds


@pytest.mark.parametrize("name", SCHEDULES)
def test_bubble_without_recomputation(name: str) -> None:
    for (partitions, micro_batches), (f, b) in itertools.product(SHAPES, COSTS):
        timeline = simulate(build(name, partitions, micro_batches, "never"), [f] * partitions, [b] * partitions)
        assert timeline.step_seconds == (micro_batches + partitions - 1) * (f + b)
        assert timeline.bubble == pytest.approx(ideal_bubble(partitions, micro_batches), abs=1e-12)


def test_ideal_bubble_of_the_paper() -> None:
    """M = 1 on 8 accelerators leaves 7 of 8 idle; M = 4K keeps it below 18 % (section 2.3)."""
    assert ideal_bubble(8, 1) == 7 / 8
    assert ideal_bubble(1, 5) == 0
    assert max(ideal_bubble(k, 4 * k) for k in (2, 4, 8)) < 0.18


@pytest.mark.parametrize(("recompute", "less"), [("always", 0), ("except_last", 1)])
def test_gpipe_with_recomputation(recompute: str, less: int) -> None:
    """The gradient's way back from stage K-1 to 0 costs K-1 backwards but no recomputation: those ran while waiting.

    Last stage: M + K - 1 forwards, then M times (recompute, backward), then K - 1 backwards of others:
    (M+K-1) (f+b) + M f; one f less if the last micro-batch is kept.
    """
    for (partitions, micro_batches), (f, b) in itertools.product(SHAPES, COSTS):
        schedule = gpipe(partitions, micro_batches, recompute)
        expected = (micro_batches + partitions - 1) * (f + b) + (micro_batches - less) * f
        assert step(schedule, f, b) == expected


def test_one_forward_one_backward_takes_as_long_as_gpipe() -> None:
    for (partitions, micro_batches), (f, b), recompute in itertools.product(SHAPES, COSTS, ("always", "never")):
        one, all_ = (build(name, partitions, micro_batches, recompute) for name in ("1f1b", "gpipe"))
        assert step(one, f, b) == step(all_, f, b)


def test_evaluation_has_the_bubble_of_the_forward() -> None:
    timeline = simulate(forward_only(4, 12), [1] * 4, [9] * 4)
    assert timeline.step_seconds == 15
    assert timeline.bubble == pytest.approx(ideal_bubble(4, 12))


def test_transfers_lengthen_the_way_there_and_back() -> None:
    timeline = simulate(gpipe(3, 1, "never"), [1, 1, 1], [2, 2, 2], transfer_seconds=[10, 100])
    assert timeline.step_seconds == 3 * 3 + 2 * 110
    starts = {str(span.action): span.start_seconds for spans in timeline.stages for span in spans}
    assert starts == {"0F0": 0, "1F0": 11, "2F0": 112, "2B0": 113, "1B0": 215, "0B0": 227}


def test_the_slowest_stage_sets_the_pace() -> None:
    micro_batches = 50
    timeline = simulate(gpipe(3, micro_batches, "never"), [1, 3, 1], [2, 6, 2])
    assert timeline.step_seconds == micro_batches * 9 + (1 + 1) + (2 + 2)


def tick_by_tick(
    schedule: Schedule, cost: dict[tuple[Kind, int], int], transfer: Sequence[int]
) -> dict[Action, tuple[int, int]]:
    """Whole-second clock, no dependency code of the package: at each tick every idle stage starts what it can."""
    position = [0] * len(schedule)
    spans: dict[Action, tuple[int, int]] = {}
    now = 0
    while any(at < len(actions) for at, actions in zip(position, schedule, strict=True)):
        for k, actions in enumerate(schedule):
            while position[k] < len(actions):
                a = actions[position[k]]
                if position[k] and spans[actions[position[k] - 1]][1] > now:
                    break
                neighbour = {Kind.F: k - 1, Kind.B: k + 1}.get(a.kind, -1)
                if 0 <= neighbour < len(schedule):
                    sender = spans.get(Action(a.kind, neighbour, a.micro_batch))
                    if sender is None or sender[1] + transfer[min(k, neighbour)] > now:
                        break
                spans[a] = (now, now + cost[a.kind, k])
                position[k] += 1
        now += 1
    return spans


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_equals_an_event_simulation(name: str, recompute: str) -> None:
    random_ = random.Random(f"{name} {recompute}")
    for _ in range(25):
        k, m = random_.randint(1, 5), random_.randint(1, 8)
        schedule = build(name, k, m, recompute)
        cost = {(kind, stage): random_.randint(1, 9) for kind in Kind for stage in range(k)}
        transfer = [random_.randint(0, 6) for _ in range(k - 1)]
        forward, again, backward = ([cost[kind, stage] for stage in range(k)] for kind in (Kind.F, Kind.R, Kind.B))
        timeline = simulate(schedule, forward, backward, again, transfer)
        simulated = {s.action: (s.start_seconds, s.end_seconds) for spans in timeline.stages for s in spans}
        assert simulated == tick_by_tick(schedule, cost, transfer)


def test_a_recomputation_costs_a_forward_unless_told_otherwise() -> None:
    schedule = gpipe(2, 3, "always")
    assert simulate(schedule, [1, 2], [3, 4]) == simulate(schedule, [1, 2], [3, 4], [1, 2])
    assert simulate(schedule, [1, 2], [3, 4], [0, 0]).step_seconds < simulate(schedule, [1, 2], [3, 4]).step_seconds


def test_peak_of_kept_micro_batches() -> None:
    for k, m in SHAPES:
        for stage in range(k):
            one, all_ = (peak_live(build(name, k, m, "never"))[stage] for name in ("1f1b", "gpipe"))
            assert one == Live(graphs=min(k - stage, m), inputs=0)
            assert all_ == Live(graphs=m, inputs=0)
            one, all_ = (peak_live(build(name, k, m, "always"))[stage] for name in ("1f1b", "gpipe"))
            assert one == Live(graphs=1, inputs=min(k - stage, m))
            assert all_ == Live(graphs=1, inputs=m)
            assert peak_live(gpipe(k, m, "except_last"))[stage] == Live(graphs=1, inputs=m - 1)
    assert peak_live(forward_only(2, 4)) == (Live(0, 0), Live(0, 0))


def test_what_is_held_while_each_action_runs() -> None:
    # 0F0 0F1 0R1 0B1 0R0 0B0
    assert live(gpipe(1, 2, "always"))[0] == (
        Live(graphs=0, inputs=1),
        Live(graphs=0, inputs=2),
        Live(graphs=1, inputs=1),
        Live(graphs=1, inputs=1),
        Live(graphs=1, inputs=0),
        Live(graphs=1, inputs=0),
    )


def test_everything_is_let_go_after_the_last_backward() -> None:
    """What a stage holds in its last action is that action's own graph."""
    for name, recompute, (k, m) in itertools.product(SCHEDULES, RECOMPUTE, SHAPES):
        for held in live(build(name, k, m, recompute)):
            assert held[-1] == Live(graphs=1, inputs=0)
            assert min(min(h.graphs, h.inputs) for h in held) >= 0


def test_peak_bytes_with_recomputation_is_one_graph_and_the_boundaries() -> None:
    """Section 2.3: N samples at the boundary and one micro-batch inside, instead of everything."""
    assert peak_bytes(gpipe(2, 8, "always"), [100, 50], [3, 4]) == (100 + 7 * 3, 50 + 7 * 4)
    assert peak_bytes(gpipe(2, 8, "never"), [100, 50], [3, 4]) == (800, 400)
    assert peak_bytes(build("1f1b", 2, 8, "never"), [100, 50], [3, 4]) == (200, 50)


def test_costs_of_zero_have_no_bubble() -> None:
    assert simulate(gpipe(2, 2, "never"), [0, 0], [0, 0]).bubble == 0
