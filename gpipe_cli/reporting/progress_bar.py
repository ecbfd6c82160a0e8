"""The bar at the foot of a terminal while something runs, the same for a training and for a measurement."""

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

_SHORTEST_BAR = 4
_TIME = len("1:02:03")


def progress_bar(console: Console, counted: str) -> Progress | None:
    """A bar to which one task is to be added; None outside a terminal. It goes away at the end: lines and summary stay.

    The task's field `state` says what goes on: phrases, the most important first. In a narrow terminal the last ones
    are left out, never the time that is left. `counted` is what stands before it, `step {task.completed}`.
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
