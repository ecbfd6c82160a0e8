"""timeline.html: Figure 2(c) of the paper with real times, measured above predicted, a tip for every bar; XML, too.

The page is one file that loads nothing, so that it can be sent and kept.
"""

import base64
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path

from gpipe_cli.reporting.plots import palette, timeline_values
from gpipe_cli.reporting.run.step_breakdown import share_word
from gpipe_cli.reporting.tables.table import Column, Table, to_html
from gpipe_cli.system.files import write_whole
from gpipe_cli.units import duration

MOST_PICTURES = 12
MOST_BARS = 8000  # of a step; more would make a page of many megabytes, so they become an image
WIDTH, LEFT, RIGHT, ROW, BAR, AXIS = 1200, 72, 18, 30, 26, 26  # of a timeline, in its own units
CHARACTER = 8.5  # width of a character of a bar's name, with its share of the margin

# Colours of the actions are those of the pictures and the same on light and dark ground; only paper, ink and what is
# idle follow the reader's choice.
STYLE = """
:root{color-scheme:light dark;--paper:#fff;--ink:#25262c;--pale:#71737d;--rule:#dcdde3;--idle:#f1f1f4;--line:#cfd0d8;
--waiting:#e2e2e8;--transfer:#8a8c96;--update:#3e404a}
@media(prefers-color-scheme:dark){:root{--paper:#17181c;--ink:#e8e8ee;--pale:#9a9ca8;--rule:#34363f;--idle:#212329;
--line:#3b3d47;--waiting:#2b2d35;--transfer:#7d808c;--update:#d3d4dc}}
body{margin:0 auto;max-width:1280px;padding:20px 24px 40px;background:var(--paper);color:var(--ink);
font:15px/1.45 system-ui,sans-serif}
header{display:flex;flex-wrap:wrap;gap:8px 24px;align-items:baseline;justify-content:space-between}
h1{font-size:20px;margin:0;font-weight:650}
label{color:var(--pale)}
select{font:inherit;color:var(--ink);background:var(--paper);border:1px solid var(--rule);border-radius:6px;
padding:3px 8px}
figure{margin:20px 0 0;overflow-x:auto}
figcaption{display:flex;gap:12px;margin-bottom:6px}
figcaption span{margin-left:auto;font-variant-numeric:tabular-nums}
figure svg{width:100%;min-width:760px;display:block}
img{width:100%;margin-top:20px;border-radius:6px}
text{font:12px system-ui,sans-serif;dominant-baseline:middle;text-anchor:middle;pointer-events:none}
.name{text-anchor:end;fill:var(--ink);font-size:13px}
.time{fill:var(--pale)}
.tick{stroke:var(--rule);fill:none}
rect{stroke:var(--paper);stroke-width:.7}
rect:hover{stroke:var(--ink);stroke-width:1.6}
.idle{fill:url(#idle)}.waiting{fill:url(#waiting)}.transfer{fill:url(#transfer)}.update{fill:var(--update)}
text.F,text.R{fill:#25262c}text.B,text.I,text.W{fill:#fff}
.legend{display:flex;flex-wrap:wrap;gap:6px 20px;margin:12px 0 0;align-items:center;font-size:13px}
.legend span{display:inline-flex;gap:7px;align-items:center}
.legend i{width:110px;height:14px;border-radius:2px}
.legend svg{width:34px;height:14px}
.legend em{color:var(--pale);font-style:normal}
table{border-collapse:collapse;margin-top:24px;font-variant-numeric:tabular-nums}
th,td{padding:4px 18px 4px 0;text-align:right;border-bottom:1px solid var(--rule);font-weight:400}
tbody th{text-align:left}
thead th{color:var(--pale)}
#tip{position:fixed;pointer-events:none;background:var(--ink);color:var(--paper);padding:5px 9px;border-radius:6px;
font-size:13px;white-space:pre}
[hidden]{display:none!important}
"""

_HATCH = '<path d="M0 0V6" stroke="var(--line)" stroke-width="1.6"/>'
PATTERNS = f"""
<svg width="0" height="0" style="position:absolute" aria-hidden="true"><defs>
<pattern id="idle" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(-45)">
<path d="M0 0H6V6H0z" fill="var(--idle)"/>{_HATCH}</pattern>
<pattern id="waiting" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(-45)">
<path d="M0 0H6V6H0z" fill="var(--waiting)"/>{_HATCH}</pattern>
<pattern id="transfer" width="4" height="4" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
<path d="M0 0H4V4H0z" fill="var(--paper)"/>
<path d="M0 0V4M0 0H4" stroke="var(--transfer)" stroke-width="2.2"/></pattern>
</defs></svg>"""

