"""The partitions as a picture: Figure 2(a) of the paper, a model of L layers cut into K contiguous parts.

A bar per stage, made of its layers, each as long as its forward and its backward are predicted to take for one
micro-batch: how even the cut is, and which layer makes it uneven, is seen at a glance. The slowest stage sets the pace
of all (section 2.2), so the mean of the stages is drawn as what no cut can beat.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gpipe_cli.reporting.plots import palette
from gpipe_cli.reporting.plots.timeline import DPI, INK, PALE_INK, WIDTH_INCHES
from gpipe_cli.reporting.run.description import PartitionDescription, RunDescription
from gpipe_cli.reporting.timeline_view import BarKind, axis_ticks, axis_unit
from gpipe_cli.units import count, duration, percent, size

if TYPE_CHECKING:  # matplotlib takes half a second to import: only who draws pays for it
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

LEFT_INCHES, RIGHT_INCHES = 0.78, 2.3  # at the right stand parameters and memory of each stage
TITLE_INCHES, HEADING_INCHES, AXIS_INCHES, LEGEND_INCHES = 0.42, 0.24, 0.5, 0.46
ROW_INCHES, PANEL_INCHES = 0.85, 5.2  # a row is lower where this would make the panel higher
PARTS: tuple[BarKind, ...] = ("F", "B")  # of a layer
BAR_HEIGHT = 0.86  # of a row
MARGIN = 1.004  # of the axis behind the longest bar
SHOWN_STAGES = 16  # of more than these only some are named
FONT, LEAST_FONT = 8.0, 6.0
CHARACTER_INCHES, LINE_INCHES = 0.068, 0.13  # of a layer's name in the larger font
LEAST_GAP_PIXELS = 4  # smaller layers touch each other
PARAMETERS_AT, MEMORY_AT = 0.85, 2.15  # inches right of the bars, where the numbers end


def known(run: RunDescription) -> bool:
    """Whether there is something to draw: what the layers cost, at least beside each other."""
    return _end(run.partitions) > 0


def draw(run: RunDescription) -> "NDArray[np.uint8]":
    """The cut as an image of shape (height, width, 3)."""
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    assert known(run), "nothing is known of the layers"
    canvas = FigureCanvasAgg(_figure(run))
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def _figure(run: RunDescription) -> "Figure":
    from matplotlib.figure import Figure

    partitions = run.partitions
    panel = min(ROW_INCHES * len(partitions), PANEL_INCHES)
    height = TITLE_INCHES + HEADING_INCHES + panel + AXIS_INCHES + LEGEND_INCHES
    width = WIDTH_INCHES - LEFT_INCHES - RIGHT_INCHES
    figure = Figure(figsize=(WIDTH_INCHES, height), dpi=DPI, facecolor="white")
    axes = figure.add_axes(
        (LEFT_INCHES / WIDTH_INCHES, (AXIS_INCHES + LEGEND_INCHES) / height, width / WIDTH_INCHES, panel / height)
    )
    # Without figures of this device seconds mean nothing; the shares of all stages do.
    whole = sum(map(_seconds, partitions))
    scale = 1.0 if run.prediction is not None else 1 / whole
    end = scale * _end(partitions)
    shown = _shown(len(partitions))
    _frame(axes, run, end, scale * whole / len(partitions), shown)
    _layers(axes, partitions, scale, width / (end * MARGIN), panel / len(partitions))
    _numbers(axes, run, shown, width, height - TITLE_INCHES - AXIS_INCHES - LEGEND_INCHES)
    _legend(figure, run)
    _title(figure, run, height)
    return figure


def _frame(axes: "Axes", run: RunDescription, end: float, mean: float, shown: Sequence[int]) -> None:
    """Everything around the bars: stages, the axis, the mean."""
    stages = len(run.partitions)
    axes.set_xlim(0, end * MARGIN)
    axes.set_ylim(stages - 0.5, -0.5)
    axes.set_yticks(list(shown), [f"stage {stage}" for stage in shown], fontsize=9, color=INK)
    axes.tick_params(axis="both", length=0, pad=5)
    for side in axes.spines.values():
        side.set_visible(False)
    ticks = axis_ticks(end)
    if run.prediction is not None:
        name, unit = axis_unit(end)
        words = f"predicted time of one micro-batch, {name} (from {run.prediction.source})"
    else:
        unit, words = 0.01, "share of the model's computation, %"
    axes.set_xticks(ticks, [f"{tick / unit:g}" for tick in ticks], fontsize=9, color=PALE_INK)
    axes.grid(axis="x", color="#d5d6dc", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set_xlabel(words, fontsize=9, color=PALE_INK, loc="right", labelpad=3)
    if stages > 1:
        axes.axvline(mean, color=palette.hexadecimal(palette.UPDATE), linewidth=1.0, linestyle=(0, (4, 3)), zorder=3)


def _layers(axes: "Axes", partitions: Sequence[PartitionDescription], scale: float, inches: float, row: float) -> None:
    """Every layer, forward before backward; ``inches`` of one unit of the axis, and of a ``row``'s height."""
    from matplotlib.collections import PolyCollection

    total = sum(len(partition.layers) for partition in partitions)
    parts, faces, layers, lines, position = [], [], [], [], 0
    for stage, partition in enumerate(partitions):
        left = 0.0
        for name, (forward, backward) in zip(partition.layers, partition.layer_seconds, strict=True):
            middle, right = left + scale * forward, left + scale * (forward + backward)
            parts += [_corners(stage, left, middle), _corners(stage, middle, right)]
            faces += [palette.hexadecimal(palette.colour(what, position, total)) for what in PARTS]
            layers.append(_corners(stage, left, right))
            lines.append(0.9 if min((right - left) * inches, row) * DPI >= LEAST_GAP_PIXELS else 0.0)
            if forward > backward:
                _name(axes, name, (left + middle) / 2, stage, (middle - left) * inches, row, (INK, faces[-2]))
            else:
                _name(axes, name, (middle + right) / 2, stage, (right - middle) * inches, row, ("white", faces[-1]))
            left = right
            position += 1
    axes.add_collection(PolyCollection(parts, facecolors=faces, linewidths=0.0))
    axes.add_collection(PolyCollection(layers, facecolors="none", edgecolors="white", linewidths=lines))


