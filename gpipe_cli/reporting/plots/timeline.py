"""A timeline as a picture: Figure 2(c) of the paper, drawn from what was measured or predicted.

A row per stage, a panel per timeline, all panels on one time axis: what came true of a prediction is seen at a glance.
A few thousand bars are drawn one by one, with their names where there is room. More than that (128 stages and 512
micro-batches have 196,608) would take minutes; they are sampled into an image, several samples a pixel.
"""

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpipe_cli.reporting.plots import palette
from gpipe_cli.reporting.timeline_view import ACTIONS, BarKind, TimelineView, axis_ticks, axis_unit, in_percent
from gpipe_cli.system.files import write_whole
from gpipe_cli.units import duration

if TYPE_CHECKING:  # matplotlib takes half a second to import: only who draws pays for it
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

MOST_BARS = 3000  # of all panels, drawn one by one
DPI = 160
WIDTH_INCHES = 11.0
LEFT_INCHES, RIGHT_INCHES = 0.78, 0.22
TOP_INCHES, TITLE_INCHES, AXIS_INCHES, LEGEND_INCHES = 0.0, 0.42, 0.5, 0.82
ROW_INCHES, PANEL_INCHES = 0.4, 4.8  # a row is lower where this would make the panel higher
SAMPLES = 4  # a pixel, across
BAR_HEIGHT = 0.86  # of a row
MARGIN = 1.004  # of the time axis behind the last bar
HATCHES: dict[BarKind, str] = {"R": "////", "waiting": "\\\\\\\\", "transfer": "xxxxx"}
CHARACTER_INCHES = 0.068  # of a bar's name
INK, PALE_INK = "#25262c", "#71737d"


def draw(views: Sequence[TimelineView]) -> "NDArray[np.uint8]":
    """The timelines under each other on one time axis, as an image of shape (height, width, 3)."""
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(_figure(views))
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def write_picture(path: Path, picture: "NDArray[np.uint8]") -> None:
    """Writes what ``draw`` made as a PNG file, whole or not at all."""
    write_whole(path, png(picture))


def png(picture: "NDArray[np.uint8]") -> bytes:
    """What ``draw`` made as the content of a PNG file."""
    from matplotlib.image import imsave

    content = io.BytesIO()
    imsave(content, picture, format="png", dpi=DPI)
    return content.getvalue()


def _figure(views: Sequence[TimelineView]) -> "Figure":
    from matplotlib.figure import Figure

    assert views, "nothing to draw"
    heights = [min(ROW_INCHES * len(view.stages), PANEL_INCHES) for view in views]
    height = TOP_INCHES + sum(heights) + TITLE_INCHES * len(views) + AXIS_INCHES + LEGEND_INCHES
    figure = Figure(figsize=(WIDTH_INCHES, height), dpi=DPI, facecolor="white")
    end = max(view.end_seconds for view in views) or 1.0
    micro_batches = max(view.micro_batches for view in views)
    single = sum(len(bars) for view in views for bars in view.stages) <= MOST_BARS
    room = WIDTH_INCHES - LEFT_INCHES - RIGHT_INCHES
    top = height - TOP_INCHES
    for view, panel in zip(views, heights, strict=True):
        top -= TITLE_INCHES + panel
        box = (LEFT_INCHES / WIDTH_INCHES, top / height, room / WIDTH_INCHES, panel / height)
        axes = figure.add_axes(box)
        _frame(axes, view, end, last=view is views[-1])
        if single:
            _bars(axes, view, micro_batches, end, room, panel)
        else:
            _sampled(axes, view, micro_batches, end, round(room * DPI), round(panel * DPI))
    _legend(figure, micro_batches, {bar.what for view in views for bars in view.stages for bar in bars}, single)
    return figure


