"""`gpipe bench`: the same steps as a training and nothing else; the table of a sweep."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import custom_models
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from training_runs import LIVELY_SMALL, SMALL, command, configure, of_type, train_here

from gpipe_cli.commands import bench
from gpipe_cli.reporting.tables.sweep import Run, bench_table, write_bench
from gpipe_cli.results.files import read_result, write_result
from gpipe_cli.results.run import RunResult
from gpipe_cli.system.machine import usable_cores
from gpipe_cli.system.source_code import commit_of
from gpipe_cli.training.events import StepDone

ODD = [
    "model=custom", "model.target=custom_models:told", "dataset=synthetic_images", "dataset.image_size=8",
    "dataset.num_classes=4", "dataset.train_samples=16", "dataset.test_samples=4", "batch_size=4", "micro_batches=1",
    "data_workers=0", "threads=1", "device=cpu", "partitions=1", "hardware=cpu", "logger=[]",
]  # fmt: skip
FIVE = ["warm_up_steps=2", "steps=3"]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five steps of two stages: more than an epoch, and past where a training would be evaluated and saved."""
    output = tmp_path_factory.mktemp("measured")
    two = ["partitions=2", "executor=in_process", "hardware=cpu", "hardware.peak_tflops=0.002", "logger=[tensorboard]"]
    assert command("bench", *SMALL, *LIVELY_SMALL, *FIVE, *two, f"output={output}") == 0
    (folder,) = output.iterdir()
    return folder


def test_the_steps_are_those_of_a_training(measured: Path, tmp_path: Path) -> None:
    heard = train_here(
        configure(*SMALL, *LIVELY_SMALL, "partitions=1", "epochs=5", "max_steps=5", "hardware=cpu"), tmp_path
    )
    events = EventAccumulator(str(measured))
    events.Reload()
    found = [event.value for event in events.Scalars("train/loss")]
    assert found == [np.float32(step.loss) for step in of_type(heard, StepDone)]
    assert len(found) == 5


def test_what_a_measurement_leaves(measured: Path) -> None:
    result = read_result(measured)
    assert "_bench_custom_synthetic_images_K2_M3" in measured.name
    assert (result["command"], result["status"], result["steps"]) == ("bench", "completed", 5)
    assert (result["warm_up_steps"], result["speed_steps"]) == (2, 3)
    assert not (measured / "checkpoints").exists()
    assert {path.name for path in measured.iterdir()} >= {"config.yaml", "pipeline.html", "timeline.png", "log.txt"}
    (start,) = result["starts"]
    assert start["command"].startswith("gpipe bench dataset=synthetic_images ")
    models = commit_of(Path(custom_models.__file__))
    assert start["code"] == {"gpipe": commit_of(Path(bench.__file__)), "model": models}
    assert (measured / "log.txt").read_text().count(" speed ") == 1
    first, third = result["samples_per_second_quartiles"]
    assert first <= result["samples_per_second"] <= third
    # forward and backward of a full mini-batch of 8; the speed counts the samples that there were
    assert result["model_flops_per_second"] == pytest.approx(result["model_flops"] / 8 * result["samples_per_second"])
    assert result["peak_flops_per_second"] == 2e9, "one CPU, whatever the stages on it"
    assert result["mfu"] == pytest.approx(result["model_flops_per_second"] / 2e9)


