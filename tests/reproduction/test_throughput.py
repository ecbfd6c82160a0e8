"""Speed over K and M: which commands, and which numbers in which column."""

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from recipe_runs import answering, column, experiment

from gpipe_cli.commands.recipe_run import make_recipe_simulator
from gpipe_cli.errors import InputError
from gpipe_cli.reproduction import runner
from gpipe_cli.reproduction.recipe import read_recipe
from gpipe_cli.reproduction.runner import Findings, Runner
from gpipe_cli.schedule.simulator import ideal_bubble

ROWS = tuple({"partitions": k, "micro_batches": m, "paper": 1.5} for k in (2, 4) for m in (1, 4))
CPU = "device=cpu"
Refusal = Callable[[Mapping[str, str]], InputError | None]


def throughput(cells: Sequence[Mapping[str, Any]]) -> Callable[[Runner], Findings]:
    """The recipe of Table 2 with a table of other cells."""
    return experiment("table2_amoebanet", tables=[{"name": "Some model", "relative_to": "K = 2", "cells": cells}])


def ideal(k: int, m: int) -> float:
    return k * (1 - ideal_bubble(k, m))


class Machine:
    """Measures 0.9 of the ideal; simulates twice the ideal for every cell but the first with Lingvo's cut, and three
    times as much with an exact one. `refusal`: of a plan with these settings."""

    def __init__(self, refusal: Refusal = lambda settings: None) -> None:
        self.refusal, self.asked = refusal, list[tuple[str, Mapping[str, str]]]()

    def __call__(self, command: str, settings: Mapping[str, str], folder: Path) -> tuple[str, dict[str, Any]]:
        self.asked.append((command, settings))
        if command == "simulated":
            if error := self.refusal(settings):
                raise error
            k, m = int(settings["partitions"]), int(settings["micro_batches"])
            times = (1 if (k, m) == (2, 1) else 2) * (3 if settings["partition.method"] == "exact" else 1)
            return "", {"samples_per_second": 7 * times * ideal(k, m), "samples": 32 * k}
        ks, ms = ([int(part) for part in settings[key].split(",")] for key in ("partitions", "micro_batches"))
        best = 8 if settings.get("recompute") == "never" else 9
        rows = []
        for k, m in product(ks, ms):
            speed = best * ideal(k, m)
            relative = 9 / 8 * speed  # as if the first row were another one
            cell = {"partitions": k, "micro_batches": m} if len(ks) * len(ms) > 1 else {}
            row = {"settings": cell, "status": "measured", "samples_per_second": speed, "relative": relative}
            rows.append(row | {"kind": "measured"})
        return "bench.json", {"rows": rows}

    def settings(self, command: str) -> list[Mapping[str, str]]:
        return [given for asked, given in self.asked if asked == command]


@pytest.fixture(autouse=True)
def _two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "usable_cores", lambda: 2)


def test_each_kind_of_number_has_its_column(tmp_path: Path) -> None:
    machine = Machine()
    found = throughput(ROWS)(answering(tmp_path, machine, settings=(CPU, "model.filters=16")))
    (table,) = found.tables
    assert column(table, "K", "") == ["2", "2", "4", "4"]
    expected = [f"{ideal(k, m) / ideal(2, 1):.2f}" for k in (2, 4) for m in (1, 4)]
    assert column(table, "here", "measured") == [*expected[:2], "-", "-"]  # two cores: no more than K = 2
    doubled = [1.0, *(2 * ideal(k, m) / ideal(2, 1) for k, m in ((2, 4), (4, 1), (4, 4)))]
    assert column(table, "Lingvo's cut", "simulated") == [f"{value:.2f}" for value in doubled]
    assert column(table, "Lingvo's cut - paper", "difference") == [f"{value - 1.5:+.2f}" for value in doubled]
    assert column(table, "N", "simulated") == ["64", "64", "128", "128"]
    assert column(table, "exact / Lingvo's", "simulated") == ["3.00"] * 4
    assert "here - paper" not in [c.heading for c in table.columns]  # the small model is another one
    notes = dict(found.notes)
    off = sum(abs(value - 1.5) for value in doubled[1:]) / 3
    assert notes["found"] == f"Some model, simulated: off from the paper's by {off:.2f} in the mean of 3 cells"
    assert [(s["partitions"], s["micro_batches"]) for s in machine.settings("bench")] == [("2", "1,4")]
    simulated = machine.settings("simulated")
    assert [(s["hardware"], s["partition.method"]) for s in simulated] == [
        *[("tpu_v2", "lingvo")] * 4,
        *[("tpu_v2", "exact")] * 4,
    ]
    assert all("model.filters" not in s for s in simulated)  # the paper's size, also at small scale


