import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from reporting_runs import (
    LANGUAGE_MODEL,
    TRANSLATION,
    evaluation,
    events,
    log,
    page_data,
    plan,
    reporter_in,
    shares,
    step,
    timeline,
)

from gpipe_cli.reporting.plots.timeline_values import StepPicture
from gpipe_cli.reporting.run.summary import show_evaluation
from gpipe_cli.results.files import read_result
from gpipe_cli.training.events import EvaluationDone, Scores, Translation, TranslationScores


def test_a_whole_run(tmp_path: Path) -> None:
    folder = tmp_path / "outputs" / "run"
    reporter, file = reporter_in(folder)
    assert read_result(folder)["status"] == "running"
    reporter.banner()
    reporter.start()
    for number in range(1, 13):
        reporter.step(step(number))
        if number % 4 == 0:
            reporter.evaluated(evaluation(number, top1=number / 16, is_best=number != 12))
            assert read_result(folder)["test"]["step"] == number
            reporter.checkpointed(number)
            # nothing does the steps before a checkpoint again: a run that is killed now needs their events
            assert [event.step for event in events(folder).Scalars("train/loss")] == list(range(1, number + 1))
    reporter.finish("completed")
    result = read_result(folder)
    assert (result["status"], result["error"]) == ("completed", None)
    assert (result["model_parameters"], result["epochs"], result["steps"]) == (1_244_400, 3, 12)
    assert (result["test"]["top1"], result["test"]["top5"], result["test"]["loss"]) == (0.75, 1.0, 1.25)
    assert result["best"]["epoch"] == 2
    assert (result["samples_per_second"], result["step_seconds"]) == (512.0, 0.0625)
    assert result["memory_bytes"] == [3 * 2**20, 2**29]
    assert result["partitions"][1]["layers"] == ["normal_3", "classifier"]
    assert (result["config"]["partitions"], result["config"]["model"]["filters"]) == (2, 16)
    assert not {"tokens_per_second", "unigram_perplexity", "global_batch_tokens"} & set(result)
    assert set(result["test"]) == {"step", "epoch", "loss", "top1", "top5", "averaged"}
    assert result["bubble"] == {"measured": None, "predicted": None, "ideal": 0.2}
    assert file.getvalue().count("completed in") == 1


def test_a_whole_run_of_text(tmp_path: Path) -> None:
    reporter, file = reporter_in(tmp_path, *TRANSLATION)
    reporter.banner()
    reporter.start()
    for number in range(1, 9):
        reporter.step(step(number, text=True))
        if number % 4 == 0:
            reporter.evaluated(evaluation(number, text=True, is_best=number == 4))
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
    lines = file.getvalue().splitlines()
    assert "1/3       1.7500    25.0 %    3.7209       41.3    31.2 %   16,000     0.04 best" in lines
    scores = "perplexity 41.3 (unigram model 312.0), token accuracy 31.2 %, loss 3.7209 nats per token"
    assert f"test         {scores}" in lines
    assert "top-" not in file.getvalue()

    reporter, _ = reporter_in(tmp_path / "failed", *LANGUAGE_MODEL)
    reporter.step(step(1, text=True, loss=float("nan"), cross_entropy=1e4))
    reporter.evaluated(evaluation(1, text=True, loss=1e4, is_best=False))
    reporter.finish("failed", "stage 1 died in [2F0]")
    result = read_result(tmp_path / "failed")
    assert (result["error"], result["test"]["perplexity"]) == ("stage 1 died in [2F0]", None), "beyond all floats"


DECODED = TranslationScores(
    bleu=34.06, chrf=55.0, bleu_copy=8.2, chrf_copy=21.1, sentences=2000, of=8123, beam=4, seconds=12.3,
    bleu_signature="nrefs:1|case:mixed", chrf_signature="nrefs:1|nc:6",
    examples=tuple(
        Translation(f"{language}-en", "Welt\x1b[2J\n!", "World!", "[b]World")
        for language in ("af", "de", "fr", "it", "nl", "sv")
    ),
)  # fmt: skip


def test_an_evaluation_of_a_translation_shows_scores_and_some_examples(tmp_path: Path) -> None:
    console, file = log()
    scores = Scores(tokens=54_321, loss=3.721, top1=0.312, top5=None, averaged=True)
    show_evaluation(
        console, tmp_path, "best, after step 8", "translation", EvaluationDone(8123, scores, 1.2, 312.0, DECODED)
    )
    written, lines = read_result(tmp_path, "evaluate.json"), file.getvalue().splitlines()
    assert written.pop("translation") == json.loads(json.dumps(asdict(DECODED)))
    assert written.pop("perplexity") == pytest.approx(41.3, abs=0.01)
    assert written == {
        "checkpoint": "best, after step 8", "task": "translation", "samples": 8123, "loss": 3.721,
        "token_accuracy": 0.312, "averaged": True, "seconds": 1.2, "tokens": 54_321, "unigram_perplexity": 312.0,
    }  # fmt: skip
    assert lines[0] == "checkpoint   best, after step 8"
    assert lines[1].endswith(" (averaged weights)")
    assert lines[2:9] == [
        "sentences    8,123 with 54,321 tokens in 1.2 s",
        "BLEU         34.1 (copying the source: 8.2)",
        "chrF         55.0 (copying the source: 21.1)",
        "decoded      2,000 of 8,123 sentences, beam 4, 12.3 s",
        "af-en        Welt [2J !",
        "  reference  World!",
        "  decoded    [b]World",
    ]
    assert [line[:5] for line in lines if "Welt" in line] == ["af-en", "de-en", "fr-en", "it-en", "nl-en"]


