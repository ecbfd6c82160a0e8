import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from reporting_runs import LANGUAGE_MODEL, description, evaluation, log, reporter_in, step
from training_runs import TINY, command

from gpipe_cli.reporting.run.banner import show_banner
from gpipe_cli.reporting.run.console import RunConsole
from gpipe_cli.results.run import Start
from gpipe_cli.training.events import CheckpointEnded


def test_a_log_has_one_line_for_an_epoch_and_no_escape_codes() -> None:
    console, file = log()
    screen = RunConsole(console, description())
    screen.start()
    screen.step(step(1), None)
    assert "train loss" not in file.getvalue()
    for number in range(2, 10):
        screen.step(step(number), 512.0)
        if number == 8:
            screen.add_evaluation(evaluation(8))
    screen.stop()
    screen.stop()
    assert not {"\x1b", "\r"} & set(file.getvalue())
    heading, *lines = file.getvalue().splitlines()
    ends = [match.end() for match in re.finditer(r"(train|test) loss|\S+", heading)]
    cells = [match.end() for match in re.finditer(r"\S+( %)?", lines[1].removesuffix(" best"))]
    assert cells[1:] == ends[1:]
    assert [line.split() for line in lines] == [
        ["1/3", "1.8500", "37.5", "%", "512.0", "0.04"],
        ["2/3", "1.4500", "37.5", "%", "1.2500", "87.5", "%", "100.0", "%", "512.0", "0.04", "best"],
    ]


def test_a_terminal_shows_a_bar_of_one_line_and_keeps_the_epochs() -> None:
    console, file = log(width=80, force_terminal=True, _environ={"TERM": "xterm"})
    run = description("epochs=100")
    screen = RunConsole(console, run)
    show_banner(console, run, Path("outputs/run"))
    screen.start()
    screen.step(step(1, learning_rate=0.000012345), 12_345.6)
    for number in range(2, 5):
        screen.step(step(number), 512.0)
    screen.add_evaluation(evaluation(4))
    screen.stop()
    frames = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue()))
    assert max(map(len, frames)) <= 80
    bars = [frame for frame in frames if frame.startswith("epoch 1/100 ")]
    assert "waiting for the first step" in bars[0]
    state = r"loss 1\.8500 top-1 37\.5 % 512\.0 samples/s lr 0\.04 .*"
    assert re.search(rf"{state}(\d:\d\d|-:--) *$", bars[-1]), bars[-1]
    assert file.getvalue().count("\x1b[?25l") == file.getvalue().count("\x1b[?25h") == 1  # the cursor is back


def banner(*settings: str, **changes: Any) -> list[str]:
    """The lines of the banner of a run of three epochs of four steps, unless told otherwise."""
    console, file = log(width=1000)
    show_banner(console, description(*settings, **changes), Path("outputs/run"))
    return [line[13:] for line in file.getvalue().splitlines()]


def test_a_run_that_max_steps_ends_tells_where_on_its_curves() -> None:
    """A learning rate that was to fall with the cosine over 1,000 epochs did not fall in 400 steps, without a word."""
    cosine = ["learning_rate=cosine", "learning_rate.warmup_epochs=0"]
    said = "max_steps=6 ends the run at 50.0 % of the cosine over 3 epochs; epochs=2 shortens it"
    assert said in banner(*cosine, "max_steps=6")
    assert not [line for line in banner(*cosine) if "max_steps" in line]
    drops = "max_steps=9 ends the run at 75.0 % of the rise of drop-path over 3 epochs"
    assert drops in banner("model.drop_path=0.3", "learning_rate=constant", "max_steps=9")
    steady = banner("learning_rate=constant", "max_steps=6")
    assert not [line for line in steady if "ends" in line]
    short = banner("learning_rate=constant", "learning_rate.peak=0.4", "learning_rate.warmup_epochs=2", "max_steps=4")
    remedy = "learning_rate.warmup_epochs=0 shortens it"
    assert f"the run ends within the warm-up, at a learning rate of 0.2; {remedy}" in short
    whole = banner(*LANGUAGE_MODEL, "~presets", "max_steps=null", "epochs=1")  # of 4 steps, for a warm-up of 200
    assert [line for line in whole if line.endswith("; learning_rate.warmup_steps=1 shortens it")]
    assert not [
        line for line in banner(*LANGUAGE_MODEL, "learning_rate.warmup_steps=1") if "within the warm-up" in line
    ]