def _frame(axes: "Axes", view: TimelineView, end: float, last: bool) -> None:
    """Everything around the bars: title, stages, time."""
    stages = len(view.stages)
    axes.set_xlim(0, end * MARGIN)
    axes.set_ylim(stages - 0.5, -0.5)
    step = next(n for n in (1, 2, 4, 8, 16, 32, 64, 10**9) if stages / n <= 16)
    shown = range(0, stages, step)
    axes.set_yticks(list(shown), [f"stage {stage}" for stage in shown], fontsize=9, color=INK)
    axes.tick_params(axis="both", length=0, pad=5)
    for side in axes.spines.values():
        side.set_visible(False)
    name, seconds = axis_unit(end)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / seconds:g}")
    ticks = axis_ticks(end)
    axes.set_xticks(ticks, [f"{tick / seconds:g}" for tick in ticks] if last else [""] * len(ticks))
    for label in axes.get_xticklabels():
        label.set(fontsize=9, color=PALE_INK)
    axes.grid(axis="x", color="#d5d6dc", linewidth=0.6)
    axes.set_axisbelow(True)
    if last:
        axes.set_xlabel(f"time since the step began, {name}", fontsize=9, color=PALE_INK, loc="right", labelpad=3)
    title: dict[str, Any] = {"fontsize": 11, "color": INK, "y": 1.0, "pad": 7}
    axes.set_title(f"{view.kind}  ·  {view.title}", loc="left", fontweight="bold", **title)
    shares = in_percent(view.breakdown)
    idle = f"idle {shares['idle']:.1f} %, of it bubble {shares['bubble']:.1f} %"
    axes.set_title(f"step {duration(view.step_seconds)}   {idle}", loc="right", **title)


def _bars(axes: "Axes", view: TimelineView, micro_batches: int, end: float, width: float, height: float) -> None:
    """Every bar by itself; ``width`` and ``height`` of the panel in inches."""
    stages = range(len(view.stages))
    idle = [_corners(stage, 0.0, view.step_seconds) for stage in stages]
    _add(axes, idle, palette.IDLE, palette.IDLE_LINE, HATCHES["waiting"])
    placed = [(bar, stage) for stage in stages for bar in view.stages[stage]]
    groups: dict[tuple[BarKind, int | None], list[list[tuple[float, float]]]] = {}
    for bar, stage in placed:
        corners = _corners(stage, bar.start_seconds, bar.end_seconds)
        groups.setdefault((bar.what, bar.micro_batch if bar.what in ACTIONS else None), []).append(corners)
    for (what, micro_batch), polygons in groups.items():
        face = palette.colour(what, micro_batch, micro_batches)
        match what:
            case "waiting":
                _add(axes, polygons, face, palette.IDLE_LINE, HATCHES[what])
            case "R":
                _add(axes, polygons, face, palette.colour("F", micro_batch, micro_batches), HATCHES[what])
                _add(axes, polygons, None, (255, 255, 255), None)
            case _:
                _add(axes, polygons, face, (255, 255, 255), HATCHES.get(what))
    inches = width / (end * MARGIN)
    size = min(9.0, 60 * height / len(view.stages))
    for bar, stage in placed:
        room = (bar.end_seconds - bar.start_seconds) * inches
        if bar.what not in (*ACTIONS, "update") or room < CHARACTER_INCHES * len(bar.name) * size / 8 + 0.04:
            continue
        middle = (bar.start_seconds + bar.end_seconds) / 2
        ink = "white" if bar.what in ("B", "update") else INK
        label = axes.text(middle, stage, bar.name, ha="center", va="center_baseline", fontsize=size, color=ink)
        if bar.what == "R":  # letters on hatching cannot be read
            face = palette.colour("R", bar.micro_batch, micro_batches)
            label.set_bbox({"facecolor": _rgb(face), "edgecolor": "none", "pad": 0.8})


def _add(
    axes: "Axes",
    polygons: Sequence[Sequence[tuple[float, float]]],
    face: palette.Colour | None,
    edge: palette.Colour,
    hatch: str | None,
) -> None:
    """Bars of one look; a hatching takes the colour of the edge, which is then not drawn unless it is white."""
    from matplotlib.collections import PolyCollection

    line = 0.7 if edge == (255, 255, 255) else 0.0
    colour = "none" if face is None else _rgb(face)
    axes.add_collection(
        PolyCollection(polygons, facecolors=colour, edgecolors=_rgb(edge), hatch=hatch, linewidths=line)
    )


