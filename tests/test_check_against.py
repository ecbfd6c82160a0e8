"""`gpipe check against=...`: other programs take the same step as our executor, and a fault of theirs is found."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from training_runs import TINY, command

from gpipe_cli.verify.against import MOST_UNITS, Distance, distance

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
    assert [row["schedule"] for row in rows] == ["ScheduleGPipe", "Schedule1F1B", "plain PyTorch, 2 threads"]
    assert {row["verdict"] for row in rows} == {"identical"}, shown
    assert [row["ours"] for row in rows[:2]] == ["gpipe", "1f1b"]
    assert all(len(row["ratios"]) == 1 and row["measured"]["memory_bytes"] > 0 for row in rows)
    assert (code, found["agrees"], shown.splitlines()[-1]) == (0, True, "agrees: 3 of 3 rows, 3 of them bit by bit")


def test_a_fault_of_the_other_program_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    """In its layer, though the gradients of all layers before it are wrong, too."""
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
        # plain PyTorch had a weight of its own for each use of a tied one, and differed by 800,000 units
        ("torch", TIED, [SUMS, SUMS, SUMS], ""),
        ("torch", SKIPS, ["left out", "left out", SUMS], "the model has skips"),
        ("torchgpipe", [*TEXT, "recompute=always"], ["identical", "identical"], ""),
        ("torchgpipe", [*TEXT, "partitions=1", "precision=bfloat16"], ["identical", "identical"], ""),
        ("torchgpipe", TIED, ["left out", SUMS], "the model has tied weights"),
        ("torchgpipe", SKIPS, ["left out", SUMS], "the model has skips"),
    ],
)
def test_the_users_model_is_compared(program: str, settings: list[str], verdicts: list[str], words: str) -> None:
    pytest.importorskip(program)
    code, found = checked(*settings, program=program)
    assert [row["verdict"] for row in found["rows"]] == verdicts
    assert (code, words in found["rows"][0]["text"]) == (int(verdicts[0] in ("fails", "left out")), True)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (["partitions=1"], "partitions=1: against=torch needs a pipeline of two stages or more; use partitions=2"),
        (["replicas=2"], "replicas=2: against=torch compares one pipeline; use replicas=1"),
        (["compile=true"], "compile=true: against=torch compares the layers as they are; use compile=false"),
        (["against=deepspeed"], "against=deepspeed: must be one of torch, torchgpipe"),
    ],
)
def test_what_cannot_be_compared_is_refused(settings: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("check", *TEXT, "against=torch", *settings) == 2
    assert line in capsys.readouterr().err


def test_a_distance_is_measured_in_what_summation_explains(tmp_path: Path) -> None:
    """The first layer beyond it, in the order of the backward; a tied weight's gradients are added up."""
    generator = torch.Generator().manual_seed(0)
    down = {f"{layer}.weight": torch.randn(50, generator=generator) for layer in "012"}
    up = {name: one + 1e-4 * torch.randn(50, generator=generator) for name, one in down.items()}

    def measured(changed: dict[str, torch.Tensor]) -> Distance:
        folders = []
        for number, (name, of) in enumerate({"down": down, "up": up, "theirs": up | changed}.items()):
            folders.append(tmp_path / name)
            folders[number].mkdir(exist_ok=True)
            save_file({key: one for key, one in of.items() if key[0] == "2"}, folders[number] / "1.safetensors")
            halves = {key: one / 2 for key, one in of.items() if key[0] != "2"}
            save_file(halves, folders[number] / "0.safetensors")
            save_file(halves, folders[number] / "2.safetensors")
        first, second, theirs = folders
        return distance(theirs, (first, second), list("012"), 1, "float32")

    assert measured({}) == measured(down) == Distance(0.0, 0.0, None)
    found = measured({"1.weight": up["1.weight"] + 3 * (down["1.weight"] - up["1.weight"])})
    assert (found.layer, round(found.units, 3)) == ("1", 2)  # from the nearer of the two
    found = measured({f"{layer}.weight": -up[f"{layer}.weight"] for layer in "01"})
    assert (found.layer, found.units > 100 * MOST_UNITS, round(found.share, 3)) == ("1", True, 2)
    assert measured({"0.weight": up["0.weight"] * math.nan}).units == math.inf
