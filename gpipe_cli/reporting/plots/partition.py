"""The partitions as a picture: Figure 2(a) of the paper, a model of L layers cut into K contiguous parts.

A bar per stage, made of its layers, each as long as its forward and its backward are predicted to take for one
micro-batch. The slowest stage sets the pace of all (section 2.2), so the mean is drawn as what no cut can beat.
"""

from collections.abc import Sequence
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from gpipe_cli.reporting.plots import palette, picture
from gpipe_cli.reporting.plots.palette import INK, PALE_INK
from gpipe_cli.reporting.plots.timeline_values import BarKind, axis_unit
from gpipe_cli.reporting.run.description import RunDescription
from gpipe_cli.units import count, duration, percent, plural, size

LEFT_INCHES, RIGHT_INCHES = 0.78, 2.3  # at the right stand parameters and memory of each stage
TITLE_INCHES, HEADING_INCHES, AXIS_INCHES, LEGEND_INCHES = 0.42, 0.24, 0.5, 0.46
ROW_INCHES, PANEL_INCHES = 0.85, 5.2  # a row is lower where this would make the panel higher
# Inches of the paper, of what is left and right of the bars, of the titles and of the legend. Beside the bars narrow
# paper has room only for the memory.
WIDE = (picture.WIDTH_INCHES, LEFT_INCHES, RIGHT_INCHES, TITLE_INCHES, LEGEND_INCHES)
NARROW = (picture.NARROW_INCHES, 0.62, 0.78, 0.55, 0.62)
PARTS: tuple[BarKind, ...] = ("F", "B")  # of a layer
FONT, LEAST_FONT = 8.0, 6.0
CHARACTER_INCHES, LINE_INCHES = 0.068, 0.13  # of a layer's name in the larger font
LEAST_GAP_PIXELS = 4  # smaller layers touch each other
MEAN_LINE: dict[str, Any] = {"color": palette.UPDATE, "linewidth": 1.0, "linestyle": (0, (4, 3))}
PARAMETERS_AT, MEMORY_AT = 0.85, 2.15  # inches right of the bars, where the numbers end


def known(run: RunDescription) -> bool:
    """Whether there is something to draw: what the layers cost, at least beside each other."""
    return max(_seconds(run)) > 0


def draw(run: RunDescription, *, narrow: bool = False) -> picture.Picture:
    """The cut as an image of shape (height, width, 3)."""
    stages = _seconds(run)
    slowest, mean = max(stages), sum(stages) / len(stages)
    panel = min(ROW_INCHES * len(stages), PANEL_INCHES)
    across, left, right, title, legend = NARROW if narrow else WIDE
    width = across - left - right
    figure = picture.new_figure(title + HEADING_INCHES + panel + AXIS_INCHES + legend, across)
    axes = picture.add_axes(figure, left, AXIS_INCHES + legend, width, panel)
    shown = picture.name_stages(axes, len(stages))
    if run.prediction is not None:
        scale, (name, unit) = 1.0, axis_unit(slowest)
        source = "" if narrow else f" (from {run.prediction.costs.source})"
        words = f"predicted time of one micro-batch, {name}{source}"
        longest = duration(slowest)
    else:  # without figures of this device seconds mean nothing; the shares of all stages do
        scale, unit, words = 1 / sum(stages), 0.01, "share of the model's computation, %"
        longest = percent(slowest / sum(stages))
    picture.show_axis(axes, scale * slowest, unit, words)
    _layers(axes, run, scale, width / (scale * slowest * picture.MARGIN), panel / len(stages))
    _numbers(axes, run, shown, width, panel, narrow)
    marks: list[Artist] = [Patch(color=palette.layer_colour(what, 0), label=palette.WORDS[what]) for what in PARTS]
    if len(stages) > 1:
        longest = f"slowest stage {longest} ({percent(slowest / mean - 1)} over the mean)"
        axes.axvline(scale * mean, zorder=3, **MEAN_LINE)
        marks.append(Line2D([], [], label="mean of the stages: no cut is faster", **MEAN_LINE))
    look: dict[str, Any] = {"ncols": 1, "labelspacing": 0.3} if narrow else {"columnspacing": 3.0}
    picture.add_legend(figure, marks, left, 0.08 if narrow else 0.2, handlelength=3.0, **look)
    heading = f"{run.model_name}  ·  {run.layers:,} layers on {plural(len(stages), 'stage')}"
    look = {"fontsize": 11, "color": INK, "va": "center_baseline", "transform": axes.transAxes}
    y = 1 + (title - 0.27 + HEADING_INCHES) / panel
    axes.text(-(left - 0.05) / width if narrow else 0, y, heading, fontweight="bold", **look)
    if narrow:
        axes.text(-(left - 0.05) / width, y - 0.2 / panel, longest, **look | {"fontsize": 9})
    else:
        axes.text(1 + MEMORY_AT / width, y, longest, ha="right", **look)
    return picture.pixels(figure)


