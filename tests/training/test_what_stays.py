"""What the user has made stays as it is: folders, files of names that this program also uses, and targets of links."""

import os
import shutil
from pathlib import Path

import pytest
from training_runs import NAMED, SMALL, command, configure, train_here

from gpipe_cli.commands.folders import contains_only_run_files

RUN = [
    *SMALL, "partitions=1", "executor=in_process", "hardware=cpu", "checkpoint.every_steps=1", "checkpoint.keep=1",
    "recompute=never",
]  # fmt: skip


def tree(folder: Path) -> dict[str, str | bytes]:
    """The content of a folder, by path: the content of files, and the targets of links."""
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.read_bytes()
        for path in folder.rglob("*")
        if path.is_symlink() or path.is_file()
    }


@pytest.mark.parametrize("name", ["train", "check", "bench", "plan"])
def test_an_empty_folder_stays(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A refused setting removed it: a mount that was prepared for the run, or its rights. What the command has made is
    removed, with the folders above."""
    mine = tmp_path / "mine"
    mine.mkdir()
    for folder in (mine, tmp_path / "new" / "run"):
        assert command(name, f"run_folder={folder}", *SMALL, "partitions=99") == 2
        assert capfd.readouterr().err.count("\n") == 1
    assert [*tmp_path.iterdir()] == [mine]


def test_a_run_writes_nothing_through_links(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Checkpoints of another run were removed as old ones of this; and a log, or weights, went into a user's file."""
    other, run = tmp_path / "other", tmp_path / "run"
    train_here(configure(*RUN, "max_steps=2", "checkpoint.keep=9"), other)
    shutil.copytree(other, run, symlinks=True)
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").symlink_to(other / "checkpoints")
    before = tree(other)
    again = ["train", f"resume={run}", f"run_folder={run}", NAMED]
    assert command(*again, "max_steps=4") == 2
    assert f"{run}/checkpoints is a link, and nothing is written through it; " in capfd.readouterr().err
    assert tree(other) == before
    assert command("evaluate", f"run={run}", NAMED) == 0, "which only reads"
    assert command("train", f"resume={run}", f"run_folder={tmp_path / 'new'}", NAMED, "max_steps=3") == 0
    assert tree(other) == before

    (run / "checkpoints").unlink()
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "step_00000001").symlink_to(other / "checkpoints" / "step_00000001")
    shutil.copytree(other / "checkpoints" / "step_00000002", run / "checkpoints" / "step_00000002")
    (run / "log.txt").symlink_to(tmp_path / "notes.txt")
    (tmp_path / "notes.txt").write_text("mine")
    staging = run / "checkpoints" / ".step_00000003.writing"
    staging.symlink_to(other / "checkpoints" / "step_00000002")
    capfd.readouterr()
    assert command(*again, "max_steps=4") == 0
    assert "step_00000003: the checkpoint cannot be written (a link leads to " in capfd.readouterr().err
    assert staging.is_symlink()
    assert {"step_00000001", "step_00000004"} <= {path.name for path in staging.parent.iterdir()}
    assert ((tmp_path / "notes.txt").read_text(), tree(other)) == ("mine", before)


def test_what_a_run_writes_is_known(tmp_path: Path) -> None:
    """What is not, keeps its folder in a sweep that begins the run again."""
    run = tmp_path / "run"
    settings = [*RUN, "max_steps=1", "logger=[tensorboard,csv]", f"run_folder={run}"]
    assert command("train", *settings) == 0
    assert contains_only_run_files(run)
    (tmp_path / "link").symlink_to(run)
    assert not contains_only_run_files(tmp_path / "link")
    (run / "notes.txt").touch()
    assert not contains_only_run_files(run)
