"""`gpipe` for the cells of a notebook: a command runs in the notebook's own process, where torch is imported once."""

import contextlib
import io
import json
import os
import shlex
import shutil
from functools import partialmethod
from pathlib import Path
from typing import Any

from rich.console import Console

from gpipe_cli.cli import main

# In a notebook rich makes each line a separate output, and draws spinners; a command should print as into a file.
Console.__init__ = partialmethod(Console.__init__, force_jupyter=False, force_terminal=False)  # type: ignore[assignment, method-assign]
os.environ.setdefault("COLUMNS", "110")


def gpipe(line: str) -> int:
    """What `gpipe LINE` prints in a shell; returns its exit code."""
    return main(shlex.split(line))


def plan(line: str) -> Any:
    """The content of plan.json, as `gpipe plan LINE format=json` prints it; with -m the list of all plans.

    Raises ValueError with the command's message if it cannot be planned.
    """
    return json.loads(_quietly("plan", *shlex.split(line), "format=json"))


def bench(name: str, line: str) -> Path:
    """Measures as `gpipe bench LINE` does, without its output, into outputs/NAME; returns that folder.

    Raises ValueError with the command's message if it cannot be measured.
    """
    folder = new(name)
    _quietly("bench", *shlex.split(line), f"run_folder={folder}")
    return folder


def _quietly(*arguments: str) -> str:
    """What a command prints. Raises ValueError with its message if it fails."""
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        code = main([*arguments])
    if code:
        raise ValueError(errors.getvalue().strip())
    return out.getvalue()


def new(name: str) -> Path:
    """The folder outputs/NAME, without what an earlier run of the cell left there."""
    folder = Path("outputs", name)
    shutil.rmtree(folder, ignore_errors=True)
    return folder
