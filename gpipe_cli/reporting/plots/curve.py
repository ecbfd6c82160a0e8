"""The picture of `gpipe plan solve=memory_time`: peak memory against the time of a step, with the Pareto front."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from gpipe_cli.reporting.plots.palette import GRID, INK, PALE_INK, run_colour
from gpipe_cli.reporting.plots.picture import Picture, new_figure, pixels, without_frame
from gpipe_cli.reporting.plots.timeline_values import axis_unit
from gpipe_cli.results.plan import PlannedCurve, PlannedPoint
from gpipe_cli.units import memory_unit, size

_HEIGHT_INCHES = 5.6
_SHOWN = 1.3  # steps longer than this many times the slowest of the front are left out
_LINE = 0.032  # height of a label, as a share of the axes


def draw_curve(curve: PlannedCurve, title: str) -> Picture:
    """All points, faint; the front joined and named; the lower bound and the limit to the memory dashed. An image of
    shape (height, width, 3)."""
    figure = new_figure(_HEIGHT_INCHES)
    figure.set_layout_engine("constrained")
    axes = figure.subplots()
    front, least = curve.front, curve.lower_bound_seconds
    names = list(dict.fromkeys(point.setting.schedule for point in curve.points))
    longest = _SHOWN * max(point.step_seconds for point in front)
    shown = [point for point in curve.points if point.step_seconds <= longest]
    unit, unit_name = memory_unit(max(point.memory_bytes for point in curve.points))
    time_name, seconds = axis_unit(max(point.step_seconds for point in shown))

    def xy(points: Sequence[PlannedPoint]) -> tuple[list[float], list[float]]:
        return [point.memory_bytes / unit for point in points], [point.step_seconds / seconds for point in points]

    for number, name in enumerate(names):
        colour = run_colour(number, len(names))
        own = [point for point in shown if point.setting.schedule == name]
        axes.plot(*xy(own), "o", color=colour, markersize=4.5, alpha=0.3, markeredgewidth=0)
        best = [point for point in own if not point.dominated]
        axes.plot(*xy(best), "o", color=colour, markersize=8, markeredgecolor="white", zorder=4)
        axes.plot([], [], "o", color=colour, markersize=6, label=name)
    axes.plot(*xy(front), color=INK, linewidth=1.3, drawstyle="steps-post", zorder=3)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_ylim(0.92 * least / seconds, 1.04 * longest / seconds)
    axes.axhline(least / seconds, color=INK, linewidth=1, linestyle=(0, (5, 4)))
    axes.annotate(
        f"no step on {curve.devices} devices takes less than {least / seconds:.3g} {time_name}",
        (0.99, least / seconds), (0, -4), xycoords=("axes fraction", "data"), textcoords="offset points",
        fontsize=8, color=INK, ha="right", va="top",
    )  # fmt: skip
    if curve.limit_bytes is not None and curve.limit_bytes / unit < 1.5 * axes.get_xlim()[1]:
        axes.axvline(curve.limit_bytes / unit, color=PALE_INK, linewidth=1, linestyle=(0, (2, 3)))
        axes.annotate(
            f" limit {size(curve.limit_bytes)}", (curve.limit_bytes / unit, 1.0), xycoords=("data", "axes fraction"),
            fontsize=8, color=PALE_INK, va="top",
        )  # fmt: skip
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.grid(color=GRID, linewidth=0.6)
    without_frame(axes)
    axes.set_xlabel(f"memory of the fullest device, {unit_name}", fontsize=9, color=PALE_INK, loc="right")
    axes.set_ylabel(f"time of a step, {time_name}", fontsize=9, color=PALE_INK, loc="top")
    left_out = len(curve.points) - len(shown)
    also = f", {left_out} slower ones left out" if left_out else ""
    axes.set_title(f"{title}, predicted: {len(shown)} candidates{also}", loc="left", fontsize=11, color=INK)
    figure.legend(loc="outside lower left", ncols=len(names), frameon=False, fontsize=9)
    figure.draw_without_rendering()
    _name(axes, front, xy(front))
    return pixels(figure)


def _name(axes: Axes, points: Sequence[PlannedPoint], places: tuple[list[float], list[float]]) -> None:
    """Labels right above the points of the front, the ends first; one that would cover another is left out."""
    taken: list[tuple[float, float, float]] = []
    placed = list(zip(points, *places, strict=True))
    for point, *xy in [*placed[-1:], *placed[:-1]]:
        setting, place = point.setting, (xy[0], xy[1])
        text = f"M {setting.micro_batches}, {setting.recompute}"
        if setting.stages_per_process > 1:
            text += f", {setting.placement}"
        x, y = axes.transAxes.inverted().transform(axes.transData.transform(place))
        width = 0.0075 * len(text)
        if any(abs(y - other) < _LINE and x < end and start < x + width for other, start, end in taken):
            continue
        taken.append((y, x, x + width))
        axes.annotate(text, place, (6, 5), textcoords="offset points", fontsize=7.5, color=INK)
