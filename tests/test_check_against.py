"""`gpipe check against=...`: other programs take the same step as our executor, and a fault of theirs is found."""

import json
from pathlib import Path
from typing import Any

import pytest
from training_runs import TINY, command

from gpipe_cli.system.machine import usable_cores
from gpipe_cli.units import plural

TEXT = [
    "model=transformer_lm", "~presets", "dataset=synthetic_text", "dataset.vocabulary=40", "dataset.train_samples=30",
    "dataset.test_samples=4", "model.layers=2", "model.width=8", "model.hidden=16", "model.heads=2", "model.length=12",
    "model.dropout=0.2", "batch_size=8", "micro_batches=4", *TINY[-3:],
]  # fmt: skip
IMAGES = ["model=custom", "dataset.image_size=8", *TINY[2:3], *TINY[4:]]
SHORT = ["against_steps=1", "against_rounds=1"]
SUMS = "within the order of summation"


@pytest.fixture(autouse=True)
def _with_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))  # where custom_models.py is


def checked(*settings: str, program: str = "torch") -> tuple[int, dict[str, Any]]:
    """The exit code of the check, and its report."""
    code = command("check", f"against={program}", *SHORT, *settings)
    (folder,) = Path("outputs").iterdir()
    return code, json.loads((folder / "check.json").read_text())


def test_schedules_of_torch_give_our_bits(capsys: pytest.CaptureFixture[str]) -> None:
    """With dropout."""
    code, found = checked(*TEXT)
    shown = capsys.readouterr().out
    rows = found["rows"]
    plain = (
        f"plain PyTorch, {plural(usable_cores(), 'thread')}"  # once as many as all of ours, of which some took turns
    )
    assert [row["schedule"] for row in rows] == ["ScheduleGPipe", "Schedule1F1B", plain]
    assert {row["verdict"] for row in rows} == {"identical"}, shown
    assert [row["ours"] for row in rows[:2]] == ["gpipe", "1f1b"]
    assert all(len(row["ratios"]) == 1 and row["measured"]["memory_bytes"] > 0 for row in rows)
    assert (code, found["agrees"], shown.splitlines()[-1]) == (0, True, "agrees: 3 of 3 rows, 3 of them bit by bit")


def test_a_fault_of_the_other_program_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    """In its layer, though the gradients of all layers before it are also wrong."""
    code, found = checked(*IMAGES, "model.target=custom_models:contrary", "micro_batches=4")
    row, _, plain = found["rows"]
    assert plain["verdict"] in ("identical", SUMS)
    assert (code, found["agrees"], row["verdict"], row["layer"]) == (1, False, "differs", "2")
    assert row["share"] == pytest.approx(2)  # the sign
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("differs: 2 of 3 rows; first ScheduleGPipe in layer 2, by")


TIED = [*TEXT, "model.tie_embeddings=true"]
SKIPS = [*IMAGES, "dataset.image_size=16", "model.target=custom_models:hourglass", "partition.balance=[8,9]"]


@pytest.mark.parametrize(
    ("program", "settings", "verdicts", "words"),
    [
        # torch's stages know micro-batches of one size: the other contestants still run
        ("torch", [*TEXT, "micro_batches=3"], ["fails", "fails", "identical"], ""),
        # plain PyTorch had a separate weight for each use of a tied one, and differed by 800,000 units
        ("torch", TIED, [SUMS, SUMS, SUMS], ""),
        ("torch", SKIPS, ["left out", "left out", SUMS], "the model has skips"),
        ("torchgpipe", [*TEXT, "recompute=always"], ["identical", "identical"], ""),
        ("torchgpipe", TIED, ["left out", SUMS], "the model has tied weights"),
    ],
)
def test_the_users_model_is_compared(program: str, settings: list[str], verdicts: list[str], words: str) -> None:
    pytest.importorskip(program)
    code, found = checked(*settings, program=program)
    assert [row["verdict"] for row in found["rows"]] == verdicts
    assert (code, words in found["rows"][0]["text"]) == (int(verdicts[0] in ("fails", "left out")), True)
