import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from reporting_runs import log, shares

from gpipe_cli.pipeline.schedule.breakdown import Breakdown
from gpipe_cli.pipeline.schedule.timeline import Timeline
from gpipe_cli.planner.auto_settings import Candidate, Comparison
from gpipe_cli.planner.cost_model import StepCosts
from gpipe_cli.planner.plan import Plan
from gpipe_cli.planner.stage_memory import StageMemory
from gpipe_cli.reporting.run.result import read_result
from gpipe_cli.reporting.tables.plan import show_plan
from gpipe_cli.reporting.tables.plan_values import HardwareView, LayerView, PlanView, StageView, plan_json

MIB = 2**20
H200 = HardwareView("h200", "figures of hardware=h200", 4e14, 2**37, 4.5e11, 1e-5)


def plan(partitions: int = 2, per_stage: int = 3, **changes: Any) -> PlanView:
    """Equal layers between an embedding and a classifier, four micro-batches of eight samples, half a second."""
    count = partitions * per_stage
    names = ["embedding", *(f"layer_{n}" for n in range(1, count - 1)), "classifier"]
    layers = tuple(
        LayerView(name, n // per_stage, 50_000_000, 2 * 10**9, 24 * MIB, 8 * MIB, 4e-3, 8e-3)
        if 0 < n < count - 1
        else LayerView(name, n // per_stage, 65_500_000, 10**9, MIB, 4 * MIB, 1e-3, 2e-3)
        for n, name in enumerate(names)
    )
    stages = []
    for k in range(partitions):
        own = layers[k * per_stage : (k + 1) * per_stage]
        flops = sum(layer.forward_flops for layer in own)
        sends = None if k == partitions - 1 else own[-1].boundary_bytes
        memory = StageMemory(200 * MIB, 200 * MIB, 400 * MIB, 1000 * MIB, 48 * MIB)
        parameters = sum(layer.parameters for layer in own)
        stages.append(StageView(tuple(layer.name for layer in own), parameters, flops, sends, 0.0125, 0.025, 3, memory))
    values: dict[str, Any] = {
        "model_name": "transformer_lm",
        "dataset_name": "synthetic_text",
        "layers": layers,
        "stages": tuple(stages),
        "micro_batches": 4,
        "schedule": "gpipe",
        "recompute": "except_last",
        "step_samples": 32.0,
        "hardware": H200,
        "step_seconds": 0.5,
        "ideal_bubble": 0.2,
        "breakdown": shares(0.15),
        "step_flops": 10**14,
        "recomputed_flops": 25 * 10**12,
        "imbalance": 0.032,
    }
    return PlanView(**(values | changes))


def shown(view: PlanView, folder: Path, width: int = 80) -> list[str]:
    console, file = log(width=width)
    show_plan(console, view, folder)
    return [line.rstrip() for line in file.getvalue().splitlines()]


def row(lines: list[str], beginning: str) -> str:
    """The only line that begins so, with single blanks."""
    (found,) = (line for line in lines if line.startswith(beginning))
    return " ".join(found.split())


def test_numbers_of_a_plan(tmp_path: Path) -> None:
    lines = shown(plan(), tmp_path)
    assert row(lines, "embedding ") == "embedding 65.5 M 1.0 G 1.0 MiB 4.0 MiB 1.0 ms 2.0 ms"
    assert row(lines, "layer_1 ...") == "layer_1 ... layer_4 x4 50.0 M 2.0 G 24.0 MiB 8.0 MiB 4.0 ms 8.0 ms"
    assert row(lines, "0      3:").endswith("165.5 M 5.0 G 12.5 ms 25.0 ms 8.0 MiB")
    assert row(lines, "1      3:").endswith("165.5 M 5.0 G 12.5 ms 25.0 ms -")
    memory = "0-1      200.0      200.0      400.0      1,000.0       48.0  1,848.0     1.4 %"
    assert memory in lines
    for line in (
        "model        transformer_lm: 6 layers, 331.0 M parameters",
        "pipeline     K = 2 partitions, M = 4 micro-batches",
        "mini-batch   32 samples",
        "             400.0 TFLOP/s, 128.0 GiB of memory, links 450.0 GB/s, latency 10 us",
        "costs from   figures of hardware=h200",
        "predicted    step 500.0 ms",
        "speed        64.0 samples/s, predicted",
        "utilisation  25.0 % of these figures, predicted, without recomputation",
        "             recomputation adds 25.0 % to the operations",
        "balance      the slowest stage takes 3.2 % more than the mean of all",
        "memory       1.8 GiB on stage 0, the fullest, predicted, of 128.0 GiB",
        "predicted       55.0      20.0    2.0   23.0 =   15.0       3.0      1.0    4.0",
        "ideal bubble 20.0 %, (K-1)/(M+K-1): stages are equal and do nothing but compute",
        f"written to   {tmp_path}/plan.json",
    ):
        assert line in lines
    assert not any("measured" in line for line in lines)


def planned(seconds: float, gib: int) -> Plan:
    """As much of a plan as a comparison shows: a step's seconds, and the memory of two stages."""
    memory = tuple(StageMemory(part * 2**30, 0, 0, 0, 0) for part in (1, gib))
    costs = StepCosts("none", False, (), (), (), ())
    idle = Breakdown(0, 0, 1, 0, 0, 0, 0)
    return Plan((1, 1), "never", 1, 1, costs, (), (), (0, 0), Timeline(()), seconds, idle, memory, 0.0)


CHOICES = (
    Comparison(
        "micro_batches",
        "the shortest step that fits",
        (
            Candidate("2", None, "stage 1 is 72.0 GiB over"),
            Candidate("4", planned(0.5, 2), chosen=True),
            Candidate("8", planned(5.123, 1)),
        ),
    ),
)


@pytest.mark.parametrize(("width", "partitions", "per_stage"), [(80, 1, 2), (120, 16, 4), (80, 128, 13)])
def test_no_line_is_wider_than_the_console(tmp_path: Path, width: int, partitions: int, per_stage: int) -> None:
    view = plan(partitions, per_stage, comparisons=CHOICES, grid="stage 0 | " + "F0 " * 20)
    stages = tuple(
        replace(stage, recomputed=k % 5, parameters=10**9 + 10**8 * k) for k, stage in enumerate(view.stages)
    )
    lines = shown(replace(view, stages=stages), tmp_path, width)
    assert max(len(line) for line in lines if not line.startswith("written to")) <= width
    assert any("R of 4" in line for line in lines) == (partitions > 1)
    assert any(f"{partitions - 40} more in plan.json" in line for line in lines) == (partitions > 40)
    assert len(read_result(tmp_path, "plan.json")["stages"]) == partitions


def test_equal_layers_and_stages_share_a_row(tmp_path: Path) -> None:
    lines = shown(plan(128, 13), tmp_path, width=120)
    assert row(lines, "layer_1 ...").startswith("layer_1 ... layer_1662 x1662 ")
    assert row(lines, "1-126 ").startswith("1-126 13 each: layer_13 ... layer_1650 ")
    assert len(lines) < 60


def test_choices_say_what_was_compared(tmp_path: Path) -> None:
    lines = shown(plan(comparisons=CHOICES), tmp_path)
    assert "micro_batches compared, predicted: the shortest step that fits" in lines
    assert "            4  500.0 ms        2.0 GiB  chosen" in lines
    assert "            8    5.12 s        1.0 GiB" in lines
    text = " ".join(" ".join(lines).split())
    assert "2 - - stage 1 is 72.0 GiB over" in text
    assert sum("chosen" in line for line in lines) == 1


def test_the_grid_is_shown_where_it_fits(tmp_path: Path) -> None:
    grid = "stage 0 | F0 F1 .. B1 B0\nstage 1 | .. F0 F1 B1 B0"
    assert "stage 1 | .. F0 F1 B1 B0" in shown(plan(grid=grid), tmp_path)
    wide = "stage 0 | " + "F0 " * 30
    assert "grid         too large to be shown here; plan.json has it" in shown(plan(grid=wide), tmp_path)
    assert wide.rstrip() in shown(plan(grid=wide), tmp_path, width=120)
    assert "grid         too large to be shown" in shown(plan(), tmp_path)


def test_text_has_tokens_and_unknown_figures_are_left_out(tmp_path: Path) -> None:
    unknown = HardwareView("mine", "layers measured on this machine", None, None, None, None)
    lines = shown(plan(hardware=unknown, sample="sequence", step_tokens=4096.0), tmp_path)
    assert "mini-batch   32 sequences, 4,096 tokens" in lines
    assert "speed        8,192 tokens/s, 64.0 sequences/s, predicted" in lines
    assert "hardware     mine" in lines
    assert not any("utilisation" in line or "of limit" in line or "FLOP/s" in line for line in lines)
    assert read_result(tmp_path, "plan.json")["utilisation"] is None


def test_the_plan_for_programs_is_complete() -> None:
    view = plan(comparisons=CHOICES, grid="a\nb", files=(("picture", "plan.png"),))
    written = json.loads(json.dumps(plan_json(view)))
    assert written["kind"] == "predicted"
    assert set(PlanView.__dataclass_fields__) <= set(written)
    memory = written["stages"][1]["memory"]
    assert (memory["optimizer_bytes"], memory["total_bytes"], memory["limit_bytes"]) == (400 * MIB, 1848 * MIB, 2**37)
    assert (written["samples_per_second"], written["utilisation"], written["parameters"]) == (64.0, 0.25, 331_000_000)
    assert (written["grid"], written["files"]) == (["a", "b"], {"picture": "plan.png"})
    assert [layer["name"] for layer in written["layers"]][:2] == ["embedding", "layer_1"]
    (comparison,) = written["comparisons"]
    assert (comparison["setting"], comparison["rule"]) == ("micro_batches", "the shortest step that fits")
    refused, chosen, _ = comparison["candidates"]
    assert (refused["step_seconds"], refused["memory_bytes"], refused["chosen"]) == (None, None, False)
    assert chosen == {"value": "4", "step_seconds": 0.5, "memory_bytes": 2 * 2**30, "chosen": True, "reason": ""}
