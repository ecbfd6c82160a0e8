"""Pictures of timelines, measured with a ruler, and their colours in the space that people see in."""

import numpy as np
from reporting_runs import timeline

from gpipe_cli.reporting.plots import palette
from gpipe_cli.reporting.plots import timeline as drawing
from gpipe_cli.reporting.plots.picture import DPI, WIDTH_INCHES
from gpipe_cli.reporting.plots.timeline import draw
from gpipe_cli.reporting.plots.timeline_values import TimelineView


def colour_at(
    picture: np.ndarray, views: list[TimelineView], panel: int, stage: int, seconds: float, down: float = 0.3
) -> tuple[int, ...]:
    """The pixel of a time in views with equally many stages; `down` from the top of the stage's row."""
    stages = len(views[0].stages)
    height = min(drawing.ROW_INCHES * stages, drawing.PANEL_INCHES)
    top = panel * (drawing.TITLE_INCHES + height) + drawing.TITLE_INCHES
    room = WIDTH_INCHES - drawing.LEFT_INCHES - drawing.RIGHT_INCHES
    end = max(view.end_seconds for view in views) * drawing.MARGIN
    row = (top + height * (stage + down) / stages) * DPI
    return tuple(map(int, picture[round(row), round((drawing.LEFT_INCHES + room * seconds / end) * DPI)]))


def rgb(colour: palette.Colour) -> tuple[int, ...]:
    return tuple(bytes.fromhex(colour[1:]))


def test_bars_are_where_their_times_say_in_the_colours_of_their_micro_batches() -> None:
    views = [timeline(), timeline(0.005, kind="predicted")]
    picture = draw(views)
    assert picture.dtype == np.uint8
    assert picture.shape[1:] == (round(WIDTH_INCHES * DPI), 3)
    for panel, view in enumerate(views):  # one axis: the predicted step ends in the middle of the picture
        for stage, bars in enumerate(view.stages):
            for bar in bars:
                if bar.what in ("F", "B"):
                    quarter = bar.start_seconds + (bar.end_seconds - bar.start_seconds) / 4
                    expected = rgb(palette.colour(bar.what, bar.micro_batch, 2))
                    assert colour_at(picture, views, panel, stage, quarter) == expected, (panel, stage, bar)
    assert colour_at(picture, views, 0, 1, 0.12) == rgb(palette.UPDATE)
    assert colour_at(picture, views, 1, 1, 0.117) == (255, 255, 255)
    idle = {colour_at(picture, views, 0, 1, 0.1 + n / 5000) for n in range(10)}
    assert rgb(palette.IDLE) in idle
    assert len(idle) > 1  # hatched
