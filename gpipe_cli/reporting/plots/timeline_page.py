"""timeline.html: recorded steps of a run in a browser, measured above predicted, on one time axis; XML, too.

Figure 2(c) of the paper with real times, with a tip for every bar: what it is, when it began and how long it
took. The page is one file that loads nothing, so that it can be sent and kept.
"""

import base64
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path

from gpipe_cli.reporting.plots import palette
from gpipe_cli.reporting.plots.page_style import PATTERNS, SCRIPT, STYLE
from gpipe_cli.reporting.plots.timeline_values import (
    ACTIONS,
    Bar,
    StepPicture,
    TimelineView,
    axis_ticks,
    axis_unit,
    in_percent,
)
from gpipe_cli.reporting.run.step_breakdown import share_cells, share_names
from gpipe_cli.reporting.tables.table import Column, Table, to_html
from gpipe_cli.system.files import write_whole
from gpipe_cli.units import duration

MOST_PICTURES = 12
MOST_BARS = 8000  # of a step; more would make a page of many megabytes, so they become an image
WIDTH, LEFT, RIGHT, ROW, BAR, AXIS = 1200, 72, 18, 30, 26, 26  # of a timeline, in its own units
CHARACTER = 8.5  # width of a character of a bar's name, with its share of the margin


def write_page(path: Path, run: str, pictures: Sequence[StepPicture]) -> None:
    """Writes the page, whole or not at all: the newest pictures, of which the very newest is shown first.

    Args:
        run: what the page is about, its heading.
    """
    assert pictures, "a page without a picture"
    newest = sorted(pictures, key=lambda picture: picture.step, reverse=True)[:MOST_PICTURES]
    write_whole(path, "\n".join(_page(run, newest)) + "\n")


def _page(run: str, pictures: Sequence[StepPicture]) -> Iterator[str]:
    micro_batches = max(view.micro_batches for picture in pictures for view in picture.views)
    yield "<!DOCTYPE html>"
    yield '<html lang="en"><head><meta charset="utf-8"/>'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
    yield f"<title>{escape(run)}: timelines</title>"
    yield f"<style>{STYLE}{''.join(_colours(micro_batches))}</style></head><body>{PATTERNS}"
    options = "".join(
        f'<option value="{number}">epoch {picture.epoch}, step {picture.step:,}</option>'
        for number, picture in enumerate(pictures)
    )
    chooser = f'<label>recorded step <select id="chooser">{options}</select></label>'
    yield f"<header><h1>{escape(run)}</h1>{chooser}</header><main>"
    for number, picture in enumerate(pictures):
        hidden = ' hidden="hidden"' if number else ""
        yield f'<section id="picture{number}"{hidden}>'
        yield from _section(picture, micro_batches)
        yield "</section>"
    yield f'</main><div id="tip" hidden="hidden"></div><script>{SCRIPT}</script></body></html>'


def _section(picture: StepPicture, micro_batches: int) -> Iterator[str]:
    views = picture.views
    end = max(view.end_seconds for view in views) or 1.0
    if sum(len(bars) for view in views for bars in view.stages) > MOST_BARS:
        yield f'<img alt="timelines, one row per stage" src="data:image/png;base64,{_image(views)}"/>'
    else:
        for view in views:
            yield from _timeline(view, end)
        yield _legend(views, micro_batches)
    yield _table(picture)


def _timeline(view: TimelineView, end: float) -> Iterator[str]:
    """One figure: a row per stage, times proportional to ``end`` seconds across."""
    scale = (WIDTH - LEFT - RIGHT) / end
    height = ROW * len(view.stages)
    numbers = f"step {duration(view.step_seconds)}, idle {in_percent(view.breakdown)['idle']:.1f} %"
    caption = f"<b>{view.kind}</b> {escape(view.title)}<span>{numbers}</span>"
    yield f'<figure class="{view.kind}"><figcaption>{caption}</figcaption>'
    yield f'<svg viewBox="0 0 {WIDTH} {height + AXIS}" role="img" aria-label="{view.kind} timeline">'
    name, unit = axis_unit(end)
    for tick in axis_ticks(end):
        x = LEFT + tick * scale
        yield f'<path class="tick" d="M{x:.1f} 0V{height + 4}"/>'
        label = f"{tick / unit:g}" + (f" {name}" if tick == 0 else "")
        yield f'<text class="time" x="{x:.1f}" y="{height + 18}">{label}</text>'
    for stage, bars in enumerate(view.stages):
        yield f'<g class="stage" transform="translate({LEFT} {stage * ROW})">'
        yield f'<text class="name" x="-8" y="{BAR / 2 + 1:g}">stage {stage}</text>'
        yield f'<path class="idle" d="M0 0H{view.step_seconds * scale:.1f}V{BAR}H0z"/>'
        for bar in bars:
            yield _bar(bar, scale)
        yield "</g>"
    yield "</svg></figure>"


