"""What `gpipe plan` writes of a plan, and how it is shown."""

from dataclasses import astuple, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from plan_runs import EVEN, HOURGLASS, plan_of, traced
from reporting_runs import log, shares
from training_runs import configure

from gpipe_cli.reporting.tables.plan import show_plan
from gpipe_cli.reporting.tables.plan_result import plan_result
from gpipe_cli.results.files import read_result
from gpipe_cli.results.plan import (
    PlannedCandidate,
    PlannedChoice,
    PlannedLayer,
    PlannedMemory,
    PlannedSkip,
    PlannedStage,
    PlanResult,
)
from gpipe_cli.results.tree import from_tree

MIB = 2**20
COMPARISON = PlannedChoice(
    "micro_batches",
    "the shortest step that fits",
    (
        PlannedCandidate("2", None, None, False, "stage 1 is 72.0 GiB over"),
        PlannedCandidate("4", 0.5, 2 * 2**30, True, ""),
        PlannedCandidate("8", 5.123, 2**30, False, ""),
    ),
)


@cache
def real() -> PlanResult:
    """A plan of seven layers on two stages."""
    config = configure(*EVEN, "partitions=2", "hardware=h200")
    return plan_result(config, traced(), plan_of(config, traced()), (), {"picture": "plan.png"})


