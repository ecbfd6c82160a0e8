"""A run that torchrun starts, and starts again when a process of it has died; and one whose torchrun ends."""

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore
from training_runs import (
    TINY,
    assert_same_tensors,
    children,
    command,
    configure,
    final_tensors,
    processes,
    session_members,
    steps_of,
    train_here,
    wait_until,
    workers_of,
)

from gpipe_cli.config.settings import to_yaml
from gpipe_cli.distributed import rendezvous
from gpipe_cli.distributed.rendezvous import Decision, broadcast_decision, store
from gpipe_cli.results.files import read_result

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
SETTINGS = [*TINY[2:], "model=custom", "model.target=mortal:build", "check_layers=false", "partitions=4",
            "epochs=10000", "ema_decay=0.9", "checkpoint.every_steps=2", "hardware=cpu",
            "logger=[csv]"]  # fmt: skip
MORTAL = """
import os, signal, time
from pathlib import Path

import custom_models
from torch import nn


TWO_STEPS = 2 * (3 + 2)  # forwards: 3 micro-batches, of which 2 are recomputed


class Dies(nn.Module):  # in the first start, in the third step, when the checkpoint of the second is there
    forwards = 0

    def forward(self, x):
        if os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0" and self.training:
            self.forwards += 1
            if self.forwards > TWO_STEPS:
                while not [*Path(__file__).parent.glob("0/outputs/*/checkpoints/last")]:
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)
        return x


def build():
    return nn.Sequential(*custom_models.small(), Dies())
"""
START = """
import os, sys

os.chdir(os.environ["RANK"])
from gpipe_cli.cli import main

sys.exit(main())
"""


@pytest.mark.slow
def test_a_run_is_resumed_when_torchrun_starts_it_again_and_writes_a_checkpoint_when_it_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its two processes have two stages each, and are in different folders: process 0 decides where the run is, and no
    other writes anywhere else. torchrun passes SIGTERM on; its exit code is 1 in any case."""
    (tmp_path / "mortal.py").write_text(MORTAL)
    (tmp_path / "start.py").write_text(START)
    for process in "01":
        (tmp_path / process).mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))

    paths = os.pathsep.join(map(str, [tmp_path, Path(__file__).parent.parent]))
    checkpoint_of_step_4 = "0/outputs/*/checkpoints/step_00000004/index.json"
    with subprocess.Popen(
        [*TORCHRUN, "--nproc-per-node=2", "--max-restarts=1", "start.py", "train", *SETTINGS],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as program:
        try:
            wait_until(lambda: [*tmp_path.glob(checkpoint_of_step_4)] or program.poll() is not None, 240, "step 4")
            ours = processes_of(program.pid)
            program.terminate()
            said, _ = program.communicate(timeout=60)
        finally:
            program.kill()
    assert program.returncode == 1, said
    wait_until(lambda: have_ended(ours), 30, "the end of every process")
    (folder,) = (tmp_path / "0" / "outputs").iterdir()
    assert not [*(tmp_path / "1").iterdir()]
    result = read_result(folder)
    assert (result["status"], result["resumed_from"]) == ("interrupted", str(folder)), said
    assert [entry["stage"] for entry in result["memory"]] == ["0,1", "2,3"]
    assert steps_of(folder) == [*range(1, result["steps"] + 1)]
    train_here(configure(*SETTINGS, "executor=in_process", f"max_steps={result['steps']}"), tmp_path / "whole")
    assert_same_tensors(final_tensors(folder), final_tensors(tmp_path / "whole"))


def test_a_run_that_left_no_checkpoint_begins_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended in "the folder is not empty", as it still does for a run of another torchrun."""
    folder = tmp_path / "run"
    folder.mkdir()
    settings = [*SETTINGS, "model.target=custom_models:small", "partitions=1", "max_steps=1"]
    (folder / "config.yaml").write_text(to_yaml(configure(*settings)))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    for expected in (2, 0):
        store.cache_clear()
        agent = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        monkeypatch.setenv("MASTER_PORT", str(agent.port))
        if expected == 0:
            broadcast_decision(lambda: Decision(folder, None, None))  # as the start before has
        assert command("train", *settings, f"run_folder={folder}") == expected
    store.cache_clear()


def processes_of(torchrun: int) -> set[int]:
    """What torchrun has started, and what that has started: each in a separate session."""
    return {one for process in children(torchrun) for one in session_members(process)}


def have_ended(numbers: set[int]) -> bool:
    return not numbers & {number for number, _, _ in processes()}


def test_no_process_outlives_a_torchrun_that_is_killed(tmp_path: Path) -> None:
    """torchrun gives each of its processes a separate session and ends them itself: killed, it left them training until
    timeout_seconds, or for 15 minutes in the search for its store.

    They also end if the workers, and the server they come from, are stopped and cannot end themselves.
    """
    folder = tmp_path / "run"
    settings = [*SETTINGS, "model.target=custom_models:small", "partitions=1", "data_workers=1"]
    with (
        tempfile.TemporaryDirectory() as name,  # the path of a test is too long for sockets
        subprocess.Popen(
            [*TORCHRUN, "--nproc-per-node=1", "-m", "gpipe_cli", "train", *settings, f"run_folder={folder}"],
            env=os.environ | {"TMPDIR": name, "PYTHONPATH": str(Path(__file__).parent.parent)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as program,
    ):
        ours: set[int] = set()
        try:
            wait_until((folder / "checkpoints" / "last").exists, 120, "the first checkpoint")
            ours |= processes_of(program.pid)
            assert list(Path(name).glob("gpipe_*/pymp-*")), "the data loader's"
            (parent,) = children(program.pid)
            workers = workers_of(parent)
            loaders = [one for worker in workers for one in children(worker)]
            for process in [*children(parent, "fork_server"), *workers, *loaders]:
                os.kill(process, signal.SIGSTOP)
            program.kill()
            wait_until(lambda: have_ended(ours), 30, "the end of every process")
            wait_until(lambda: not list(Path(name).glob("gpipe_*")), 30, "the end of the temporary folder")
        finally:
            program.kill()
            for one in ours:
                with suppress(ProcessLookupError):
                    os.kill(one, signal.SIGKILL)


def test_a_process_whose_torchrun_was_killed_as_it_began_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too early for the kernel to tell it: it then looked for torchrun's store for 15 minutes."""
    monkeypatch.setenv("MASTER_PORT", "1")  # on which nothing listens
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setattr(rendezvous, "_STORE_TIMEOUT", timedelta(seconds=0.1))
    store.cache_clear()
    with pytest.raises(TimeoutError, match="torchrun: no answer from its store"):
        rendezvous.previous_run_folder()
