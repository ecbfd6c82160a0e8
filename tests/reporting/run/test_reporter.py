from pathlib import Path

import pytest
from reporting_runs import (
    LANGUAGE_MODEL,
    TRANSLATION,
    evaluation,
    events,
    plan,
    reporter_in,
    shares,
    step,
)

from gpipe_cli.results.files import read_result
from gpipe_cli.training.events import CheckpointReady


def test_a_whole_run(tmp_path: Path) -> None:
    folder = tmp_path / "outputs" / "run"
    reporter, file = reporter_in(folder)
    assert read_result(folder)["status"] == "running"
    for number in range(1, 13):
        reporter.on_message(step(number))
        if number % 4 == 0:
            reporter.on_message(evaluation(number, top1=number / 16, is_best=number != 12))
            assert read_result(folder)["test"]["step"] == number
            reporter.on_message(CheckpointReady(number))
            # nothing does the steps before a checkpoint again: a run that is killed now needs their events
            assert [event.step for event in events(folder).Scalars("train/loss")] == list(range(1, number + 1))
    reporter.finish("completed")
    result = read_result(folder)
    assert (result["status"], result["error"]) == ("completed", None)
    assert result["best"]["epoch"] == 2
    assert (result["samples_per_second"], result["step_seconds"]) == (512.0, 0.0625)
    assert result["memory_bytes"] == [3 * 2**20, 2**29]
    assert file.getvalue().count("completed in") == 1


def test_a_whole_run_of_text(tmp_path: Path) -> None:
    reporter, _ = reporter_in(tmp_path, *TRANSLATION)
    for number in range(1, 9):
        reporter.on_message(step(number, text=True))
        if number % 4 == 0:
            reporter.on_message(evaluation(number, text=True, is_best=number == 4))
    reporter.finish("completed")
    result = read_result(tmp_path)
    assert result["task"] == "translation"
    test = {"epoch": 2, "perplexity": pytest.approx(41.3), "token_accuracy": 0.312, "tokens": 5000, "averaged": False}
    assert result["test"] == test | {"step": 8, "loss": pytest.approx(3.72086, abs=1e-5)}
    assert result["best"]["step"] == 4
    assert (result["tokens_per_second"], result["samples_per_second"]) == (16_000.0, 512.0)
    assert result["unigram_perplexity"] == 312.0
    assert (result["global_batch"], result["global_batch_tokens"]) == (None, 4096)
    assert "sentencepiece" in result["versions"]
    reporter, _ = reporter_in(tmp_path / "failed", *LANGUAGE_MODEL)
    reporter.on_message(step(1, text=True, loss=float("nan"), cross_entropy=1e4))
    reporter.on_message(evaluation(1, text=True, loss=1e4, is_best=False))
    reporter.finish("failed", "stage 1 died in [2F0]")
    result = read_result(tmp_path / "failed")
    assert (result["error"], result["test"]["perplexity"]) == ("stage 1 died in [2F0]", None), "beyond all floats"


def test_shares_of_a_run_are_medians_without_the_warm_up(tmp_path: Path) -> None:
    reporter, _ = reporter_in(tmp_path, plan=plan())
    bubbles = [0.5, 0.5, 0.5, 0.1, 0.11, 0.3]
    for number, bubble in enumerate(bubbles, 1):
        counted = {"activation_bytes": (2 * 2**20, 4 * 2**20), "overhead_bytes": (0, 0)} if number == 2 else {}
        reporter.on_message(step(number, **counted))
        reporter.add_breakdown(number, shares(bubble))
    reporter.finish("completed")
    result = read_result(tmp_path)
    assert result["breakdown"]["measured"] == pytest.approx(shares(0.11))
    assert result["breakdown"]["predicted"] == shares(0.12)
    assert result["idle"] == {"measured": pytest.approx(0.19), "predicted": pytest.approx(0.2)}
    assert result["bubble"] == {"measured": pytest.approx(0.11), "predicted": 0.12, "ideal": 0.2}
    assert result["prediction"]["memory_bytes"] == [5 * 2**20, 2**29]
    assert result["activation_bytes"] == [2 * 2**20, 4 * 2**20]


def test_a_checkpoint_whose_message_was_not_read_can_be_resumed(tmp_path: Path) -> None:
    """Ctrl-C just after an epoch: the summary said that none was written yet."""
    reporter, file = reporter_in(tmp_path)
    reporter.on_message(step(1))
    (tmp_path / "checkpoints" / "step_00000001").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step_00000001" / "index.json").touch()
    reporter.finish("interrupted")
    assert f"checkpoint   {tmp_path}, after step 1" in file.getvalue().splitlines()
