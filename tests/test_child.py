"""A command that runs as a child of another ends with it, however that one ends."""

import subprocess
import sys
from pathlib import Path

from training_runs import wait_until

PARENT = """
import sys
from gpipe_cli.commands.child import run_process
run_process([sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(60)"])
"""


def test_a_command_ends_with_a_parent_that_was_killed() -> None:
    """A recipe that was killed left its measurement running for minutes: it has a session of its own."""
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = Path("/proc", parent.stdout.readline().strip())
        assert child.exists()
        parent.kill()
        wait_until(lambda: not child.exists(), 10, "the child ends")
