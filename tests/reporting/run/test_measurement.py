import tracemalloc
from dataclasses import astuple

import pytest
from reporting_runs import spec

from gpipe_cli.planner.stage_memory import StageMemory as PlannedMemory
from gpipe_cli.reporting.run.measurement import StepMedians, classify_speed, stage_memory
from gpipe_cli.results.run import StageMemory


def test_medians_are_over_the_steps_without_the_warm_up_and_while_there_are_no_others_over_that() -> None:
    medians = StepMedians(warm_up_steps=1)
    assert medians.median("tokens") is None
    assert medians.quartiles("tokens") is None
    medians.add({"tokens": 0.05})
    assert (medians.median("tokens"), medians.quartiles("tokens")) == (0.05, (0.05, 0.05))
    for tokens in (1000, 300, 600):
        medians.add({"tokens": tokens})
    assert (medians.median("tokens"), medians.median("tokens", last=2)) == (600.0, 450.0)
    assert medians.median("tokens", last=9) == 600.0, "the first one is warm-up"
    assert medians.quartiles("tokens") == (450.0, 800.0)
    assert StepMedians(warm_up_steps=0).median("tokens") is None


def test_a_recent_median_costs_the_same_however_long_the_run_is() -> None:
    """After each step all values were copied: a run of a million steps spent minutes on it."""
    medians = StepMedians(warm_up_steps=3)
    for number in range(100_000):
        medians.add({"tokens": number})
    tracemalloc.start()
    try:
        assert medians.median("tokens", last=20) == 99_989.5
        assert tracemalloc.get_traced_memory()[1] < 10_000
    finally:
        tracemalloc.stop()


def test_a_speed_is_a_pipelines_only_where_every_stage_had_its_cores() -> None:
    assert classify_speed(False, None) is None
    assert classify_speed(False, 0.04) == "measured"
    assert classify_speed(False, 0.3) == "measured_contended"
    assert classify_speed(True, 0.3) == "measured_one_device"


def test_parts_of_the_memory_add_up_to_the_peak() -> None:
    planned = [PlannedMemory(10, 20, 30, 400, 7)] * 2
    apart = stage_memory(spec(), planned, [1500, 460], [401, 402], [1000, 0])
    assert apart == (
        StageMemory(0, 1000, 10, 20, 30, 401, 39, 1500),
        StageMemory(1, 0, 10, 20, 30, 402, -2, 460),  # not all of it at the same time
    )
    one_process = spec(rank_of_stage=(0, 0), devices=("cpu", "cpu"))
    (together,) = stage_memory(one_process, planned, [2000, 2000], None, [1000, 1000])
    assert (together.stage, together.weights, together.activations, together.peak) == (None, 20, 800, 2000)
    assert sum(astuple(together)[1:-1]) == together.peak
    assert stage_memory(one_process, planned, [], None, None) == ()


@pytest.mark.parametrize(
    ("devices", "rank_of_stage", "stages"),
    [
        ("cuda:0 cuda:0 cuda:1 cuda:1", (0, 0, 0, 0), ["0,1", "2,3"]),
        ("cpu cpu cpu cpu", (0, 0, 0, 1), ["0-2", 3]),
    ],
)
def test_stages_that_share_a_peak_share_a_row(
    devices: str, rank_of_stage: tuple[int, ...], stages: list[object]
) -> None:
    """An allocator, or the system, tells what all of them needed: it is not there once for each."""
    placed = spec(layer_names=(("a",),) * 4, devices=tuple(devices.split()), rank_of_stage=rank_of_stage)
    found = stage_memory(placed, [PlannedMemory(1, 0, 0, 2, 0)] * 4, [100] * 4, None, None)
    assert [entry.stage for entry in found] == stages
    assert sum(entry.peak for entry in found) == 100 * len(stages)
