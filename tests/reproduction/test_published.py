"""Speeds that others have published: what every cell must say, and what the simulator says of some of them."""

from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from recipe_runs import column, experiment, real_runner

from gpipe_cli.reproduction.recipe import read_recipe
from gpipe_cli.reproduction.runner import Findings

TINY = (
    "model=transformer_lm dataset=synthetic_text dataset.vocabulary=64 model.layers=2 model.width=16 model.hidden=64 "
    "model.heads=2 model.length=8 hardware=a100_80 schedule=1f1b"
)


def sources(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = read_recipe(name).values["sources"]
    return found


def reproduced(folder: Path, *sources: dict[str, Any], name: str = "published") -> Findings:
    return experiment(name, sources=[*sources])(real_runner(name, folder))


def test_torchgpipe_s_cells_keep_their_ratios(tmp_path: Path) -> None:
    """Table 2 of the paper as torchgpipe measured it: 0.12 in the mean of eight cells relative to the first."""
    theirs = next(source for source in sources("published") if source["name"] == "torchgpipe, AmoebaNet-D")
    table, summary = reproduced(tmp_path, theirs).tables
    published, simulated = ([float(x) for x in column(table, kind, kind)] for kind in ("published", "simulated"))
    pairs = [*zip(published, simulated, strict=True)]
    assert mean(abs(ours / simulated[0] - them / published[0]) for them, ours in pairs[1:]) < 0.15
    assert column(summary, "source") == ["torchgpipe, AmoebaNet-D", "all"]
    assert column(summary, "cells") == ["9", "9"]


def test_units_are_those_of_the_source(tmp_path: Path) -> None:
    """One plan in all four: two pipelines of two stages, 16 sequences of 8 tokens."""
    cell = {"name": "a", "published": 1.0, "settings": "partitions=2 replicas=2 micro_batches=4 batch_size=16"}
    units = "s per step", "samples/s", "samples/s per GPU", "tokens/s per GPU"
    tables = [{"model": "tiny", "unit": unit, "settings": TINY, "cells": [cell]} for unit in units]
    source = {"name": "Theirs", "source": "a document, table 1", "hardware": "2 GPUs", "note": "nothing"}
    found = reproduced(tmp_path, {**source, "tables": tables})
    off = [float(column(table, "simulated - published, %", "difference")[0]) for table in found.tables[:4]]
    seconds, of_all, of_each, tokens = (1 + each / 100 for each in off)
    assert of_all == pytest.approx(4 * of_each, rel=1e-3)
    assert tokens == pytest.approx(8 * of_each, rel=1e-3)
    assert of_all * seconds == pytest.approx(16, rel=0.5)  # a step of 2 ms, which the table has to a millisecond


def test_torchgpipe_s_u_nets_have_its_parameters_and_nearly_its_memory(tmp_path: Path) -> None:
    table, sent, summary = experiment("unet_memory")(real_runner("unet_memory", tmp_path)).tables
    assert column(table, "parameters", "published") == column(table, "", "counted")
    off = [float(one) for one in column(table, "planned - published, %", "difference")]
    assert max(map(abs, off)) < 20
    assert column(sent, "cell") == ["pipeline-4 (24, 160)", "pipeline-8 (48, 160)"]  # two stages are neighbours
    assert summary.title == "How far the simulated figures are off"


def test_torchgpipe_s_u_net_keeps_its_speed_ups(tmp_path: Path) -> None:
    (source,) = sources("unet_speed")
    first = {**source, "tables": source["tables"][:1]}
    table, sent, _ = reproduced(tmp_path, first, name="unet_speed").tables
    assert column(table, "speed-up", "published") == ["1.00", "0.86", "1.25", "2.35", "3.11"]
    theirs, ours = ([float(one) for one in table.columns[at].cells] for at in (-2, -1))
    assert mean(abs(one / them - 1) for one, them in zip(ours[1:], theirs[1:], strict=True)) < 0.15
    assert [float(one.removesuffix(" %")) > 30 for one in column(sent, "saved")] == [True, True]
