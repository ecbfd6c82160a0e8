"""What `gpipe compare` prints and writes: a table at 80 columns, CSV, pictures and the page.

A row for each run, as in the paper's tables 2 and 5. Where the columns do not fit beside each other there are several
tables under each other, and the numbers of the runs tell which rows belong together.
"""

from pathlib import Path

from rich.console import Console

from gpipe_cli.reporting.compare.comparison import Comparison
from gpipe_cli.reporting.compare.notes import notes, same_curve_notes
from gpipe_cli.reporting.compare.page import write_page
from gpipe_cli.reporting.compare.run_names import listed
from gpipe_cli.reporting.run.lines import show_facts, show_line
from gpipe_cli.reporting.tables.table import Column, Table, show_table, to_csv
from gpipe_cli.system.files import write_whole
from gpipe_cli.units import plural

TRAINED = "completed"
CSV, PAGE, CURVES, BARS = "comparison.csv", "comparison.html", "curves.png", "bars.png"
MOST_SETTINGS = 16  # in the console; the page has all


def show_comparison(console: Console, comparison: Comparison) -> None:
    """Prints the table and its notes."""
    count = len(comparison.runs)
    completed = all(run.result["status"] == TRAINED for run in comparison.runs)
    show_line(console, f"{plural(count, 'run')}{f', {TRAINED}' if completed else ''}", "bold")
    number = Column("run", cells=[str(number + 1) for number in range(count)], number=True)
    named = [] if comparison.by_settings else [Column("name", cells=comparison.names)]
    results = [column for column in comparison.results if column.key != "status" or not completed]
    show_table(console, Table("", [number, *named, *comparison.settings[:MOST_SETTINGS], *results]), gap=1)
    console.print()
    if left_out := comparison.settings[MOST_SETTINGS:]:
        keys = listed([column.key for column in left_out])
        show_facts(console, [("note", f"{plural(len(left_out), 'more setting')} differ: {keys}; {PAGE} has all")])
    show_facts(console, [("note", note) for note in notes(comparison)])


def csv_of(comparison: Comparison) -> str:
    """All columns; units stand in the headings."""
    return to_csv(Table(CSV, [Column("run", cells=comparison.names), *comparison.columns]))


def write_comparison(console: Console, comparison: Comparison, folder: Path) -> None:
    """Writes all files into ``folder``, which must exist, and prints their names."""
    from gpipe_cli.reporting.compare.run_curves import COMPARED
    from gpipe_cli.reporting.plots.bars import draw_bars
    from gpipe_cli.reporting.plots.curves import draw_curves
    from gpipe_cli.reporting.plots.picture import write_picture

    tags = [tag for tag in COMPARED if any(tag in run.curves for run in comparison.runs)]
    same = [note for tag in tags[:1] for note in same_curve_notes(comparison, tag)]
    if not tags:
        same = ["no run has curves, so there are none to draw"]
    drawn = []
    for name, picture in ((CURVES, draw_curves(comparison, tags) if tags else None), (BARS, draw_bars(comparison))):
        if (folder / PAGE).exists():
            (folder / name).unlink(missing_ok=True)  # of a comparison of other runs
        if picture is not None:
            write_picture(folder / name, picture)
            drawn.append(folder / name)
    write_whole(folder / CSV, csv_of(comparison))
    write_page(folder / PAGE, comparison, [*notes(comparison), *same], drawn)
    show_facts(console, [("note", note) for note in same])  # after all is written: the console may be a closed pipe
    show_facts(console, [("page", str(folder / PAGE)), ("table", str(folder / CSV))])
    show_facts(console, [("picture", str(picture)) for picture in drawn])
