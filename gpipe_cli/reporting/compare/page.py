"""comparison.html: runs beside each other in a browser, to be sorted, with their curves and bars.

One file that loads nothing, pictures included, so that a comparison can be sent and kept.
"""

import base64
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from gpipe_cli.reporting.compare.comparison import Comparison
from gpipe_cli.reporting.plots.page_style import STYLE
from gpipe_cli.reporting.plots.palette import run_colour
from gpipe_cli.reporting.tables.table import Column, Table, to_html
from gpipe_cli.system.files import write_whole
from gpipe_cli.units import plural

# What this page has beyond the look of timeline.html.
OWN_STYLE = """
.wide{overflow-x:auto;margin-top:16px}
table{margin-top:0;min-width:100%}
thead th{cursor:pointer;vertical-align:bottom;white-space:pre;user-select:none}
thead th:hover,thead th:focus-visible,thead th[aria-sort]{color:var(--ink)}
thead th[aria-sort]::after{content:" \\2193";}
thead th[aria-sort=ascending]::after{content:" \\2191"}
td{white-space:nowrap}
.text{text-align:left}
tbody th{white-space:nowrap;position:sticky;left:0;background:var(--paper)}
tbody th i{display:inline-block;width:11px;height:11px;border-radius:2px;margin-right:8px}
.failed{color:#d0342c}
ul{margin:16px 0 0;padding-left:18px}
li{margin:3px 0}
"""
# Rows are sorted by the value itself, not by how it is written; what a run does not have comes last either way.
SCRIPT = """
const heads=[...document.querySelectorAll('thead th')],body=document.querySelector('tbody');
function sort(head){const n=heads.indexOf(head),up=head.getAttribute('aria-sort')!=='ascending';
heads.forEach(h=>h.removeAttribute('aria-sort'));head.setAttribute('aria-sort',up?'ascending':'descending');
const value=row=>row.children[n].dataset.value,sign=up?1:-1;
const order=(a,b)=>{const x=value(a),y=value(b);if(x===y)return 0;if(x==='')return 1;if(y==='')return -1;
return sign*(isNaN(x)||isNaN(y)?x.localeCompare(y,undefined,{numeric:true}):x-y)};
body.append(...[...body.rows].sort(order))}
heads.forEach(head=>{head.tabIndex=0;head.addEventListener('click',()=>sort(head));
head.addEventListener('keydown',event=>{if(event.key==='Enter'||event.key===' '){event.preventDefault();sort(head)}})});
"""


def write_page(path: Path, comparison: Comparison, notes: Sequence[str], pictures: Sequence[Path]) -> None:
    """Writes the page, whole or not at all; ``pictures`` are PNG files, named by what they show."""
    write_whole(path, "\n".join(_page(comparison, notes, pictures)) + "\n")


def _page(comparison: Comparison, notes: Sequence[str], pictures: Sequence[Path]) -> Iterator[str]:
    title = f"{plural(len(comparison.runs), 'run')} compared"
    yield "<!DOCTYPE html>"
    yield '<html lang="en"><head><meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{escape(title)}</title>"
    yield f"<style>{STYLE}{OWN_STYLE}</style></head><body>"
    yield f"<header><h1>{escape(title)}</h1><label>a click on a heading sorts</label></header><main>"
    if notes:
        yield f"<ul>{''.join(f'<li>{escape(note)}</li>' for note in notes)}</ul>"
    columns = [column for column in comparison.columns if column.key != "command" or len(set(column.cells)) > 1]
    columns.sort(key=lambda column: not column.printed)  # what the console has stands at the left
    count = len(comparison.runs)
    table = Table("", [Column("run", cells=comparison.labels), *columns])
    yield f'<div class="wide">{to_html(table, [run_colour(position, count) for position in range(count)])}</div>'
    for path in pictures:
        data = base64.b64encode(path.read_bytes()).decode("ascii")
        yield f'<img alt="{escape(path.stem)}" src="data:image/png;base64,{data}">'
    yield f"</main><script>{SCRIPT}</script></body></html>"
