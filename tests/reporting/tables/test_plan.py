"""What `gpipe plan` writes of a plan, and how it is shown."""

from pathlib import Path

import pytest
from plan_runs import EVEN, HOURGLASS, plan_of, traced
from reporting_runs import log
from training_runs import configure

from gpipe_cli.planner.plan import Plan, PlannedSkip
from gpipe_cli.reporting.tables.plan import show_plan
from gpipe_cli.results.files import read_result
from gpipe_cli.units import rate, size


def shown(made: Plan, folder: Path, width: int = 80) -> list[str]:
    console, file = log(width=width, force_terminal=True)
    show_plan(console, made, folder, verbose=True)
    return [line.rstrip() for line in file.getvalue().splitlines()]


def row(lines: list[str], beginning: str) -> str:
    """The only line with that beginning, with single blanks."""
    (found,) = (line for line in lines if line.startswith(beginning))
    return " ".join(found.split())


@pytest.mark.parametrize("partitions", [1, 7])
def test_numbers_of_a_plan(tmp_path: Path, partitions: int) -> None:
    config = configure(*EVEN, f"partitions={partitions}", "hardware=h200")
    result = plan_of(config, traced())
    lines = shown(result, tmp_path)
    assert max(len(line) for line in lines if not line.startswith("written to")) <= 80
    assert any(line.endswith(f" a step, {rate(result.samples_per_second)} samples/s") for line in lines)
    assert row(lines, "utilisation").startswith(f"utilisation {100 * (result.utilisation or 0):.1f} %")
    fullest = max(stage.memory.total_bytes for stage in result.stages)
    assert row(lines, "memory  ").startswith(f"memory {size(fullest)} on stage ")
    assert result.samples_per_second == 8 / result.step_seconds
    for stage in result.stages:
        assert stage.memory.total_bytes == sum(stage.memory)
    assert read_result(tmp_path, "plan.json")["samples_per_second"] == result.samples_per_second


def test_skips_past_other_stages_are_named_with_their_bytes(tmp_path: Path) -> None:
    """One of a cut with 2 samples of 16 pixels in a micro-batch; of many only the first."""
    config = configure(*HOURGLASS, "partitions=3", "partition.balance=[4,8,5]", "hardware=h200")
    made = plan_of(config, traced(*HOURGLASS))
    pixels = 2 * 16 * 16 * 4
    assert made.skips == (PlannedSkip("images", 0, 2, 3 * pixels), PlannedSkip("high", 0, 2, 4 * pixels))
    assert [stage.boundary_bytes for stage in made.stages] == [4 * pixels, 4 * pixels, None]
    lines = shown(made, tmp_path)
    first = lines.index("skips        images: stage 0 to 2, 6.0 KiB of each micro-batch")
    assert lines[first + 1] == "             high: stage 0 to 2, 8.0 KiB of each micro-batch"
    assert read_result(tmp_path, "plan.json")["skips"] == [skip._asdict() for skip in made.skips]


def test_stages_that_share_a_device_are_shown_so(tmp_path: Path) -> None:
    """The banner gave a stage's share of the memory as the device's memory."""
    config = configure(*EVEN, "partitions=4", "stages_per_process=2", "executor=auto", "hardware=h100")
    made = plan_of(config, traced())
    lines = shown(made, tmp_path, width=120)
    stages = read_result(tmp_path, "plan.json")["stages"]
    assert {stage["memory"]["limit_bytes"] for stage in stages} == {int(74.5 * 2**30) // 2}
    assert "74.5 GiB of memory, shared by 2 stages, links" in row(lines, "             74.5 GiB")
    assert any(line.endswith("the fullest, at its peak: fits 37.2 GiB per stage") for line in lines)
