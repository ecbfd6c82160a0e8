"""The picture of the partitions, measured with a ruler: how long the bars of its layers are."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from reporting_runs import description, log, placement, plan

from gpipe_cli.planner.stage_memory import StageMemory
from gpipe_cli.reporting.plots import palette
from gpipe_cli.reporting.plots import partition as partition_picture
from gpipe_cli.reporting.plots.picture import DPI, WIDTH_INCHES
from gpipe_cli.reporting.run.description import RunDescription
from gpipe_cli.reporting.run.reporter import Reporter

Seconds = tuple[tuple[float, float], ...]


def cut(*stages: Seconds) -> RunDescription:
    """A run with these seconds of the layers of its stages."""
    count = len(stages)
    made = plan(
        layers=[seconds for stage in stages for seconds in stage], balance=tuple(map(len, stages)),
        memory=(StageMemory(2**30, 0, 0, 0, 0),) * count,
    )  # fmt: skip
    names = tuple(tuple(f"l{n}" for n in range(len(stage))) for stage in stages)
    devices = {"parameters": (1000,) * count, "cost": (1.0,) * count, "devices": ("cpu",) * count}
    return description(plan=made, placement=placement(layer_names=names, **devices))


def widths(picture: NDArray[np.uint8], run: RunDescription) -> list[tuple[int, int]]:
    """The pixels across that each layer's forward and backward have, in the line where there are most."""
    layers = run.layers
    bars = picture[: -round(partition_picture.LEGEND_INCHES * DPI)]

    def most(colour: palette.Colour) -> int:
        return int((bars == palette.rgb(colour)).all(axis=2).sum(axis=1).max())

    return [
        (most(palette.colour("F", layer, layers)), most(palette.colour("B", layer, layers))) for layer in range(layers)
    ]


def test_layers_are_as_long_as_they_take() -> None:
    """The last one is not trained: it has no backward."""
    run = cut(((2.0, 3.0), (1.0, 4.0)), ((3.0, 5.0), (1.0, 0.0)))
    found = widths(partition_picture.draw(run), run)
    unit = sum(found[0]) / 5
    assert unit > 100
    for (forward, backward), expected in zip(found, [(2, 3), (1, 4), (3, 5), (1, 0)], strict=True):
        assert (forward / unit, backward / unit) == (pytest.approx(expected[0], 0.03), pytest.approx(expected[1], 0.03))


@pytest.mark.parametrize("stages", [1, 128])
def test_few_and_many_stages_are_all_there(stages: int) -> None:
    run = cut(*(((1e-3, 2e-3),) * 4,) * stages)
    picture = partition_picture.draw(run)
    assert picture.shape[1] == WIDTH_INCHES * DPI
    assert picture.shape[0] < 1200
    coloured = picture[:, 250:1300].max(axis=2).astype(int) - picture[:, 250:1300].min(axis=2) > 30
    rows = coloured.mean(axis=1) > 0.9  # lines of pixels inside of a bar
    assert np.diff(np.concatenate([[0], rows.astype(int)])).clip(0).sum() == stages


@pytest.mark.parametrize(
    ("ending", "known", "drawn"), [("dry_run", True, True), ("interrupted", True, False), ("completed", False, False)]
)
def test_a_run_without_a_timeline_is_drawn_at_its_end(tmp_path: Path, ending: Any, known: bool, drawn: bool) -> None:
    Reporter(tmp_path, cut(((1.0, 2.0),)) if known else description(), log()[0]).finish(ending)
    assert (tmp_path / "partitions.png").exists() == drawn
