"""The table of `gpipe bench -m` in a console: readable at 80 columns, so it falls into speed and memory if need be."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from gpipe_cli.reporting.run.summary import show_facts, show_line, speed_kind
from gpipe_cli.reporting.tables.bench import AUTO, CSV, HOPELESS, JSON
from gpipe_cli.reporting.tables.sweep import plain_table
from gpipe_cli.units import duration, operations, percent, rate, size

Column = tuple[str, list[str]]

SYMBOLS = {"partitions": "K", "micro_batches": "M"}  # the paper's
_SHORT = ("devices", "executor", "threads", "kind")  # resolved, and shown as columns; all else as lines
_COLUMN_GAP = 2


def show_bench(console: Console, table: Mapping[str, Any], folder: Path) -> None:
    """Shows the rows of a table as bench.json has them."""
    rows = table["rows"]
    settings = _settings(table)
    speed, rest = _speed(rows), [*_memory(rows), *_resolved(rows, table["varies"])]
    console.rule(Text(f"sweep {folder}"), align="left")
    wide = sum(_width(column) + _COLUMN_GAP for column in (*settings, *speed, *rest)) > console.width
    for columns in ([*settings, *speed], [*settings, *rest]) if wide else ([*settings, *speed, *rest],):
        shown = plain_table()
        for heading, cells in columns:
            numbers = all(cell == "-" or cell[:1].isdigit() for cell in cells)
            left = heading in ("status", "executor", "kind") or not numbers
            shown.add_column(heading, justify="left" if left else "right", overflow="fold", no_wrap=not left)
        for number in range(len(rows)):
            shown.add_row(*(Text(cells[number]) for _, cells in columns))
        console.print(shown)
        console.print()
    for why, names in _reasons(rows).items():
        show_line(console, f"{'; '.join(names)}: {why}")
    show_facts(console, _notes(rows, table["varies"]))
    show_facts(console, [("written to", f"{folder / JSON}, {CSV}")])


def _settings(table: Mapping[str, Any]) -> list[Column]:
    def asked(row: Mapping[str, Any], key: str) -> str:
        """`4`; of what was to be chosen also what was: `auto: 4`."""
        value, chosen = row["settings"].get(key), row["resolved"].get(key, AUTO)
        return f"{value}: {_value(chosen)}" if value == AUTO != chosen else _value(value)

    columns = [(_symbol(key), [asked(row, key) for row in table["rows"]]) for key in table["varies"]]
    return [*columns, ("status", [row["status"].replace("_", " ") for row in table["rows"]])]


def _speed(rows: Sequence[Mapping[str, Any]]) -> list[Column]:
    columns: list[Column] = []
    for key in ("tokens_per_second", "samples_per_second"):
        of = [row for row in rows if row.get(key) is not None and (key[0] == "t" or "tokens_per_second" not in row)]
        if of or (key[0] == "s" and not columns):
            unit = key.replace("_per_second", "/s")
            columns.append((unit, [rate(row.get(key)) if row in of else "-" for row in rows]))
    rounds = max(row["rounds_measured"] for row in rows)
    spread = "range_over_rounds" if rounds > 1 else "quartiles"
    columns.append(("range" if rounds > 1 else "quartiles", [_spread(row, spread) for row in rows]))
    columns.append(("relative", ["-" if row["relative"] is None else f"{row['relative']:.2f}" for row in rows]))
    seconds = [row["step_seconds"] for row in rows]
    columns.append(("step", ["-" if value is None else duration(value) for value in seconds]))
    return columns


def _spread(row: Mapping[str, Any], key: str) -> str:
    """`221.0 to 233.4`: over the steps of one round, or over rounds."""
    if key == "quartiles":
        key = "tokens_per_second_quartiles" if "tokens_per_second" in row else "samples_per_second_quartiles"
    ends = row.get(key)
    return "-" if ends is None else f"{rate(ends[0])} to {rate(ends[1])}"


def _memory(rows: Sequence[Mapping[str, Any]]) -> list[Column]:
    def fullest(row: Mapping[str, Any], key: str) -> str:
        return size(max(row[key])) if row[key] else "-"

    flops = [row["model_flops_per_second"] for row in rows]
    columns = [
        ("bubble", [percent(row["bubble"]) for row in rows]),
        ("memory", [fullest(row, "memory_bytes") for row in rows]),
        ("activations", [fullest(row, "activation_bytes") for row in rows]),
        ("FLOP/s", ["-" if value is None else operations(value) for value in flops]),
    ]
    if any(row["mfu"] is not None for row in rows):
        columns.append(("MFU", [percent(row["mfu"]) for row in rows]))
    return columns


def _resolved(rows: Sequence[Mapping[str, Any]], varies: Sequence[str]) -> list[Column]:
    """What differs without being asked for."""
    keys = [key for key in _SHORT if key not in varies and any(key in row["resolved"] for row in rows)]
    return [(key, [_value(row["resolved"].get(key, "-")) for row in rows]) for key in keys]


def _reasons(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """What became of cells that were not measured -> which ones."""
    reasons: dict[str, list[str]] = {}
    for number, row in enumerate(rows, start=1):
        if row["reason"]:
            name = ", ".join(f"{_symbol(key)} = {_value(value)}" for key, value in row["settings"].items())
            name = name or f"run {number}"  # of a sweep over one value nothing differs
            reasons.setdefault(f"{row['status'].replace('_', ' ')}: {row['reason']}", []).append(name)
    return reasons


def _notes(rows: Sequence[Mapping[str, Any]], varies: Sequence[str]) -> list[tuple[str, str]]:
    measured = [row for row in rows if row["status"] == "measured"]
    notes: list[tuple[str, str]] = []
    kinds = {row["kind"] for row in measured}
    if len(kinds) == 1:
        worst = max((row["without_core"] for row in measured if row.get("without_core") is not None), default=None)
        notes.append(("speed", speed_kind(measured[0]["kind"], worst)))
    if measured:
        notes.append(("memory", "peak of the fullest stage: its process's, on a GPU the allocator's"))
        notes.append(("activations", "of the fullest stage, counted; bubble measured"))
    for key in dict.fromkeys(key for row in rows for key in row["resolved"] if key not in (*_SHORT, *varies)):
        values = [_value(row["resolved"].get(key, "-")) for row in rows]
        notes.append(("differs too", f"{key}: {', '.join(values)}"))
    hopeless = sum(row["status"] in HOPELESS for row in rows)
    if hopeless and not measured:
        notes.append(("", "nothing was measured"))
    return notes


def _symbol(key: str) -> str:
    return SYMBOLS.get(key, key)


def _value(value: object) -> str:
    """As it is written on the command line."""
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case list():
            return "[" + ",".join(map(_value, value)) + "]"
    return str(value)


def _width(column: Column) -> int:
    heading, cells = column
    return max(len(heading), *map(len, cells))
