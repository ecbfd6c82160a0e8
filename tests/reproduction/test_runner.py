"""What all experiments share: their commands, and what is said of the user's settings."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import pytest
from recipe_runs import Answer, answering, shares_of_a_step

from gpipe_cli.commands.recipe_run import simulating_recipe
from gpipe_cli.config.typed import RefusedError
from gpipe_cli.errors import InputError
from gpipe_cli.reporting.tables.recipe import Reproduction
from gpipe_cli.reproduction.recipe import explained, load
from gpipe_cli.reproduction.runner import FOLDER, LOG, CommandFailedError, Gpu, Runner, last_wins, with_users

RESIZED = "model.filters=16: in every command; other statements about models and sizes (titles, scaled down, our choice, the paper's size) describe the recipe without these settings"  # noqa: E501


def runner(folder: Path, error: Exception | None, seen: list[list[str]], *users: str) -> Runner:
    """Whose commands write nothing but a line to the log, and end with ``error``."""

    def perform(command: Sequence[str], log: IO[str]) -> None:
        seen.append(list(command))
        log.write("said\n")
        if error is not None:
            raise error

    settings = last_wins(("model.filters=16", "threads=1", *users))
    return Runner(
        "some_recipe", folder, settings, perform, simulating_recipe("breakdown"), lambda line: None, "desk", users
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
    assert log.startswith(f"\n$ gpipe bench -m -cd {FOLDER} -cn some_recipe partitions=1,2 ")
    assert log.endswith("said\n")


def test_a_measurement_of_what_cannot_be_is_bad_input(tmp_path: Path) -> None:
    rows = [{"status": "impossible", "reason": "model.filters=x: must be a whole number"}]
    here = runner(tmp_path, CommandFailedError("model.filters=x: must be a whole number"), [])

    def bench(*statuses: str) -> None:
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "bench.json").write_text(json.dumps({"rows": [{**rows[0], "status": s} for s in statuses]}))
        here.bench("a", "partitions=1,2")

    with pytest.raises(InputError, match=r"^model\.filters=x: must be a whole number$"):
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


def breakdown(
    folder: Path, given: Sequence[str], gpus: Sequence[Gpu] = (), answer: Answer = shares_of_a_step
) -> Reproduction:
    perform = answering(folder, answer).perform
    return load("breakdown").reproduce(
        "desk", "", gpus, given, folder, perform, simulating_recipe("breakdown"), lambda line: None
    )


def test_what_the_user_gave_stands_beside_what_is_said_of_the_recipe(tmp_path: Path) -> None:
    """A model of 16 filters was called `AmoebaNet-D (18, 32)`, as if nothing had been given."""
    for given, note in (((), None), (("seed=1",), "seed=1: in every command"), (("model.filters=16",), RESIZED)):
        notes = dict(breakdown(tmp_path, given).notes)
        assert notes.get("given") == note
        assert notes["scaled down"].startswith("AmoebaNet-D (18, 32)")


def test_a_gpu_that_was_not_used_is_not_the_machine(tmp_path: Path) -> None:
    assert "GPU" not in breakdown(tmp_path, (), [Gpu("H200", 2**37)]).machine  # the desk's device=cpu
    assert breakdown(tmp_path, ("device=auto",), [Gpu("H200", 2**37)]).machine.startswith("1 GPU (H200), ")


def test_settings_that_leave_size_and_data_as_they_are(tmp_path: Path) -> None:
    given = ("checkpoint.keep=1", "++device=cpu", "steps=2", "steps_more=1", "dataset.root=data", "dataset=digits")
    assert answering(tmp_path, shares_of_a_step, *given).changed() == ("steps_more=1", "dataset=digits")
    users = answering(tmp_path, shares_of_a_step, "partitions=8", "partition.balance=[1,2]", "epochs=1")
    assert users.changed("partitions", "partition") == ("epochs=1",)


def test_a_refused_setting_that_nobody_typed_is_called_the_recipes(tmp_path: Path) -> None:
    def refuses(error: RefusedError) -> Answer:
        def machine(command: str, settings: Mapping[str, str], folder: Path) -> tuple[str, dict[str, Any]]:
            raise error

        return machine

    for error, place in (
        (RefusedError("model.filters", 32, "too many"), " (a setting of this recipe at desk scale)"),
        (RefusedError("recompute", "always", "no"), " (a setting of this recipe)"),  # of its file
        (RefusedError("batch_size", 8, "too few"), ""),  # the user's
        (RefusedError("executor", "auto", "no"), ""),  # nobody's: its default
    ):
        with pytest.raises(InputError, match=f"^{re.escape(str(error) + place)}$"):
            breakdown(tmp_path, ("batch_size=8",), answer=refuses(error))
    error = RefusedError("model.variant", "d", "the chosen model has no such setting; leave it out")
    assert explained(error, ("model=resnet",), (), ("model.variant",)) == (
        "model.variant=d: the chosen model has no such setting (a setting of this recipe, which does not go with "
        "model=resnet)"
    )