def test_rows_that_recompute_differently_are_sweeps_of_their_own(tmp_path: Path) -> None:
    rows = (
        {"row": "naive-1", "partitions": 1, "micro_batches": 1, "recompute": "never", "paper": 1.0},
        {"row": "pipeline-1", "partitions": 1, "micro_batches": 4, "paper": 0.8},
        {"row": "pipeline-2", "partitions": 2, "micro_batches": 4, "paper": 1.4},
    )
    machine = Machine()
    (table,) = throughput(rows)(answering(tmp_path, machine, settings=(CPU,))).tables
    benches = machine.settings("bench")
    assert [(s["partitions"], s.get("recompute")) for s in benches] == [("1", "never"), ("1,2", None)]
    first = 8 * ideal(1, 1)
    assert column(table, "here", "measured") == [
        "1.00",
        f"{9 * ideal(1, 4) / first:.2f}",
        f"{9 * ideal(2, 4) / first:.2f}",
    ]
    assert column(table, "", "") == ["naive-1", "pipeline-1", "pipeline-2"]


def test_cells_that_cannot_be_do_not_take_the_others_with_them(tmp_path: Path) -> None:
    """After two minutes of measuring, a plan refused `partitions=8`, which nobody had typed, and all was lost."""
    reason = "partitions=4: the model has only 3 layers; use partitions=3 or fewer"

    def refusing(*partitions: str) -> Machine:
        return Machine(refusal=lambda settings: InputError(reason) if settings["partitions"] in partitions else None)

    found = throughput(ROWS)(answering(tmp_path, refusing("4"), CPU, "model.layers=1"))
    (table,) = found.tables
    numbers = [f"{ideal(2, m) / ideal(2, 1):.2f}" for m in (1, 4)]
    assert column(table, "here", "measured") == [*numbers, "-", "-"]
    assert column(table, "Lingvo's cut", "simulated")[2:] == ["impossible", "impossible"]
    assert ("impossible", f"Some model, K = 4, M = 1; K = 4, M = 4: {reason}") in found.notes


@pytest.mark.parametrize(
    ("name", "most", "within"),
    [
        ("table2_transformer", (0.45,), None),
        ("table2_amoebanet", (0.28,), 0.12),
        ("table3_no_fast_interconnect", (0.15, 0.2), None),
    ],
)
def test_the_papers_tables_are_as_near_as_we_say(name: str, most: tuple[float, ...], within: float | None) -> None:
    """The mean difference from the paper of each model's cells with Lingvo's cut; `within`: the largest relative
    difference with M = 32."""
    values, simulate = read_recipe(name).values, make_recipe_simulator(name)
    for table, least in zip(values["tables"], most, strict=True):
        speeds = []
        for row in table["cells"]:
            cell = [f"{key}={row[key]}" for key in ("partitions", "micro_batches")]
            figures = values["figures"], "partition.method=lingvo"
            speeds.append(simulate([*table.get("settings", ()), *figures, *cell]).samples_per_second)
        pairs = [(speed / speeds[0], row["paper"]) for speed, row in zip(speeds, table["cells"], strict=True)][1:]
        assert mean(abs(ours - paper) for ours, paper in pairs) < least + 0.005
        for (ours, paper), row in zip(pairs, table["cells"][1:], strict=True):
            assert within is None or row["micro_batches"] < 32 or abs(ours / paper - 1) <= within
