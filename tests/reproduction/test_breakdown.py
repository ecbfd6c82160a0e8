"""The pie of the NeurIPS version beside ours."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from reproduction_runs import cells, runner

from gpipe_cli.reproduction.breakdown import Breakdown, reproduce
from gpipe_cli.reproduction.runner import CommandFailedError

PAPER = {"compute": 0.656, "recompute": 0.225, "bubble": 0.041, "imbalance": 0.032, "update": 0.017, "set_up": 0.029}
MEASURED = {**dict.fromkeys(PAPER, 0.01), "compute": 0.7, "recompute": 0.21, "transfer": 0.05}
SIMULATED = {**dict.fromkeys(PAPER, 0.0), "compute": 0.75, "recompute": 0.25, "transfer": 0.0}


def answer(command: str, settings: Mapping[str, str], folder: Path) -> tuple[str, dict[str, Any]]:
    if command == "plan":
        assert settings["cost"] == "measured"
        view = {"stages": [{}, {}], "micro_batches": 16, "model_name": "Some model", "breakdown": SIMULATED}
        return "plan.json", {**view, "bubble": 0.05, "hardware": {"source": "layers measured on this machine"}}
    row = {"breakdown": MEASURED, "bubble": 0.07, "ideal_bubble": 1 / 17, "kind": "measured_one_device", "reason": None}
    return "bench.json", {"rows": [row]}


def test_shares_stand_beside_the_papers(tmp_path: Path) -> None:
    found = reproduce(Breakdown(**PAPER), runner(tmp_path, answer))
    (table,) = found.tables
    assert table.title == "Where the time of a step goes, Some model, K = 2, M = 16"
    assert cells(table, "share of a step", "") == [
        "compute", "recompute", "bubble", "imbalance", "transfer", "update", "set-up",
    ]  # fmt: skip
    assert cells(table, "paper", "paper") == ["65.6 %", "22.5 %", "4.1 %", "3.2 %", "-", "1.7 %", "2.9 %"]
    assert cells(table, "here", "measured") == ["70.0 %", "21.0 %", "1.0 %", "1.0 %", "5.0 %", "1.0 %", "1.0 %"]
    assert cells(table, "layers here", "simulated")[:2] == ["75.0 %", "25.0 %"]
    differences = cells(table, "here - paper, points", "difference")
    assert differences == ["+4.4", "-1.5", "-3.1", "-2.2", "-", "-0.7", "-1.9"]
    assert any("0.30 measured, 0.34 in the paper" in line for _, line in found.notes)
    assert ("measured", "the stages shared a device or cores: not the shares of a pipeline") in found.notes
    ((_, picture),) = found.files
    assert Path(picture).read_bytes().startswith(b"\x89PNG")


def test_what_was_not_recorded_is_a_failure(tmp_path: Path) -> None:
    def broken(command: str, settings: Mapping[str, str], folder: Path) -> tuple[str, dict[str, Any]]:
        return "bench.json", {"rows": [{"breakdown": None, "reason": "out of memory"}]}

    with pytest.raises(CommandFailedError, match=r"^out of memory$"):
        reproduce(Breakdown(**PAPER), runner(tmp_path, broken))


def test_the_papers_shares_are_a_whole() -> None:
    with pytest.raises(ValueError, match=r"add up to 1\.344"):
        Breakdown(**{**PAPER, "compute": 1.0})
