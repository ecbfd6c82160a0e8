"""Lines on the console: as they are, labelled facts, errors; and settings as they are typed.

The words are ASCII: logs are read in places without UTF-8, where the sentences of a translation are shown as escapes.
"""

import re
import shlex
import sys
import textwrap
from collections.abc import Iterable

from rich.console import Console
from rich.text import Text

LABEL_WIDTH = 12  # of the longest label, so that its line reads as a sentence: `mini-batch   32 = 1 replica x ...`
COMMANDS = ("gpipe ", "tensorboard ")  # lines that are copied begin with these


def show_line(console: Console, text: str, style: str = "") -> None:
    """Prints one line as it is; long ones are not broken, so that paths and commands can be copied."""
    writable = text.encode(console.encoding, "backslashreplace").decode(console.encoding)
    console.print(Text(writable, style), soft_wrap=True)


def show_error(text: str) -> None:
    """Says in one line on stderr what went wrong."""
    sys.stderr.write(f"{' '.join(text.split())}\n")
    sys.stderr.flush()


def show_facts(console: Console, facts: Iterable[tuple[str, str]]) -> None:
    """Prints labelled lines; in a terminal that is narrower than one, it goes on below the fact, at a blank."""
    for label, fact in facts:
        lines = [f"{label:<{LABEL_WIDTH}} {fact}"]
        if console.is_terminal and not fact.startswith(COMMANDS):
            indent = " " * (LABEL_WIDTH + 1)
            lines = textwrap.wrap(
                lines[0], console.width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
            )
        for line in lines:
            show_line(console, line)


def override(key: str, value: str) -> str:
    """`key=value` as one types it: Hydra takes commas and brackets for its own, the shell takes blanks."""
    if re.fullmatch(r"[\w./-]+", value):
        return f"{key}={value}"
    override = f"{key}='" + value.replace("'", "\\'") + "'"
    return shlex.quote(override) if re.search(r'["$`!\\]', override) else f'"{override}"'
