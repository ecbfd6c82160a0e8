import io
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from reporting_runs import description, evaluation, log, plan, spec, step
from rich.console import Console

from gpipe_cli.planner.pipeline_spec import PipelineSpec
from gpipe_cli.reporting.run.banner import show_banner
from gpipe_cli.reporting.run.console import RunConsole, following
from gpipe_cli.reporting.run.lines import show_line
from gpipe_cli.reporting.run.reporter import Reporter
from gpipe_cli.reporting.run.summary import show_summary
from gpipe_cli.results.run import read_run_result

SHARES = {
    "compute": 0.5, "recompute": 0.2, "update": 0.05, "bubble": 0.1, "imbalance": 0.05, "transfer": 0.05, "set_up": 0.05
}  # fmt: skip


def banner(*settings: str, **changes: Any) -> str:
    console, file = log()
    show_banner(console, description(*settings, **changes), Path("outputs/run"))
    return file.getvalue()


@pytest.fixture(scope="module")
def summary(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """The summary of a run of three epochs in 133 s, the second one the best; other entries of result.json as given."""
    folder = tmp_path_factory.mktemp("run")
    reporter = Reporter(folder, description(), log()[0])
    for number in range(1, 13):
        reporter.step(step(number))
    reporter.evaluated(evaluation(8, loss=0.05, top1=0.989, averaged=True))
    reporter.evaluated(evaluation(12, loss=0.0512, top1=0.986, averaged=True, is_best=False))
    reporter.finish("completed")
    result = replace(read_run_result(folder), seconds=133.0)

    def shown(resume: str | None = "outputs/run", width: int = 0, **changes: Any) -> str:
        """With a `width` on a terminal."""
        console, file = log(width=width, force_terminal=True, no_color=True) if width else log()
        show_summary(console, replace(result, **changes), folder, "", "outputs/run/last, after step 8", resume)
        return file.getvalue()

    return shown


def test_the_banner_says_what_runs() -> None:
    text = banner()
    for fact in (
        "mini-batch   32 = 1 replica x 4 micro-batches x 8 samples\n",
        "AmoebaNet-D (6, 16): 5 layers, 1.24 M parameters",
        "digits: 1,437 training and 360 test samples",
        "K = 2 partitions, M = 4 micro-batches",
        "gpipe, recompute except_last",
        "ideal bubble 20.0 %",
        " learning rate 0.04, after a warm-up of 4 steps from 0.01\n",
    ):
        assert fact in text
    rows = [re.sub(r" +", " ", line).strip() for line in text.splitlines()]
    assert "0 cuda:0 3: stem ... normal_2 432.1 k 51.2 %" in rows
    assert "1 cuda:1 2: normal_3, classifier 812.3 k 48.8 %" in rows


def large(name: str) -> PipelineSpec:
    """Eight stages of 36 layers."""
    names = (tuple(f"{name}_{number:03d}" for number in range(36)),) * 8
    sizes: dict[str, Any] = {"parameters": (155_300_000,) * 8, "cost": (0.1,) * 8}
    sizes |= {"devices": ("cuda:7",) * 8, "process_of_stage": range(8)}
    return spec(layer_names=names, lengths=(128,), **sizes)


def test_a_log_has_one_line_for_an_epoch_and_no_escape_codes() -> None:
    console, file = log()
    screen = RunConsole(console, description())
    screen.start()
    screen.step(step(1), None)
    assert "train loss" not in file.getvalue()
    for number in range(2, 10):
        screen.step(step(number, samples=320 if number == 2 else 32), 512.0)  # means are over samples
        if number == 8:
            screen.evaluated(evaluation(8))
    screen.stop()
    screen.stop()
    assert not {"\x1b", "\r"} & set(file.getvalue())
    heading, *lines = file.getvalue().splitlines()
    ends = [match.end() for match in re.finditer(r"(train|test) loss|\S+", heading)]
    cells = [match.end() for match in re.finditer(r"\S+( %)?", lines[1].removesuffix(" best"))]
    assert cells[1:] == ends[1:]
    assert [line.split() for line in lines] == [
        ["1/3", "1.7846", "25.0", "%", "512.0", "0.04"],
        ["2/3", "1.3500", "25.0", "%", "1.2500", "87.5", "%", "100.0", "%", "512.0", "0.04", "best"],
    ]


@pytest.mark.parametrize("width", [80, 40])
def test_a_terminal_shows_a_bar_of_one_line_and_keeps_the_epochs(width: int) -> None:
    """A narrow one breaks no word, and shows the time left."""
    console, file = log(width=width, force_terminal=True, _environ={"TERM": "xterm"})
    run = description("epochs=100", spec=large("layer"))
    screen = RunConsole(console, run)
    show_banner(console, run, Path("outputs/run"))
    screen.start()
    screen.step(step(1, top1=1.0, learning_rate=0.000012345), 12_345.6)
    for number in range(2, 5):
        screen.step(step(number), 512.0)
    screen.evaluated(evaluation(4))
    screen.stop()
    frames = re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue()))
    assert max(map(len, frames)) <= width
    assert "…" not in file.getvalue()
    bars = [frame for frame in frames if frame.startswith("epoch 1/100 ")]
    assert width < 80 or "waiting for the first step" in bars[0]
    state = r"loss 1\.7500 top-1 43\.8 % 512\.0 samples/s lr 0\.04 .*" if width == 80 else r"loss 1\.7500 .*"
    assert re.search(rf"{state}(\d:\d\d|-:--) *$", bars[-1]), bars[-1]
    assert file.getvalue().count("\x1b[?25l") == file.getvalue().count("\x1b[?25h") == 1  # the cursor is back


