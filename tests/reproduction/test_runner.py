"""What all commands of a recipe share."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import pytest

from gpipe_cli.reproduction.runner import FOLDER, LOG, CommandFailedError, Runner, last_wins, with_users


def runner(folder: Path, error: Exception | None, seen: list[list[str]], *users: str) -> Runner:
    """Whose commands write nothing but a line to the log, and end with ``error``."""

    def perform(command: Sequence[str], log: IO[str]) -> None:
        seen.append(list(command))
        log.write("said\n")
        if error is not None:
            raise error

    settings = last_wins(("model.filters=16", "threads=1", *users))
    return Runner("some_recipe", folder, settings, perform, lambda line: None, True, users)


def test_the_users_settings_win_and_a_command_gets_only_its_own(tmp_path: Path) -> None:
    """Commands that were told of steps and rounds dropped them: what the log shows to be typed was not what counted."""
    seen: list[list[str]] = []
    here = runner(tmp_path, None, seen, "threads=2", "steps=3")
    with pytest.raises(FileNotFoundError):  # nothing was run, so there is nothing to read
        here.plan("a", "hardware=p40", "model.filters=8", "threads=4")
    for command in (here.bench, here.train):
        with pytest.raises(FileNotFoundError):
            command("a")
    planned, measured, trained = seen
    settings = planned[planned.index("-cn") + 2 :]
    assert settings == ["hardware=p40", "model.filters=16", "threads=2", f"run_folder='{tmp_path / 'a'}'"]
    assert planned[:5] == ["plan", "-cd", str(FOLDER), "-cn", "some_recipe"]
    assert "steps=3" in measured
    assert "steps=3" not in trained


def test_other_settings_take_the_place_of_the_scales_and_not_of_the_users(tmp_path: Path) -> None:
    desk = runner(tmp_path, None, [], "seed=3")
    paper = desk.with_settings()
    assert paper.settings == ("seed=3",)
    assert desk.with_settings("seed=1", "epochs=2").settings == ("seed=3", "epochs=2")
    with pytest.raises(FileNotFoundError):
        paper.train("a")
    assert len(desk.commands) == 1  # one list of all that was run


@pytest.mark.parametrize(
    ("error", "file", "content", "words"),
    [
        (CommandFailedError("RuntimeError: broken"), "", {}, r"^RuntimeError: broken; .*log\.txt$"),
        (KeyboardInterrupt(), "", {}, "^$"),
        # a run that failed says why in what it wrote: `exit code 1` was all that a recipe said of one that diverged
        (
            CommandFailedError("exit code 1"),
            "result.json",
            {"status": "failed", "error": "diverged"},
            "^diverged; .*log",
        ),
        (
            CommandFailedError("exit code 1"),
            "bench.json",
            {"rows": [{"status": "measured"}, {"status": "failed", "reason": "diverged"}]},
            "^diverged; .*log",
        ),
    ],
)
def test_an_error_of_a_command_is_the_recipes(
    error: Exception, file: str, content: dict[str, object], words: str, tmp_path: Path
) -> None:
    (tmp_path / "a").mkdir()
    if file:
        (tmp_path / "a" / file).write_text(json.dumps(content))
    with pytest.raises(type(error), match=words):
        runner(tmp_path, error, []).bench("a", "partitions=1,2")
    log = (tmp_path / LOG).read_text(encoding="utf-8")
    assert log.startswith(f"\n$ gpipe bench -m -cd {FOLDER} -cn some_recipe partitions=1,2 ")
    assert log.endswith("said\n")


def test_a_measurement_of_what_cannot_be_is_bad_input(tmp_path: Path) -> None:
    rows = [{"status": "impossible", "reason": "model.filters=x: must be a whole number"}]
    here = runner(tmp_path, CommandFailedError("model.filters=x: must be a whole number"), [])

    def bench(*statuses: str) -> None:
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "bench.json").write_text(json.dumps({"rows": [{**rows[0], "status": s} for s in statuses]}))
        here.bench("a", "partitions=1,2")

    with pytest.raises(ValueError, match=r"^model\.filters=x: must be a whole number$"):
        bench("impossible", "impossible")
    assert not (tmp_path / "a").exists()
    with pytest.raises(CommandFailedError, match=r"^model\.filters=x: .*log\.txt$"):
        bench("impossible", "failed")


def test_one_of_batch_size_and_batch_tokens_takes_the_place_of_the_other() -> None:
    """Of a recipe's `batch_tokens=1024` the user of `batch_size=16` knew nothing, and was told to add null."""
    assert with_users(("seed=1", "batch_tokens=1024"), ("batch_size=16",)) == ("seed=1", "batch_size=16")
    assert with_users(("batch_size=8",), ("+batch_tokens=64",)) == ("+batch_tokens=64",)
    assert with_users(("batch_size=8",), ("batch_tokens=null",)) == ("batch_size=8", "batch_tokens=null")
    both = ("batch_size=16", "batch_tokens=64")
    assert set(with_users(("batch_tokens=8",), both)) == set(both)  # the commands say what is wrong with that
