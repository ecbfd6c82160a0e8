"""A timeline as a picture: Figure 2(c) of the paper, drawn from what was measured or predicted.

Up to MAX_BARS bars are hatched, outlined and, where they fit, labelled. More bars would take minutes to draw that way
and are plain. Of larger steps (128 stages and 512 micro-batches have 131,072 actions) a window is drawn.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.path import Path as Outline
from matplotlib.ticker import MaxNLocator

from gpipe_cli.reporting.plots import palette, picture
from gpipe_cli.reporting.plots.palette import GRID, INK, PALE_INK
from gpipe_cli.reporting.plots.timeline_values import (
    ACTIONS,
    BarKind,
    TimelineView,
    axis_unit,
    last_stages_and_actions,
    to_percent,
)
from gpipe_cli.units import duration

MAX_BARS = 3000  # bars of all panels together; more bars are drawn plain
LEFT_INCHES, RIGHT_INCHES = 0.78, 0.22
TITLE_INCHES, AXIS_INCHES, LEGEND_INCHES = 0.42, 0.5, 0.82
LEGEND_TOP_INCHES = 0.57  # for up to LEGEND_LINES kinds of actions; more kinds make the legend higher
LEGEND_LINES = 3
ROW_INCHES, PANEL_INCHES = 0.4, 4.8  # rows shrink where the panel would exceed its height
HATCHES: dict[BarKind, str] = {"R": "////", "waiting": "\\\\\\\\", "transfer": "xxxxx"}
SHOWN_STAGES, SHOWN_ACTIONS = 16, 20  # of a window; with more stages, only some are labelled
BAR_HEIGHT = 0.86  # fraction of a row's height
MARGIN = 1.004  # length of the time axis, relative to the longest timeline
LEGEND_LINE_INCHES = 0.16
CHARACTER_INCHES = 0.068  # width of a character in a bar's name
# Inches: width of the figure, margins left and right of the bars, height of a title.
WIDE = (picture.WIDTH_INCHES, LEFT_INCHES, RIGHT_INCHES, TITLE_INCHES)
NARROW = (picture.NARROW_INCHES, 0.62, 0.1, 0.6)


def draw(views: Sequence[TimelineView], *, narrow: bool = False) -> picture.Picture:
    """The timelines one below the other on a common time axis, as an image of shape (height, width, 3)."""
    assert views, "nothing to draw"
    figure_width, left, right, title = WIDE if not narrow else NARROW
    views = [last_stages_and_actions(view, SHOWN_STAGES, SHOWN_ACTIONS) for view in views]
    rows = [range(max(0, len(view.stages) - SHOWN_STAGES) if view.window else 0, len(view.stages)) for view in views]
    heights = [min(ROW_INCHES * len(shown), PANEL_INCHES) for shown in rows]
    kinds = {bar.what for view in views for bars in view.stages for bar in bars}
    lines = LEGEND_LINE_INCHES * max(0, sum(what in kinds for what in ACTIONS) - LEGEND_LINES)
    top = sum(heights) + title * len(views) + AXIS_INCHES + LEGEND_INCHES + lines
    figure = picture.new_figure(top, figure_width)
    end = max(view.end_seconds for view in views) or 1.0
    name, unit = axis_unit(end)
    micro_batches = max(view.micro_batches for view in views)
    single = sum(len(bars) for view in views for bars in view.stages) <= MAX_BARS
    width = figure_width - left - right
    for view, shown, height in zip(views, rows, heights, strict=True):
        top -= title + height
        axes = _add_axes(figure, left, top, width, height)
        _name_stages(axes, shown)
        label = f"{view.window}; time in {name}" if view.window else f"time since the step began, {name}"
        _show_axis(axes, end, unit, label if view is views[-1] else "")
        shares = to_percent(view.breakdown)
        idle = f"idle {shares['idle']:.1f} %, including bubble {shares['bubble']:.1f} %"
        numbers = f"step {duration(view.step_seconds)}{', ' if narrow else '   '}{idle}"
        note = f", {view.note}" if view.note and not narrow else ""
        _put_titles(axes, f"{view.kind}  ·  {view.title}{note}", numbers, narrow)
        _bars(axes, view, micro_batches, single)
        if single:
            _label_bars(axes, view, micro_batches, width / (end * MARGIN), height / len(shown))
    _legend(figure, micro_batches, kinds, single, LEGEND_TOP_INCHES + lines, narrow)
    return picture.to_pixels(figure)


def _bars(axes: Axes, view: TimelineView, micro_batches: int, hatched: bool) -> None:
    groups: dict[tuple[BarKind, int | None], list[tuple[int, float, float]]] = {}
    for stage, bars in enumerate(view.stages):
        for what, micro_batch, start, end in bars:
            groups.setdefault((what, micro_batch if what in ACTIONS else None), []).append((stage, start, end))
    # Hatching takes the colour of the edge; width 0 hides the edge itself.
    idle = {"edgecolors": palette.IDLE_LINE, "hatch": HATCHES["waiting"]} if hatched else {}
    outline = {"edgecolors": "white", "linewidths": 0.7} if hatched else {"linewidths": 0.0}
    whole_step = [(stage, 0.0, view.step_seconds) for stage in range(len(view.stages))]
    _add_bars(axes, whole_step, facecolors=palette.IDLE, linewidths=0.0, **idle)
    for (what, micro_batch), placed in groups.items():
        face = palette.colour(what, micro_batch, micro_batches)
        if what == "waiting":
            _add_bars(axes, placed, facecolors=face, linewidths=0.0, **idle)
        elif what == "R" and hatched:
            forward = palette.colour("F", micro_batch, micro_batches)
            _add_bars(axes, placed, facecolors=face, edgecolors=forward, hatch=HATCHES["R"], linewidths=0.0)
            _add_bars(axes, placed, facecolors="none", **outline)
        else:
            _add_bars(axes, placed, facecolors=face, hatch=HATCHES.get(what) if hatched else None, **outline)


def _label_bars(axes: Axes, view: TimelineView, micro_batches: int, inches: float, row: float) -> None:
    """Labels the bars that fit their names; ``inches`` per second, ``row``: height of a row in inches."""
    size = min(9.0, 60 * row)
    for stage, bar in ((stage, bar) for stage, bars in enumerate(view.stages) for bar in bars):
        room = (bar.end_seconds - bar.start_seconds) * inches
        if bar.what not in (*ACTIONS, "update") or room < CHARACTER_INCHES * len(bar.name) * size / 8 + 0.04:
            continue
        middle = (bar.start_seconds + bar.end_seconds) / 2
        ink = "white" if bar.what in ("B", "I", "W", "update") else INK
        label = axes.text(middle, stage, bar.name, ha="center", va="center_baseline", fontsize=size, color=ink)
        if bar.what == "R":  # letters on hatching cannot be read
            face = palette.colour("R", bar.micro_batch, micro_batches)
            label.set_bbox({"facecolor": face, "edgecolor": "none", "pad": 0.8})


def _legend(figure: Figure, micro_batches: int, kinds: set[BarKind], hatched: bool, top: float, narrow: bool) -> None:
    """A table of colours, kinds of actions by micro-batches; to its right, the kinds of bars without a micro-batch."""
    left, table = (0.05, 1.25) if narrow else (LEFT_INCHES, 2.3)
    rows = {
        f"{what}  {palette.KIND_NAMES[what]}": [palette.colour(what, m, micro_batches) for m in range(micro_batches)]
        for what in ACTIONS
        if what in kinds
    }
    if rows:
        height = LEGEND_LINE_INCHES * len(rows)
        axes = _add_axes(figure, left + 0.95, top - height, table, height)
        colours = [[list(bytes.fromhex(colour[1:])) for colour in row] for row in rows.values()]
        axes.imshow(np.array(colours, np.uint8), aspect="auto", interpolation="nearest")
        axes.set_yticks(range(len(rows)), list(rows), fontsize=8, color=INK)
        axes.xaxis.tick_top()
        axes.set_xticks(sorted({0, micro_batches - 1}))
        axes.tick_params(axis="x", pad=2, labelsize=8, labelcolor=INK)
        if micro_batches > 1:
            axes.set_title("micro-batch", fontsize=8, color=PALE_INK, y=1.0, pad=3.5)
        left += 0.95 + table + (0.15 if narrow else 0.4)
    marks = {
        palette.KIND_NAMES["waiting"]: (palette.WAITING, palette.IDLE_LINE, HATCHES["waiting"], "waiting" in kinds),
        palette.KIND_NAMES["transfer"]: (palette.TRANSFER, "white", HATCHES["transfer"], "transfer" in kinds),
        palette.OTHERWISE_IDLE: (palette.IDLE, palette.IDLE_LINE, HATCHES["waiting"], True),
        palette.KIND_NAMES["update"]: (palette.UPDATE, palette.UPDATE, None, "update" in kinds),
    }
    patches = [
        Patch(facecolor=face, edgecolor=edge, hatch=hatch if hatched else None, linewidth=0, label=name)
        for name, (face, edge, hatch, present) in marks.items()
        if present
    ]
    figure_width, figure_height = figure.get_size_inches()
    columns, length, spacing, bottom = (1, 2.0, 0.25, 0.06) if narrow else (len(patches), 3.0, 0.5, 0.22)
    figure.legend(
        handles=patches, loc="lower left", bbox_to_anchor=(left / figure_width, bottom / figure_height), borderpad=0,
        borderaxespad=0, frameon=False, labelcolor=INK, fontsize=8, ncols=columns, handlelength=length,
        labelspacing=spacing, handleheight=1.4, columnspacing=3.0,
    )  # fmt: skip


def _add_axes(figure: Figure, left: float, bottom: float, width: float, height: float) -> Axes:
    """Axes without a frame, placed in inches."""
    figure_width, figure_height = figure.get_size_inches()
    axes = figure.add_axes((left / figure_width, bottom / figure_height, width / figure_width, height / figure_height))
    picture.hide_frame(axes)
    return axes


def _put_titles(axes: Axes, left: str, right: str, narrow: bool) -> None:
    """Titles a panel: `left` in bold; `right`, the numbers, next to it, or below it in a narrow figure."""
    look: dict[str, Any] = {"fontsize": 11, "color": INK, "y": 1.0}
    axes.set_title(left, loc="left", fontweight="bold", **look, pad=21 if narrow else 7)
    if narrow:
        below: dict[str, Any] = {"xytext": (0, 7), "textcoords": "offset points", "fontsize": 9, "color": INK}
        axes.annotate(right, (0, 1), xycoords="axes fraction", **below)
    else:
        axes.set_title(right, loc="right", **look, pad=7)


def _name_stages(axes: Axes, stages: range) -> None:
    """Makes a row for each stage, the first at the top, and labels at most SHOWN_STAGES of them."""
    step = next(n for n in (1, 2, 4, 8, 16, 32, 64, len(stages)) if len(stages) / n <= SHOWN_STAGES)
    shown = stages[::step]
    axes.set_ylim(stages.stop - 0.5, stages.start - 0.5)
    axes.set_yticks(list(shown), [f"stage {stage}" for stage in shown], color=INK)


def _show_axis(axes: Axes, end: float, unit: float, label: str) -> None:
    """Draws the time axis up to `end` seconds, in units of `unit` seconds; without numbers if `label` is empty."""
    axes.set_xlim(0, end * MARGIN)
    axes.xaxis.set_major_locator(MaxNLocator(10, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / unit:g}")
    axes.tick_params(labelbottom=bool(label))
    axes.grid(axis="x", color=GRID, linewidth=0.6)
    axes.set_xlabel(label, fontsize=9, color=PALE_INK, loc="right", labelpad=3)


def _add_bars(axes: Axes, bars: Sequence[tuple[int, float, float]], **look: Any) -> None:
    """Draws bars, (row, start, end), as one compound path, since hatching is rendered once per path."""
    half = BAR_HEIGHT / 2
    corners = [
        ((start, row - half), (end, row - half), (end, row + half), (start, row + half)) for row, start, end in bars
    ]
    axes.add_collection(PathCollection([Outline.make_compound_path_from_polys(np.array(corners))], **look))
