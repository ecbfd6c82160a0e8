"""What `gpipe bench` shows of one configuration: that it goes on, and then the numbers of the paper's tables 2 and 3.

The same run as a training, told by its speed: median and quartiles over steps, where the time of a step went, memory,
and how much of the devices' peak the model's own operations reach.
"""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from gpipe_cli.reporting.run.description import RunDescription
from gpipe_cli.reporting.run.progress_bar import LINE_SECONDS, progress_bar
from gpipe_cli.reporting.run.step_breakdown import share_facts
from gpipe_cli.reporting.run.summary import TIMELINE_PAGE, memory_table, show_banner, show_facts, show_line, speed_kind
from gpipe_cli.reporting.run.task import words_of
from gpipe_cli.training.events import Evaluated, StepDone
from gpipe_cli.units import duration, operations, percent, plural, rate


class BenchConsole:
    """Shows the progress of a measurement on one console, as `RunConsole` does that of a training."""

    def __init__(self, console: Console, description: RunDescription, line_seconds: float = LINE_SECONDS) -> None:
        self.console = console
        self._run = description
        self._unit = words_of(description.task).speed
        self._line_seconds = line_seconds
        self._bar: Progress | None = None
        self._last_line = time.monotonic()

    def banner(self, folder: Path) -> None:
        """Shows what is about to be measured."""
        show_banner(self.console, self._run, folder)

    def start(self) -> None:
        """Shows the bar, in a terminal."""
        self._bar = progress_bar(self.console, "step {task.completed:.0f}/{task.total:.0f}")
        if self._bar is None:
            return
        self._bar.add_task("", total=self._run.total_steps, state=("waiting", "for the first step"))
        self._bar.start()

    def step(self, message: StepDone, speed: float | None) -> None:
        """A step was done; ``speed`` is the recent one, in samples or for text in tokens a second."""
        warm = message.step > self._run.warm_up_steps
        state = f"{rate(speed)} {self._unit}" if warm else "warm-up"
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=message.step, state=(state,))
        elif time.monotonic() - self._last_line >= self._line_seconds:
            show_line(self.console, f"step {message.step:,} of {self._run.total_steps:,}, {state}")
            self._last_line = time.monotonic()

    def evaluated(self, message: Evaluated) -> None:
        raise AssertionError("a measurement evaluates nothing")

    def facts(self, facts: Iterable[tuple[str, str]]) -> None:
        """Shows labelled lines in the middle of a run; a bar stays below them."""
        show_facts(self.console, facts)

    def stop(self) -> None:
        """Takes the bar away; harmless when repeated."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def show_measurement(console: Console, result: dict[str, Any], flops_note: str, folder: Path) -> None:
    """Shows what was measured.

    Args:
        result: what result.json holds.
        flops_note: where the peak comes from, or why it is not known.
    """
    done = f"{plural(result['steps'], 'step')} done"
    console.print()
    match result["status"]:
        case "completed":
            line = f"measured {plural(result['speed_steps'], 'step')} after {result['warm_up_steps']} of warm-up"
            show_line(console, f"{line}, in {duration(result['seconds'])}", "bold green")
        case "interrupted":
            show_line(console, f"interrupted after {duration(result['seconds'])}: {done}", "bold yellow")
        case status:
            show_line(console, f"{status} after {duration(result['seconds'])}: {done}", "bold red")
    if result["error"]:
        show_facts(console, [("error", result["error"])])
    show_facts(console, _speed(result))
    show_facts(console, share_facts(result))
    show_facts(console, memory_table(result))
    show_facts(console, _flops(result, flops_note))
    show_facts(console, [("run folder", str(folder))])
    if (folder / TIMELINE_PAGE).exists():
        show_facts(console, [("timeline", str(folder / TIMELINE_PAGE))])


def _speed(result: dict[str, Any]) -> Iterable[tuple[str, str]]:
    if result["samples_per_second"] is None:
        return
    words = words_of(result["task"])
    label = "speed"
    for unit, key in (("tokens", "tokens_per_second"), (f"{words.sample}s", "samples_per_second")):
        if result.get(key) is not None:
            first, third = result[f"{key}_quartiles"]
            spread = f"quartiles {rate(first)} and {rate(third)}, {plural(result['speed_steps'], 'step')}"
            yield label, f"{rate(result[key])} {unit}/s (median; {spread})"
            label = ""
    warm_up = ", warm-up included" if result["speed_includes_warm_up"] else ""
    yield "", f"{duration(result['step_seconds'])} per step{warm_up}"
    yield "", speed_kind(result["samples_per_second_kind"], result["without_core"])


def _flops(result: dict[str, Any], note: str) -> Iterable[tuple[str, str]]:
    if result["model_flops_per_second"] is None:
        return
    step = f"{operations(result['model_flops'])}FLOP of a full step, recomputation not counted"
    yield "model", f"{operations(result['model_flops_per_second'])}FLOP/s ({step})"
    yield "MFU", f"{percent(result['mfu'])} of {note}" if result["mfu"] is not None else f"not known: {note}"
