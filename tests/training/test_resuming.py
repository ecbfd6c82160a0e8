"""Runs that are resumed: resume=auto, max_restarts, a signal that asks for a checkpoint."""

import os
import re
import shlex
import signal
import sys
from datetime import datetime
from pathlib import Path
from uuid import uuid4

import pytest
from training_runs import (
    NAMED,
    SMALL,
    TINY,
    assert_same_tensors,
    children,
    command,
    command_struck,
    configure,
    final_tensors,
    start_program,
    steps_of,
    train_here,
    wait_until,
    workers_of,
)

from gpipe_cli.commands import restart
from gpipe_cli.config.settings import TrainConfig
from gpipe_cli.reporting.run.lines import LOG
from gpipe_cli.results.files import RESULT_FILE, read_result, write_result
from gpipe_cli.results.metrics import METRICS
from gpipe_cli.results.run import read_run_result
from gpipe_cli.training.checkpoint import files
from gpipe_cli.training.checkpoint.files import list_checkpoints, step_of

linux = pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
RUN = [*SMALL, "hardware=cpu", "epochs=10000", "evaluate_every_epochs=10000", "checkpoint.every_steps=1"]
IN_PROCESS = ["partitions=1", "executor=in_process"]


FAILING = """
import time

import custom_models
from torch import nn
from gpipe_cli.training.checkpoint import files

write = files.write_stage


def slowly(*what):
    time.sleep(1)
    return write(*what)


files.write_stage = slowly


class Fails(nn.Module):
    calls = 0  # 3 forwards of a step, and what is recomputed; then the second step, or the evaluation before it

    def forward(self, x):
        self.calls += 1
        if self.calls > 5:
            raise ArithmeticError("as it was told to")
        return x


def build():
    return nn.Sequential(*custom_models.small(), Fails())
"""

KILLED = """
import os
import signal

import custom_models
from gpipe_cli.training.checkpoint import files

finish = files.finish_checkpoint


def be_killed(draft, index, **options):
    finish(draft, index, **options)
    if index.progress.step == 2:
        os.kill(os.getpid(), signal.SIGKILL)


files.finish_checkpoint = be_killed
build = custom_models.small
"""


