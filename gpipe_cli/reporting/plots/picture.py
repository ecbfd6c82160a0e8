"""What all pictures share. matplotlib takes half a second to import: who draws only sometimes imports this there."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure
from matplotlib.image import imsave
from matplotlib.path import Path as Outline
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from gpipe_cli.reporting.plots.palette import GRID, INK, PALE_INK, Colour, rgb
from gpipe_cli.system.files import write_whole

Picture = NDArray[np.uint8]  # shape (height, width, 3)

DPI = 160
WIDTH_INCHES = 11.0
# TensorBoard shows pictures about 350 pixels wide: on so little paper letters stay readable there.
NARROW_INCHES = 4.0
SHOWN_STAGES = 16  # with more stages than these only some are named
BAR_HEIGHT = 0.86  # height of a bar, where a row has height 1
MARGIN = 1.004  # length of an axis, where the longest bar has length 1
LEGEND_LINE_INCHES = 0.16


def new_figure(height_inches: float, width_inches: float = WIDTH_INCHES) -> Figure:
    return Figure(figsize=(width_inches, height_inches), dpi=DPI, facecolor="white")


def add_axes(figure: Figure, left: float, bottom: float, width: float, height: float) -> Axes:
    """Axes without a frame, placed in inches."""
    across, up = figure.get_size_inches()
    axes = figure.add_axes((left / across, bottom / up, width / across, height / up))
    without_frame(axes)
    return axes


def without_frame(axes: Axes) -> None:
    for side in axes.spines.values():
        side.set_visible(False)
    axes.tick_params(axis="both", which="both", length=0, pad=5, labelsize=9, labelcolor=PALE_INK)
    axes.set_axisbelow(True)


def put_titles(axes: Axes, left: str, right: str, narrow: bool) -> None:
    """Above a panel: in bold what it shows, and beside that, or on narrow paper below it, numbers."""
    look: dict[str, Any] = {"fontsize": 11, "color": INK, "y": 1.0}
    axes.set_title(left, loc="left", fontweight="bold", **look, pad=21 if narrow else 7)
    if narrow:
        below: dict[str, Any] = {"xytext": (0, 7), "textcoords": "offset points", "fontsize": 9, "color": INK}
        axes.annotate(right, (0, 1), xycoords="axes fraction", **below)
    else:
        axes.set_title(right, loc="right", **look, pad=7)


def name_stages(axes: Axes, stages: int) -> None:
    """A row for each stage, the first at the top, of which at most SHOWN_STAGES are named."""
    step = next(n for n in (1, 2, 4, 8, 16, 32, 64, stages) if stages / n <= SHOWN_STAGES)
    shown = range(0, stages, step)
    axes.set_ylim(stages - 0.5, -0.5)
    axes.set_yticks(list(shown), [f"stage {stage}" for stage in shown], color=INK)


def show_axis(axes: Axes, end: float, unit: float, words: str) -> None:
    """The axis below bars that end at `end`, in units of so much; without numbers if there are no `words`."""
    axes.set_xlim(0, end * MARGIN)
    axes.xaxis.set_major_locator(MaxNLocator(10, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value / unit:g}")
    axes.tick_params(labelbottom=bool(words))
    axes.grid(axis="x", color=GRID, linewidth=0.6)
    axes.set_xlabel(words, fontsize=9, color=PALE_INK, loc="right", labelpad=3)


def add_bars(axes: Axes, bars: Sequence[tuple[int, float, float]], **look: Any) -> None:
    """Bars, each with the row of its stage, its start and its end; ``look`` is that of a PathCollection. They are one
    path, as a hatching is drawn anew for each path."""
    half = BAR_HEIGHT / 2
    corners = [
        ((start, row - half), (end, row - half), (end, row + half), (start, row + half)) for row, start, end in bars
    ]
    axes.add_collection(PathCollection([Outline.make_compound_path_from_polys(np.array(corners))], **look))


def add_colour_table(
    figure: Figure, rows: Mapping[str, Sequence[Colour]], left: float, top: float, width: float
) -> Axes:
    """Colours side by side in rows, whose names stand left of them; places in inches."""
    height = LEGEND_LINE_INCHES * len(rows)
    axes = add_axes(figure, left, top - height, width, height)
    table = [[rgb(colour) for colour in colours] for colours in rows.values()]
    axes.imshow(np.array(table, np.uint8), aspect="auto", interpolation="nearest")
    axes.set_xticks([])
    axes.set_yticks(range(len(rows)), list(rows), fontsize=8, color=INK)
    return axes


def add_legend(figure: Figure, handles: Sequence[Artist], left: float, bottom: float, **look: Any) -> None:
    """Labelled patches or lines beside each other, at a place in inches."""
    across, up = figure.get_size_inches()
    figure.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(left / across, bottom / up), borderpad=0, borderaxespad=0,
        frameon=False, labelcolor=INK, **({"fontsize": 8, "ncols": len(handles)} | look),
    )  # fmt: skip


def pixels(figure: Figure) -> Picture:
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def png(picture: Picture) -> bytes:
    content = io.BytesIO()
    imsave(content, picture, format="png", dpi=DPI)
    return content.getvalue()


def write_picture(path: Path, picture: Picture) -> None:
    write_whole(path, png(picture))