def _bar(bar: Bar, scale: float) -> str:
    seconds = bar.end_seconds - bar.start_seconds
    x = max(0.0, bar.start_seconds * scale)  # clocks of several machines may put it a little before the step
    width = max(0.0, bar.end_seconds * scale - x)
    action = bar.what in ACTIONS
    kind = f"{bar.what} {bar.name}" if action else bar.what
    for_whom = "" if action or bar.micro_batch is None else f" for micro-batch {bar.micro_batch}"
    what = f"{bar.name} {palette.WORDS[bar.what]}" if action else palette.WORDS[bar.what]
    tip = f"{what}{for_whom}|starts at {duration(bar.start_seconds)}, takes {duration(seconds)}"
    shape = f'<rect class="{kind}" x="{x:.2f}" width="{width:.2f}" height="{BAR}"><title>{tip}</title></rect>'
    if not action or width < CHARACTER * len(bar.name) + 3:
        return shape
    return f'{shape}<text class="{bar.what}" x="{x + width / 2:.1f}" y="{BAR / 2 + 1:g}">{bar.name}</text>'


def _legend(views: Iterable[TimelineView], micro_batches: int) -> str:
    """The actions in the colours of all micro-batches, then what has none."""
    seen = {bar.what for view in views for bars in view.stages for bar in bars}
    entries = []
    for what in ACTIONS:
        if what in seen:
            colours = [palette.colour(what, m, micro_batches) for m in range(micro_batches)]
            stops = ",".join(colours if len(colours) > 1 else colours * 2)
            gradient = f'<i style="background:linear-gradient(90deg,{stops})"></i>'
            entries.append(f"<span>{gradient}{what} {palette.WORDS[what]}</span>")
    for name in ("waiting", "transfer", "idle", "update"):
        if name == "idle" or name in seen:
            mark = f'<svg viewBox="0 0 34 14"><path class="{name}" d="M0 0H34V14H0z"/></svg>'
            entries.append(f"<span>{mark}{palette.WORDS.get(name, palette.OTHERWISE_IDLE)}</span>")
    last = f"left: micro-batch 0, right: {micro_batches - 1}"
    return f'<p class="legend">{"".join(entries)}<em>{last}</em></p>'


def _table(picture: StepPicture) -> str:
    """Numbers beside each other, in columns of their own: what was measured, what was predicted."""
    columns = [Column("", cells=["step", *share_names()])]
    for kind in ("measured", "predicted"):
        view = next((view for view in picture.views if view.kind == kind), None)
        step, breakdown = ("-", None) if view is None else (duration(view.step_seconds), view.breakdown)
        columns.append(Column(kind, cells=[step, *share_cells(breakdown)], number=True))
    return to_html(Table("", columns))


def _colours(micro_batches: int) -> Iterator[str]:
    """A rule for every action's colour; a recomputation has the rim of its forward."""
    for m in range(micro_batches):
        rim = palette.colour("F", m, micro_batches)
        for what in ACTIONS:
            fill = palette.colour(what, m, micro_batches)
            yield f".{what}{m}{{fill:{fill}{f';stroke:{rim}' if what == 'R' else ''}}}"


def _image(views: Sequence[TimelineView]) -> str:
    """The picture as base64 of a PNG."""
    from gpipe_cli.reporting.plots.picture import png
    from gpipe_cli.reporting.plots.timeline import draw

    return base64.b64encode(png(draw(views))).decode("ascii")
