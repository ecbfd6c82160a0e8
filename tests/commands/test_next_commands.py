"""What `gpipe train` proposes at its end: commands that work, made of what the user typed."""

import json
import shlex
from pathlib import Path

import pytest
from training_runs import SMALL, command, configure

from gpipe_cli.commands.next_commands import next_commands


def proposed(typed: str, **sizes: int) -> dict[str, str]:
    given = {"layers": 10, "train_samples": 1437} | sizes
    arguments = shlex.split(typed)
    chosen = [one.replace("=auto", "=2") for one in arguments if not one.startswith(("resume", "-c", "name"))]
    return dict(next_commands([arguments], configure(*chosen), **given))


@pytest.mark.parametrize(
    ("typed", "change", "prove"),
    [
        ("", "micro_batches=8", ""),
        ("partitions=auto epochs=3", "partitions=auto epochs=3 micro_batches=8", "partitions=2"),
        ("resume=auto run_folder=x ++seed=2", "++seed=2 micro_batches=8", "++seed=2"),
        # a micro-batch of one sample, of which batch norm of a small map is refused, is not proposed
        ("batch_size=15", "batch_size=15 partitions=1", "batch_size=15"),
        ("partitions=3 partition.balance=[3,3,4] micro_batches=9",
         "micro_batches=9 partitions=1", "partitions=3 'partition.balance=[3,3,4]' micro_batches=9"),
    ],
)  # fmt: skip
def test_commands_keep_what_was_typed(typed: str, change: str, prove: str) -> None:
    expected = {"change": f"gpipe train {change}", "prove": f"gpipe check {prove}".rstrip()}
    assert proposed(typed) == expected


def test_what_cannot_be_is_not_proposed() -> None:
    assert proposed("partitions=1", layers=1) == {"prove": "gpipe check partitions=1"}
    assert proposed("", train_samples=33)["change"] == "gpipe train partitions=1", "the last mini-batch has one sample"
    assert proposed("resume=outputs/a") == {}, "what the run was begun with is not on the command line"


def test_the_commands_that_a_training_ends_with_work(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """In a folder whose name a shell would take for three words."""
    folder = tmp_path / "it's a run"
    short = [*SMALL, "micro_batches=1", "partitions=2", "executor=in_process", "max_steps=1", "hardware=cpu"]
    arguments = [one for one in short if one != "micro_batches=3"]
    assert command("train", *arguments, f"run_folder='{folder}'".replace("it's", "it\\'s")) == 0
    lines = capfd.readouterr().out.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("look "))
    look, *commands = (line[13:] for line in lines[at:])
    assert shlex.split(look) == [str(folder / "pipeline.html")]
    assert not [line for line in lines[:at] if line.startswith(("page ", "curves "))], "not twice"
    change, prove = map(shlex.split, commands)
    assert [change[1], prove[1]] == ["train", "check"]
    assert command(*change[1:], "run_folder=changed") == 0
    result = json.loads(Path("changed", "result.json").read_text())
    assert (result["config"]["micro_batches"], result["config"]["partitions"], result["steps"]) == (2, 2, 1)
    assert command(*prove[1:]) == 0
    assert "identical: partitions, recomputation and executors change nothing" in capfd.readouterr().out
