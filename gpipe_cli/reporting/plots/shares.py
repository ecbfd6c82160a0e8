"""Shares of a step as stacked bars, one below the other: the paper's pie chart (NeurIPS), made easy to compare."""

from collections.abc import Mapping, Sequence

from gpipe_cli.reporting.plots.palette import INK, oklch
from gpipe_cli.reporting.plots.picture import WIDTH_INCHES, Picture, add_axes, new_figure, pixels
from gpipe_cli.reporting.plots.timeline_values import SHARES
from gpipe_cli.reporting.run.step_breakdown import share_word

ROW_INCHES, AXIS_INCHES, LEGEND_INCHES = 0.55, 0.45, 0.6
LEFT_INCHES, RIGHT_INCHES = 2.3, 0.25
LEAST_NAMED = 0.03  # a smaller share of a bar has no room for its number
# Lightness, chroma, hue: useful work is dark, repeated work lighter, waiting and the rest pale.
COLOURS = {
    "compute": (0.55, 0.13, 262.0),
    "recompute": (0.76, 0.10, 262.0),
    "bubble": (0.72, 0.14, 45.0),
    "imbalance": (0.84, 0.11, 70.0),
    "transfer": (0.72, 0.11, 150.0),
    "update": (0.62, 0.12, 325.0),
    "set_up": (0.80, 0.02, 262.0),
}


def draw_shares(bars: Sequence[tuple[str, Mapping[str, float]]]) -> Picture:
    """A bar for each (name, SHARES that sum to 1, some may be missing), as an image of shape (height, width, 3)."""
    height = ROW_INCHES * len(bars)
    figure = new_figure(height + AXIS_INCHES + LEGEND_INCHES)
    axes = add_axes(figure, LEFT_INCHES, AXIS_INCHES, WIDTH_INCHES - LEFT_INCHES - RIGHT_INCHES, height)
    left = [0.0] * len(bars)
    for name in SHARES:
        widths = [shares.get(name, 0.0) for _, shares in bars]
        drawn = axes.barh(range(len(bars)), widths, 0.66, left, color=oklch(*COLOURS[name]), label=share_word(name))
        words = [f"{100 * width:.1f}" if width >= LEAST_NAMED else "" for width in widths]
        ink = "white" if COLOURS[name][0] < 0.6 else INK
        for number in axes.bar_label(drawn, words, label_type="center", fontsize=9, color=ink):
            number.set_verticalalignment("center_baseline")  # aligned with the names of the bars
        left = [begin + width for begin, width in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(bars)), [name for name, _ in bars], fontsize=9.5, color=INK)
    axes.set_xlim(0, 1)
    axes.set_ylim(len(bars) - 0.5, -0.5)
    axes.xaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f} %")
    figure.legend(loc="upper left", bbox_to_anchor=(0.0, 1.0), ncols=len(SHARES), frameon=False, fontsize=9)
    return pixels(figure)
