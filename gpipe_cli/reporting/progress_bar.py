"""The bar at the foot of a terminal while something runs, the same for a training and for a measurement."""

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


def progress_bar(console: Console, counted: str) -> Progress | None:
    """A bar to which one task is to be added, whose field `state` says what goes on; None outside a terminal.

    It goes away at the end: lines and summary stay. `counted` is what stands before it, `step {task.completed}`.
    """
    if not console.is_terminal or console.is_dumb_terminal:
        return None
    return Progress(
        TextColumn(counted, markup=False),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[state]}", markup=False),
        TimeRemainingColumn(compact=True),
        console=console,
        expand=True,
        transient=True,
    )
