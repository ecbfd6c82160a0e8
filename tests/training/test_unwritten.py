"""A run that cannot write: what it can do without is left out, what it cannot do without ends it in one line."""

import errno
import importlib
import re
from pathlib import Path

import pytest
from training_runs import (
    NAMED,
    SMALL,
    command,
    command_struck,
    configure,
    final_tensors,
    steps_of,
    train_here,
    wait_until,
)

from gpipe_cli.results.files import RESULT_FILE, read_result
from gpipe_cli.system.forked_call import Fork

RUN = [*SMALL, "partitions=2", "executor=in_process"]


def test_a_run_continues_without_its_pictures_and_not_without_its_checkpoints_and_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A picture that could not be written once ended the training with a traceback, which hid all other causes."""
    run = tmp_path / "run"
    train_here(configure(*RUN, "epochs=1"), run)
    for name in ("pipeline.html", "timeline.png", "timeline_trace.json"):
        (run / name).mkdir()  # nothing can be renamed to that, whoever tries
    resume = ["train", f"resume={run}", NAMED, f"run_folder={run}"]
    assert command(*resume, "epochs=2") == 0
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"{run}/pipeline.html: Is a directory" in said
    assert read_result(run)["status"] == "completed"

    staging = run / "checkpoints" / ".step_00000009.writing"
    staging.write_text("a file where a folder is wanted")
    whole = final_tensors(run)
    assert command(*resume, "epochs=3") == 1
    captured = capsys.readouterr()
    result = read_result(run)
    assert result["status"] == "failed"
    assert result["error"] == f"{run}/checkpoints/step_00000009: the checkpoint cannot be written (File exists)"
    assert "Traceback" not in captured.out + captured.err
    assert not (run / "failure.txt").exists()
    assert final_tensors(run).keys() == whole.keys()
    staging.unlink()
    assert command(*resume, "epochs=3") == 0
    assert (run / "checkpoints" / "step_00000009").is_dir()

    (run / "result.json").unlink()
    (run / "result.json").mkdir()
    capsys.readouterr()
    assert command(*resume, "epochs=4") == 1
    assert capsys.readouterr().err == f"gpipe train: {run}/result.json: Is a directory\n"


@pytest.mark.parametrize(
    "calls",
    [
        {"os.link": errno.EOPNOTSUPP, "fcntl.flock": errno.ENOLCK},  # NFS
        {"os.symlink": errno.EPERM, "os.link": errno.EPERM, "os.chmod": errno.EPERM},  # FAT
        # SMB: over a file that another program has open, and for folders
        {"os.replace": errno.EACCES, "os.fsync": errno.EINVAL},
        {"os.rename": errno.ENOSYS},  # object storage, for folders
    ],
    ids=["NFS", "FAT", "SMB", "objects"],
)
def test_a_disk_may_lack_calls(calls: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without fsync, chmod or a rename the run once failed: after its last step, or before the first step when resumed
    in another folder."""
    for call in calls:  # this process also builds the model
        module, _, name = call.rpartition(".")
        monkeypatch.setattr(call, getattr(importlib.import_module(module), name))
    runs = [tmp_path / "run", tmp_path / "other"]
    given = ", ".join(f"{call}: {error}" for call, error in calls.items())
    lacks = ["model.target=custom_models:small_without", f"model.arguments={{calls: {{{given}}}}}"]
    settings = [*RUN, *lacks, "checkpoint.keep=1", "logger=[csv]"]
    assert command("train", *settings, "epochs=2", f"run_folder={runs[0]}") == 0
    assert command("train", f"resume={runs[0]}", lacks[0], f"run_folder={runs[1]}", "epochs=3") == 0
    assert command("export", f"run={runs[1]}", lacks[0]) == 0
    assert command("compare", *map(str, runs)) == 0
    for run, steps in zip(runs, (6, 9), strict=True):
        assert (read_result(run)["status"], steps_of(run)[-1]) == ("completed", steps)
        assert (run / "checkpoints" / f"step_{steps:08}").is_dir()


def test_a_run_whose_folder_has_gone_ends_with_the_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And the folder does not reappear with checkpoints without a configuration."""
    run = tmp_path / "run"

    def take_away() -> None:
        there = "checkpoints/last", RESULT_FILE  # the workers may be ahead of their parent
        wait_until(lambda: all((run / name).exists() for name in there), 60, "the first checkpoint, and result.json")
        run.rename(tmp_path / "elsewhere")

    settings = [*RUN, "epochs=10000", "checkpoint.every_steps=1"]
    assert command_struck(take_away, "train", *settings, f"run_folder={run}") == 1
    said = capsys.readouterr().err.splitlines()
    gone = "the run folder was deleted or moved; begin .* by resume=FOLDER"
    # with a prefix where this process was still writing its first files
    assert re.fullmatch(rf"(gpipe train: )?{run}: {gone}", said[-1])
    assert "Traceback" not in "".join(said)
    assert not run.exists()
    assert final_tensors(tmp_path / "elsewhere")


def test_a_run_that_nobody_can_follow_does_not_begin(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        assert Fork(lambda: command("train", *RUN, f"run_folder={tmp_path / 'run'}"), full.fileno()).wait() == (1, 0)
    assert not (tmp_path / "run").exists()
