"""One table at any width, and for programs."""

import csv
import io
import json
from math import nan

import pytest
from reporting_runs import log

from gpipe_cli.reporting.tables.table import Column, Table, show_table, to_text

RUNS = Table(
    "",
    [
        Column("run", cells=["outputs/2026-01-31_12-00-00_amoebanet_digits_K2_M4", "outputs/mine"]),
        Column("K", cells=["2", "16"], number=True, key="partitions", values=[2, 16]),
        Column("status", cells=["completed", "failed (1)"]),
        Column(
            "samples\n/s", cells=["159.3", "-"], number=True, key="samples_per_second", values=[159.2714285714286, None]
        ),
        Column("test", cells=["98.6 %", "-"], number=True, values=[nan, None]),
        Column("what it is", cells=["a model of the paper that learns digits", "-"], values=[[1, 2], True]),
        Column("folder", cells=["-", "-"], values=["a,b", 'c "d"'], printed=False),
    ],
    names=3,
)


def shown(table: Table, elsewhere: str = "format=csv", **options: object) -> list[str]:
    console, file = log(**options)
    show_table(console, table, elsewhere=elsewhere)
    return file.getvalue().splitlines()


@pytest.mark.parametrize("width", range(36, 130, 3))
def test_a_terminal_of_any_width_gets_one_table_without_a_broken_word(width: int) -> None:
    """It broke into as many tables as it had columns, of which each had the names of the runs again; and `completed`
    into `complete` and `d`."""
    lines = shown(RUNS, width=width, force_terminal=True)
    assert max(map(len, lines)) <= width
    (ruler,) = (at for at, line in enumerate(lines) if set(line) == {"\u2500"})
    note = next((at for at, line in enumerate(lines) if "more column" in line), len(lines))
    found = {word for line in lines[:note] for word in line.split() if "..." not in word} - {lines[ruler]}
    words = {word for column in RUNS.columns for cell in (*column.cells, column.heading) for word in cell.split()}
    assert found <= words, "no word and no number is broken"
    assert {"completed", "(1)", "16", "outputs/mine"} <= found, "what names a row is never left out"
    left_out = sum(word not in found for word in ("159.3", "98.6", "digits"))
    assert " ".join(lines[note:]).startswith(f"{left_out} more column" if left_out else "")


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_a_pipe_gets_every_column_and_a_line_for_each_row(encoding: str) -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding)
    console, _ = log(file=file, width=20)
    show_table(console, RUNS, elsewhere="format=csv")
    file.seek(0)
    *_, ruler, first, second = file.read().splitlines()
    assert set(ruler) == {"\u2500" if encoding == "utf-8" else "-"}
    assert first.split("  ")[-1] == "a model of the paper that learns digits"
    assert second.split() == ["outputs/mine", "16", "failed", "(1)", "-", "-", "-"]


def test_programs_get_every_column_and_every_digit() -> None:
    first, second = json.loads(to_text(RUNS, "json"))
    assert first == {
        "run": RUNS.columns[0].cells[0], "partitions": 2, "status": "completed",
        "samples_per_second": 159.2714285714286, "test": None, "what it is": [1, 2], "folder": "a,b",
    }  # fmt: skip
    assert (second["samples_per_second"], second["what it is"]) == (None, True)
    one, other = csv.DictReader(io.StringIO(to_text(RUNS, "csv")))
    assert (one["samples_per_second"], one["what it is"], one["folder"]) == ("159.2714285714286", "[1,2]", "a,b")
    assert (other["samples_per_second"], other["what it is"], other["folder"]) == ("", "true", 'c "d"')
