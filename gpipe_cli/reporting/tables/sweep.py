"""What became of the runs of a sweep, as a table: settings that differ, and what the runs reached."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from gpipe_cli.reporting.run.summary import show_line
from gpipe_cli.reporting.tables.wide_table import show_in_parts
from gpipe_cli.units import duration, percent, perplexity, rate

INTERRUPTED = 130


@dataclass(frozen=True)
class Run:
    """What became of one run."""

    differs: str  # `micro_batches=4`
    folder: Path
    exit_code: int
    seconds: float
    result: dict[str, object]  # the run's result.json, empty if it wrote none
    number: int = 1  # within the sweep; the first is 1
    round: int = 1  # likewise
    settings: dict[str, object] = field(default_factory=dict)  # those that differ
    error: str = ""  # one line, if it failed

    @property
    def failed(self) -> bool:
        return self.exit_code != 0

    @property
    def status(self) -> str:
        if self.exit_code == INTERRUPTED:
            return "interrupted"
        return f"failed ({self.exit_code})" if self.failed else str(self.result.get("status", "completed"))


def top1(result: dict[str, object]) -> float | None:
    """The accuracy on the test set in a run's result, if there is one."""
    return _of_test(result, "top1")


def show_table(runs: Sequence[Run]) -> None:
    """Prints what became of the runs, and why those failed that did."""
    runs = sorted(runs, key=lambda run: run.number)
    table = plain_table()
    table.add_column("run", justify="right")
    table.add_column("what differs", overflow="fold")
    table.add_column("status", no_wrap=True)
    columns = _columns([run.result for run in runs])
    for heading in (*(heading for heading, _ in columns), "step", "time"):
        table.add_column(heading, justify="right", no_wrap=True)
    for run in runs:
        table.add_row(
            str(run.number),
            escape(run.differs),
            f"[red]{run.status}[/red]" if run.failed else run.status,
            *(cell(run.result) for _, cell in columns),
            "-" if (step := number_of(run.result.get("step_seconds"))) is None else duration(step),
            duration(run.seconds),
        )
    console = Console()
    console.rule(Text(f"sweep {runs[0].folder.parent}"), align="left")
    show_in_parts(console, table)
    for run in runs:
        if run.failed and run.error:
            show_line(console, f"run {run.number}: {run.error}")


def show_rest(planned: int, runs: Sequence[Run], go_on_with: str) -> None:
    """What a sweep has left to do, and by which command; nothing if there is none."""
    left = planned - len(runs)
    if left > 0 or any(run.failed for run in runs):
        rest = f"{left} of {planned} not run; " if left > 0 else ""
        Console().print(Text(f"{rest}go on with  {go_on_with}"), soft_wrap=True)


def plain_table() -> Table:
    """As the banner's: no lines between columns, so that names stay whole at 80 columns."""
    return Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))


def number_of(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _columns(results: Sequence[dict[str, object]]) -> list[tuple[str, Callable[[dict[str, object]], str]]]:
    """What runs are compared by: headings, and the cell of a result. A sweep over images and text has those of both."""
    text = {result.get("task", "classification") != "classification" for result in results if result}
    columns: list[tuple[str, Callable[[dict[str, object]], str]]] = []
    if text != {True}:
        columns.append(("top-1", lambda result: percent(top1(result))))
    if True in text:
        columns.append(("perplexity", lambda result: perplexity(_of_test(result, "perplexity"))))
    if text != {True}:
        columns.append(("samples/s", lambda result: rate(number_of(result.get("samples_per_second")))))
    if True in text:
        columns.append(("tokens/s", lambda result: rate(number_of(result.get("tokens_per_second")))))
    return columns


def _of_test(result: dict[str, object], score: str) -> float | None:
    test = result.get("test")
    return number_of(test.get(score)) if isinstance(test, dict) else None