def _layers(axes: Axes, run: RunDescription, scale: float, inches: float, row: float) -> None:
    """Every layer, forward before backward; ``inches`` of one unit of the axis, and of a ``row``'s height."""
    parts: list[tuple[int, float, float]] = []
    layers: list[tuple[int, float, float]] = []
    faces, lines = [], []
    for stage, (names, seconds) in enumerate(zip(run.placement.layer_names, run.plan.layer_seconds, strict=True)):
        left = 0.0
        for name, (forward, backward) in zip(names, seconds, strict=True):
            middle, right = left + scale * forward, left + scale * (forward + backward)
            light, dark = (palette.layer_colour(what, len(layers)) for what in PARTS)
            parts += [(stage, left, middle), (stage, middle, right)]
            faces += [light, dark]
            layers.append((stage, left, right))
            lines.append(0.9 if min((right - left) * inches, row) * picture.DPI >= LEAST_GAP_PIXELS else 0.0)
            if forward > backward:
                _name(axes, name, (left + middle) / 2, stage, (middle - left) * inches, row, (INK, light))
            else:
                _name(axes, name, (middle + right) / 2, stage, (right - middle) * inches, row, ("white", dark))
            left = right
    picture.add_bars(axes, parts, facecolors=faces, linewidths=0.0)
    picture.add_bars(axes, layers, facecolors="none", edgecolors="white", linewidths=lines)


def _name(axes: Axes, name: str, x: float, stage: int, width: float, row: float, colours: tuple[str, str]) -> None:
    """The name of a layer, across or upwards, where there is room for it, above the line of the mean; sizes in inches,
    colours of the name and of its bar."""
    needed, height = CHARACTER_INCHES * len(name), picture.BAR_HEIGHT * row
    across, upwards = (FONT * (room - 0.06) / needed for room in (width, height))
    box = {"facecolor": colours[1], "edgecolor": "none", "pad": 0.8}
    style: dict[str, Any] = {"ha": "center", "color": colours[0], "zorder": 4, "bbox": box}
    if across >= LEAST_FONT and height >= LINE_INCHES:
        axes.text(x, stage, name, va="center_baseline", fontsize=min(FONT, across), **style)
    elif upwards >= LEAST_FONT and width >= LINE_INCHES:
        axes.text(x, stage, name, va="center", fontsize=min(FONT, upwards), rotation=90, **style)


def _numbers(axes: Axes, run: RunDescription, shown: Sequence[int], width: float, panel: float, narrow: bool) -> None:
    """Beside each bar: the parameters of the stage, and the memory that it is predicted to need, without libraries."""
    columns = []
    if not narrow:
        columns.append(("parameters", PARAMETERS_AT, [count(number) for number in run.placement.parameters]))
    if run.prediction is not None:
        heading, at = ("memory", NARROW[2] - 0.05) if narrow else ("memory of the model", MEMORY_AT)
        columns.append((heading, at, [size(stage.total_bytes) for stage in run.prediction.memory]))
    for heading, at, numbers in columns:
        place: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "ha": "right"}  # of the width, and a stage
        x, above = 1 + at / width, -0.5 - 0.1 * len(numbers) / panel
        axes.text(x, above, heading, fontsize=FONT, color=PALE_INK, **place)
        for stage in shown:
            axes.text(x, stage, numbers[stage], va="center_baseline", fontsize=9, color=INK, **place)


def _seconds(run: RunDescription) -> list[float]:
    """Of one micro-batch on each stage, forward and backward."""
    return [sum(forward + backward for forward, backward in layers) for layers in run.plan.layer_seconds]