def test_shares_of_a_run_are_medians_without_the_warm_up(tmp_path: Path) -> None:
    reporter, file = reporter_in(tmp_path, plan=plan())
    bubbles = [0.5, 0.5, 0.5, 0.1, 0.11, 0.3]
    for number, bubble in enumerate(bubbles, 1):
        counted = {"activation_bytes": (2 * 2**20, 4 * 2**20), "library_bytes": (0, 0)} if number == 2 else {}
        reporter.step(step(number, **counted), (2 * 2**20, 3 * 2**20) if number == 2 else None)
        reporter.recorded(number, shares(bubble))
    reporter.finish("completed")
    result = read_result(tmp_path)
    assert result["breakdown"]["measured"] == pytest.approx(shares(0.11))
    assert result["breakdown"]["predicted"] == shares(0.12)
    assert result["idle"] == {"measured": pytest.approx(0.19), "predicted": pytest.approx(0.2)}
    assert result["bubble"] == {"measured": pytest.approx(0.11), "predicted": 0.12, "ideal": 0.2}
    assert result["prediction"]["memory_bytes"] == [5 * 2**20, 2**29]
    assert result["activation_bytes"] == [2 * 2**20, 4 * 2**20]
    lines = file.getvalue().splitlines()
    assert all(len(line) <= 80 for line in lines if not line.startswith(("run folder", "curves")))
    first = lines.index("% of a step  compute recompute update   idle = bubble imbalance transfer set-up")
    assert lines[first + 1 : first + 4] == [
        "measured        59.0      20.0    2.0   19.0 =   11.0       3.0      1.0    4.0",
        "predicted       58.0      20.0    2.0   20.0 =   12.0       3.0      1.0    4.0",
        "ideal bubble 20.0 %, (K-1)/(M+K-1) for K equal devices that only compute",
    ]
    first = lines.index("predicted    60.0 ms a step, measured 62.5 ms (4 % more)")
    assert lines[first + 1 : first + 3] == [
        "             stage 0: 2.0 MiB of activations, counted 2.0 MiB (as predicted)",
        "             stage 1: 3.0 MiB of activations, counted 4.0 MiB (33 % more)",
    ]


def test_a_prediction_is_compared_once_after_twenty_steps(tmp_path: Path) -> None:
    figures = plan(step_seconds=0.125)
    figures = replace(figures, costs=replace(figures.costs, source="hardware=cpu figures", basis="data_sheet"))
    reporter, file = reporter_in(tmp_path, plan=figures)
    for number in range(1, 20):
        reporter.step(step(number, without_core=(0.0, 0.4)))
    assert "predicted" not in file.getvalue()
    reporter.step(step(20))
    lines = file.getvalue().splitlines()
    assert "predicted    125.0 ms a step, measured 62.5 ms (0.50 times as long)" in lines
    assert "             from hardware=cpu figures; hardware=auto cost=measured times the layers themselves" in lines
    assert "             measured_contended: other programs used these cores for 40.0 % of the time" in lines
    reporter.step(step(21))
    reporter.finish("completed")
    assert file.getvalue().count("predicted ") == 1  # nothing else was measured


def test_a_checkpoint_whose_message_was_not_read_is_one_to_go_on_from(tmp_path: Path) -> None:
    """Ctrl-C just after an epoch: the summary said that none was written yet."""
    reporter, file = reporter_in(tmp_path)
    reporter.step(step(1))
    (tmp_path / "checkpoints" / "step_00000001").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step_00000001" / "index.json").touch()
    reporter.finish("interrupted")
    assert f"checkpoint   {tmp_path}, after step 1" in file.getvalue().splitlines()


def test_the_picture_of_a_step_is_in_the_folder_and_in_tensorboard(tmp_path: Path) -> None:
    reporter, file = reporter_in(tmp_path, plan=plan())
    reporter.timeline(StepPicture(1, 4, (timeline(),)))
    first = (tmp_path / "timeline.png").read_bytes()
    reporter.timeline(StepPicture(2, 6, (timeline(),)))  # another one of the epoch takes its place
    reporter.timeline(StepPicture(2, 8, (timeline(), timeline(0.008, kind="predicted"))))
    reporter.finish("completed")
    assert (tmp_path / "timeline.png").read_bytes() != first
    assert [step["step"] for step in page_data(tmp_path)["steps"]] == [4, 8]
    assert f"page         {tmp_path}/pipeline.html" in file.getvalue().splitlines()
    one, _, both = events(tmp_path).Images("pictures/timeline")
    assert (one.step, both.step) == (4, 8)
    assert both.height > one.height
