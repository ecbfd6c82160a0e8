"""The terminal line that names what a command is doing, before it has anything to show.

The line has no line feed, so that the next phase, or what is shown next, replaces it. Outside a terminal, a phase that
takes long may get a separate line while it lasts.
"""

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from threading import Timer

_LONG_SECONDS = 1.0


class _Line:
    """The state of the terminal line."""

    def __init__(self) -> None:
        self.title = ""  # the last title given
        self.shown = 0  # characters on the line
        self.piped = False  # whether long phases are also named outside a terminal
        self.timer: Timer | None = None  # writes the line of a phase that takes long


_LINE: ContextVar[_Line | None] = ContextVar("phase", default=None)


@contextmanager
def phases() -> Iterator[None]:
    """While active, phases are shown; afterwards the line is cleared."""
    before = _LINE.set(_Line())
    try:
        yield
    finally:
        end_phase()
        _LINE.reset(before)


def name_long_phases() -> None:
    """From here on, also name long phases outside a terminal: no other program reads the output."""
    if (line := _LINE.get()) is not None:
        line.piped = True


def phase(doing: str, title: str | None = None) -> bool:
    """Show `doing`, after the last `title` given if both fit on the line. Returns whether a terminal shows it."""
    line = _LINE.get()
    if line is None:
        return False
    if not sys.stdout.isatty():
        end_phase()
        if line.piped:
            line.timer = Timer(_LONG_SECONDS, _write_line, (doing,))
            line.timer.daemon = True
            line.timer.start()
        return False
    line.title = line.title if title is None else title
    columns = shutil.get_terminal_size().columns - 1
    text = f"{line.title}: {doing} ..."
    _write(line, text if line.title and len(text) <= columns else f"{doing} ..."[:columns])
    return True


def end_phase() -> None:
    """Clear the line, before something else is shown."""
    line = _LINE.get()
    if line is not None and line.shown:
        _write(line, "")
    if line is not None and line.timer is not None:
        line.timer.cancel()


def _write(line: _Line, text: str) -> None:
    """Replace the line with `text`, without escape codes, and put the cursor at its beginning."""
    blanks = " " * (line.shown - len(text))
    sys.stdout.write(f"{text}{blanks}\r")
    sys.stdout.flush()
    line.shown = len(text)


def _write_line(doing: str) -> None:
    with suppress(OSError):  # the next line that the command itself writes raises it again
        sys.stdout.write(f"{doing} ...\n")
        sys.stdout.flush()
