"""The progress of a run: a bar in a terminal and, for a training, one permanent line per epoch.

Outside a terminal, there are no bar and no escape codes; long epochs print a line now and then. Training loss and
accuracy are means over the elements of the epoch so far, including its steps before a resume. The loss is the
cross-entropy: the minimized loss includes label smoothing and the auxiliary head, and is not comparable with the test
loss in the same line.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from math import ceil
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

from gpipe_cli.reporting.run.description import RunContext, score_fields, task_labels
from gpipe_cli.reporting.run.lines import show_line
from gpipe_cli.training.events import Evaluated, StepDone
from gpipe_cli.units import learning_rate, loss, percent, perplexity, rate

LINE_SECONDS = 15.0  # a log gets a line this often while steps are done or sentences translated
_READ_BYTES = 4096
_SHORTEST_BAR = 4
_TIME = len("1:02:03")
DROP_ORDER = (
    7,
    5,
    2,
    6,
    1,
)  # columns that narrow terminals drop, in this order; epoch, test loss and main score remain


class RunConsole:
    """Shows the progress of a run on a console."""

    def __init__(self, console: Console, run: RunContext) -> None:
        self.console = console
        self._run = run
        self._labels = task_labels(run.config.task)
        self._bar: Progress | None = None
        self._epoch = 0
        self._means: tuple[float | None, float | None] = None, None  # training loss and accuracy of the epoch so far
        self._speed: float | None = None
        self._learning_rate: float | None = None
        self._line_waits = False  # the epoch has ended, but its evaluation may still come
        self._header_shown = False
        self._last_line = time.monotonic()

    def start(self) -> None:
        run = self._run
        by_steps = "step {task.completed:.0f}/{task.total:.0f}"
        self._bar = progress_bar(self.console, by_steps if run.bench else "epoch {task.fields[epoch]}")
        if self._bar is None:
            return
        assert run.ready.steps_per_epoch is not None
        epoch = min(run.ready.first_step // run.ready.steps_per_epoch + 1, run.config.epochs)
        step_seconds = None if run.prediction is None else run.prediction.step_seconds
        self._bar.add_task("", total=run.total_steps, epoch=f"{epoch}/{run.config.epochs}", each=step_seconds)
        self._show_bar(run.ready.first_step, "waiting", "for the first step", "(slow: it allocates memory)")
        self._bar.start()

    def _show_bar(self, done: int, *state: str) -> bool:
        """Shows the state in the bar, if it exists; returns whether it does."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, state=state)
        return self._bar is not None

    @property
    def _line_is_due(self) -> bool:
        """Whether it is time for another line in a log."""
        return time.monotonic() - self._last_line >= LINE_SECONDS

    def step(self, message: StepDone, speed: float | None) -> None:
        """Shows a step; ``speed`` is the recent speed in samples/s, for text in tokens/s."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], each=message.seconds)
        if self._run.bench:
            self._step_parts(message, speed)
            return
        self._start_epoch(message.epoch)
        self._means = message.epoch_cross_entropy, message.epoch_top1
        self._speed, self._learning_rate = speed, message.learning_rate
        self._line_waits = message.position == self._run.ready.steps_per_epoch
        mean_loss, accuracy = self._format_means()
        state = f"loss {mean_loss}", f"{self._labels.accuracy} {accuracy}", f"{rate(speed)} {self._labels.speed}"
        shown = self._show_bar(message.step, *state, f"lr {learning_rate(message.learning_rate)}")
        if not shown and not self._line_waits and self._line_is_due:
            self._line(f" {100 * message.position // (self._run.ready.steps_per_epoch or 1)}%")

    def _step_parts(self, message: StepDone, speed: float | None) -> None:
        state = f"{rate(speed)} {self._labels.speed}" if message.step > self._run.warm_up_steps else "warm-up"
        if not self._show_bar(message.step, state) and self._line_is_due:
            show_line(self.console, f"step {message.step:,} of {self._run.total_steps:,}, {state}")
            self._last_line = time.monotonic()

    def add_evaluation(self, message: Evaluated) -> None:
        """Shows the line of the epoch, with the scores; a test set that chooses nothing is in the summary."""
        if message.split == "test" and self._run.config.dataset.validation is not None:
            return
        self._start_epoch(message.epoch)
        self._line_waits = False
        self._line(test=message)

    def stop(self) -> None:
        """Removes the bar and shows the pending line, if any; may be called repeatedly."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        self._show_waiting()

    def _start_epoch(self, epoch: int) -> None:
        if epoch != self._epoch:
            self._show_waiting()
            self._epoch = epoch
            self._means = None, None
            if self._bar is not None:
                self._bar.update(self._bar.task_ids[0], epoch=f"{epoch}/{self._run.config.epochs}")

    def _show_waiting(self) -> None:
        if self._line_waits:
            self._line()
        self._line_waits = False

    def _format_means(self) -> tuple[str, str]:
        mean_loss, accuracy = self._means
        return loss(mean_loss), percent(accuracy)

    def _line(self, share: str = "", test: Evaluated | None = None) -> None:
        if not self._header_shown:
            labels = self._labels
            scores = list(labels.scores)
            if self._run.config.dataset.validation is not None:
                scores[0] = "val loss"
            if not (self._run.config.text or self._run.config.has_top5):
                scores[2] = ""
            headings = "epoch", "train loss", labels.accuracy, *scores, labels.speed, "lr"
            show_line(self.console, self._columns(*headings), "bold")
            self._header_shown = True
        tested = "", "", ""
        if test is not None:
            test_loss, second, third = score_fields(self._run.config.task, test.scores).values()
            third_shown = "" if third is None else percent(third)
            tested = loss(test_loss), perplexity(second) if self._run.config.text else percent(second), third_shown
        epoch = f"{self._epoch}/{self._run.config.epochs}{share}"
        line = self._columns(
            epoch, *self._format_means(), *tested, rate(self._speed), learning_rate(self._learning_rate)
        )
        show_line(self.console, f"{line} best" if test is not None and test.is_best else line)
        self._last_line = time.monotonic()

    def _columns(self, *cells: str) -> str:
        """A line of cells; a cell that is too long takes up padding of the next cells."""
        ends = self._labels.ends
        widths = [end - begin for begin, end in zip((0, *ends), ends, strict=False)]
        shown = list(range(len(widths)))
        for column in DROP_ORDER:
            if sum(widths[at] for at in shown) + len(" best") > self.console.width:
                shown.remove(column)
        line, end = cells[0], widths[0]
        for at in shown[1:]:
            end += widths[at]
            line += f" {cells[at]}".rjust(end - len(line))
        return line