def _sampled(axes: "Axes", view: TimelineView, micro_batches: int, end: float, width: int, height: int) -> None:
    """All bars as an image of ``width`` x ``height`` pixels."""
    import numpy as np

    seconds = (np.arange(width * SAMPLES) + 0.5) * (end * MARGIN / (width * SAMPLES))
    background = np.where((seconds < view.step_seconds)[:, None], palette.IDLE, (255, 255, 255))
    rows = np.empty((len(view.stages), width, 3), np.float32)
    colours: dict[tuple[BarKind, int | None], palette.Colour] = {}
    for stage, bars in enumerate(view.stages):
        row = background.astype(np.float32)
        if bars:
            for key in {(bar.what, bar.micro_batch) for bar in bars} - colours.keys():
                colours[key] = palette.colour(*key, micro_batches)
            starts = np.array([bar.start_seconds for bar in bars])
            ends = np.array([bar.end_seconds for bar in bars])
            faces = np.array([colours[bar.what, bar.micro_batch] for bar in bars], np.float32)
            found = np.searchsorted(starts, seconds, side="right") - 1
            inside = (found >= 0) & (seconds < ends[found])
            row[inside] = faces[found[inside]]
        rows[stage] = row.reshape(width, SAMPLES, 3).mean(axis=1)
    # Nearest row of each line of pixels; the last pixel of a row stays white where rows are high enough for it.
    lines = (np.arange(height) * len(view.stages)) // height
    image = rows[lines]
    if height >= 8 * len(view.stages):
        image[:-1][lines[:-1] != lines[1:]] = 255
    extent = (0.0, end * MARGIN, len(view.stages) - 0.5, -0.5)
    axes.imshow(image.round().astype(np.uint8), extent=extent, aspect="auto", interpolation="nearest", zorder=2)


def _legend(figure: "Figure", micro_batches: int, seen: set[BarKind], hatched: bool) -> None:
    """Micro-batches across, kinds of actions down; beside it what has no micro-batch."""
    import numpy as np
    from matplotlib.patches import Rectangle

    width, height = figure.get_size_inches()
    axes = figure.add_axes((0.0, 0.0, 1.0, LEGEND_INCHES / height))  # in inches from here on
    axes.set(xlim=(0, width), ylim=(0, LEGEND_INCHES))
    axes.set_axis_off()
    words: dict[str, Any] = {"fontsize": 8, "color": INK, "va": "center_baseline"}
    left, line, top = LEFT_INCHES, 0.16, 0.57
    actions = [what for what in ACTIONS if what in seen]
    if actions:
        table = [[palette.colour(what, m, micro_batches) for m in range(micro_batches)] for what in actions]
        box = (left + 0.95, left + 3.25, top - line * len(actions), top)
        axes.imshow(np.array(table, np.uint8), extent=box, aspect="auto", interpolation="nearest")
        axes.set(xlim=(0, width), ylim=(0, LEGEND_INCHES))
        for row, what in enumerate(actions):
            axes.text(left, top - line * (row + 0.5), f"{what}  {palette.WORDS[what]}", **words)
        half = (box[1] - box[0]) / micro_batches / 2 if micro_batches <= 32 else 0.0
        axes.text(box[0] + half, top + 0.1, "0", ha="center", **words)
        if micro_batches > 1:
            axes.text(box[1] - half, top + 0.1, str(micro_batches - 1), ha="center", **words)
            axes.text((box[0] + box[1]) / 2, top + 0.1, "micro-batch", ha="center", **(words | {"color": PALE_INK}))
        left += 3.65
    for name, face, edge, hatch in _other_marks(seen):
        x, y = left, top - line * 1.5 - 0.085
        pattern = hatch if hatched else None
        axes.add_patch(
            Rectangle((x, y), 0.34, 0.17, facecolor=_rgb(face), edgecolor=_rgb(edge), hatch=pattern, linewidth=0)
        )
        axes.text(x + 0.42, y + 0.085, name, **words)
        left += 0.68 + 0.07 * len(name)


def _other_marks(seen: set[BarKind]) -> Iterator[tuple[str, palette.Colour, palette.Colour, str | None]]:
    marks: tuple[tuple[BarKind, palette.Colour], ...] = (("waiting", palette.IDLE_LINE), ("transfer", (255, 255, 255)))
    for what, edge in marks:
        if what in seen:
            yield palette.WORDS[what], palette.colour(what, None, 1), edge, HATCHES.get(what)
    yield palette.OTHERWISE_IDLE, palette.IDLE, palette.IDLE_LINE, HATCHES["waiting"]
    if "update" in seen:
        yield palette.WORDS["update"], palette.colour("update", None, 1), palette.UPDATE, None


def _corners(stage: int, start: float, end: float) -> list[tuple[float, float]]:
    top, bottom = stage - BAR_HEIGHT / 2, stage + BAR_HEIGHT / 2
    return [(start, top), (end, top), (end, bottom), (start, bottom)]


def _rgb(colour: palette.Colour) -> tuple[float, float, float]:
    red, green, blue = colour
    return red / 255, green / 255, blue / 255
