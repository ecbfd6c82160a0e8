"""A validation set chooses the best weights, and the test set is scored once, with them."""

from pathlib import Path

import pytest
from image_files import write_images
from training_runs import NAMED, SMALL, command

from gpipe_cli.results.files import read_result, write_result
from gpipe_cli.results.run import read_run_result
from gpipe_cli.training.checkpoint.files import list_checkpoints, read_index

RUN = [*SMALL, "dataset.validation=0.3", "epochs=4", "learning_rate=constant", "learning_rate.peak=0.3", "ema_decay=0"]


def test_the_validation_set_chooses_and_the_test_set_is_scored_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In processes as in a single one, stopped and resumed or not. Every epoch was evaluated on the test set, which so
    chose the weights that were then scored with it."""
    assert command("train", *RUN, "partitions=1", f"run_folder={tmp_path / 'whole'}") == 0
    printed = capsys.readouterr().out
    assert "16 training, 6 validation and 10 test samples" in printed
    assert "best         chosen on the validation set" in printed
    assert "val loss" in printed
    whole = read_run_result(tmp_path / "whole")
    assert whole.validation is not None
    assert whole.test is not None
    assert whole.best is None
    last = read_index(list_checkpoints(tmp_path / "whole")[-1]).progress
    assert whole.validation.step == whole.test.step == last.best_step
    assert last.step != last.best_step, "the weights that are scored are not the last ones"
    assert command("evaluate", f"run={tmp_path / 'whole'}", NAMED, "partitions=1") == 0
    assert read_result(tmp_path / "whole", "evaluate.json")["loss"] == whole.test.loss

    parts = [*RUN, "partitions=3", f"run_folder={tmp_path / 'parts'}"]
    assert command("train", *parts, "max_steps=3") == 0
    capsys.readouterr()
    assert command("train", f"resume={tmp_path / 'parts'}", NAMED, f"run_folder={tmp_path / 'parts'}") == 0
    resumed = read_run_result(tmp_path / "parts")
    assert (resumed.validation, resumed.test) == (whole.validation, whole.test)
    assert command("compare", f"{tmp_path}", "format=csv") == 0
    assert "validation_top1" in capsys.readouterr().out


def test_a_run_that_was_killed_before_the_test_set_was_scored_reports_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = [*RUN, "executor=in_process", "resume=auto", f"run_folder={tmp_path / 'run'}"]
    assert command("train", *run) == 0
    result = read_result(tmp_path / "run")
    write_result(tmp_path / "run", result | {"status": "running", "test": None})
    capsys.readouterr()
    assert command("train", *run) == 0
    (said,) = (line for line in capsys.readouterr().out.splitlines() if "complete" in line)
    evaluate = said.partition("score the test set by  gpipe ")[2]
    assert command(*evaluate.split()) == 0
    assert read_result(tmp_path / "run", "evaluate.json")["loss"] == result["test"]["loss"]


def test_without_one_the_test_set_has_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("train", *SMALL, "executor=in_process", "max_steps=3", f"run_folder={tmp_path / 'run'}") == 0
    printed = capsys.readouterr().out
    assert "best         chosen on the test set" in printed
    assert "the best, chosen on the test set, after step 3" in printed
    assert command("compare", f"{tmp_path / 'run'}") == 0
    assert "test set" in capsys.readouterr().out


def test_a_folder_that_is_not_used_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`val` next to `train` and `test` was silently not read; without `test` it was called the test set."""
    photos = tmp_path / "photos"
    for split in ("train", "val", "test"):
        for name in "abcd":
            write_images(photos / split / name, "0.png", "1.png")
    run = [
        *SMALL[5:], "dataset=image_folder", f"dataset.root={photos}", "dataset.image_size=16", "max_steps=1",
        "executor=in_process", "batch_size=4", "micro_batches=2",
    ]  # fmt: skip
    assert command("train", *run, f"run_folder={tmp_path / 'unused'}") == 0
    assert f"{photos / 'val'} is not used; dataset.validation=val" in capsys.readouterr().out
    assert command("train", *run, "dataset.validation=val", f"run_folder={tmp_path / 'used'}") == 0
    assert "8 training, 8 validation and 8 test samples" in capsys.readouterr().out
    (photos / "test").rename(tmp_path / "away")
    assert command("train", *run, f"run_folder={tmp_path / 'test'}") == 0
    assert f"{photos / 'val'} is the test set" in capsys.readouterr().out
    assert command("train", *run, "dataset.validation=val", f"run_folder={tmp_path / 'no'}") == 2
    assert "dataset.validation=val: " in capsys.readouterr().err


def test_a_best_checkpoint_that_is_gone_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The newest was taken instead, and called the best."""
    run = tmp_path / "run"
    assert command("train", *RUN, "executor=in_process", f"run_folder={run}") == 0
    progress = read_index(list_checkpoints(run)[-1]).progress
    gone = run / "checkpoints" / f"step_{progress.best_step:08d}"
    gone.rename(tmp_path / "gone")
    capsys.readouterr()
    assert command("evaluate", f"run={run}", NAMED) == 0
    assert f"{gone}: the best checkpoint no longer exists; step_{progress.step:08d} is taken" in (
        capsys.readouterr().err
    )
    resumed = [f"resume={run}", NAMED, "executor=in_process", "epochs=5", f"run_folder={tmp_path / 'resumed'}"]
    assert command("train", *resumed) == 0, "its test set was to be scored with weights that are gone"
    assert f"{gone}: the best checkpoint no longer exists" in capsys.readouterr().err
    result = read_run_result(tmp_path / "resumed")
    assert result.validation is not None
    assert result.test is not None
    assert result.validation.step == result.test.step == progress.step + 2
    begun = [*SMALL, "executor=in_process", "max_steps=1", f"init_from={run}"]
    assert command("train", *begun, f"run_folder={tmp_path / 'begun'}") == 0
    assert f"from {run} (step {progress.step})" in capsys.readouterr().out


def test_a_run_is_not_resumed_on_other_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only the seed and the size of mini-batches were compared: the rest of the run had other samples, unseen."""
    run = tmp_path / "run"
    assert command("train", *SMALL, "executor=in_process", "max_steps=1", f"run_folder={run}") == 0
    capsys.readouterr()
    for setting in ("dataset.validation=0.3", "dataset.drop_last=true", "dataset=digits"):
        resume = [f"resume={run}", NAMED, setting, "max_steps=2", f"run_folder={tmp_path / 'resumed'}"]
        assert command("train", *resume) == 2
        (said,) = capsys.readouterr().err.splitlines()
        assert f"{setting.partition('=')[0]}=" in said
        assert "remove the setting" in said