def _name(axes: "Axes", name: str, x: float, stage: int, width: float, row: float, colours: tuple[str, str]) -> None:
    """The name of a layer, across or upwards, where there is room for it, above the line of the mean; sizes in inches,
    colours of the name and of its bar."""
    needed, height = CHARACTER_INCHES * len(name), BAR_HEIGHT * row
    across, upwards = (FONT * (room - 0.06) / needed for room in (width, height))
    box = {"facecolor": colours[1], "edgecolor": "none", "pad": 0.8}
    style: dict[str, Any] = {"ha": "center", "color": colours[0], "zorder": 4, "bbox": box}
    if across >= LEAST_FONT and height >= LINE_INCHES:
        axes.text(x, stage, name, va="center_baseline", fontsize=min(FONT, across), **style)
    elif upwards >= LEAST_FONT and width >= LINE_INCHES:
        axes.text(x, stage, name, va="center", fontsize=min(FONT, upwards), rotation=90, **style)


def _numbers(axes: "Axes", run: RunDescription, shown: Sequence[int], width: float, room: float) -> None:
    """Beside each bar: the parameters of the stage, and the memory that it is predicted to need, without libraries."""
    columns = [("parameters", PARAMETERS_AT, [count(partition.parameters) for partition in run.partitions])]
    if run.prediction is not None:
        columns.append(("memory of the model", MEMORY_AT, [size(number) for number in run.prediction.memory_bytes]))
    panel = room - HEADING_INCHES
    for heading, at, numbers in columns:
        x = 1 + at / width
        top = 1 + 0.1 / panel
        axes.text(x, top, heading, transform=axes.transAxes, ha="right", fontsize=FONT, color=PALE_INK)
        for stage in shown:
            y = 1 - (stage + 0.5) / len(run.partitions)
            style: dict[str, Any] = {"ha": "right", "va": "center_baseline", "fontsize": 9, "color": INK}
            axes.text(x, y, numbers[stage], transform=axes.transAxes, **style)


def _title(figure: "Figure", run: RunDescription, height: float) -> None:
    stages = [_seconds(partition) for partition in run.partitions]
    layers = sum(len(partition.layers) for partition in run.partitions)
    y = 1 - 0.27 / height
    title = f"{run.model_name}  ·  {layers:,} layers on {len(stages)} stage{'s' if len(stages) > 1 else ''}"
    words: dict[str, Any] = {"fontsize": 11, "color": INK, "va": "center_baseline"}
    figure.text(LEFT_INCHES / WIDTH_INCHES, y, title, fontweight="bold", **words)
    longest = duration(max(stages)) if run.prediction is not None else percent(max(stages) / sum(stages))
    if len(stages) > 1:
        over = max(stages) * len(stages) / sum(stages) - 1
        longest = f"slowest stage {longest} ({percent(over)} over the mean)"
    figure.text(1 - 0.15 / WIDTH_INCHES, y, longest, ha="right", **words)


def _legend(figure: "Figure", run: RunDescription) -> None:
    """The layers across, forward above backward; then the mean."""
    import numpy as np

    width, height = figure.get_size_inches()
    axes = figure.add_axes((0.0, 0.0, 1.0, LEGEND_INCHES / height))  # in inches from here on
    axes.set(xlim=(0, width), ylim=(0, LEGEND_INCHES))
    axes.set_axis_off()
    words: dict[str, Any] = {"fontsize": FONT, "color": INK, "va": "center_baseline"}
    layers = min(64, sum(len(partition.layers) for partition in run.partitions))
    table = [[palette.colour(what, n, layers) for n in range(layers)] for what in PARTS]
    top, line, left = 0.42, 0.16, LEFT_INCHES
    axes.imshow(
        np.array(table, np.uint8),
        extent=(left + 0.75, left + 2.55, top - 2 * line, top),
        aspect="auto",
        interpolation="nearest",
    )
    axes.set(xlim=(0, width), ylim=(0, LEGEND_INCHES))
    for row, what in enumerate(PARTS):
        axes.text(left, top - line * (row + 0.5), palette.WORDS[what], **words)
    axes.text(left + 2.65, top - line, "first to last layer", **words)
    if len(run.partitions) > 1:
        at = left + 4.1
        colour = palette.hexadecimal(palette.UPDATE)
        axes.plot([at, at + 0.34], [top - line] * 2, color=colour, linewidth=1.0, linestyle=(0, (4, 3)))
        axes.text(at + 0.42, top - line, "mean of the stages: no cut is faster", **words)


def _corners(stage: int, start: float, end: float) -> list[tuple[float, float]]:
    top, bottom = stage - BAR_HEIGHT / 2, stage + BAR_HEIGHT / 2
    return [(start, top), (end, top), (end, bottom), (start, bottom)]


def _shown(stages: int) -> range:
    """The stages that are named."""
    return range(0, stages, next(n for n in (1, 2, 4, 8, 16, 32, 64, 10**9) if stages / n <= SHOWN_STAGES))


def _seconds(partition: PartitionDescription) -> float:
    return sum(forward + backward for forward, backward in partition.layer_seconds)


def _end(partitions: Sequence[PartitionDescription]) -> float:
    return max(map(_seconds, partitions))
