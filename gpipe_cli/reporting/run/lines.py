"""Lines on the console (plain lines, labelled facts, errors), the log of a run, and settings as they are typed.

Lines are ASCII, since logs are also read where UTF-8 is missing; there, translated sentences appear as escapes.
"""

import re
import shlex
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import datetime
from pathlib import Path

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from gpipe_cli.config.schema import quote
from gpipe_cli.config.settings import CONFIG_FILE, format_target_setting
from gpipe_cli.system.files import open_to_append
from gpipe_cli.system.status_line import end_phase

LOG = "log.txt"
LABEL_WIDTH = 12  # length of the longest label: `mini-batch   32 = 1 replica x ...`
COMMANDS = ("gpipe ", "tensorboard ")  # facts that begin like this are commands to copy, which are never broken


def show_line(console: Console, text: str, style: str = "") -> None:
    """Prints and logs a line; long lines are not broken, so that paths and commands can be copied."""
    end_phase()
    writable = text.encode(console.encoding, "backslashreplace").decode(console.encoding)
    console.print(Text(writable, style), soft_wrap=True)
    log(text)


def show_text(console: Console, text: str, style: str = "") -> None:
    """Prints a sentence, wrapped to the width of the terminal."""
    for line in wrap(text, console.width) if console.is_terminal else [text]:
        show_line(console, line, style)


def wrap(text: str, width: int) -> list[str]:
    """The lines of a text, broken at blanks only; after a number, as in `40.5 samples/s`, only if unavoidable."""
    lines = [text]
    for breakable in (re.sub(r"(?<=\d) (?=[^\W\d]|%)", "\xa0", text), text):
        if max(map(cell_len, lines), default=0) <= width:
            break
        lines = textwrap.wrap(breakable, max(1, width), break_long_words=False, break_on_hyphens=False)
    return [line.replace("\xa0", " ") for line in lines]


def show_error(text: str) -> None:
    """Prints an error as a single line on stderr, and logs it."""
    end_phase()
    line = " ".join(text.split())
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
    log(line)


def print_fields(console: Console, facts: Iterable[tuple[str, str]]) -> None:
    """Prints labelled lines; in a narrow terminal, a fact is wrapped at blanks and continues below itself."""
    for label, fact in facts:
        lines = [fact]
        if console.is_terminal and not fact.startswith(COMMANDS):
            lines = wrap(fact, console.width - LABEL_WIDTH - 1)
        for line in lines:
            show_line(console, f"{label:<{LABEL_WIDTH}} {line}")
            label = ""


def align_or_stack(console: Console, rows: Sequence[tuple[str, Sequence[str]]]) -> Iterable[tuple[str, str]]:
    """Labelled lines with aligned cells; the first row is the heading, and a column may be of `=` only. In a terminal
    that is too narrow for them, columns become lines."""
    lines = align(rows)
    if not console.is_terminal or max(len(line) for _, line in lines) < console.width - LABEL_WIDTH:
        return lines
    labels, cells = zip(*rows, strict=True)
    columns = ((column[0].strip(), column[1:]) for column in zip(*cells, strict=True) if column[0] != "=")
    return align([(labels[0], labels[1:]), *columns])


def align(rows: Sequence[tuple[str, Sequence[str]]]) -> list[tuple[str, str]]:
    """(label, line) for each row, with the cells of a column right-aligned."""
    widths = [max(map(len, cells)) for cells in zip(*(cells for _, cells in rows), strict=True)]
    return [(label, " ".join(map(str.rjust, cells, widths))) for label, cells in rows]


class _Log:
    """log.txt in ``folder``. Lines wait until the run's CONFIG_FILE exists: a refused run leaves no log."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._waiting = bytearray()

    def add(self, text: str) -> None:
        timestamp = f"{datetime.now():%Y-%m-%d %H:%M:%S}"
        lines = (line.rstrip() for line in text.splitlines())
        self._waiting += "".join(f"{timestamp}  {line}\n" for line in lines if line).encode(errors="backslashreplace")
        if not (self._folder / CONFIG_FILE).is_file():
            return
        # lines that cannot be written wait for the next call
        with suppress(OSError), open_to_append(self._folder / LOG) as file:
            while self._waiting:
                del self._waiting[: file.write(self._waiting)]


_LOG: ContextVar[_Log | None] = ContextVar("log", default=None)


@contextmanager
def log_to_folder(folder: Path | None) -> Iterator[None]:
    """While active, lines that are shown are also logged, with the time, in the run's ``folder``; None: nowhere."""
    before = _LOG.set(None if folder is None else _Log(folder))
    try:
        yield
    finally:
        _LOG.reset(before)


def log(text: str) -> None:
    """Adds lines to the log of the current run, if any, without showing them."""
    if (current := _LOG.get()) is not None:
        current.add(text)


def format_resume_command(command: str, folder: Path, targets: Iterable[str | None], key: str = "resume") -> str:
    """The command that takes the run or the sweep in `folder` by the setting `key`; `targets`: the functions, if any,
    that its runs call, and that have to be named again."""
    again = dict.fromkeys(filter(None, targets))
    return " ".join(
        [f"gpipe {command}", format_override(key, str(folder)), *([format_target_setting(*again)] if again else [])]
    )


def format_override(key: str, value: str) -> str:
    """`key=value`, quoted as needed on a command line: for Hydra (commas, brackets) and for the shell (blanks)."""
    if re.fullmatch(r"[\w./-]+", value):
        return f"{key}={value}"
    setting = f"{key}={quote(value)}"
    return shlex.quote(setting) if re.search(r'["$`!\\]', setting) else f'"{setting}"'
