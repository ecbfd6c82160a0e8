"""Shares of a step as bars, one above the other: the pie of the paper's NeurIPS version, made to be compared.

A pie tells its own slices apart; beside two others it is bars on one axis that the eye can follow.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from gpipe_cli.reporting.plots.palette import hexadecimal, oklch
from gpipe_cli.reporting.plots.timeline import DPI, INK, PALE_INK, WIDTH_INCHES
from gpipe_cli.reporting.run.step_breakdown import share_word
from gpipe_cli.reporting.timeline_view import SHARES

if TYPE_CHECKING:  # matplotlib takes half a second to import: only who draws pays for it
    import numpy as np
    from numpy.typing import NDArray

ROW_INCHES, AXIS_INCHES, LEGEND_INCHES = 0.55, 0.45, 0.6
LEFT_INCHES, RIGHT_INCHES = 2.3, 0.25
LEAST_NAMED = 0.03  # share of the bar below which there is no room for its number
# Lightness, chroma, hue: useful work is dark, what is done twice lighter, waiting and the rest pale.
COLOURS = {
    "compute": (0.55, 0.13, 262.0),
    "recompute": (0.76, 0.10, 262.0),
    "bubble": (0.72, 0.14, 45.0),
    "imbalance": (0.84, 0.11, 70.0),
    "transfer": (0.72, 0.11, 150.0),
    "update": (0.62, 0.12, 325.0),
    "set_up": (0.80, 0.02, 262.0),
}


def draw_shares(bars: Sequence[tuple[str, Mapping[str, float]]]) -> "NDArray[np.uint8]":
    """A bar for each (name, shares that add up to 1), as an image of shape (height, width, 3).

    Shares are named as in SHARES; one that is missing is none.
    """
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    height = ROW_INCHES * len(bars) + AXIS_INCHES + LEGEND_INCHES
    figure = Figure(figsize=(WIDTH_INCHES, height), dpi=DPI, facecolor="white")
    room = WIDTH_INCHES - LEFT_INCHES - RIGHT_INCHES
    box = (LEFT_INCHES / WIDTH_INCHES, AXIS_INCHES / height, room / WIDTH_INCHES, ROW_INCHES * len(bars) / height)
    axes = figure.add_axes(box)
    left = [0.0] * len(bars)
    for name in SHARES:
        widths = [shares.get(name, 0.0) for _, shares in bars]
        fill = hexadecimal(oklch(*COLOURS[name]))
        axes.barh(range(len(bars)), widths, left=left, height=0.66, color=fill, label=share_word(name), linewidth=0)
        ink = "white" if COLOURS[name][0] < 0.6 else INK
        for at, width in enumerate(widths):
            if width >= LEAST_NAMED:
                words = f"{100 * width:.1f}"
                axes.text(left[at] + width / 2, at, words, ha="center", va="center_baseline", fontsize=9, color=ink)
        left = [begin + width for begin, width in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(bars)), [name for name, _ in bars], fontsize=9.5, color=INK)
    axes.set_xlim(0, 1)
    axes.set_ylim(len(bars) - 0.5, -0.5)
    ticks = [step / 5 for step in range(6)]
    axes.set_xticks(ticks, [f"{100 * tick:.0f} %" for tick in ticks], fontsize=8.5, color=PALE_INK)
    axes.tick_params(length=0, pad=5)
    for side in axes.spines.values():
        side.set_visible(False)
    figure.legend(loc="upper left", bbox_to_anchor=(0.0, 1.0), ncols=len(SHARES), frameon=False, fontsize=9)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()
