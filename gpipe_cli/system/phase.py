"""The line of a terminal that names what a command is doing, before it has anything to show.

It has no end: what is shown next takes its place, and so does the next phase. Outside a terminal there is none.
"""

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class _Line:
    """What stands on the terminal."""

    def __init__(self) -> None:
        self.title = ""  # the phase of the preparation
        self.shown = 0  # characters


_LINE: ContextVar[_Line | None] = ContextVar("phase", default=None)


@contextmanager
def phases() -> Iterator[None]:
    """Inside, phases are shown; afterwards none is left."""
    before = _LINE.set(_Line())
    try:
        yield
    finally:
        end_phase()
        _LINE.reset(before)


def phase(doing: str, title: str | None = None) -> bool:
    """Shows what is being done, behind the title that was given last if there is room for it. False where nothing is
    shown."""
    line = _LINE.get()
    if line is None or not sys.stdout.isatty():
        return False
    line.title = line.title if title is None else title
    room = shutil.get_terminal_size().columns - 1
    whole = f"{line.title}: {doing} ..."
    _write(line, whole if line.title and len(whole) <= room else f"{doing} ..."[:room])
    return True


def end_phase() -> None:
    """Takes the line away, as something else is shown."""
    if (line := _LINE.get()) is not None and line.shown:
        _write(line, "")


def _write(line: _Line, text: str) -> None:
    """The title in the place of what is shown, the cursor at its beginning, with no escape codes."""
    blanks = " " * (line.shown - len(text))
    sys.stdout.write(f"{text}{blanks}\r")
    sys.stdout.flush()
    line.shown = len(text)