def test_the_time_left_is_there_from_the_first_step_on() -> None:
    """Rich needs two steps, which may take minutes; before the first one, there is the prediction: 12 steps of 60 s."""
    console, file = log(force_terminal=True, _environ={"TERM": "xterm"})
    screen = RunConsole(console, description(plan=plan(step_seconds=60.0)))
    screen.start()
    screen.step(step(1, seconds=400.0), 512.0)
    screen.stop()
    left = re.findall(r"(\d?:?\d\d:\d\d) *(?:[\r\n]|$)", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue()))
    assert list(dict.fromkeys(left)) == ["12:00", "1:13:20"]


def test_the_summary_of_a_completed_run(summary: Callable[..., str]) -> None:
    lines = summary().splitlines()
    assert "completed in 2 min 13 s: 3 epochs, 12 steps" in lines
    assert "nothing was trained" in summary(status="dry_run")
    assert "test         top-1 98.6 %, top-5 100.0 %, loss 0.0512 (averaged weights)" in lines
    assert "best         top-1 98.9 %, top-5 100.0 %, loss 0.0500 (averaged weights), after epoch 2" in lines
    assert "speed        512.0 samples/s, 62.5 ms per step (medians after the first 3 steps)" in lines
    assert re.search(r"^curves       tensorboard --logdir /\S+/run0$", summary(), re.MULTILINE)
    assert not [line for line in lines if "checkpoint" in line or "resume" in line]
    contended = {"samples_per_second_kind": "measured_contended", "without_core": 0.34}
    assert "measured_contended: other programs used these cores for 34.0 % of the time\n" in summary(**contended)
    assert "(medians of the first 2 steps, which are slow)" in summary(speed_includes_warm_up=True, speed_steps=2)
    assert summary(status="interrupted", steps=0).startswith("\ninterrupted before the first step was done\n")
    assert summary(epochs=0, steps=3).startswith("\ncompleted in 2 min 13 s: 3 steps\n")


@pytest.mark.parametrize("folder", ["outputs/a_K2", "sweep/a=4,b=[2]", "it's $HOME \\slash", "a\\b=\\"])
def test_the_command_to_go_on_survives_shell_and_hydra(summary: Callable[..., str], folder: str) -> None:
    lines = summary(resume=folder, status="interrupted").splitlines()
    assert "interrupted after 2 min 13 s: 3 epochs, 12 steps done" in lines
    assert "checkpoint   outputs/run/last, after step 8" in lines
    (command,) = (line.removeprefix("go on with   ") for line in lines if line.startswith("go on with"))
    _, _, override = shlex.split(command)
    assert folder != "outputs/a_K2" or "go on with   gpipe train resume=outputs/a_K2" in lines  # without quotes
    parsed = OverridesParser.create().parse_override(override)
    assert (parsed.key_or_group, parsed.value()) == ("resume", folder)


def test_what_a_place_without_utf_8_cannot_write_is_escaped() -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    show_line(Console(file=file, width=80, color_system=None), "Österreich [b] Россия")
    file.flush()
    escaped = rb"\xd6sterreich [b] \u0420\u043e\u0441\u0441\u0438\u044f"
    assert file.buffer.getvalue().rstrip() == escaped  # type: ignore[attr-defined]


def test_what_a_command_writes_to_a_log_is_followed(tmp_path: Path) -> None:
    """A recipe's measurements take minutes, and nothing was seen of them."""
    file = tmp_path / "log.txt"
    file.write_text("of an earlier command\n")
    console, shown = log(force_terminal=True, _environ={"TERM": "xterm"})
    with following(console, file), file.open("a") as written:
        written.write(f"step 3 of 20, {'9' * 90}\n\n")
    assert "step 3 of 20, 999" in shown.getvalue()
    assert "earlier" not in shown.getvalue()
