"""The pie of the NeurIPS version beside ours."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from recipe_runs import answering, column, shares_of_a_step

from gpipe_cli.reproduction.breakdown import Breakdown
from gpipe_cli.reproduction.recipe import load
from gpipe_cli.reproduction.runner import CommandFailedError

PAPER = {"compute": 0.656, "recompute": 0.225, "bubble": 0.041, "imbalance": 0.032, "update": 0.017, "set_up": 0.029}


def test_shares_stand_beside_the_papers(tmp_path: Path) -> None:
    recipe = load("breakdown").breakdown
    assert recipe is not None
    assert sum(asdict(recipe).values()) == pytest.approx(1)
    found = Breakdown(**PAPER).reproduce(answering(tmp_path, shares_of_a_step))
    (table,) = found.tables
    assert table.title == "Where the time of a step goes, Some model, K = 2, M = 16"
    assert column(table, "share of a step", "") == [
        "compute", "recompute", "update", "bubble", "imbalance", "transfer", "set-up",
    ]  # fmt: skip
    assert column(table, "paper", "paper") == ["65.6 %", "22.5 %", "1.7 %", "4.1 %", "3.2 %", "-", "2.9 %"]
    assert column(table, "here", "measured") == ["70.0 %", "21.0 %", "1.0 %", "1.0 %", "1.0 %", "5.0 %", "1.0 %"]
    assert column(table, "layers here", "simulated")[:2] == ["75.0 %", "25.0 %"]
    differences = column(table, "here - paper, points", "difference")
    assert differences == ["+4.4", "-1.5", "-0.7", "-3.1", "-2.2", "-", "-1.9"]
    assert any("0.30 measured, 0.34 in the paper" in line for _, line in found.notes)
    shared = "measured_one_device: stages shared a device or cores; not the shares of a pipeline"
    assert ("measured", shared) in found.notes
    ((_, picture),) = found.files
    assert Path(picture).read_bytes().startswith(b"\x89PNG")


def test_what_was_not_recorded_is_a_failure(tmp_path: Path) -> None:
    def broken(command: str, settings: Mapping[str, str], folder: Path) -> tuple[str, dict[str, Any]]:
        return "bench.json", {"rows": [{"breakdown": None, "reason": "out of memory"}]}

    with pytest.raises(CommandFailedError, match=r"^out of memory$"):
        Breakdown(**PAPER).reproduce(answering(tmp_path, broken))