def progress_bar(console: Console, count_format: str) -> Progress | None:
    """A transient bar, to which the caller adds a task; None outside a terminal. `count_format`: the format of the text
    left of the bar. The task's field `state` has the phrases right of it, the most important first, and `each` the
    seconds of a step, if known."""
    if not console.is_terminal or console.is_dumb_terminal:
        return None
    return Progress(
        TextColumn(count_format, markup=False, table_column=Column(no_wrap=True)),
        BarColumn(bar_width=None),
        _State(console, count_format),
        _TimeLeft(Column(no_wrap=True)),
        console=console, expand=True, transient=True, refresh_per_second=4,
    )  # fmt: skip


@contextmanager
def show_log_tail(console: Console, log: Path) -> Iterator[None]:
    """While active, shows the newest line of `log`, to which a command writes, at the bottom of a terminal."""
    begin = log.stat().st_size

    def newest() -> Text:
        with log.open("rb") as file:
            file.seek(max(begin, log.stat().st_size - _READ_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
        return Text(next((line for line in reversed(lines) if line.strip()), ""), no_wrap=True, overflow="ellipsis")

    with Live(console=console, get_renderable=newest, transient=True) if console.is_terminal else nullcontext():
        yield


class _TimeLeft(ProgressColumn):
    """The time left. Until two steps are done, from which rich measures it, it follows from the task's field `each`,
    the seconds of a step."""

    max_refresh = 0.5  # seconds, so that the time does not flicker

    def render(self, task: Task) -> Text:
        left = task.time_remaining
        step_seconds = task.fields.get("each")
        if left is None and step_seconds is not None and task.remaining is not None:
            left = step_seconds * task.remaining
        if left is None:
            return Text("--:--", "progress.remaining")
        minutes, seconds = divmod(ceil(left), 60)
        hours, minutes = divmod(minutes, 60)
        shown = f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes:02}:{seconds:02}"
        return Text(shown, "progress.remaining")


class _State(ProgressColumn):
    """As many phrases as fit next to the other columns and the remaining time."""

    def __init__(self, console: Console, count_format: str) -> None:
        super().__init__(Column(no_wrap=True))
        self._console, self._count_format = console, count_format

    def render(self, task: Task) -> Text:
        blanks = 3
        room = self._console.width - len(self._count_format.format(task=task)) - _SHORTEST_BAR - _TIME - blanks
        shown = ""
        for phrase in task.fields["state"]:
            longer = f"{shown} {phrase}".lstrip()
            if len(longer) > room:
                break
            shown = longer
        return Text(shown)