@linux
def test_a_run_whose_stage_is_killed_restarts_and_once_stopped_is_resumed_with_another_k(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The signal reaches the workers and their loaders too, as SLURM, systemd and a closed terminal send it. A loader
    that SIGTERM had killed was a failure of the run."""
    run = tmp_path / "run"
    line = ["train", *RUN, "resume=auto", f"run_folder={run}"]

    def strike() -> None:
        wait_until(lambda: list_checkpoints(run) and (run / RESULT_FILE).exists(), 60, "the first checkpoint")
        os.kill(workers_of(os.getpid())[1], signal.SIGKILL)
        wait_until(lambda: read_result(run)["restarts"], 60, "another start")
        begun = step_of(list_checkpoints(run)[-1])
        wait_until(lambda: step_of(list_checkpoints(run)[-1]) > begun, 60, "a step")
        stages = workers_of(os.getpid())
        for loader in (loader for stage in stages for loader in children(stage)):
            os.kill(loader, signal.SIGTERM)
        for process in (os.getpid(), *stages):
            os.kill(process, signal.SIGHUP)

    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # not as nohup has it
    again = ["partitions=2", "data_workers=1", "max_restarts=1"]
    assert command_struck(strike, *line, *again) == 3
    signal.signal(signal.SIGHUP, before)
    said, errors = capsys.readouterr()
    assert errors == ""
    result = read_result(run)
    (restart,) = result["restarts"]
    assert re.match(r"stage 1 was killed by signal 9 \(SIGKILL\) .*; the machine may be out of memory", restart["why"])
    assert f"\nrestart 1 of 1: {restart['why']}; goes on after step {restart['step']}\n" in said
    assert (result["status"], result["steps"]) == ("interrupted", step_of(list_checkpoints(run)[-1]))
    (start,) = result["starts"]  # whatever restarted in it
    assert start["command"] == shlex.join(["gpipe", *line, *again])
    assert datetime.fromisoformat(start["started"]) <= datetime.fromisoformat(start["ended"])
    assert start["first_step"] == 0, "the command's, not its restart's"
    assert f"  restart 1 of 1: {restart['why']}; goes on" in (run / "log.txt").read_text()
    wait_until(lambda: not workers_of(os.getpid()), 20, "the end of every worker")

    steps = result["steps"] + 2
    line = [*line, *IN_PROCESS, f"max_steps={steps}"]
    assert command(*line) == 0
    train_here(configure(*RUN, *IN_PROCESS, f"max_steps={steps}"), tmp_path / "whole")
    assert_same_tensors(final_tensors(run), final_tensors(tmp_path / "whole"))
    write_result(run, read_result(run) | {"status": "running"})  # as one that was killed at its very end
    capsys.readouterr()
    assert command(*line) == 0
    assert f"complete, with {steps} steps; nothing is left to do\n" in capsys.readouterr().out
    result = read_result(run)
    assert result["status"] == "completed"
    assert [one["command"] for one in result["starts"]] == [start["command"], shlex.join(["gpipe", *line])]
    assert (result["starts"][0], result["starts"][1]["first_step"]) == (start, steps - 2)


def test_a_result_has_the_tests_of_which_a_killed_parent_did_not_hear(tmp_path: Path) -> None:
    """Its stages have written their checkpoints while it was drawing a picture: result.json is as at the beginning."""
    line = ["train", *RUN, *IN_PROCESS, "resume=auto", "epochs=2", "evaluate_every_epochs=1"]
    run, results = tmp_path / "run", []
    unheard = {"status": "running", "steps": 0, "epochs": 0, "test": None, "best": None}
    for steps in ("max_steps=3", "max_steps=null", "max_steps=null"):  # nothing is left for the last one
        assert command(*line, "checkpoint.every_steps=0", steps, f"run_folder={run}") == 0
        results.append(read_result(run))
        write_result(run, results[-1] | unheard)
    first, second, last = results
    assert (second["status"], second["steps"], second["epochs"], second["test"]["step"]) == ("completed", 6, 2, 6)
    assert second["best"] == first["test"], "the better one of step 3, of which the second start was not told"
    assert {key: last[key] for key in unheard} == {key: second[key] for key in unheard}


def test_a_process_that_is_killed_after_the_last_checkpoint_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "killed.py").write_text(KILLED)
    # the parent imports it too: without this it would be killed itself, by the next test that writes a checkpoint
    monkeypatch.setattr(files, "finish_checkpoint", files.finish_checkpoint)
    monkeypatch.syspath_prepend(str(tmp_path))
    settings = [*RUN, "model.target=killed:build", "max_restarts=1", "max_steps=2"]
    assert command("train", *settings, "partitions=1", f"run_folder={tmp_path / 'run'}") == 0
    assert "complete, with 2 steps; nothing is left" in capsys.readouterr().out
    result = read_result(tmp_path / "run")
    assert (result["status"], result["steps"], result["test"]["step"]) == ("completed", 2, 2)
    # a complete run is not complete with settings with which it could not be resumed
    line = ["resume=auto", f"run_folder={tmp_path / 'run'}", "model.target=killed:other"]
    assert command("train", *line) == 2
    assert re.match(r"gpipe train: model.target=killed:other: .* has no function other", capsys.readouterr().err)


@linux
def test_no_row_is_lost_where_the_command_is_killed_as_a_checkpoint_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint was complete before the command had written what it was told of its steps: 55 to 57 of 60 rows.
    And torch's folder for compiled code stayed among the temporary files."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    command_of = "int(open(f'/proc/{os.getppid()}/stat').read().rpartition(')')[2].split()[1])"  # above the server
    (tmp_path / "killed.py").write_text(KILLED.replace("os.getpid()", command_of))
    run = tmp_path / "run"
    line = ["train", *RUN, *IN_PROCESS, "logger=[csv]", "checkpoint.every_steps=2", "resume=auto", f"run_folder={run}"]
    program = start_program(*line, "model.target=killed:build")
    program.communicate(timeout=120)
    assert program.returncode == -signal.SIGKILL
    wait_until(lambda: not [*(tmp_path / "tmp").iterdir()], 20, "the end of the temporary files")
    # the next step is trained while the checkpoint is written, and may also have been reported
    assert (step_of(list_checkpoints(run)[-1]), steps_of(run)[:2]) == (2, [1, 2])
    assert command(*line, "model.target=custom_models:small", "max_steps=3") == 0
    assert steps_of(run) == [1, 2, 3]


def test_what_a_killed_start_has_left_is_begun_again_and_what_is_not_ours_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    line = ["train", *RUN, *IN_PROCESS, "max_steps=1", "resume=auto"]
    (run / "checkpoints" / ".step_00000001.writing").mkdir(parents=True)
    (run / f".{uuid4().hex}.partial").touch()
    assert command(*line, f"run_folder={run}") == 0
    assert (run / "config.yaml").read_text().count("resume: null") == 1
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["best", "last", "step_00000001"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").touch()
    for more, setting in (
        ([], "resume=auto"),
        ([f"run_folder={tmp_path / 'mine'}"], f"run_folder={tmp_path / 'mine'}"),
        ([f"run_folder={run}", "seed=9", "max_steps=2"], "seed=9"),
        ([f"run_folder={run}", f"init_from={run}"], f"init_from={run}: the run that is resumed has its weights"),
        (["-m", "seed=1,2"], "resume=auto"),
    ):
        capsys.readouterr()
        assert command(*line, *more) == 2
        said = capsys.readouterr()
        assert said.err.startswith(f"gpipe train: {setting}"), said.err
        assert ("model  " in said.out, said.err.count("\n")) == (False, 1)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]


def test_a_run_that_fails_completes_the_checkpoint_that_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both processes take longer to write the one of step 1 than the last stage to fail in step 2."""
    (tmp_path / "failing.py").write_text(FAILING)
    monkeypatch.setattr(files, "write_stage", files.write_stage)  # as it was when this ends
    monkeypatch.syspath_prepend(str(tmp_path))
    run = tmp_path / "run"
    settings = [*RUN, "model.target=failing:build", "partitions=2"]
    assert command("train", *settings, "max_restarts=1", f"run_folder={run}") == 1
    result = read_result(run)
    assert "as it was told to" in result["error"]
    assert result["restarts"] == []  # another start would end in the same way
    assert [step_of(found) for found in list_checkpoints(run)] == [1]


def test_a_run_goes_on_in_its_folder_and_in_another_one_only_where_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It went on in a new folder, and the old one stayed interrupted beside it. Its time was that of the last start
    beside the steps of all, its warm-up that of the steps left, and no command was proposed that changes a setting."""
    monkeypatch.chdir(tmp_path)
    line = ["train", *RUN, *IN_PROCESS, "logger=[csv]", "epochs=3"]
    assert command(*line, "max_steps=1", "learning_rate.warmup_epochs=1", "run_folder=run") == 0
    (tmp_path / "link").symlink_to("run")
    assert command("train", "resume=link", NAMED, "max_steps=2") == 0
    before = read_result(tmp_path / "run")
    assert command("train", f"resume={tmp_path}/run/", NAMED, "max_steps=4", "run_folder=copy") == 0
    assert read_result(tmp_path / "run") == before
    assert command("train", "resume=run", NAMED, "max_steps=4", "dry_run=true", "output=dry") == 0
    assert read_result(tmp_path / "run") == before
    capsys.readouterr()
    assert command("train", "resume=run", NAMED, "max_steps=4") == 0
    said = capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"run", "link", "copy", "dry"}
    results = [read_result(tmp_path / name) for name in ("run", "copy")]
    for result in results:
        assert (result["status"], result["steps"]) == ("completed", 4)
        assert [start["first_step"] for start in result["starts"]] == [0, 1, 2]
        assert result["seconds"] == pytest.approx(sum(start["seconds"] for start in result["starts"]))
    assert results[0]["starts"][:2] == before["starts"]
    assert (steps_of(tmp_path / "run"), steps_of(tmp_path / "copy")) == ([1, 2, 3, 4], [3, 4])
    assert (tmp_path / "run" / LOG).read_text().count("  $ gpipe train ") == 3
    train_here(
        configure(*RUN, *IN_PROCESS, "epochs=3", "max_steps=4", "learning_rate.warmup_epochs=1"), tmp_path / "whole"
    )
    for name in ("run", "copy"):
        assert_same_tensors(final_tensors(tmp_path / name), final_tensors(tmp_path / "whole"))

    (times,) = re.findall(
        r"\ncompleted in (.+): 4 steps \(1 whole epoch\); since it was resumed, 2 steps in (.+)\n", said
    )
    both = [METRICS[key].text(read_run_result(tmp_path / "run")) for key in ("seconds", "start_seconds")]
    assert [*times] == both
    assert command("compare", "run", "copy") == 0
    assert f"\ntime of the last start {both[1]} " in re.sub(" +", " ", capsys.readouterr().out)
    (first, *_, last) = re.findall("after a warm-up of 3 steps from (.+)\n", (tmp_path / "run" / LOG).read_text())
    assert first == last
    (change,) = re.findall("\nchange +gpipe (.*)\n", said)
    assert command(*shlex.split(change), "run_folder=changed") == 0
    changed = read_result(tmp_path / "changed")["config"]
    keys = {key for key, value in changed.items() if value != results[0]["config"][key]}
    assert keys - {"partition", "threads"} == {"partitions", "run_folder", "resume"}


def test_fewer_gpus_have_fewer_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    left = iter([4, 3, 4, 4, 4, 0, 8, 7, 8, 7])
    monkeypatch.setattr(restart, "number_of_gpus", lambda config: next(left))
    config: TrainConfig = configure(*TINY, "partitions=6", "partition.balance=[1,1,1,1,1,2]")
    fewer, why = restart._shrink_to_remaining_gpus(config)
    assert (fewer.partitions, fewer.partition.balance) == (4, None)
    assert "partitions=4" in why
    assert restart._shrink_to_remaining_gpus(config) == (config, "")
    assert restart._shrink_to_remaining_gpus(config) == (config, "")
    # a run of two of eight GPUs became one of a single stage when any of the eight was lost
    config = configure(*TINY, "partitions=2")
    assert restart._shrink_to_remaining_gpus(config) == (config, "")
    fewer, why = restart._shrink_to_remaining_gpus(configure(*TINY, "partitions=4", "replicas=2"))
    assert (fewer.partitions, fewer.replicas, "7 of 8 GPUs" in why) == (3, 2, True)
