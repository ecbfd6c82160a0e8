"""Timed steps: every action once, in order, with waiting and transfer apart."""

import itertools
import os
import subprocess
import sys
import time

import pytest
import torch
from engine_runs import NOTHING_FROZEN, SumOfSquares, build_stages, costs_of, local_transport, tricky_model

from gpipe_cli.data.micro_batches import micro_batch_sizes
from gpipe_cli.pipeline.runtime.executor import Executor
from gpipe_cli.pipeline.runtime.step_timings import MARKS_PER_ACTION, MARKS_PER_STAGE, max_marks, timeline_of_marks
from gpipe_cli.schedule.named_schedules import build
from gpipe_cli.schedule.schedule import Action, Kind
from gpipe_cli.schedule.timeline import Event, EventKind, Span


def executor(partitions: int) -> Executor:
    """The tricky model in `partitions` stages of this process."""
    stages = build_stages(
        tricky_model(), costs_of("tricky", NOTHING_FROZEN), micro_batch_sizes(6, partitions), here=range(partitions)
    )
    return Executor(stages, range(partitions), local_transport(stages))


def test_a_step_records_every_action_of_its_stages() -> None:
    plan = build("1f1b", 3, 4, "except_last")
    runs = executor(3)
    before = time.perf_counter()
    timings = runs.run(plan, 0, [2] * 4, (torch.randn(8, 3, 8, 8),), SumOfSquares())
    after = time.perf_counter()
    seconds = timings.seconds()
    assert [len(seconds[k]) for k in range(3)] == [
        MARKS_PER_ACTION * len(actions) + MARKS_PER_STAGE for actions in plan
    ]
    assert all(len(values) <= max_marks(4) for values in seconds.values())
    timeline = timeline_of_marks(plan, [seconds[k] for k in range(3)])
    for actions, spans, values in zip(plan, timeline.stages, seconds.values(), strict=True):
        assert tuple(span.action for span in spans) == actions
        assert values == sorted(values)
        assert before <= values[0] <= values[-1] <= after
    # all stages are in one process, so that at no time more than one action runs
    spans = sorted((s for stage in timeline.stages for s in stage), key=lambda span: span.start_seconds)
    assert all(a.end_seconds <= b.start_seconds for a, b in itertools.pairwise(spans))


def test_waiting_ends_when_the_neighbour_has_computed_and_the_rest_is_transfer() -> None:
    """Stage 0 computes F0 from 0 to 10 and sends until 11; stage 1 waits from 0 and has it at 13."""
    plan = build("gpipe", 2, 1, "never")
    f0, b0, f1, b1 = (Action(kind, stage, 0) for stage in (0, 1) for kind in (Kind.F, Kind.B))
    stage0 = [0.0, 0, 10, 11, 11, 32, 40, 40, 40, 40, 40, 42]
    stage1 = [0.0, 13, 20, 20, 20, 20, 30, 30, 30, 30, 30, 31]
    timeline = timeline_of_marks(plan, [stage0, stage1])
    assert timeline.stages == ((Span(f0, 0, 10), Span(b0, 32, 40)), (Span(f1, 13, 20), Span(b1, 20, 30)))
    assert timeline.events[0] == (
        Event(EventKind.TRANSFER, 10, 11, f0),
        Event(EventKind.WAITING, 11, 30, b0),
        Event(EventKind.TRANSFER, 30, 32, b0),
        Event(EventKind.UPDATE, 40, 42, None),
    )
    assert timeline.events[1] == (
        Event(EventKind.WAITING, 0, 10, f1),
        Event(EventKind.TRANSFER, 10, 13, f1),
        Event(EventKind.UPDATE, 30, 31, None),
    )
    # what stage 1, which was done with the step before, waited before this one began is no part of it
    assert timeline_of_marks(plan, [stage0, stage1], began_seconds=5.0).events[1][0] == Event(
        EventKind.WAITING, 5, 10, f1
    )
    # it was sent before stage 1 was free: all is transfer; later than it was there, by clocks that differ: nothing
    for began, kind in ((12.0, EventKind.TRANSFER), (-99.0, EventKind.WAITING)):
        free = [*stage1]
        free[0] = began
        stage0[2] = 10 if kind is EventKind.TRANSFER else 15
        assert timeline_of_marks(plan, [stage0, free]).events[1][0] == Event(kind, began, 13, f1)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="pins processes to a core")
def test_a_core_that_others_want_too_is_shared() -> None:
    """Two programs that never rest, on the one core that this one may use: it has about a third of it."""
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})  # what is started from here on may use no other
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        runs, plan = executor(1), build("gpipe", 1, 4, "never")
        steps = (runs.run(plan, step, [32] * 4, (torch.randn(128, 3, 8, 8),), SumOfSquares()) for step in range(30))
        noticed = any(timings.cpu_starved_share(0) > 0.2 for timings in steps)
    finally:
        for other in others:
            other.kill()
            other.wait()
        os.sched_setaffinity(0, allowed)
    assert noticed
