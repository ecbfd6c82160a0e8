"""Columns of numbers say of a schedule what its actions say: the same times to the bit, and the same peaks."""

import random
from dataclasses import astuple

import pytest
from schedule_runs import build, parse

from gpipe_cli.errors import InputError
from gpipe_cli.pipeline.schedule.breakdown import breakdown
from gpipe_cli.pipeline.schedule.columns import Columns, peak_bytes_of_rows, simulate_columns
from gpipe_cli.pipeline.schedule.held import Held, changed_bytes
from gpipe_cli.pipeline.schedule.named_schedules import SCHEDULES, forward_only
from gpipe_cli.pipeline.schedule.schedule import RECOMPUTE, Schedule, stage_retained, with_recomputation
from gpipe_cli.pipeline.schedule.simulator import EdgeCost, StageCost, TieCost, simulate


def some_schedule(random_: random.Random, name: str) -> Schedule:
    k, m = random_.randint(1, 8), random_.randint(1, 9)
    if random_.random() < 0.1:
        return forward_only(k, m)
    schedule = build(name, k, m, random_.choice(RECOMPUTE))
    if random_.random() < 0.5:  # neighbours on one device, in any order that can run
        starts = {
            span.action: (span.start_seconds, number)
            for number, spans in enumerate(simulate(schedule, [StageCost(1, 1, 2, 1, 1)] * k).stages)
            for span in spans
        }
        pairs = [schedule[first : first + 2] for first in range(0, len(schedule), 2)]
        schedule = Schedule(tuple(sorted((a for row in pair for a in row), key=starts.__getitem__)) for pair in pairs)
    return schedule


@pytest.mark.parametrize("name", SCHEDULES)
def test_times_and_shares_are_those_of_the_simulation_by_events(name: str) -> None:
    random_ = random.Random(name)
    for number in range(40):
        schedule = some_schedule(random_, name)
        k = len(schedule.stages)
        stages = [StageCost(*(random_.uniform(0.1, 2) for _ in range(5))) for _ in range(k)]
        ties = []
        if number % 2:
            stages = [StageCost(*astuple(stage)[:5], random_.random(), random_.random()) for stage in stages]
            ties = [TieCost(tuple({0, random_.randrange(k), k - 1}), random_.random())]
        edges = [EdgeCost(random_.uniform(0, 1.5), random_.uniform(0, 1.5)) for _ in range(k - 1)] if number % 3 else []
        timeline = simulate(schedule, stages, edges, ties=ties)
        spans = {span.action: span[1:] for of_stage in timeline.stages for span in of_stage}
        times = simulate_columns(Columns.of(schedule), stages, edges, ties)
        found = zip(times.start_seconds.tolist(), times.end_seconds.tolist(), strict=True)
        assert list(found) == [spans[a] for row in schedule for a in row]
        assert times.step_seconds == timeline.step_seconds
        assert times.step_end_seconds == pytest.approx(timeline.step_end_seconds, rel=1e-12)
        step = timeline.step_end_seconds + 0.5
        shares = breakdown(timeline, schedule.micro_batches, step)
        assert astuple(times.breakdown(step)) == pytest.approx(astuple(shares), abs=1e-12)


@pytest.mark.parametrize("name", SCHEDULES)
def test_peaks_are_those_of_the_actions(name: str) -> None:
    random_ = random.Random(name)
    for _ in range(20):
        schedule = some_schedule(random_, name)
        sizes = [Held(*(random_.randint(0, 9) for _ in range(4))) for _ in schedule.stages]
        retained = [stage_retained(actions) for actions in schedule.stages]
        expected = []
        for row in schedule:
            now = most = 0
            for a in row:
                begin, end = changed_bytes(sizes[a.stage])[a.kind, next(retained[a.stage])[1]]
                most = max(most, now + begin)
                now += begin + end
            expected.append(most)
        assert peak_bytes_of_rows(Columns.of(schedule), sizes) == tuple(expected)


@pytest.mark.parametrize("name", SCHEDULES)
def test_recomputations_are_those_of_the_actions(name: str) -> None:
    order = build(name, 6, 7, "never")
    for mode in RECOMPUTE:
        found, expected = Columns.of(order).with_recomputation(mode), Columns.of(with_recomputation(order, mode))
        for column, of_actions in zip(vars(found).values(), vars(expected).values(), strict=True):
            assert column.tolist() == of_actions.tolist()


def test_a_schedule_that_deadlocks_is_refused() -> None:
    with pytest.raises(InputError, match="deadlock"):
        simulate_columns(Columns.of(parse("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1")), [StageCost(1, 1, 1)] * 2)
