"""report.html: the paper's claims and our results, for all recipes of a folder, in one self-contained file.

The page has no script. A table at the top, of all claims and the numbers below each, links to a section for each
recipe, with its tables and their plots, its notes and its commands.
"""

from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

from gpipe_cli.reporting.reproduced.verdict import AGREEMENT_TOLERANCE, judge_columns
from gpipe_cli.reporting.tables.recipe import Reproduction
from gpipe_cli.reporting.tables.table import Column, to_html
from gpipe_cli.system.files import write_atomic
from gpipe_cli.units import duration, plural

REPORT = "report.html"
CLAIMS = [
    Column(name, number=name in ("paper", "ours", "difference", "min"))
    for name in ("the paper", "number", "paper", "ours", "ours is", "difference", "verdict", "min")
]
ORIGIN_NOTES = {
    "measured": "was run here and timed, or evaluated",
    "counted": "was run here, and is exact whatever the machine is",
    "planned": "follows from shapes; was not run",
    "simulated": "was not run: a schedule simulated with the seconds of layers, timed here or by a data sheet",
    "published": "has been measured by others",
    "difference": "is none (-) where data or sizes are not the paper's",
    "agrees": f"differs from the paper's by at most {AGREEMENT_TOLERANCE:.0%} of it, in all rows of a table",
}


def write_report(folder: Path, reproductions: Sequence[Reproduction], failed: Mapping[str, str]) -> None:
    """Write the page into ``folder``; ``failed``: name of a recipe -> why it failed. Raises OSError."""
    style = Path(__file__).with_name("report.css").read_text(encoding="utf-8")
    write_atomic(folder / REPORT, "\n".join(_page(reproductions, failed, style, folder)) + "\n")


def _page(reproductions: Sequence[Reproduction], failed: Mapping[str, str], style: str, folder: Path) -> Iterator[str]:
    seconds = sum(reproduction.seconds for reproduction in reproductions)
    machines = "; ".join(dict.fromkeys(reproduction.machine for reproduction in reproductions))
    scales = ", ".join(dict.fromkeys(reproduction.scale for reproduction in reproductions))
    yield '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1"><title>GPipe, reproduced</title>'
    yield f"<style>{style}</style></head><body>"
    yield "<header><h1>GPipe, reproduced</h1>"
    yield f'<p class="pale">{plural(len(reproductions), "recipe")} at scale {escape(scales)}, '
    yield f"{duration(seconds)} on {escape(machines)}.</p></header><main>"
    if failed:
        yield '<section><h2>Not reproduced</h2><ul class="failed">'
        yield from (f"<li><code>{escape(name)}</code> failed: {escape(why)}</li>" for name, why in failed.items())
        yield "</ul></section>"
    yield '<section><h2>Claims</h2><table class="claims"><thead><tr>'
    yield from (f'<th scope="col">{column.heading}</th>' for column in CLAIMS[1:-1])
    yield "</tr></thead>"
    yield from map(_group, reproductions)
    yield "</table></section>"
    yield '<section><h2>How a number was obtained</h2><dl class="kinds">'
    yield from (f"<dt>{kind}</dt><dd>{escape(words)}</dd>" for kind, words in ORIGIN_NOTES.items())
    yield "</dl></section>"
    for reproduction in reproductions:
        yield from _section(reproduction, folder / reproduction.name)
    yield "</main></body></html>"


def _group(reproduction: Reproduction) -> str:
    """A claim across the table, with the rows that it lacks at this scale, and its numbers below."""
    name = escape(reproduction.name)
    without = "".join(f"; <em>{escape(line)}</em>" for label, line in reproduction.notes if label == "left out")
    took = duration(reproduction.seconds).replace(" ", "&nbsp;")
    about = f'{escape(reproduction.claim)}{without} <a href="#{name}">{name}</a>, {took}'
    lines = [f'<tbody><tr><th scope="rowgroup" colspan="{len(CLAIMS) - 2}">{about}</th></tr>']
    for _, what, *cells, _ in claim_rows(reproduction):
        columns = zip(CLAIMS[2:-1], cells, strict=True)
        line = (f'<td data-of="{column.heading}">{escape(cell)}</td>' for column, cell in columns)
        lines.append(f'<tr><th scope="row">{escape(what)}</th>{"".join(line)}</tr>')
    return "\n".join([*lines, "</tbody>"])


def claim_rows(reproduction: Reproduction) -> Iterator[tuple[str, ...]]:
    """A row for each verdict on the tables, comparable numbers first; without a verdict, a row with a note."""
    words = next(
        (line for label, line in reproduction.notes if label in ("weights", "found")), "no number in the paper"
    )
    claim = reproduction.claim
    minutes = f"{reproduction.seconds / 60:.1f}"
    of_tables = [verdict for table in reproduction.tables for verdict in judge_columns(table)]
    for verdict in sorted(of_tables, key=lambda verdict: verdict.words == "not comparable"):
        yield claim, *verdict, minutes
        claim = minutes = ""
    if claim:
        yield claim, words, "", "", "", "", "", minutes


def _section(reproduction: Reproduction, folder: Path) -> Iterator[str]:
    from gpipe_cli.reporting.plots.picture import png  # not at the top, as matplotlib takes half a second
    from gpipe_cli.reporting.reproduced.chart import charts, draw

    name = escape(reproduction.name)
    yield f'<section id="{name}" class="recipe"><h2>{escape(reproduction.title)}</h2>'
    yield f'<p class="claim">{escape(reproduction.claim)}.</p>'
    source = escape(reproduction.source)
    yield f'<p class="pale"><code>{name}</code>, {source}; scale {escape(reproduction.scale)}, '
    yield f"{duration(reproduction.seconds)} on {escape(reproduction.machine)}</p>"
    for table in reproduction.tables:
        yield f'<h3>{escape(table.title)}</h3><div class="wide">{to_html(table)}</div>'
        if drawn := list(charts(table)):
            lines = dict.fromkeys(line.name for chart in drawn for line in chart.lines)
            yield _image(f"{table.title}: {', '.join(lines)}", png(draw(drawn)), f"{360 * len(drawn)}px")
    for what, path in reproduction.files:  # the recipe's folder may have been moved since
        picture = folder / Path(path).name
        if picture.suffix == ".png" and picture.is_file():
            yield _image(f"{reproduction.title}: {what}", picture.read_bytes())
    yield '<dl class="notes">'
    yield from (f"<dt>{escape(label)}</dt><dd>{escape(line)}</dd>" for label, line in reproduction.notes)
    commands = "\n".join(reproduction.commands)
    yield f"</dl><details><summary>{plural(len(reproduction.commands), 'command')}</summary>"
    yield f"<pre>{escape(commands)}</pre></details></section>"


def _image(words: str, content: bytes, width: str = "auto") -> str:
    source = f"data:image/png;base64,{b64encode(content).decode('ascii')}"
    return f'<p><img alt="{escape(words)}" style="width:{width}" src="{source}"></p>'
