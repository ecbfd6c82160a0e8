"""The terminal line that names what a command is doing, before it has anything to show.

The line has no line feed, so that the next phase, or what is shown next, replaces it. Only terminals get it.
"""

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class _Line:
    """The state of the terminal line."""

    def __init__(self) -> None:
        self.title = ""  # the last title given
        self.shown = 0  # characters on the line


_LINE: ContextVar[_Line | None] = ContextVar("phase", default=None)


@contextmanager
def phases() -> Iterator[None]:
    """Inside, phases are shown; afterwards the line is cleared."""
    before = _LINE.set(_Line())
    try:
        yield
    finally:
        end_phase()
        _LINE.reset(before)


def phase(doing: str, title: str | None = None) -> bool:
    """Show `doing`, after the last `title` given if there is room for both. Returns whether anything is shown."""
    line = _LINE.get()
    if line is None or not sys.stdout.isatty():
        return False
    line.title = line.title if title is None else title
    room = shutil.get_terminal_size().columns - 1
    whole = f"{line.title}: {doing} ..."
    _write(line, whole if line.title and len(whole) <= room else f"{doing} ..."[:room])
    return True


def end_phase() -> None:
    """Clear the line, before something else is shown."""
    if (line := _LINE.get()) is not None and line.shown:
        _write(line, "")


def _write(line: _Line, text: str) -> None:
    """Replace the line by `text`, without escape codes, and put the cursor at its beginning."""
    blanks = " " * (line.shown - len(text))
    sys.stdout.write(f"{text}{blanks}\r")
    sys.stdout.flush()
    line.shown = len(text)
