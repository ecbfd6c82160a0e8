"""The table of a sweep: the settings that differ, and the results of the runs."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from gpipe_cli.reporting.run.lines import show_line
from gpipe_cli.reporting.run.result import value_of
from gpipe_cli.reporting.tables.table import Column, Table, show_table
from gpipe_cli.units import duration, percent, perplexity, rate

INTERRUPTED = 130


@dataclass(frozen=True)
class Run:
    """A run that ended."""

    differs: str  # `micro_batches=4`
    folder: Path
    exit_code: int
    seconds: float
    result: dict[str, Any]  # the run's result.json, empty if it wrote none
    number: int = 1  # within the sweep; the first is 1
    round: int = 1  # likewise
    settings: dict[str, Any] = field(default_factory=dict)  # those that differ
    error: str = ""  # one line, if it failed

    @property
    def failed(self) -> bool:
        return self.exit_code != 0

    @property
    def status(self) -> str:
        if self.exit_code == INTERRUPTED:
            return "interrupted"
        return f"failed ({self.exit_code})" if self.failed else str(self.result.get("status", "completed"))


def show_sweep(runs: Sequence[Run]) -> None:
    """Prints a row for each run, and the errors of those that failed."""
    runs = sorted(runs, key=lambda run: run.number)
    results = [run.result for run in runs]
    steps = (result.get("step_seconds") for result in results)
    # a run that was refused wrote nothing: the microseconds until then say nothing
    times = ["-" if run.failed and not run.result else duration(run.seconds) for run in runs]
    columns = (
        Column("run", cells=[str(run.number) for run in runs], number=True),
        Column("what differs", cells=[run.differs for run in runs]),
        Column("status", cells=[run.status for run in runs]),
        *_scores_and_speeds(results),
        Column("step", cells=["-" if step is None else duration(step) for step in steps], number=True),
        Column("time", cells=times, number=True),
    )
    console = Console()
    console.rule(Text(f"sweep {runs[0].folder.parent}"), align="left")
    show_table(console, Table("", columns))
    for run in runs:
        if run.failed and run.error:
            show_line(console, f"run {run.number}: {run.error}")


def show_rest(planned: int, runs: Sequence[Run], go_on_with: str) -> None:
    """What a sweep has left to do, and by which command; nothing if there is none."""
    left = planned - len(runs)
    if left > 0 or any(run.failed for run in runs):
        rest = f"{left} of {planned} not run; " if left > 0 else ""
        Console().print(Text(f"{rest}go on with  {go_on_with}"), soft_wrap=True)


def _scores_and_speeds(results: Sequence[dict[str, Any]]) -> Iterator[Column]:
    """What runs are compared by. A sweep over images and text has the columns of both."""
    kinds = {result.get("task", "classification") != "classification" for result in results if result}
    images, text = kinds != {True}, True in kinds
    columns: tuple[tuple[bool, str, Callable[[dict[str, Any]], str]], ...] = (
        (images, "top-1", lambda result: percent(value_of(result, "test", "top1"))),
        (text, "perplexity", lambda result: perplexity(value_of(result, "test", "perplexity"))),
        (images, "samples/s", lambda result: rate(result.get("samples_per_second"))),
        (text, "tokens/s", lambda result: rate(result.get("tokens_per_second"))),
    )
    for shown, heading, cell in columns:
        if shown:
            yield Column(heading, cells=[cell(result) for result in results], number=True)
