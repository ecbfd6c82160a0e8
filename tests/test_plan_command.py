"""`gpipe plan` as its users type it."""

import csv
import json
import resource
from pathlib import Path
from typing import Any

import pytest
from training_runs import TINY, command

from gpipe_cli.schedule.simulator import ideal_bubble

PLAN = [*TINY, "batch_size=8", "micro_batches=4"]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def plan(*settings: str) -> dict[str, Any]:
    """Plans into `outputs`; returns plan.json."""
    assert command("plan", *settings) == 0
    file = max(Path("outputs").glob("*/plan.json"), key=lambda file: file.stat().st_mtime)
    return json.loads(file.read_text(encoding="utf-8"))


def test_a_plan_is_shown_and_written(capsys: pytest.CaptureFixture[str]) -> None:
    read = plan(*PLAN, "partitions=2", "verbose=true")
    shown = capsys.readouterr().out
    (folder,) = Path("outputs").iterdir()
    assert "_plan_amoebanet_synthetic_images_K2_M4" in folder.name
    assert {file.name for file in folder.iterdir()} == {
        "settings.yaml", "plan.json", "pipeline.html", "timeline.png", "timeline_trace.json",
    }  # fmt: skip
    assert (folder / "timeline.png").read_bytes().startswith(b"\x89PNG")
    trace = json.loads((folder / "timeline_trace.json").read_text(encoding="utf-8"))
    actions = [event for event in trace if event["ph"] == "X" and event.get("cat") in ("F", "R", "B")]
    assert len(actions) == 2 * (3 * 4 - 1)  # every micro-batch but the last is recomputed
    assert read["kind"] == "predicted"
    assert read["ideal_bubble"] == ideal_bubble(2, 4)
    assert "stage 0 | F0 F1 F2 F3" in shown
    assert "everything below is predicted" in shown


@pytest.mark.parametrize(
    ("settings", "cause"),
    [
        ("recompute=never", "share of the whole step"),
        ("recompute=always", "recomputation fills"),
        ("recompute=never schedule=interleaved partitions=4 stages_per_process=2", "schedule=interleaved"),
    ],
)
def test_why_the_bubble_is_below_the_ideal_one(settings: str, cause: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Recomputation was named where nothing is recomputed, too."""
    read = plan(*PLAN, "partitions=2", *settings.split())
    assert read["bubble"] < read["ideal_bubble"]
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("ideal bubble"))
    causes = ("share of the whole step", "recomputation fills", "schedule=interleaved")
    assert [named for named in causes if named in line] == [cause]


def test_a_training_chooses_too_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    settings = [*TINY, "batch_size=8", "partitions=auto", "micro_batches=auto", "dry_run=true", "run_folder=dry"]
    assert command("train", *settings) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "chosen partitions and micro_batches" in shown
    assert "compared" in shown
    config = json.loads(Path("dry/result.json").read_text(encoding="utf-8"))["config"]
    assert isinstance(config["partitions"], int)
    assert isinstance(config["micro_batches"], int)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ("hardware.memory_gib=0.0001", "hardware.memory_gib=0.0001: no cut fits; in the best one stage"),
        ("solve=max_model batch_size=auto", "batch_size=auto cannot be chosen at the same time; give a number"),
        ("hardware=tpu_v2 hardware.tflops=null", "hardware.tflops=null: a step cannot be predicted without it"),
        ("-m batch_size=interval(4,8)", "batch_size=interval(4,8): a sweep has no bounds"),
        ("write_schedule=order.csv", "write_schedule=order.csv: it is there already; give another, or remove it"),
        ("schedule=order.csv", "schedule=order.csv: 0B1 is missing; add it to stage 0\nstage 0 > F0 F1 .  B0"),
        ("schedule=split.csv compile=true", "compile=true: schedule=split.csv cuts backwards in two"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(capsys: pytest.CaptureFixture[str], settings: str, line: str) -> None:
    Path("order.csv").write_text("0F0,0F1,0B0\n1F0,1B0,1F1,1B1\n", encoding="utf-8")
    Path("split.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1I0,1W0,1F1,1B1\n", encoding="utf-8")
    assert command("plan", *PLAN, "partitions=2", "micro_batches=2", *settings.split()) == 2
    assert Path("order.csv").read_text(encoding="utf-8").startswith("0F0,0F1,0B0\n")
    captured = capsys.readouterr()
    assert captured.err.startswith("gpipe plan: ")
    assert line in captured.err
    drawn = 2 if "\nstage" in line else 0  # the schedule's grid below the line
    assert captured.err.count("\n") == 1 + drawn
    assert not list(Path(".").glob("outputs/*"))


def test_a_plan_of_the_schedule_that_was_written_is_the_same() -> None:
    """A row for each device."""
    settings = "schedule=zero_bubble", "stages_per_process=2", "write_schedule=order.csv"
    written = plan(*PLAN, "partitions=4", *settings)
    assert written["files"]["schedule_file"] == "order.csv"
    assert Path("order.csv").read_text(encoding="utf-8").count("\n") == 2
    read = plan(*PLAN, "partitions=4", "schedule=order.csv")
    assert read["step_seconds"] == written["step_seconds"]
    assert [stage["memory"] for stage in read["stages"]] == [stage["memory"] for stage in written["stages"]]


def test_programs_get_the_plan_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """`gpipe plan ... format=json | jq .step_seconds`"""
    written = plan(*PLAN, "partitions=2", "hardware=h100", "format=json")
    assert json.loads(capsys.readouterr().out) == written
    assert command("plan", *PLAN, "partitions=2", "hardware=h100", "format=csv") == 0
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert [row["stage"] for row in rows] == ["0", "1"]
    for row, stage in zip(rows, written["stages"], strict=True):
        assert float(row["forward_seconds"]) == stage["forward_seconds"]
        assert int(row["memory.total_bytes"]) == stage["memory"]["total_bytes"]
        assert row["layers"] == f"[{','.join(stage['layers'])}]"


def test_a_sweep_is_a_table_of_plans(capsys: pytest.CaptureFixture[str]) -> None:
    """What cannot be planned is a row that says so, and a reason."""
    sweep = [*PLAN, "hardware=h100", "-m", "partitions=2,20"]
    assert command("plan", *sweep, "recompute=never,always", "format=json") == 0
    found = json.loads(capsys.readouterr().out)
    varied = [{"partitions": k, "recompute": mode} for k in (2, 20) for mode in ("never", "always")]
    assert [one["settings"] for one in found] == varied
    assert all("partitions=20: the model has only" in one["error"] for one in found[2:])
    alone = plan(*PLAN, "hardware=h100", "partitions=2", "recompute=always")
    assert found[1] == alone | {"settings": varied[1], "error": None, "files": found[1]["files"]}
    capsys.readouterr()
    assert command("plan", *sweep, "recompute=always", "format=csv") == 0
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    assert [row["partitions"] for row in rows] == ["2", "20"]
    assert (float(rows[0]["step_seconds"]), rows[1]["step_seconds"]) == (alone["step_seconds"], "")


def test_a_plan_is_shown_before_it_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    """On a full disk it named a page and a picture that were not there."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, before[1]))  # less than the page, which comes first
    try:
        assert command("plan", *PLAN) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    captured = capsys.readouterr()
    assert "ideal bubble" in captured.out
    assert "pipeline.html" in captured.err
    assert "timeline.png" not in captured.out
