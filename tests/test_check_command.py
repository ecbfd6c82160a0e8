"""`gpipe check` as a user calls it: real runs in worker processes, a verdict, an exit code."""

import json
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from training_runs import TINY, command, session_members, start_program, wait_until

IN_PROCESS = "executor=in_process"
IMAGES = ["model=custom", "dataset.image_size=8", *TINY[2:3], *TINY[4:]]
TEXT = [
    "model=transformer_lm",
    "~presets",
    "dataset=synthetic_text",
    "dataset.vocabulary=40",
    "dataset.train_samples=30",
    "dataset.test_samples=4",
    "model.layers=2",
    "model.width=8",
    "model.hidden=16",
    "model.heads=2",
    "model.length=12",
    "batch_size=8",
    "micro_batches=3",
    *TINY[-3:],
]
CUT_BEFORE_THE_LAYER = "partition.balance=[1,4]"
CUT_BEHIND_IT = "partition.balance=[3,2]"


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))  # where custom_models.py is
    monkeypatch.setenv("COLUMNS", "80")


def verdict() -> dict[str, Any]:
    """What the only check in this folder has left."""
    (folder,) = Path("outputs").iterdir()
    assert "_check_" in folder.name
    (file,) = folder.iterdir()
    assert file.name == "check.json"
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def rows(found: dict[str, Any], **wanted: object) -> list[dict[str, Any]]:
    return [row for row in found["rows"] if all(row[key] == value for key, value in wanted.items())]


