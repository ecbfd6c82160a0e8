"""What the processes of a run hold, as bars made of parts: the paper's table 1, per process, from what was measured.

Without libraries: beside the half a GiB that those take in every process on a CPU, a small model could not be seen.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.patches import Patch

from gpipe_cli.reporting.plots import picture
from gpipe_cli.reporting.plots.palette import INK, MEMORY_PARTS, oklch
from gpipe_cli.units import GIB, MIB, size

ROW_INCHES, PANEL_INCHES, TITLE_INCHES, AXIS_INCHES, LEGEND_INCHES = 0.4, 4.8, 0.6, 0.5, 0.5
LEFT_INCHES, RIGHT_INCHES = 0.72, 0.8  # at the right stand the sums


def draw(processes: Sequence[Mapping[str, Any]], title: str) -> picture.Picture:
    """A bar for each entry of ``memory`` in result.json, as an image of shape (height, width, 3) for narrow places."""
    assert processes, "nothing to draw"
    panel = min(ROW_INCHES * len(processes), PANEL_INCHES)
    width = picture.NARROW_INCHES - LEFT_INCHES - RIGHT_INCHES
    figure = picture.new_figure(TITLE_INCHES + panel + AXIS_INCHES + LEGEND_INCHES, picture.NARROW_INCHES)
    axes = picture.add_axes(figure, LEFT_INCHES, AXIS_INCHES + LEGEND_INCHES, width, panel)
    shown = picture.name_stages(axes, len(processes))
    axes.set_yticks(list(shown), [_name(processes[at]["stage"]) for at in shown], color=INK)
    sums = [process["peak"] - process["libraries"] for process in processes]
    name, unit = ("GiB", GIB) if max(sums) >= 10 * GIB else ("MiB", MIB)
    left = [0.0] * len(processes)
    for part, colour in MEMORY_PARTS.items():
        sizes = [max(0.0, process[part] / unit) for process in processes]  # `other` is below 0 where parts took turns
        bars = [(row, start, start + held) for row, (start, held) in enumerate(zip(left, sizes, strict=True))]
        picture.add_bars(axes, bars, facecolors=oklch(*colour), edgecolors="white", linewidths=0.5)
        left = [start + held for start, held in zip(left, sizes, strict=True)]
    picture.show_axis(axes, max(*left, 1e-3), 1.0, f"peak of each process, {name}")
    for at in shown:
        axes.text(1.04, at, size(max(0, sums[at])), transform=axes.get_yaxis_transform(), va="center_baseline",
                  fontsize=9, color=INK)  # fmt: skip
    libraries = max(process["libraries"] for process in processes)
    beside = f"beside libraries of {size(libraries)} in each" if libraries else "as the allocator of the GPU has it"
    picture.put_titles(axes, title, beside, narrow=True)
    marks = [Patch(color=oklch(*colour), label=part) for part, colour in MEMORY_PARTS.items()]
    picture.add_legend(figure, marks, 0.1, 0.1, ncols=3, handlelength=1.6, columnspacing=1.4, labelspacing=0.35)
    return picture.pixels(figure)


def _name(stage: int | str | None) -> str:
    return "all" if stage is None else f"stage {stage}"
