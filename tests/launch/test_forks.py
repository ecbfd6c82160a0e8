"""No process forks while another thread of it may hold a lock, which nothing would ever release in the fork."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from training_runs import SMALL

# What Python 3.12 and later do to warn: they count the threads after the fork. Those of OpenBLAS end before each fork.
# A thread that was joined may take a moment to leave /proc on a busy machine, where the sweep failed once; it holds no
# lock.
COUNTING = """
import os, threading, time, traceback

def count():
    end = time.monotonic() + 2
    while (number := len(os.listdir("/proc/self/task"))) > threading.active_count() and time.monotonic() < end:
        time.sleep(0.01)
    names = [thread.name for thread in threading.enumerate()]
    by = next(call.filename for call in reversed(traceback.extract_stack()) if "gpipe_cli" in call.filename)
    with open(os.environ["FORKS"], "a") as file:
        file.write(f"{os.path.basename(by)} {number} {names}\\n")

os.register_at_fork(after_in_parent=count)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="finds threads in /proc")
def test_no_process_of_a_sweep_forks_while_it_has_threads(tmp_path: Path) -> None:
    """Each run has two workers, one of which has a loader process. A command outside a terminal has a thread that
    tells of long phases, as of imports. A single run is watched in test_imports.py."""
    (tmp_path / "sitecustomize.py").write_text(COUNTING)
    paths = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[1])])
    environment = os.environ | {"PYTHONPATH": paths, "FORKS": str(tmp_path / "forks")}
    settings = [*SMALL, "partitions=2", "executor=distributed", "data_workers=1", "epochs=1", "micro_batches=1,2"]
    command = [sys.executable, "-m", "gpipe_cli", "train", "-m", *settings, f"hydra.sweep.dir={tmp_path / 'sweep'}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_forked_without_threads(tmp_path / "forks", {"fork_server.py", "loading.py", "forked_call.py"})


def assert_forked_without_threads(file: Path, forking: set[str]) -> None:
    """`file`: what COUNTING wrote; `forking`: the files of the package that call os.fork."""
    forks = file.read_text().splitlines()
    assert {line.split()[0] for line in forks} == forking
    assert [line for line in forks if line.split()[1] != "1"] == []
