"""Forty of the malformed command lines that recipes/measurements makes up, each answered by one line."""

import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parent.parent / "recipes" / "measurements" / "malformed_command_lines.py"


def test_malformed_command_lines_are_one_line_and_leave_nothing() -> None:
    ended = subprocess.run([sys.executable, PROGRAM, "--lines", "40"], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "all                    40 lines    0 failed" in ended.stdout