@pytest.mark.parametrize(("classes", "top5"), [(5, False), (6, True)])
def test_a_run_describes_its_images_and_omits_a_score_that_is_100_percent_by_definition(
    classes: int, top5: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["dataset.augmentation.random_resized_crop=[0.1,1.0]", f"dataset.num_classes={classes}", "max_steps=1"]
    assert command("train", *TINY, *given, "partitions=1", "run_folder=run") == 0
    shown, test = capsys.readouterr().out, json.loads(Path("run/result.json").read_text())["test"]
    assert "dataset      synthetic_images, 16 x 16 pixels: 22 training" in shown
    assert "random crops of 10 to 100 % of the area" in shown
    assert ("top-5" in shown, test["top5"] is not None) == (top5, top5)


def test_a_quiet_run_prints_errors_and_a_last_line(capfd: pytest.CaptureFixture[str]) -> None:
    given = [*TINY, "partitions=2", "max_steps=1", "quiet=true"]
    assert command("train", *given, "run_folder=run") == 0
    out, err = capfd.readouterr()
    assert (re.fullmatch(r"completed in .*: 1 step, in run\n", out) is not None, err) == (True, "")
    assert "memory, MiB" in Path("run/log.txt").read_text()
    assert command("train", *given, "batch_size=64") == 2
    out, err = capfd.readouterr()
    assert (out, err.count("\n")) == ("", 1)


def test_a_preset_is_shown_with_what_it_sets() -> None:
    """`model=transformer_lm dataset=text_files` stopped after 400 steps at width 128, where the model's file has 2048;
    what is typed is not the preset's."""
    text = ["model=transformer_lm", "dataset=text_files", "dataset.root=book.txt", "model.heads=8"]  # and epochs=3
    (line,) = (line for line in banner(*text) if line.startswith("small: "))
    settings = line.removeprefix("small: ").partition(";")[0].split()
    assert {"max_steps=400", "model.width=128", "checkpoint.every_epochs=5"} <= {*settings}
    assert not [setting for setting in settings if setting.startswith(("model.heads", "epochs", "preset"))]
    assert not [line for line in banner(*text, "~presets") if "small" in line]


@pytest.mark.parametrize("folder", ["outputs/a_K2", "sweep/a=4,b=[2]", "it's $HOME \\slash", "a\\b=\\"])
def test_a_summary_has_the_scores_and_a_resume_command_that_survives_shell_and_hydra(folder: str) -> None:
    reporter, file = reporter_in(Path(folder))
    for number in range(1, 13):
        reporter.on_message(step(number))
    reporter.on_message(evaluation(8, loss=0.05, top1=0.989, averaged=True))
    reporter.on_message(evaluation(12, loss=0.0512, top1=0.986, averaged=True, is_best=False))
    reporter.on_message(CheckpointEnded(8))
    reporter.finish("interrupted")
    lines = file.getvalue().splitlines()
    assert re.search("^interrupted after .*: 12 steps \\(3 whole epochs\\) done$", file.getvalue(), re.MULTILINE)
    assert "test         top-1 98.6 %, top-5 100.0 %, loss 0.0512 (averaged weights)" in lines
    assert "best         top-1 98.9 %, top-5 100.0 %, loss 0.0500 (averaged weights)" in lines
    assert "             chosen on the test set, after step 8, in epoch 2" in lines
    assert "speed        512.0 samples/s, 62.5 ms per step (medians after the first 3 steps)" in lines
    assert f"checkpoint   {folder}, after step 8" in lines
    (command,) = (line.removeprefix("resume with  ") for line in lines if line.startswith("resume with"))
    _, _, override = shlex.split(command)
    assert folder != "outputs/a_K2" or "resume with  gpipe train resume=outputs/a_K2" in lines  # without quotes
    parsed = OverridesParser.create().parse_override(override)
    assert (parsed.key_or_group, parsed.value()) == ("resume", folder)


@pytest.mark.parametrize(
    ("settings", "written", "resume_command"),
    [
        (["max_steps=6"], 4, ["gpipe train resume=run"]),
        (["max_steps=6"], 6, []),
        (["resume=old", "epochs=4"], None, ["gpipe train resume=old epochs=4"]),
        ([], None, []),
    ],
)
def test_a_proposed_resume_command_has_something_to_do(
    settings: list[str], written: int | None, resume_command: list[str]
) -> None:
    """A run of which the last checkpoint is written was to be resumed, and so was a complete one, without the setting
    that gave it more epochs."""
    started = Start("2026-01-31T12:00:00", " ".join(["gpipe train", *settings]))
    reporter, file = reporter_in(Path("run"), *settings, start=started)
    reporter.on_message(step(6))
    if written is not None:
        reporter.on_message(CheckpointEnded(written))
    reporter.finish("interrupted")
    assert re.findall("^resume with +(.*)$", file.getvalue(), re.MULTILINE) == resume_command
    assert re.search("6 steps \\(1 whole epoch\\) done", file.getvalue())
