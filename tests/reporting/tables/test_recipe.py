"""What `gpipe reproduce` shows and writes: where every column comes from, at 80 columns and as Markdown."""

import io
from pathlib import Path

from rich.console import Console

from gpipe_cli.reporting.tables.recipe import Reproduction, show_reproduction
from gpipe_cli.reporting.tables.table import Column, Table

COLUMNS = (
    Column("K"),
    *(
        Column(heading, origin)
        for heading in ("speed", "memory of all")
        for origin in ("paper", "measured", "simulated")
    ),
    Column("measured - paper", "difference"),
)
ROWS = tuple((k, *(f"{value}.00" for value in range(6)), "+0.10") for k in ("1", "16"))
REPRODUCTION = Reproduction(
    "table9", "A table", "A claim", "section 9", "8 GPUs", "desk", "2 cores of a CPU",
    (Table.of_rows("Speed over K", COLUMNS, ROWS),),
    (("scaled down", "all of it"),), ("gpipe bench",), (), 61.0,
)  # fmt: skip


def test_a_wide_table_stays_one_that_fits_without_a_broken_word(tmp_path: Path) -> None:
    """At 80 columns a table said `torchgp` and, below it, `ipe`: a blank for each column had not been counted."""
    for width in range(40, 120, 5):
        file = io.StringIO()
        show_reproduction(
            Console(file=file, width=width, color_system=None, force_terminal=True), REPRODUCTION, tmp_path
        )
        lines = file.getvalue().splitlines()
        table = lines[lines.index("Speed over K") + 1 : lines.index("scaled down  all of it") - 1]
        assert max(map(len, table)) <= width
        (row,) = (line.split() for line in table if line.startswith("16"))
        shown = len(row) - 1
        assert [cell for cell in ROWS[1][1:] if cell in row] == row[1:], "in their order"
        assert (f"{7 - shown} more column" in "\n".join(table)) == (shown < 7)
        words = {word for line in table for word in line.split()}
        assert {"speed", "measured", "paper", "16", "0.00"} <= words, width
    file = io.StringIO()
    show_reproduction(Console(file=file, width=40), REPRODUCTION, tmp_path)
    assert "+0.10" in next(line for line in file.getvalue().splitlines() if line.startswith("16")), "a pipe gets all"
