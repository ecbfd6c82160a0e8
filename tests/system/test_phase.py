"""The line that names what a command is doing, on a real terminal."""

import os
import pty
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from training_runs import TINY, command

DRY = [*TINY, "partitions=2", "hardware=cpu", "dry_run=true"]


@contextmanager
def terminal(patch: pytest.MonkeyPatch, columns: int) -> Iterator[list[str]]:
    """Inside, stdout is a terminal; afterwards the list has what was written to it."""
    written: list[str] = []
    reading, writing = pty.openpty()
    patch.setenv("COLUMNS", str(columns))
    patch.setenv("TERM", "xterm")
    with os.fdopen(writing, "w") as stdout, patch.context() as inner:
        inner.setattr(sys, "stdout", stdout)
        yield written
    found = b""
    with suppress(OSError):  # as Linux says the end: what was written arrives a little later on a busy machine
        while part := os.read(reading, 65536):
            found += part
    written.append(found.decode())
    os.close(reading)


def seen(written: str) -> list[str]:
    """The lines that are left: what a carriage return brings the cursor back to is overwritten."""
    lines = []
    for line in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written).replace("\r\n", "\n").split("\n"):
        shown = ""
        for part in line.split("\r"):
            shown = part + shown[len(part) :]
        lines.append(shown.rstrip())
    return lines


def test_phases_are_named_on_one_line_that_nothing_is_left_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """For many seconds a terminal said `starting ...`."""
    assert command("train", *DRY, "run_folder=piped") == 0
    piped = capsys.readouterr().out.replace("piped", "shown").splitlines()
    with terminal(monkeypatch, 110) as written:
        assert command("train", *DRY, "run_folder=shown") == 0
    what = "AmoebaNet-D (3, 4) on synthetic_images, K = 2, M = 3"
    torch = "importing torch, which computes the layers"
    phases = [phase.strip() for phase in re.split(r"[\r\n]", written[0]) if phase.strip().endswith(" ...")]
    assert phases == [
        "reading the settings ...",
        *(f"{what}: {doing} ..." for doing in (torch, "building the model", "planning a step")),
    ]
    assert [line for line in seen(written[0]) if line] == [line.rstrip() for line in piped if line.strip()]


def test_what_is_refused_stands_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with terminal(monkeypatch, 40) as written:
        assert command("train", *DRY, "partitions=20") == 2
    assert "\rbuilding the model ... " in written[0], "without the title, which has no room"
    assert seen(written[0]) == [""]
    assert capsys.readouterr().err.startswith("gpipe train: partitions=20: ")
