"""A run that torchrun starts, and starts again when a process of it has died."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.distributed import TCPStore
from training_runs import TINY, assert_same_tensors, command, configure, final_tensors, train_here

from gpipe_cli.config.settings import to_yaml
from gpipe_cli.distributed.rendezvous import Decision, agree, store
from gpipe_cli.reporting.run.result import read_result

SETTINGS = [*TINY[2:], "model=custom", "model.target=mortal:build", "check_layers=false", "partitions=4",
            "epochs=1", "ema_decay=0.9", "checkpoint.every_steps=2", "hardware=cpu"]  # fmt: skip
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


def test_a_run_goes_on_when_torchrun_starts_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its two processes have two stages each, and are in different folders: process 0 says where the run lies, and no
    other writes anywhere else."""
    (tmp_path / "mortal.py").write_text(MORTAL)
    (tmp_path / "start.py").write_text(START)
    for process in "01":
        (tmp_path / process).mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    train_here(configure(*SETTINGS, "executor=in_process"), tmp_path / "whole")

    paths = os.pathsep.join(map(str, [tmp_path, Path(__file__).parent.parent]))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    with subprocess.Popen(
        [*torchrun, "start.py", "train", *SETTINGS],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as program:
        try:
            said, _ = program.communicate(timeout=240)
        finally:
            program.terminate()  # and with it what it has started
    assert program.returncode == 0, said
    (folder,) = (tmp_path / "0" / "outputs").iterdir()
    assert not [*(tmp_path / "1").iterdir()]
    assert read_result(folder)["resumed_from"] == str(folder)
    assert [entry["stage"] for entry in read_result(folder)["memory"]] == ["0,1", "2,3"]
    assert_same_tensors(final_tensors(folder), final_tensors(tmp_path / "whole"))
    events = EventAccumulator(str(folder))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3]


def test_a_run_that_left_no_checkpoint_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended in "the folder is not empty", as it still does for a run of another torchrun."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent))  # where custom_models.py is
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
            agree(lambda: Decision(folder, None, None))  # as the start before has
        assert command(monkeypatch, "train", *settings, f"run_folder={folder}") == expected
    store.cache_clear()
