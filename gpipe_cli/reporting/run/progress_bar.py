"""The line at the foot of a terminal while something runs, the same for a training and for a measurement."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

LINE_SECONDS = 15.0  # a log shows a sign of life this often, as long as something is done
_READ_BYTES = 4096
_SHORTEST_BAR = 4
_TIME = len("1:02:03")


def progress_bar(console: Console, counted: str) -> Progress | None:
    """A bar to which one task is to be added; None outside a terminal. It goes away at the end: lines and summary stay.

    The task's field `state` is what goes on: phrases, the most important first. In a narrow terminal the last ones
    are left out, never the time that is left. `counted` comes before it, `step {task.completed}`.
    """
    if not console.is_terminal or console.is_dumb_terminal:
        return None
    return Progress(
        TextColumn(counted, markup=False, table_column=Column(no_wrap=True)),
        BarColumn(bar_width=None),
        _State(console, counted),
        TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True)),
        console=console,
        expand=True,
        transient=True,
    )


@contextmanager
def following(console: Console, log: Path, line_seconds: float = LINE_SECONDS) -> Iterator[None]:
    """Inside, show the newest line of a file to which a command writes: at the foot of a terminal, or now and then if
    there is a new one."""
    begin = log.stat().st_size

    def newest() -> Text:
        with log.open("rb") as file:
            file.seek(max(begin, log.stat().st_size - _READ_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
        return Text(next((line for line in reversed(lines) if line.strip()), ""), no_wrap=True, overflow="ellipsis")

    if console.is_terminal:
        with Live(console=console, get_renderable=newest, transient=True):
            yield
        return
    over = threading.Event()

    def show() -> None:
        shown = Text()
        while not over.wait(line_seconds):
            if (line := newest()) != shown:  # a command that says nothing for long would repeat itself here
                console.print(line)
                shown = line

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class _State(ProgressColumn):
    """As many phrases as there is room for beside the other columns."""

    def __init__(self, console: Console, counted: str) -> None:
        super().__init__(Column(no_wrap=True))
        self._console, self._counted = console, counted

    def render(self, task: Task) -> Text:
        blanks = 3
        room = self._console.width - len(self._counted.format(task=task)) - _SHORTEST_BAR - _TIME - blanks
        shown = ""
        for phrase in task.fields["state"]:
            longer = f"{shown} {phrase}".lstrip()
            if len(longer) > room:
                break
            shown = longer
        return Text(shown)
