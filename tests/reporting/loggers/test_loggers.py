"""Loggers other than TensorBoard: the same points, settings and pictures, in stores that are read back."""

import csv
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reporting_runs import description, evaluation, events, plan, reporter_in, shares, step, timeline
from training_runs import command

from gpipe_cli.reporting.loggers.logger import hyperparameters
from gpipe_cli.reporting.plots.timeline_values import StepPicture
from gpipe_cli.results.files import read_result


def report(folder: Path, *settings: str, end: bool = True, **changes: Any) -> str:
    """Reports a run of four steps, with an evaluation and a picture; returns what its console shows."""
    reporter, file = reporter_in(folder, f"output={folder.parent}", *settings, plan=plan(), **changes)
    first = changes.get("first_step", 0)
    for number in range(first + 1, first + 5):
        reporter.on_message(step(number))
        reporter.add_breakdown(number, shares(0.1))
    reporter.on_message(evaluation(first + 4))
    reporter.timeline(StepPicture(1, first + 4, (timeline(),)))
    if end:
        reporter.finish("completed")
    else:
        reporter.break_off()
    return file.getvalue()


def points(folder: Path) -> dict[str, list[tuple[int, float]]]:
    found = events(folder)
    return {tag: [(one.step, one.value) for one in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_mlflows_files_have_what_the_events_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Resumed, the run continues there; what MLflow does not let change becomes a tag."""
    mlflow = pytest.importorskip("mlflow")
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / "run"
    report(folder, "logger=[tensorboard,mlflow]", end=False)
    report(folder, "logger=[tensorboard,mlflow]", "partitions=1", first_step=4)
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "mlruns").as_uri())
    (experiment,) = (one for one in client.search_experiments() if one.name == "gpipe")
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("run", "FINISHED")
    found = points(folder)
    assert {"train/loss", "test/top1", "bubble/measured", "final/top1", "speed/step_over_predicted"} <= found.keys()
    for tag, expected in found.items():
        history = client.get_metric_history(run.info.run_id, tag)
        assert sorted((one.step, np.float32(one.value)) for one in history) == expected, tag
    config = description(f"output={tmp_path}", "logger=[tensorboard,mlflow]", "partitions=1").config
    settings = {key: str(value) for key, value in hyperparameters(config).items()}
    assert run.data.params == settings | {"partitions": "2"}
    assert (run.data.params["micro_batches"], run.data.tags["resumed.partitions"]) == ("4", "1")
    artifacts = {artifact.path for artifact in client.list_artifacts(run.info.run_id)}
    assert artifacts >= {"result.json", "pipeline.html", "banner.txt", "timeline_00000008.png"}
    assert "tensorboard --logdir" not in report(tmp_path / "dry", "logger=[mlflow]", "dry_run=true")
    assert not list((tmp_path / "dry").glob("*tfevents*"))
    assert len(client.search_runs([experiment.experiment_id])) == 1


def test_metrics_csv_has_what_the_events_have_and_what_a_resumed_run_repeats_once(tmp_path: Path) -> None:
    settings = ("logger=[tensorboard,csv]", "stages_per_process=2", "hardware=cpu")  # memory/stages_0,1
    report(tmp_path, *settings, end=False)
    with (tmp_path / "metrics.csv").open("a") as torn:
        torn.write("5,0.1")  # a row that was cut short when the process was killed
    report(tmp_path, *settings, first_step=2)
    with (tmp_path / "metrics.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["1", "2", "3", "4", "5", "6"]
    found = points(tmp_path)
    assert set(rows[0]) == {"step", *found}
    for tag, expected in found.items():
        assert [(int(row["step"]), np.float32(row[tag])) for row in rows if row[tag]] == expected, tag


def test_a_damaged_metrics_csv_ends_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A power failure left zeros in it: the run could not be resumed. Damaged rows are left out; a file without
    its columns is left as it is."""
    report(tmp_path, "logger=[csv]", end=False)
    file = tmp_path / "metrics.csv"
    head, *rows = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([head, rows[0], b"x,1\n", bytes(200_000), b"\n", rows[1], b"\xff", rows[2]]))
    report(tmp_path, "logger=[csv]", first_step=3)
    assert capsys.readouterr().err == f"warning: {file}: 3 damaged lines left out\n"
    steps = [line.partition(b",")[0] for line in file.read_bytes().splitlines()]
    assert steps == [b"step", b"1", b"2", b"4", b"5", b"6", b"7"]
    damaged = bytes(len(head) - 1) + file.read_bytes()[len(head) - 1 :]
    file.write_bytes(damaged)
    report(tmp_path, "logger=[csv]", first_step=4)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: {file}: its first line names no columns; move it away; ")
    assert file.read_bytes() == damaged
    file.unlink()
    os.mkfifo(file)  # to open it waited for a writer, without end, and no signal ended the run
    report(tmp_path, "logger=[csv]", first_step=4)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: {file}: is not a regular file; ")
    assert read_result(tmp_path)["status"] == "completed"


def test_each_output_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Once for each kind of error: after the first, of a picture, no other was ever named."""
    reporter, _ = reporter_in(tmp_path, "logger=[csv]", plan=plan())
    (tmp_path / "pipeline.html").mkdir()
    for number in (1, 2):
        reporter.on_message(step(number))
        reporter.timeline(StepPicture(1, number, (timeline(),)))
    reporter.on_message(evaluation(2))
    (tmp_path / "metrics.csv").unlink()
    (tmp_path / "metrics.csv").mkdir()
    for number in (3, 4):
        reporter.on_message(step(number))
        reporter.on_message(evaluation(number))
    (tmp_path / "pipeline.html").rmdir()
    (tmp_path / "pipeline.html").symlink_to("elsewhere")
    reporter.timeline(StepPicture(1, 4, (timeline(),)))
    named = [line.split(": ")[1:3] for line in capsys.readouterr().err.splitlines()]
    assert named == [
        [f"{tmp_path}/pipeline.html", "Is a directory; the run continues without this output"],
        [f"{tmp_path}/metrics.csv", "Is a directory; the run continues without this output"],
        [
            f"{tmp_path}/pipeline.html",
            "is a link, and nothing is written through it; the run continues without this output",
        ],
    ]


def test_a_server_that_is_not_there_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")  # nothing listens there
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    report(tmp_path / "run", "logger=[mlflow,tensorboard]")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: logger=mlflow: MlflowException: ")
    assert len(points(tmp_path / "run")["train/loss"]) == 4
    assert read_result(tmp_path / "run")["status"] == "completed"


def test_what_is_not_installed_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)  # Python's own way to say so
    assert command("train", "logger=mlflow") == 2
    assert "needs mlflow-skinny, which is not installed; pip install mlflow-s" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