def test_text_is_measured_in_real_tokens(tmp_path: Path) -> None:
    text = "model=transformer_lm dataset=synthetic_text model.layers=3 model.width=16 model.heads=2 model.length=8"
    text += " device=cpu threads=1 batch_size=4 micro_batches=2 partitions=1 data_workers=0 hardware=tpu_v3"
    assert command("bench", *text.split(), *FIVE, f"run_folder={tmp_path}") == 0
    result = read_result(tmp_path)
    planned = result["model_flops"] / (4 * 8)
    assert result["model_flops_per_second"] == pytest.approx(planned * result["tokens_per_second"])
    # the plan may be for any machine; this one is a CPU
    assert (result["mfu"], result["peak_flops_per_second"]) == (None, None)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two rounds of cells that come to different ends, and of one device; the file is one for `gpipe train`."""
    folder = tmp_path_factory.mktemp("table")
    recipe = "defaults:\n  - train\n  - _self_\nseed: 7\nmax_steps: 1\n"
    (folder / "small.yaml").write_text(recipe)
    taken = folder / "sweep" / "model.arguments.way=fine" / "notes.txt"  # somebody's
    taken.parent.mkdir(parents=True)
    taken.touch()
    arguments = ["-cd", str(folder), "-cn", "small", "-m", *ODD, *FIVE, "rounds=2", f"hydra.sweep.dir={folder}/sweep"]
    assert command("bench", *arguments, "+model.arguments.way=fine,hungry,wrong") == 0
    return folder / "sweep"


def test_cells_that_cannot_be_are_rows(table: Path) -> None:
    written = read_result(table, "bench.json")
    assert (written["varies"], written["rounds"]) == (["model.arguments.way"], 2)
    baseline, *others = written["rows"]
    assert baseline["baseline"]
    assert (baseline["relative"], baseline["partitions"], baseline["micro_batches"]) == (1.0, 1, 1)
    assert (baseline["threads"], baseline["resolved"]["recompute"]) == (usable_cores(), "never")
    rows = {row["settings"]["model.arguments.way"]: row for row in others}
    ends = {way: row["status"] for way, row in rows.items()}
    assert ends == {"fine": "measured", "hungry": "out_of_memory", "wrong": "impossible"}
    assert "can't allocate memory" in rows["hungry"]["reason"]
    assert "way=wrong: cannot be" in rows["wrong"]["reason"]
    fine = rows["fine"]
    assert (fine["baseline"], fine["threads"], fine["rounds_measured"]) == (False, 1, 2)
    assert fine["folders"] == ["model.arguments.way=fine-2", "model.arguments.way=fine-3"]
    assert [file.name for file in (table / "model.arguments.way=fine").iterdir()] == ["notes.txt"]
    assert [read_result(table / folder)["config"]["seed"] for folder in fine["folders"]] == [7, 7]
    assert read_result(table / fine["folders"][0])["steps"] == 5, "max_steps of the recipe is for gpipe train"
    # a second round of what cannot be would be no other
    begun = json.loads((table / "sweep.json").read_text())["runs"]
    assert [(run["run"], run["round"]) for run in begun] == [(0, 1), (0, 2), (1, 1), (1, 2), (2, 1), (3, 1)]
    with (table / "bench.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["status"] for line in lines] == ["measured", *ends.values()]
    assert float(lines[1]["samples_per_second"]) == fine["samples_per_second"]


def test_a_table_goes_on_where_it_was_interrupted(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (table / "bench.json").read_bytes()
    sweep = read_result(table, "sweep.json")
    sweep["runs"][-1]["exit_code"] = None  # as if the sweep had been killed when the last cell had begun
    write_result(table, sweep, "sweep.json")
    assert command("bench", f"resume={table}", "model.target=custom_models:told") == 0
    assert capsys.readouterr().out.count("before, skipped") == 5
    assert (table / "bench.json").read_bytes() == before, "the last cell came to the same end again"
    assert read_result(table, "sweep.json")["runs"][-1]["exit_code"] == 2


def measured_run(number: int, turn: int, speed: float, **changes: Any) -> Run:
    result = RunResult(
        "completed", samples_per_second=speed, samples_per_second_kind="measured", executor="in_process",
        hardware={"threads_per_process": 1},
        config={"partitions": number, "micro_batches": 4, "model": {"filters": 4}, "output": "outputs"},
    )  # fmt: skip
    settings = {"partitions": number}
    return Run(number, turn, f"partitions={number}", "x", 0, 1.0, "", settings, replace(result, **changes))


def test_rounds_are_compared_within_themselves() -> None:
    """The machine is twice as fast in the second round, and three times in the third."""
    speeds = {1: (10.0, 20.0, 30.0), 2: (15.0, 28.0, 60.0)}
    runs = [measured_run(n, turn, speeds[n][turn - 1]) for turn in (1, 2, 3) for n in (1, 2)]
    first, second = bench_table(runs, 3).rows
    assert first.relative == 1
    assert second.relative == 1.5  # of 1.5, 1.4 and 2
    assert [row.relative for row in bench_table(runs, 3, baseline=2).rows] == [pytest.approx(1 / 1.5), 1]
    assert (second.samples_per_second, second.range_over_rounds) == (28.0, (15.0, 60.0))
    assert [(row.partitions, row.micro_batches) for row in (first, second)] == [(1, 4), (2, 4)]


def test_what_auto_became_and_what_differs_without_being_asked_for_are_shown(tmp_path: Path) -> None:
    """A setting that the table varies was left out of what was resolved, also where it had been left to the program."""
    auto = []
    for turn, k in ((1, 4), (2, 2)):
        config = {"partitions": k, "micro_batches": 4, "model": {"filters": 8}}
        run = measured_run(0, turn, 10.0, config=config, memory_bytes=(1,) * k)
        auto.append(replace(run, settings={"partitions": "auto", "executor": "auto"}))
    table = bench_table([*auto, measured_run(1, 1, 10.0), measured_run(1, 2, 10.0)], 2)
    assert [row.resolved for row in table.rows] == [
        {"partitions": 4, "model.filters": 8, "executor": "in_process"},
        {"partitions": 1, "model.filters": 4, "executor": "in_process"},
    ]
    write_bench(tmp_path, table)
    first, second = csv.DictReader((tmp_path / "bench.csv").open(encoding="utf-8"))
    assert [(row["partitions"], row["partitions_resolved"]) for row in (first, second)] == [("auto", "4"), ("1", "1")]
    assert (first["executor"], first["executor_resolved"]) == ("auto", "in_process")  # both columns had one name
