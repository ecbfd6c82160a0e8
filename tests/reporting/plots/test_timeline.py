import numpy as np
import pytest
from reporting_runs import shares, timeline

from gpipe_cli.reporting.plots import palette
from gpipe_cli.reporting.plots import timeline as drawing
from gpipe_cli.reporting.plots.picture import DPI, MARGIN, WIDTH_INCHES
from gpipe_cli.reporting.plots.timeline import draw
from gpipe_cli.reporting.plots.timeline_values import Bar, TimelineView


def pixel(views: list[TimelineView], panel: int, stage: int, seconds: float, down: float = 0.3) -> tuple[int, int]:
    """Where the picture of views with equally many stages shows a time; `down` from the top of the stage's row."""
    stages = len(views[0].stages)
    height = min(drawing.ROW_INCHES * stages, drawing.PANEL_INCHES)
    top = panel * (drawing.TITLE_INCHES + height) + drawing.TITLE_INCHES
    room = WIDTH_INCHES - drawing.LEFT_INCHES - drawing.RIGHT_INCHES
    end = max(view.end_seconds for view in views) * MARGIN
    row = (top + height * (stage + down) / stages) * DPI
    return round(row), round((drawing.LEFT_INCHES + room * seconds / end) * DPI)


def colour_at(picture: np.ndarray, place: tuple[int, int]) -> tuple[int, ...]:
    return tuple(int(part) for part in picture[place])


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
                    found = colour_at(picture, pixel(views, panel, stage, quarter))
                    assert found == palette.rgb(palette.colour(bar.what, bar.micro_batch, 2)), (panel, stage, bar)
    assert colour_at(picture, pixel(views, 0, 1, 0.12)) == palette.rgb(palette.UPDATE)
    assert colour_at(picture, pixel(views, 1, 1, 0.117)) == (255, 255, 255)
    idle = {colour_at(picture, pixel(views, 0, 1, 0.1 + n / 5000)) for n in range(10)}
    assert palette.rgb(palette.IDLE) in idle
    assert len(idle) > 1  # hatched


def many(stages: int, micro_batches: int) -> TimelineView:
    """Every stage does F and B of all micro-batches, each a second long, then nothing for as long."""
    row = [Bar(what, m, 2 * m + b, 2 * m + b + 1) for m in range(micro_batches) for b, what in enumerate(("F", "B"))]  # type: ignore[arg-type]
    return TimelineView("many", "predicted", (tuple(row),) * stages, 4 * micro_batches, shares(0.5))


def test_many_bars_are_plain() -> None:
    view = many(128, 512)  # 131,072 bars
    picture = draw([view])
    for stage in (0, 64, 127):
        for m in (3, 255, 500):  # a forward and a backward are two seconds, a pixel is 1.3
            found = colour_at(picture, pixel([view], 0, stage, 2 * m + 1, down=0.5))
            assert found in [palette.rgb(palette.colour(what, m, 512)) for what in ("F", "B")], (stage, m)
        assert colour_at(picture, pixel([view], 0, stage, 3 * 512, down=0.5)) == palette.rgb(palette.IDLE)


@pytest.mark.parametrize(
    "view", [TimelineView("nothing", "measured", ((), ()), 0.0, shares(0.1)), many(1, 1), many(40, 3)]
)
def test_strange_timelines_are_drawn(view: TimelineView) -> None:
    assert draw([view]).std() > 0
