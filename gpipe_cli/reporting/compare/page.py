"""comparison.html: a sortable table, speed-up over K, and curves, in one self-contained file.

uPlot (Leon Sorokin, MIT licence), which the file contains, draws the curves: see `uplot/SOURCE`.
"""

import math
import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import quote

from gpipe_cli.reporting.compare.comparison import Comparison
from gpipe_cli.reporting.compare.run_record import SPEEDS, Curve, same_curves
from gpipe_cli.reporting.compare.scaling import Scaling, devices, scalings, work
from gpipe_cli.reporting.page.page import PAGE, in_script
from gpipe_cli.reporting.plots.palette import run_colour
from gpipe_cli.reporting.tables.table import Column, Table, to_html
from gpipe_cli.results.measures import MEASURES
from gpipe_cli.system.files import write_whole
from gpipe_cli.units import plural

MEDIAN_STEPS, LONG = 21, 60  # window of the running median, as which a speed of more than LONG points is drawn
MARKED_POINTS = 30  # curves with at most this many points mark them
LOGARITHMIC = 30  # an axis is logarithmic if the largest value is more than this many times the smallest
THIN, WIDE = 1.4, 7.0  # widths of lines in pixels
DASHES: tuple[list[int], ...] = ([], [10, 4], [2, 2], [12, 4, 2, 4])
DASHED_FROM = 6  # runs; fewer are told apart by colour alone
MOST_POINTS = 1500  # points in a drawn curve: more than there are pixels
MOST_OF_CHART = 30_000  # points of all curves of a chart: the browser keeps a slot for each in every curve
# Settings that label a line of the speed-up chart, where they differ.
NAMING = (
    "micro_batches", "schedule", "recompute", "replicas", "stages_per_process", "placement", "executor", "model.name",
    "dataset.name", "batch_size", "batch_tokens", "precision", "compile",
)  # fmt: skip
# Files of a run to which the table links -> text of the link.
FILES = {PAGE: "pipeline", ".": "folder"}
_HERE = Path(__file__).parent


def write_page(path: Path, comparison: Comparison, notes: Sequence[str], tags: Sequence[str]) -> None:
    """Writes the page, whole or not at all, with the curves of `tags`; links are relative. Raises OSError."""
    write_whole(path, "\n".join(_page(path.parent, comparison, notes, tags)) + "\n")


def _page(folder: Path, comparison: Comparison, notes: Sequence[str], tags: Sequence[str]) -> Iterator[str]:
    runs = comparison.runs
    colours = [run_colour(position, len(runs)) for position in range(len(runs))]
    title = f"{plural(len(runs), 'run')} compared"
    library, style = (_part(f"uplot/{name}") for name in ("uPlot.iife.min.js", "uPlot.min.css"))
    columns = [column for column in comparison.columns if column.key != "command" or len(set(column.cells)) > 1]
    columns.sort(key=lambda column: not column.printed)  # columns that consoles show come first
    table = Table("", [Column("run", cells=comparison.labels), *columns])
    scaled = _scaling(comparison)
    unit = "K =" if all(devices(run) == run.settings["partitions"] for run in runs) else "devices:"
    data = {
        "runs": [{"label": label, "colour": colour} for label, colour in zip(comparison.labels, colours, strict=True)],
        # columns in which more or less is better have bars; + 1 for the column of links
        "bars": [at + 1 for at, one in enumerate(table.columns) if one.key in MEASURES and MEASURES[one.key].better],
        "curves": _curves(comparison, tags),
        "scaling": scaled,
        "scaling_unit": unit,
    }
    yield "<!DOCTYPE html>"
    yield '<html lang="en"><head><meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{escape(title)}</title>"
    yield f"<style>{_part('../style.css')}{style}{_part('comparison.css')}</style></head><body>"
    yield f'<header><h1>{escape(title)}</h1><button id="theme" type="button" aria-label="light or dark colours">dark'
    yield f'</button></header><p class="pale">{escape(_in_common(comparison))}</p><main>'
    if notes:
        yield f"<ul>{''.join(f'<li>{escape(note)}</li>' for note in notes)}</ul>"
    yield '<section aria-label="table"><p class="pale">A click on a heading sorts.'
    yield '<span id="scrolled" hidden> There are more columns at the right: scroll the table.</span></p>'
    yield f'<div class="wide">{to_html(table, colours, [_links(folder, run.folder) for run in runs])}</div>'
    if tags:
        logs = escape(os.path.commonpath([run.folder.resolve() for run in runs]))
        yield f'<p class="pale">All of it in TensorBoard: <code>tensorboard --logdir {logs}</code></p>'
    yield "</section>"
    if scaled:
        yield f"<section><h2>Speed-up over {unit.rstrip(' =:')}</h2>"
        yield f'<p class="pale">{escape(_about_scaling(comparison))}</p>'
        yield '<div id="scaling" class="charts"></div></section>'
    if tags:
        yield '<section><h2>Curves</h2><p class="pale">A click on a run hides it; drag over a part of the steps to see '
        yield 'it alone, double click to see all.</p><div id="chips" role="group" aria-label="runs that are shown">'
        yield '</div><div id="curves" class="charts"></div></section>'
    yield '</main><div id="tip" class="tip" hidden></div>'
    yield f'<script type="application/json" id="data">{in_script(data)}</script>'
    yield f"<script>/*\n{_part('uplot/LICENSE')}*/\n{library}</script>"
    yield f"<script>{_part('../theme.js')}</script><script>{_part('comparison.js')}</script></body></html>"