def plan(partitions: int = 2, per_stage: int = 3, *, uneven: bool = False, **changes: Any) -> PlanResult:
    """That with numbers to read: equal layers between an embedding and a classifier, half a second."""
    inner, outer = (5 * 10**7, 2 * 10**9, 24 * MIB, 8 * MIB, 4e-3, 8e-3), (655 * 10**5, 10**9, MIB, 4 * MIB, 1e-3, 2e-3)
    last = partitions * per_stage - 1
    names = ["embedding", *(f"layer_{n}" for n in range(1, last)), "classifier"]
    layers = tuple(
        PlannedLayer(name, n // per_stage, *(inner if 0 < n < last else outer)) for n, name in enumerate(names)
    )
    hardware = changes.get("hardware", real().hardware)
    memory = PlannedMemory(*(value * MIB for value in (200, 200, 400, 1000, 48, 1848)), hardware.limit_bytes)
    stages = tuple(
        PlannedStage(
            process=k,
            layers=tuple(names[k * per_stage : (k + 1) * per_stage]),
            parameters=165_500_000 + 10**8 * k * uneven,
            forward_flops=5 * 10**9,
            boundary_bytes=None if k == partitions - 1 else 8 * MIB,
            forward_seconds=0.0125,
            backward_seconds=0.025,
            recomputed=k % 5 if uneven else 3,
            memory=memory,
        )
        for k in range(partitions)
    )
    numbers = {
        "parameters": 331_000_000, "step_samples": 32, "step_seconds": 0.5, "samples_per_second": 64.0,
        "breakdown": shares(0.15), "imbalance": 0.032, "step_flops": 10**14, "recomputed_flops": 25 * 10**12,
        "utilisation": 0.25, "grid": None,
    }  # fmt: skip
    return replace(real(), layers=layers, stages=stages, **(numbers | changes))


def shown(made: PlanResult, folder: Path, width: int = 80, *, verbose: bool = True) -> list[str]:
    console, file = log(width=width, force_terminal=True)
    show_plan(console, made, folder, verbose=verbose)
    return [line.rstrip() for line in file.getvalue().splitlines()]


def row(lines: list[str], beginning: str) -> str:
    """The only line that begins so, with single blanks."""
    (found,) = (line for line in lines if line.startswith(beginning))
    return " ".join(found.split())


def test_numbers_of_a_plan(tmp_path: Path) -> None:
    lines = shown(plan(comparisons=(COMPARISON,)), tmp_path)
    assert row(lines, "embedding ") == "embedding 65.5 M 1.0 G 1.0 MiB 4.0 MiB 1.0 ms 2.0 ms"
    assert row(lines, "layer_1 ...") == "layer_1 ... layer_4 x4 50.0 M 2.0 G 24.0 MiB 8.0 MiB 4.0 ms 8.0 ms"
    assert row(lines, "0      3:").endswith("165.5 M 5.0 G 12.5 ms 25.0 ms 8.0 MiB")
    assert row(lines, "1      3:").endswith("165.5 M 5.0 G 12.5 ms 25.0 ms -")
    for line in (
        "0-1    1,848.0     1.4 %    200.0      200.0      400.0      1,000.0     48.0",
        "micro_batches compared, predicted: the shortest step that fits",
        "            2         -              -  stage 1 is 72.0 GiB over",
        "            4  500.0 ms        2.0 GiB  chosen",
        "            8    5.12 s        1.0 GiB",
        "model        AmoebaNet-D (3, 4): 6 layers, 331.0 M parameters",
        "pipeline     K = 2 partitions, M = 4 micro-batches",
        "mini-batch   32 samples",
        "hardware     h200: 67 TFLOP/s in float32, 494 in tf32, 989 in bfloat16",
        "             assumed: 40.0 TFLOP/s in float32",
        "             131.0 GiB of memory, links 350.0 GB/s, latency 10 us",
        "costs from   hardware=h200 figures",
        "predicted    500.0 ms a step, 64.0 samples/s",
        "speed-up     1.14 times one device that recomputes nothing",
        "utilisation  25.0 % of these figures, predicted, without recomputation",
        "             recomputation adds 25.0 % to the operations",
        "balance      the slowest stage takes 3.2 % more than the mean of all",
        "memory       1.8 GiB on stage 0, the fullest: fits 131.0 GiB",
        "predicted       55.0      20.0    2.0   23.0 =   15.0       3.0      1.0    4.0",
        "ideal bubble 20.0 %, (K-1)/(M+K-1) for K equal devices that only compute",
        "picture      plan.png",
        f"written to   {tmp_path}/plan.json",
    ):
        assert line in lines
    assert not any("measured" in line for line in lines)
    result = real()
    memory = result.stages[1].memory
    assert result.samples_per_second == 8 / result.step_seconds
    assert memory.total_bytes == sum(astuple(memory)[:5])
    show_plan(log()[0], result, tmp_path)
    assert from_tree(PlanResult, read_result(tmp_path, "plan.json")) == result


def test_a_plan_answers_first_and_lists_layers_only_if_told_to(tmp_path: Path) -> None:
    lines = shown(plan(grid=("stage 0 | F0 F1",)), tmp_path, verbose=False)
    assert [line.split()[0] for line in lines[1:4]] == ["predicted", "speed-up", "memory"]
    assert row(lines, "0      3:").endswith("165.5 M 5.0 G 12.5 ms 25.0 ms 8.0 MiB")
    assert not any(line.startswith(("layer_1", "stage 0 |", "memory: ")) for line in lines)


def test_skips_past_other_stages_are_named_with_their_bytes(tmp_path: Path) -> None:
    """One of a cut with 2 samples of 16 pixels in a micro-batch; of many only the first."""
    config = configure(*HOURGLASS, "partitions=3", "partition.balance=[4,8,5]", "hardware=h200")
    made = plan_result(config, traced(*HOURGLASS), plan_of(config, traced(*HOURGLASS)), (), {})
    pixels = 2 * 16 * 16 * 4
    assert made.skips == (PlannedSkip("images", 0, 2, 3 * pixels), PlannedSkip("high", 0, 2, 4 * pixels))
    assert [stage.boundary_bytes for stage in made.stages] == [4 * pixels, 4 * pixels, None]
    lines = shown(made, tmp_path)
    first = lines.index("skips        images: stage 0 to 2, 6.0 KiB of each micro-batch")
    assert lines[first + 1] == "             high: stage 0 to 2, 8.0 KiB of each micro-batch"
    assert from_tree(PlanResult, read_result(tmp_path, "plan.json")) == made
    many = (PlannedSkip("near", 1, 2, 1), *(PlannedSkip(f"skip_{n}", n, 9, MIB) for n in range(5)))
    lines = shown(replace(made, skips=many), tmp_path)
    first = lines.index("skips        skip_0: stage 0 to 9, 1.0 MiB of each micro-batch")
    assert lines[first + 3] == "             and 2 more, in plan.json"


@pytest.mark.parametrize(("width", "partitions", "per_stage"), [(80, 1, 2), (80, 128, 13)])
def test_no_line_is_wider_than_the_console(tmp_path: Path, width: int, partitions: int, per_stage: int) -> None:
    made = plan(partitions, per_stage, uneven=True, comparisons=(COMPARISON,), grid=("stage 0 | " + "F0 " * 20,))
    lines = shown(made, tmp_path, width)
    assert max(len(line) for line in lines if not line.startswith("written to")) <= width
    assert any("R of 4" in line for line in lines) == (partitions > 1)
    assert any(f"{partitions - 40} more in plan.json" in line for line in lines) == (partitions > 40)
    assert len(read_result(tmp_path, "plan.json")["stages"]) == partitions


def test_stages_that_share_a_device_are_shown_so(tmp_path: Path) -> None:
    """The banner gave a stage's share of the memory as that of the device."""
    config = configure(*EVEN, "partitions=4", "stages_per_process=2", "executor=auto", "hardware=h100")
    made = plan_of(config, traced())
    written = plan_result(config, traced(), made, (), {})
    assert {stage.memory.limit_bytes for stage in written.stages} == {int(74.5 * 2**30) // 2}
    lines = shown(written, tmp_path, width=120)
    assert "74.5 GiB of memory, shared by 2 stages, links" in row(lines, "             74.5 GiB")
    assert row(lines, "memory  ").endswith("the fullest")
    assert any(line.endswith("the fullest, at one moment: fits 37.2 GiB for each stage") for line in lines)
    table = lines[lines.index("stages: FLOPs of the forward, bytes and predicted time of one micro-batch") :]
    assert table[1].split()[:3] == ["stage", "process", "layers"]
    assert [line.split()[:2] for line in table[3:7]] == [["0", "0"], ["1", "0"], ["2", "1"], ["3", "1"]]
