from pathlib import Path

import pytest
from reporting_runs import description, evaluation, log, step
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gpipe_cli.reporting.reporter import Reporter, show_evaluation
from gpipe_cli.reporting.result import read_result


def test_a_whole_run(tmp_path: Path) -> None:
    folder = tmp_path / "outputs" / "run"
    console, file = log()
    reporter = Reporter(folder, description(), console)
    assert read_result(folder)["status"] == "running"
    reporter.banner()
    reporter.start()
    for number in range(1, 13):
        reporter.step(step(number))
        if number % 4 == 0:
            reporter.evaluated(evaluation(number, top1=number / 16, is_best=number != 12))
            assert read_result(folder)["test"]["step"] == number
            reporter.checkpointed(number, "last")
    reporter.finish("completed")
    result = read_result(folder)
    assert result["status"] == "completed"
    assert result["error"] is None
    assert (result["model_parameters"], result["epochs"], result["steps"]) == (1_244_400, 3, 12)
    assert (result["test"]["top1"], result["test"]["top5"], result["test"]["loss"]) == (0.75, 1.0, 1.25)
    assert result["best"]["epoch"] == 2
    assert (result["samples_per_second"], result["step_seconds"]) == (512.0, 0.0625)
    assert result["samples_per_second_kind"] == "measured"
    assert result["memory_bytes"] == [3 * 2**20, 2**29]
    assert [partition["parameters"] for partition in result["partitions"]] == [432_100, 812_300]
    assert result["partitions"][1]["layers"] == ["normal_3", "classifier"]
    assert result["config"] == {"partitions": 2, "model": {"filters": 16}}
    assert result["versions"]["torch"]
    assert result["hardware"]["cores"] >= 1
    events = EventAccumulator(str(folder))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == list(range(1, 13))
    shown = events.Tensors("banner/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "global batch 32 = 1 replica x 4 micro-batches x 8 samples" in shown
    assert file.getvalue().count("completed in") == 1


@pytest.mark.parametrize("terminal", [False, True])
def test_interrupted_before_the_first_step(tmp_path: Path, terminal: bool) -> None:
    console, file = log(force_terminal=terminal, _environ={"TERM": "xterm"})
    reporter = Reporter(tmp_path, description(), console)
    reporter.banner()
    reporter.start()
    reporter.finish("interrupted")
    reporter.finish("failed", "too late")
    reporter.step(step(1))
    reporter.evaluated(evaluation(1))
    result = read_result(tmp_path)
    assert (result["status"], result["steps"], result["test"]) == ("interrupted", 0, None)
    assert result["samples_per_second"] is None
    text = file.getvalue()
    assert text.count("interrupted before the first step") == 1
    assert "there is nothing to resume" in text
    assert "gpipe train" not in text
    assert "too late" not in text


def test_interrupted_after_a_checkpoint_says_where_it_is(tmp_path: Path) -> None:
    console, file = log()
    reporter = Reporter(tmp_path, description(), console)
    for number in range(1, 6):
        reporter.step(step(number))
        if number == 4:
            reporter.checkpointed(4, "last", tmp_path / "checkpoints" / "last")
            reporter.checkpointed(4, "best", tmp_path / "checkpoints" / "best")
    reporter.finish("interrupted")
    lines = file.getvalue().splitlines()
    assert f"checkpoint   {tmp_path}/checkpoints/last, after step 4" in lines
    assert f"go on with   gpipe train resume={tmp_path}" in lines
    assert read_result(tmp_path)["steps"] == 5


def test_a_failed_run_keeps_its_error(tmp_path: Path) -> None:
    console, file = log()
    reporter = Reporter(tmp_path, description(), console)
    reporter.step(step(1))
    reporter.finish("failed", "stage 1 died in [2F0]")
    assert read_result(tmp_path)["error"] == "stage 1 died in [2F0]"
    assert "stage 1 died in [2F0]" in file.getvalue()


def test_a_dry_run_speaks_of_no_results(tmp_path: Path) -> None:
    console, file = log()
    reporter = Reporter(tmp_path, description(), console)
    reporter.banner()
    reporter.finish("dry_run")
    result = read_result(tmp_path)
    assert (result["status"], result["model_parameters"], len(result["partitions"])) == ("dry_run", 1_244_400, 2)
    assert "nothing was trained" in file.getvalue()
    assert "tensorboard" not in file.getvalue()


def test_what_is_no_number_is_null_in_the_result(tmp_path: Path) -> None:
    console, _ = log()
    reporter = Reporter(tmp_path, description(), console)
    reporter.step(step(1, loss=float("nan"), cross_entropy=float("nan")))
    reporter.evaluated(evaluation(1, loss=float("inf"), is_best=False))
    reporter.finish("completed")
    assert read_result(tmp_path)["test"]["loss"] is None
    assert read_result(tmp_path)["best"] is None


def test_a_resumed_run_knows_the_tests_before_it_and_forgets_those_it_repeats(tmp_path: Path) -> None:
    first = Reporter(tmp_path, description(), log()[0])
    first.step(step(4))
    first.evaluated(evaluation(4, top1=0.5))
    first.step(step(8))
    first.evaluated(evaluation(8, top1=0.75, is_best=False))
    first.finish("interrupted")
    console, file = log()
    second = Reporter(tmp_path, description(resumed_from=str(tmp_path), first_step=4), console)
    second.finish("interrupted")
    result = read_result(tmp_path)
    assert result["best"]["step"] == 4
    assert result["test"] is None
    assert (result["steps"], result["epochs"]) == (4, 1)
    assert f"gpipe train resume={tmp_path}" in file.getvalue()


def test_an_evaluation_leaves_the_result_of_the_run_alone(tmp_path: Path) -> None:
    console, file = log()
    Reporter(tmp_path, description(), console).finish("completed")
    before = read_result(tmp_path)
    show_evaluation(
        console,
        tmp_path,
        {
            "checkpoint": "best, after step 8",
            "samples": 360,
            "loss": 0.05,
            "top1": 0.986,
            "top5": None,
            "averaged": False,
            "seconds": 1.2,
        },
    )
    assert read_result(tmp_path) == before
    assert read_result(tmp_path, "evaluate.json")["top1"] == 0.986
    assert "test         top-1 98.6 %, loss 0.0500\n" in file.getvalue()
    assert "samples      360 in 1.2 s\n" in file.getvalue()
