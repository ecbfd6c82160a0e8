"""`gpipe demo`: three measurements, and what is said of them."""

import os
import signal
import webbrowser
from dataclasses import replace
from pathlib import Path

import pytest
from reporting_runs import page_data
from training_runs import TINY, command, composed, session_members, start_program, wait_until

from gpipe_cli.commands import demo
from gpipe_cli.commands.bench import _requested
from gpipe_cli.reporting.tables.demo import explained
from gpipe_cli.results.run import IdleShares, RunResult, read_run_result

CUTS = [(1, 1), (2, 1), (2, 4)]
SMALL = (*TINY[:9], *TINY[10:], "hardware=cpu", "recompute=never", "steps=1", "warm_up_steps=0")


def runs_of_demo() -> list[Path]:
    (folder,) = Path("outputs").glob("*_demo")
    found = [folder / f"partitions={k}_micro_batches={m}" for k, m in CUTS]
    assert sorted(path for path in folder.iterdir() if path.is_dir()) == found
    return found


@pytest.mark.parametrize("opens", ["true", "false"])
def test_three_cuts_are_measured_and_the_page_of_the_last_is_opened(
    opens: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    opened = tmp_path / "opened"
    browser = tmp_path / "browser"
    browser.write_text(f"#!/bin/sh\nprintf %s \"$1\" > '{opened}'\n")
    browser.chmod(0o755)
    monkeypatch.setenv("BROWSER", str(browser))
    monkeypatch.setattr(webbrowser, "_tryorder", None)  # it reads BROWSER once
    monkeypatch.setattr(demo, "MEASURED", SMALL)
    assert command("demo", f"open={opens}") == 0
    runs = runs_of_demo()
    results = [read_run_result(run) for run in runs]
    assert [(one.config["partitions"], one.config["micro_batches"]) for one in results] == CUTS
    assert [(one.executor, one.status) for one in results] == [
        ("in_process", "completed"), ("distributed", "completed"), ("distributed", "completed")
    ]  # fmt: skip
    page = runs[-1] / "pipeline.html"
    (step,) = page_data(runs[-1])["steps"]
    assert step["step_seconds"] == results[-1].step_seconds
    assert (opened.read_text() if opened.exists() else None) == (page.resolve().as_uri() if opens == "true" else None)
    shown = capfd.readouterr().out
    assert str(page) in shown
    assert "relative" in shown
    assert "gpipe train" in shown


def test_the_measurements_are_fair() -> None:
    """The same work in each, in processes of one thread, with nothing computed twice."""
    found = [_requested(composed(*demo.MEASURED, *cell, command="bench"), {}).config for _, cell, _ in demo.CELLS]
    assert [(config.partitions, config.micro_batches) for config in found] == CUTS
    first, *others = (replace(config, partitions=1, micro_batches=1) for config in found)
    assert others == [first, first]
    assert (first.threads, first.recompute, first.device, first.dataset.name) == (1, "never", "cpu", "digits")


def test_without_a_display_no_browser_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
        monkeypatch.delenv(name, raising=False)
    assert not demo._has_browser()
    monkeypatch.setenv("WAYLAND_DISPLAY", "wayland-0")
    assert demo._has_browser()


def test_a_measurement_that_fails_ends_it(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    layers = ("model=custom", "model.target=custom_models:told", "+model.arguments.way=hungry")
    monkeypatch.setattr(demo, "MEASURED", (*layers, *SMALL[2:]))
    assert command("demo", "open=false") == 1
    shown = capfd.readouterr().out
    assert "can't allocate memory" in shown
    (log,) = Path("outputs").glob("*_demo/log.txt")
    assert str(log) in shown


def test_it_can_be_interrupted() -> None:
    program = start_program("demo", "open=false")
    wait_until(lambda: [*Path("outputs").glob("*_demo/*/config.yaml")], 120, "the first measurement")
    os.killpg(program.pid, signal.SIGINT)
    _, error = program.communicate(timeout=30)
    assert (program.returncode, error) == (130, "gpipe demo: interrupted\n")
    wait_until(lambda: not session_members(program.pid), 10, "the end of all processes")


def said(speeds: tuple[float, float, float], *, without_core: float = 0.0, cores: int = 2) -> str:
    """The sentences about measurements of these speeds in samples/s."""
    kind = "measured_contended" if without_core else "measured"
    results = [
        RunResult(
            "completed", samples_per_second=speed, samples_per_second_kind=kind, without_core=without_core,
            idle=IdleShares(measured=idle), config={"partitions": k, "micro_batches": m},
        )
        for speed, idle, (k, m) in zip(speeds, (0.01, 0.52, 0.22), CUTS, strict=True)
    ]  # fmt: skip
    return "\n".join(explained(results, cores))


@pytest.mark.parametrize(
    ("sentences", "has", "lacks"),
    [
        (said((100, 98, 150)), ["0.98 times", "idle 52.0 %", "1.50 times", "idle for 22.0 %", "1.60"], ["no gain"]),
        (said((100, 130, 150)), ["1.30 times", "chance"], ["gains nothing"]),
        (said((100, 98, 90)), ["0.90 times", "no gain", "transfers cost time"], ["other programs", "Other programs"]),
        (said((100, 98, 90), without_core=0.4), ["no gain", "up to 40.0 % of the time"], ["transfers cost"]),
        (said((100, 98, 150), without_core=0.4), ["1.50 times", "up to 40.0 % of the time"], ["no gain"]),
        (said((100, 60, 70), without_core=0.5, cores=1), ["0.70 times", "one core"], ["Other", "at the same time"]),
    ],
)  # fmt: skip
def test_only_what_was_measured_is_claimed(sentences: str, has: list[str], lacks: list[str]) -> None:
    assert [words for words in has if words not in sentences] == []
    assert [words for words in lacks if words in sentences] == []
