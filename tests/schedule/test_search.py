"""The orders that `schedule=auto` makes: they can run, they fit, none that has a name is faster."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from gpipe_cli.schedule.dependencies import check
from gpipe_cli.schedule.in_flight_memory import SavedAmounts, peaks_of_devices
from gpipe_cli.schedule.named_schedules import order
from gpipe_cli.schedule.schedule import RECOMPUTE_MODES, Kind, Schedule, with_recomputation
from gpipe_cli.schedule.search import Problem, search_order
from gpipe_cli.schedule.simulator import FREE_TRANSFERS, EdgeCost, StageCost, simulate

TICK = StageCost(1.0, 1.0, 2.0, 1.0, 1.0)


def problem(partitions: int, micro_batches: int, devices: int | None = None) -> Problem:
    """Equal stages, free transfers, memory without a limit."""
    device_of_stage = [k % (devices or partitions) for k in range(partitions)]
    sizes = [SavedAmounts(graph=5, input=1, gradients=1, weights=3)] * partitions
    return Problem(
        [TICK] * partitions, FREE_TRANSFERS, (), device_of_stage, micro_batches, sizes, None, "never", split=True
    )


def uneven(seed: int) -> Problem:
    """Stages, links and memory at random."""
    at_random = random.Random(seed)
    devices, each = at_random.choice([(1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (3, 2), (1, 3)])
    micro_batches = at_random.randint(1, 9)
    partitions = devices * each
    stages = []
    for _ in range(partitions):
        forward, inputs, weights = (at_random.uniform(0.5, 2) for _ in range(3))
        stages.append(StageCost(forward, forward * 1.05, (inputs + weights) * 0.97, inputs, weights, 0.1))
    neighbours = pairwise(range(partitions))
    edges = {ends: EdgeCost(at_random.uniform(0, 0.3), at_random.uniform(0, 0.3)) for ends in neighbours}
    activation_budget = None if at_random.random() < 0.3 else [at_random.randint(12, 40) for _ in range(partitions)]
    activation_budget = activation_budget and [sum(activation_budget[device::devices]) for device in range(devices)]
    device_of_stage = [k % devices for k in range(partitions)]
    sizes = [SavedAmounts(5, at_random.randint(0, 4), 1, at_random.randint(1, 4)) for _ in range(partitions)]
    recompute = at_random.choice((*RECOMPUTE_MODES, "auto"))
    slowdown = at_random.choice(((), (1.0, 1.2)))
    return Problem(
        stages,
        edges,
        slowdown,
        device_of_stage,
        micro_batches,
        sizes,
        activation_budget,
        recompute,
        at_random.random() < 0.8,
    )


def ends(problem: Problem, schedule: Schedule) -> float:
    """When the last update has ended."""
    timeline = simulate(schedule, problem.stages, problem.edges, problem.slowdown, problem.device_of_stage)
    return max(event.end_seconds for events in timeline.events for event in events)


@pytest.mark.parametrize("seed", range(40))
def test_what_is_found_runs_fits_and_has_the_order_of_1f1b(seed: int) -> None:
    given = uneven(seed)
    best, tried = search_order(given)
    held = [[size] * given.micro_batches for size in given.sizes]
    for one in tried:
        check(one.schedule)
        for actions in one.schedule.stages:
            for kinds in ((Kind.B, Kind.I), (Kind.B, Kind.W)):
                assert [a.micro_batch for a in actions if a.kind in kinds] == list(range(given.micro_batches))
            assert given.split or all(a.kind not in (Kind.I, Kind.W) for a in actions)
        if one.fits:
            assert one.seconds == pytest.approx(ends(given, one.schedule))
            peaks = peaks_of_devices(one.schedule, held, given.device_of_stage)
            assert given.activation_budget is None or all(
                a <= b for a, b in zip(peaks, given.activation_budget, strict=True)
            )
    if best is None:
        assert not any(one.fits for one in tried)
        return
    for name in ("1f1b", "zero_bubble") if given.split else ("1f1b",):
        if given.activation_budget is None and given.recompute != "auto":
            made = order(name, len(given.stages), given.micro_batches)
            assert best.seconds <= 1.001 * ends(given, with_recomputation(made, given.recompute))


def test_equal_stages_get_what_is_known_to_be_best() -> None:
    """Zero bubble's step with a stage on each device; with two it is beaten."""
    for devices, micro_batches in ((2, 4), (4, 4), (4, 8), (8, 32)):
        best, _ = search_order(problem(devices, micro_batches))
        assert best is not None
        assert best.seconds == 3 * micro_batches + devices - 1
        twice, _ = search_order(problem(2 * devices, micro_batches, devices))
        assert twice.seconds < 2 * best.seconds


@pytest.mark.parametrize("activation_budget", [24, 30, 36, 42, 50])
def test_recomputing_as_few_as_fit_is_no_slower_than_all_but_the_last(activation_budget: int) -> None:
    """With a limit, orders were made as if all graphs were kept, and had few micro-batches in flight."""
    given = replace(
        problem(4, 6),
        sizes=[SavedAmounts(graph=20, input=1, gradients=3, weights=8)] * 4,
        activation_budget=[activation_budget] * 4,
    )
    fewest, most = (search_order(replace(given, recompute=recompute))[0] for recompute in ("auto", "except_last"))
    assert fewest.seconds <= most.seconds
