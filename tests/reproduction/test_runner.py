"""What all experiments share: their commands, and what is said of the user's settings."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import pytest

from gpipe_cli.commands.recipe_run import make_recipe_simulator
from gpipe_cli.reproduction.runner import LOG, RECIPES_DIR, CommandFailedError, Runner, add_user_settings, keep_last


def runner(folder: Path, error: Exception | None, seen: list[list[str]], *users: str) -> Runner:
    """Whose commands write nothing but a line to the log, and end with ``error``."""

    def perform(command: Sequence[str], log: IO[str]) -> None:
        seen.append(list(command))
        log.write("said\n")
        if error is not None:
            raise error

    settings = keep_last(("model.filters=16", "threads=1", *users))
    return Runner(
        "some_recipe", folder, settings, perform, make_recipe_simulator("breakdown"), lambda line: None, "small", users
    )


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
    assert planned[:5] == ["plan", "-cd", str(RECIPES_DIR), "-cn", "some_recipe"]
    assert "steps=3" in measured
    assert "steps=3" not in trained


def test_an_error_of_a_command_is_the_recipes(tmp_path: Path) -> None:
    """A run that failed says why in what it wrote: `exit code 1` was all that a recipe said of one that diverged."""
    here = runner(tmp_path, CommandFailedError("exit code 1"), [])
    written = {
        "": (None, r"^exit code 1; .*log\.txt$"),
        "bench.json": ({"rows": [{"status": "measured"}, {"status": "failed", "reason": "slow"}]}, "^slow; .*log"),
        "result.json": ({"status": "failed", "error": "diverged"}, "^diverged; .*log"),
    }
    (tmp_path / "a").mkdir()
    for file, (content, words) in written.items():
        if file:
            (tmp_path / "a" / file).write_text(json.dumps(content))
        with pytest.raises(CommandFailedError, match=words):
            here.bench("a", "partitions=1,2")
    log = (tmp_path / LOG).read_text(encoding="utf-8")
    assert log.startswith(f"\n$ gpipe bench -m -cd {RECIPES_DIR} -cn some_recipe partitions=1,2 ")
    assert log.endswith("said\n")


def test_one_of_batch_size_and_batch_tokens_takes_the_place_of_the_other() -> None:
    """Of a recipe's `batch_tokens=1024` the user of `batch_size=16` knew nothing, and was told to add null."""
    assert add_user_settings(("seed=1", "batch_tokens=1024"), ("batch_size=16",)) == ("seed=1", "batch_size=16")
    assert add_user_settings(("batch_size=8",), ("+batch_tokens=64",)) == ("+batch_tokens=64",)
    assert add_user_settings(("batch_size=8",), ("batch_tokens=null",)) == ("batch_size=8", "batch_tokens=null")
    both = ("batch_size=16", "batch_tokens=64")
    assert set(add_user_settings(("batch_tokens=8",), both)) == set(both)  # the commands say what is wrong with that