# What a bar is stands in its title, which browsers show late and small; the script shows it at once. Without scripts
# the newest step and all titles are there.
SCRIPT = """
const chooser=document.getElementById('chooser'),tip=document.getElementById('tip');
function choose(){document.querySelectorAll('section').forEach(s=>s.hidden=s.id!=='picture'+chooser.value)}
chooser.addEventListener('change',choose);choose();
document.addEventListener('pointermove',event=>{
const bar=event.target.closest('rect');
if(!bar){tip.hidden=true;return}
const title=bar.querySelector('title');
if(title){bar.dataset.tip=title.textContent;title.remove()}
tip.textContent=bar.dataset.tip.replace('|','\\n');tip.hidden=false;
const x=Math.min(event.clientX+14,innerWidth-tip.offsetWidth-8),y=event.clientY+18;
tip.style.left=x+'px';tip.style.top=(y+tip.offsetHeight>innerHeight?event.clientY-tip.offsetHeight-10:y)+'px'});
"""


def write_page(path: Path, run: str, pictures: Sequence[timeline_values.StepPicture]) -> None:
    """Writes the page about ``run``, its heading: the newest pictures, of which the very newest is shown first."""
    assert pictures, "a page without a picture"
    newest = sorted(pictures, key=lambda picture: picture.step, reverse=True)[:MOST_PICTURES]
    write_whole(path, "\n".join(_page(run, newest)) + "\n")


def _page(run: str, pictures: Sequence[timeline_values.StepPicture]) -> Iterator[str]:
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


def _section(picture: timeline_values.StepPicture, micro_batches: int) -> Iterator[str]:
    views = picture.views
    end = max(view.end_seconds for view in views) or 1.0
    if sum(len(bars) for view in views for bars in view.stages) > MOST_BARS:
        from gpipe_cli.reporting.plots.picture import png
        from gpipe_cli.reporting.plots.timeline import draw

        image = base64.b64encode(png(draw(views))).decode("ascii")
        yield f'<img alt="timelines, one row per stage" src="data:image/png;base64,{image}"/>'
    else:
        for view in views:
            yield from _timeline(view, end)
        yield _legend(views, micro_batches)
    yield _table(picture)


def _timeline(view: timeline_values.TimelineView, end: float) -> Iterator[str]:
    """One figure: a row per stage, times proportional to ``end`` seconds across."""
    scale = (WIDTH - LEFT - RIGHT) / end
    height = ROW * len(view.stages)
    numbers = f"step {duration(view.step_seconds)}, idle {timeline_values.in_percent(view.breakdown)['idle']:.1f} %"
    caption = f"<b>{view.kind}</b> {escape(view.title)}<span>{numbers}</span>"
    yield f'<figure class="{view.kind}"><figcaption>{caption}</figcaption>'
    yield f'<svg viewBox="0 0 {WIDTH} {height + AXIS}" role="img" aria-label="{view.kind} timeline">'
    name, unit = timeline_values.axis_unit(end)
    for tick in timeline_values.axis_ticks(end):
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


def _bar(bar: timeline_values.Bar, scale: float) -> str:
    seconds = bar.end_seconds - bar.start_seconds
    x = max(0.0, bar.start_seconds * scale)  # clocks of several machines may put it a little before the step
    width = max(0.0, bar.end_seconds * scale - x)
    action = bar.what in timeline_values.ACTIONS
    kind = f"{bar.what} {bar.name}" if action else bar.what
    for_whom = "" if action or bar.micro_batch is None else f" for micro-batch {bar.micro_batch}"
    what = f"{bar.name} {palette.WORDS[bar.what]}" if action else palette.WORDS[bar.what]
    tip = f"{what}{for_whom}|starts at {duration(bar.start_seconds)}, takes {duration(seconds)}"
    shape = f'<rect class="{kind}" x="{x:.2f}" width="{width:.2f}" height="{BAR}"><title>{tip}</title></rect>'
    if not action or width < CHARACTER * len(bar.name) + 3:
        return shape
    return f'{shape}<text class="{bar.what}" x="{x + width / 2:.1f}" y="{BAR / 2 + 1:g}">{bar.name}</text>'


def _legend(views: Iterable[timeline_values.TimelineView], micro_batches: int) -> str:
    """The actions in the colours of all micro-batches, then what has none."""
    seen = {bar.what for view in views for bars in view.stages for bar in bars}
    entries = []
    for what in timeline_values.ACTIONS:
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


def _table(picture: timeline_values.StepPicture) -> str:
    """Shares of a step, in columns of their own what was measured and what was predicted; below `idle` its causes."""
    shares = (*timeline_values.BUSY, "idle", *timeline_values.IDLE)
    columns = [
        Column("", cells=["step", *("of it " * (name in timeline_values.IDLE) + share_word(name) for name in shares)])
    ]
    for kind in ("measured", "predicted"):
        cells = ["-"] * (1 + len(shares))
        for view in picture.views:
            if view.kind == kind:
                shown = timeline_values.in_percent(view.breakdown)
                cells = [duration(view.step_seconds), *(f"{shown[name]:.1f} %" for name in shares)]
        columns.append(Column(kind, cells=cells, number=True))
    return to_html(Table("", columns))


def _colours(micro_batches: int) -> Iterator[str]:
    """A rule for every action's colour; a recomputation has the rim of its forward."""
    for m in range(micro_batches):
        rim = palette.colour("F", m, micro_batches)
        for what in timeline_values.ACTIONS:
            fill = palette.colour(what, m, micro_batches)
            yield f".{what}{m}{{fill:{fill}{f';stroke:{rim}' if what == 'R' else ''}}}"