def test_the_default_network_is_identical_in_every_way(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["model.drop_path=0.4", "model.dropout=0.2", "gradient_clipping=0.1", "freeze=[stem]"]
    assert command(monkeypatch, "check", *TINY, *settings) == 0
    shown = capsys.readouterr().out
    found = verdict()
    assert found["identical"]
    assert found["verdict"].startswith("identical: partitions, recomputation and executors change nothing (19 variants")
    ways = {(row["partitions"], row["schedule"], row["recompute"], row["executor"]) for row in found["rows"]}
    modes = ("always", "except_last", "never")
    executors = [(1, "in_process"), (2, "in_process"), (2, "distributed")]
    pipelines = {(k, s, mode, e) for k, e in executors for s in ("gpipe", "1f1b") for mode in modes}
    assert ways == pipelines | {(1, "gpipe", "never", "pytorch")}
    assert len(rows(found, verdict="reference")) == 1
    assert len(rows(found, verdict="identical")) == 17
    # not only to each other: the model as it is, in plain PyTorch, has the same outputs and gradients
    assert [row["verdict"] for row in rows(found, executor="pytorch")] == ["identical"]
    (other_order,) = rows(found, verdict="within tolerance")
    assert (other_order["partitions"], other_order["schedule"]) == (1, "1f1b")
    assert 0 < other_order["difference"] < 1e-5
    (whole,) = rows(found, micro_batches=1)
    assert whole["verdict"] == "differs, as it must"
    assert "batch norm normalizes each micro-batch" in whole["text"]
    assert found["loss"] > 0
    assert "identical (8 of 8)" in shown
    lines = shown.splitlines()
    assert max(len(line) for line in lines[: lines.index("", 6) + 1]) <= 80
    assert lines[-1] == found["verdict"]


def test_text_is_checked_with_its_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    assert command(monkeypatch, "check", *TEXT, "model.dropout=0", "model.attention_dropout=0", IN_PROCESS) == 0
    found = verdict()
    assert len(rows(found, verdict="identical")) == 2 * 3 * 2 - 2 + 1
    # without dropout and batch norm M is another order of sums, no more
    (whole,) = rows(found, micro_batches=1)
    assert whole["verdict"] == "within tolerance"
    assert 0 < whole["difference"] < 1e-5


def test_dropout_depends_on_the_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    assert command(monkeypatch, "check", *TEXT, "model.dropout=0.3", "partitions=1") == 0
    (whole,) = rows(verdict(), micro_batches=1)
    assert whole["verdict"] == "differs, as it must"
    assert "random numbers" in whole["text"]


@pytest.mark.parametrize(
    ("model", "settings", "differing", "words"),
    [
        # it halves what it is given, unseen by torch: a recomputation begins with a half
        ("halves_unseen", [CUT_BEFORE_THE_LAYER], {"always", "except_last"}, "changes its input in place"),
        ("draws_elsewhere", ["model.arguments={source:numpy}"], {"always", "except_last", "never"}, "numpy.random"),
    ],
)
def test_a_layer_that_differs_is_named(
    model: str,
    settings: list[str],
    differing: set[str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = [*IMAGES, f"model.target=custom_models:{model}", IN_PROCESS, *settings]
    assert command(monkeypatch, "check", *given) == 1
    found = verdict()
    assert not found["identical"]
    assert found["verdict"].startswith("differs: ")
    bad = rows(found, verdict="differs", schedule="gpipe", partitions=2)
    assert {row["recompute"] for row in bad} == differing
    assert {row["layer"] for row in bad} == {"1"}
    assert all(words in row["text"] for row in bad)
    assert words in capsys.readouterr().out


def test_a_finding_is_never_identical(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing differs at these cuts, and at another it would: the word was `identical`, the exit code 0."""
    given = [*IMAGES, "model.target=custom_models:halves_unseen", IN_PROCESS, CUT_BEHIND_IT]
    assert command(monkeypatch, "check", *given) == 1
    found = verdict()
    assert not [row for row in found["rows"] if row["verdict"] in ("differs", "fails")]
    assert [finding["layer"] for finding in found["findings"]] == ["1"]
    assert not found["identical"]
    assert found["verdict"].startswith("refused: layer 1 changes its input in place")
    assert re.search("^refused .*layer 1 changes its input in place", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize(("model", "fails"), [("works_in_place", 6), ("hides_in_place", 2)])
def test_a_layer_that_changes_its_input_is_a_verdict(
    model: str, fails: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At every cut: as shapes show it, or the first variant, which the others cannot be compared with then."""
    given = [*IMAGES, f"model.target=custom_models:{model}", CUT_BEFORE_THE_LAYER]
    assert command(monkeypatch, "check", *given) == 1
    captured = capsys.readouterr()
    found = verdict()
    failing = rows(found, verdict="fails")
    assert len(failing) == fails
    assert {row["layer"] for row in failing} == {"1"}
    assert all("layer 1 changes its input in place" in row["text"] and "\n" not in row["text"] for row in failing)
    assert "Traceback" not in captured.out + captured.err
    assert {row["verdict"] for row in found["rows"]} <= {"fails", "left out"}
    assert found["verdict"].startswith("fails: ")


def test_a_network_that_fails_in_any_case(monkeypatch: pytest.MonkeyPatch) -> None:
    assert command(monkeypatch, "check", *IMAGES, "model.target=custom_models:wants_no_values") == 1
    found = verdict()
    whole = rows(found, partitions=1, recompute="never", executor="in_process")
    references = [row for row in whole if row["micro_batches"] == 3]
    assert [(row["verdict"], row["layer"]) for row in references] == [("fails", "1")] * 2
    assert references[0]["text"] == "layer 1 raises RuntimeError: no values, please"
    assert {row["verdict"] for row in found["rows"] if row not in references} == {"left out"}
    assert len(found["rows"]) == 20
    assert found["loss"] is None


def test_what_fails_among_processes_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert command(monkeypatch, "check", *IMAGES, "model.target=custom_models:is_lonely", CUT_BEFORE_THE_LAYER) == 1
    found = verdict()
    assert all(row["verdict"] != "fails" for row in rows(found, executor="in_process"))
    first, *others = rows(found, executor="distributed")
    assert (first["verdict"], first["layer"]) == ("fails", "1")
    assert "not alone" in first["text"]
    assert {row["verdict"] for row in others} == {"left out"}


def test_shared_parameters_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    given = [*IMAGES, "model.target=custom_models:shares", IN_PROCESS]
    assert command(monkeypatch, "check", *given, "partition.balance=[2,3]") == 1
    found = verdict()
    failing = rows(found, verdict="fails")
    assert [row["partitions"] for row in failing] == [2] * 6
    assert all("layers 1 and 2 share parameter weight" in row["text"] for row in failing)
    assert len(rows(found, partitions=1, verdict="identical")) == 5
    assert "keep them together, as by partition.balance=[1,4]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("-m partitions=1,2", "gpipe check: -m: check has no sweeps"),
        ("partitions=auto", "gpipe check: partitions=auto: "),
        ("resume=outputs/x", "gpipe check: resume=outputs/x: a check runs the first mini-batch of a training"),
        ("dry_run=true", "gpipe check: dry_run=true: a check trains nothing"),
        ("batch_size=32", "gpipe check: batch_size=32: the training set has only 22 samples"),
    ],
)
def test_bad_input_is_one_line(
    arguments: str, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [setting for setting in TINY if not setting.startswith(arguments.partition("=")[0])]
    assert command(monkeypatch, "check", *arguments.split(), *given) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(line)
    assert len(captured.err.splitlines()) == 1
    assert not list(Path().glob("outputs/*")), "nothing is left behind"


def test_interrupted_it_leaves_nothing() -> None:
    program = start_program("check", *TINY)
    try:
        wait_until(lambda: len(session_members(program.pid)) > 2, 60, "a worker has started")
        time.sleep(0.5)
        program.send_signal(signal.SIGINT)
        out, err = program.communicate(timeout=30)
        assert program.returncode == 130
        assert "Traceback" not in out + err
        wait_until(lambda: not session_members(program.pid), 10, "all processes have ended")
        assert not list(Path().glob("outputs/*"))
    finally:
        for number in session_members(program.pid):
            subprocess.run(["kill", "-9", str(number)], check=False)
