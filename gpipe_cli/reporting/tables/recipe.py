"""What `gpipe reproduce` shows: the paper's numbers, ours, the difference; for people, as Markdown and as JSON."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from gpipe_cli.reporting.run.lines import show_facts, show_text
from gpipe_cli.reporting.run.result import write_result
from gpipe_cli.reporting.tables.table import Table, show_table, to_markdown
from gpipe_cli.system.files import write_whole
from gpipe_cli.units import duration

REPRODUCTION = "reproduction"  # .json and .md


@dataclass(frozen=True)
class Reproduction:
    """What came out of a recipe."""

    name: str
    title: str
    source: str
    scale: str  # paper, desk
    machine: str
    tables: tuple[Table, ...]
    notes: tuple[tuple[str, str], ...]  # label, line: scaled down, simulated, our choice, what was found
    commands: tuple[str, ...]  # that were run
    files: tuple[tuple[str, str], ...]  # what it is, path
    seconds: float


def show_reproduction(console: Console, reproduction: Reproduction, folder: Path) -> None:
    """Shows it, and writes reproduction.json and reproduction.md into ``folder``."""
    try:
        tables = [_plain(table) for table in reproduction.tables]
        write_result(folder, vars(reproduction) | {"tables": tables}, f"{REPRODUCTION}.json")
        write_whole(folder / f"{REPRODUCTION}.md", markdown(reproduction))
    finally:  # what cannot be written is shown all the same
        for table in reproduction.tables:
            console.print()
            show_text(console, table.title, "bold")
            named = replace(table, names=sum(not column.origin for column in table.columns))
            show_table(console, named, gap=3, elsewhere=f"{REPRODUCTION}.md")
        console.print()
        show_facts(console, reproduction.notes)
        show_facts(console, [("took", f"{duration(reproduction.seconds)} on {reproduction.machine}")])
        show_facts(console, reproduction.files)
        show_facts(console, [("written to", str(folder / f"{REPRODUCTION}.md"))])


def markdown(reproduction: Reproduction) -> str:
    """As a section of recipes/README.md."""
    lines = [f"### {reproduction.name}", "", f"{reproduction.title}. Source: {reproduction.source}.", ""]
    for table in reproduction.tables:
        lines += [f"**{table.title}**", "", to_markdown(table)]
    lines += [f"* {label}: {line}" for label, line in reproduction.notes]
    lines += [f"* took: {duration(reproduction.seconds)} on {reproduction.machine}", ""]
    return "\n".join(lines)


def _plain(table: Table) -> dict[str, Any]:
    columns = [{"heading": column.heading, "origin": column.origin} for column in table.columns]
    return {"title": table.title, "columns": columns, "rows": table.rows}