def _part(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def _in_common(comparison: Comparison) -> str:
    """Model, data set and machine, where all runs have the same."""
    facts = [(run.result.model, run.result.dataset, run.machine) for run in comparison.runs]
    return ", ".join(str(values[0]) for values in zip(*facts, strict=True) if len(set(values)) == 1)


def _links(page: Path, run: Path) -> str:
    """Links to the FILES that the folder `run` has, relative to the folder `page`."""
    there = os.path.relpath(run.resolve(), page.resolve())
    found = [(name, words) for name, words in FILES.items() if (run / name).exists()]
    return "".join(f'<a href="{escape(quote(os.path.join(there, name)))}">{words}</a>' for name, words in found)


def _curves(comparison: Comparison, tags: Sequence[str]) -> list[dict[str, Any]]:
    """A chart for each tag, all over the same range of steps."""
    known = [run.curves[tag].steps for run in comparison.runs for tag in tags if tag in run.curves]
    ends = {min(steps[0] for steps in known), max(steps[-1] for steps in known)} if known else set()
    return [_chart(comparison, tag, ends) for tag in tags]


def _chart(comparison: Comparison, tag: str, ends: Collection[int]) -> dict[str, Any]:
    """The chart of a tag. `x`: the steps of any curve, and `ends`; `at`: positions of a line's own points in `x`."""
    curves = [run.curves.get(tag) for run in comparison.runs]
    groups = same_curves(curves)
    smoothed = tag in SPEEDS and any(curve is not None and len(curve.values) > LONG for curve in curves)
    most = min(MOST_POINTS, MOST_OF_CHART // len(curves))
    shown = {at: _points(curve, tag in SPEEDS, most) for at, curve in enumerate(curves) if curve is not None}
    steps = sorted({*ends, *(step for points in shown.values() for step in points)})
    places = {step: at for at, step in enumerate(steps)}
    known = [value for points in shown.values() for value in points.values() if value is not None]
    notes = [f"running median of {MEDIAN_STEPS} steps"] * smoothed
    notes += ["logarithmic"] * (is_logarithmic := logarithmic(known))
    notes += [f"identical to the last bit: {comparison.referred(group)}" for group in groups[:3]]
    lines = [
        {
            "run": at, "label": comparison.labels[at], "width": width, "dash": dash,
            "at": [places[step] for step in points], "values": list(points.values()),
            "colour": run_colour(at, len(curves)) + ("80" if width > THIN else ""),
            "points": len(points) <= MARKED_POINTS,
        }
        for at, (width, dash) in enumerate(styles(len(curves), groups))
        if (points := shown.get(at)) is not None
    ]  # fmt: skip
    percent = tag.endswith(("top1", "top5", "accuracy"))
    title = tag.replace("/", ": ").replace("_per_second", "/s").replace("_", " ")
    return {"title": title, "note": "; ".join(notes), "x": steps, "lines": lines, "percent": percent,
            "logarithmic": is_logarithmic}  # fmt: skip


def styles(count: int, groups: Sequence[Sequence[int]]) -> list[tuple[float, list[int]]]:
    """The width and dashes of each line. Lines of a group coincide: widths decrease, so that all stay visible."""
    made = [(THIN, DASHES[n % len(DASHES)] if count >= DASHED_FROM else []) for n in range(count)]
    for group in groups:
        for rank, position in enumerate(group):
            made[position] = (THIN + (WIDE - THIN) * (1 - rank / (len(group) - 1)), [])
    return made


def running_median(values: Sequence[float]) -> list[float]:
    """For each value, the median of the MEDIAN_STEPS values around it; of fewer at both ends."""
    half = MEDIAN_STEPS // 2
    return [median(values[max(0, n - half) : n + half + 1]) for n in range(len(values))]


def logarithmic(values: Sequence[float]) -> bool:
    """Whether an axis with these values is logarithmic."""
    return bool(values) and min(values) > 0 and LOGARITHMIC * min(values) < max(values) < math.inf


def _points(curve: Curve, speed: bool, most: int) -> dict[int, float | None]:
    """The points to draw, step -> value, None if not finite. A curve of more than `most` points is reduced to the
    minimum and the maximum of equally long parts, so that no peak is lost."""
    values: Sequence[float] = curve.values
    if speed and len(values) > LONG and all(map(math.isfinite, values)):
        values = running_median(values)
    points: list[tuple[int, float | None]] = [
        (step, value if math.isfinite(value) else None) for step, value in zip(curve.steps, values, strict=True)
    ]
    if len(points) <= most:
        return dict(points)
    size = math.ceil(2 * len(points) / most)
    kept = [points[0], points[-1]]
    for first in range(0, len(points), size):
        part = sorted(points[first : first + size], key=lambda point: -math.inf if point[1] is None else point[1])
        kept += (part[0], part[-1])
    return dict(sorted(kept))


def _scaling(comparison: Comparison) -> list[dict[str, Any]]:
    """Speed-up and efficiency over the number of devices: a line for runs that do the same work in the same way."""
    runs = comparison.runs
    known: dict[int, Scaling] = {at: one for at, one in enumerate(scalings(runs)) if one is not None}
    x = sorted({devices(runs[at]) for at in known})
    if len(x) < 2:
        return []
    told = [column for column in comparison.settings if column.key in NAMING]
    told = [column for column in told if len({column.cells[at] for at in known}) > 1]
    of_line: dict[tuple[str, str], list[int]] = {}
    for at in known:
        name = ", ".join(f"{column.heading.replace(chr(10), '')} = {column.cells[at]}" for column in told)
        of_line.setdefault((name, work(runs[at])), []).append(at)
    often = Counter(name for name, _ in of_line)

    def chart(
        title: str, note: str, ideal: Sequence[float], values: Mapping[int, float | None], percent: bool
    ) -> dict[str, Any]:
        line = {"run": None, "label": "ideal", "values": ideal, "width": 1.2, "dash": [5, 5], "points": False}
        lines: list[dict[str, Any]] = [line] if ideal else []
        for number, ((name, _), members) in enumerate(of_line.items()):
            points: dict[int, list[float]] = {}
            for at in members:
                if (value := values[at]) is not None:
                    points.setdefault(devices(runs[at]), []).append(value)
            label = name or "measured"
            lines.append({
                "run": None, "label": label if often[name] == 1 else f"{label}: {comparison.referred(members)}",
                "values": [median(points[n]) if n in points else None for n in x],
                "colour": run_colour(number, len(of_line)), "width": 2, "dash": [], "points": True,
            })  # fmt: skip
        return {"title": title, "note": note, "x": x, "lines": lines, "percent": percent, "logarithmic": False}

    speed = {at: one.speed_up for at, one in known.items()}
    share = {at: one.efficiency for at, one in known.items()}
    # lines that begin at different numbers of devices have no common ideal
    common = len({devices(runs[one.base]) for one in known.values()}) == 1
    charts = [chart("speed-up", "times as fast", [n / x[0] for n in x if common], speed, percent=False)]
    if any(value is not None and devices(runs[at]) > x[0] for at, value in share.items()):
        charts.append(chart("efficiency", "speed-up by device", [1.0] * len(x), share, percent=True))
    return charts


def _about_scaling(comparison: Comparison) -> str:
    """The caption of the speed-up charts: which runs are the base, and what is left out."""
    bases = {one.base for one in scalings(comparison.runs) if one is not None}
    text = f"How many times as fast as {comparison.referred(sorted(bases))}, at the same work on the same machine."
    kinds = {run.result.samples_per_second_kind for run in comparison.runs}
    if "measured_one_device" in kinds:
        text += " No efficiency where stages shared a device or cores: of how many devices would it be?"
    if "measured_contended" in kinds:
        text += " Runs whose cores other programs had at times are left out."
    return text
