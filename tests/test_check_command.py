"""`gpipe check` as a user calls it: real runs in worker processes, a verdict, an exit code."""

import json
from pathlib import Path
from typing import Any

import pytest
from training_runs import TINY, command

IN_PROCESS = "executor=in_process"
IMAGES = ["model=custom", "dataset.image_size=8", *TINY[2:3], *TINY[4:]]
TEXT = [
    "model=transformer_lm", "~presets", "dataset=synthetic_text", "dataset.vocabulary=40", "dataset.train_samples=30",
    "dataset.test_samples=4", "model.layers=2", "model.width=8", "model.hidden=16", "model.heads=2", "model.length=12",
    "model.attention_dropout=0", "batch_size=8", "micro_batches=3", *TINY[-3:],
]  # fmt: skip


@pytest.fixture(autouse=True)
def _with_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))  # where custom_models.py is
    monkeypatch.setenv("COLUMNS", "80")


def found_by_check() -> dict[str, Any]:
    """What the only check in this folder has left."""
    (folder,) = Path("outputs").iterdir()
    assert "_check_" in folder.name
    (file,) = folder.iterdir()
    assert file.name == "check.json"
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def rows(found: dict[str, Any], **wanted: object) -> list[dict[str, Any]]:
    return [row for row in found["rows"] if all(row[key] == value for key, value in wanted.items())]


def test_a_schedule_of_a_file_is_checked_too(tmp_path: Path) -> None:
    """One whose gradients are summed in an order that is neither gpipe's nor 1f1b's."""
    file = tmp_path / "order.csv"
    file.write_text("0F0,0F1,0F2,0B0,0B2,0B1\n1F0,1F1,1F2,1B0,1B2,1B1\n", encoding="utf-8")
    assert command("check", *TEXT, IN_PROCESS, f"schedule={file}") == 0
    (row,) = rows(found_by_check(), schedule=str(file))
    assert (row["verdict"], row["recompute"], 0 < row["difference"] < 1e-5) == ("within tolerance", "except_last", True)


@pytest.mark.parametrize(
    ("model", "settings", "left_out", "verdict", "words"),
    [
        # it halves what it is given, unseen by torch: a recomputation begins with a half
        ("halves_unseen", [IN_PROCESS, "partition.balance=[1,4]"], 0, "differs: 5 of 17 variants; first in layer 1",
         "layer 1 gives other values when micro-batch 0 is recomputed"),
        # the first variant fails, which the others cannot be compared with then
        ("wants_no_values", [], 24, "fails: 2 of 2 variants; first in layer 1",
         "layer 1 raises RuntimeError: no values; please"),
        # what a layer is given lies in memory as in every other pipeline, and not as its layer before has left it
        ("looks_at_strides", [IN_PROCESS, "partitions=1"], 0, "differs: 1 of 7 variants; first in layer 2", "layer 2"),
    ],
)  # fmt: skip
def test_a_layer_that_cannot_be_pipelined_is_named(
    model: str, settings: list[str], left_out: int, verdict: str, words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert command("check", *IMAGES, f"model.target=custom_models:{model}", *settings) == 1
    captured = capsys.readouterr()
    found = found_by_check()
    assert not found["identical"]
    assert found["verdict"].startswith(verdict)
    bad = rows(found, verdict="differs") + rows(found, verdict="fails")
    assert all("\n" not in row["text"] for row in bad)
    assert any(words in row["text"] for row in bad)
    assert len(rows(found, verdict="left out")) == left_out
    assert words in " ".join(captured.out.split())
    assert "Traceback" not in captured.out + captured.err


def test_a_batch_norm_that_is_applied_twice_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("check", *IMAGES, "model.target=custom_models:norms_twice") == 2
    line = "gpipe check: layer 1.norm: a batch norm is applied twice in a forward, "
    assert line in capsys.readouterr().err
