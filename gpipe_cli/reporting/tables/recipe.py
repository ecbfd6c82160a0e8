"""The report of `gpipe reproduce`: the paper's numbers, ours and the difference; on the console, as Markdown, JSON."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from gpipe_cli.config.old_words import update_words
from gpipe_cli.errors import InputError, describe_error
from gpipe_cli.reporting.run.lines import print_fields, show_text
from gpipe_cli.reporting.tables.table import Column, Table, show_table, to_markdown
from gpipe_cli.results.files import read_result, write_result
from gpipe_cli.system.files import write_atomic
from gpipe_cli.units import duration

REPRODUCTION = "reproduction"  # .json and .md


@dataclass(frozen=True)
class Reproduction:
    """The results of a recipe."""

    name: str
    title: str
    claim: str  # the paper's claim in our own words
    source: str
    needs: str  # devices and data needed at the paper's scale
    scale: str  # paper, small, smoke
    machine: str
    tables: tuple[Table, ...]
    notes: tuple[tuple[str, str], ...]  # label, line: what was scaled down, simulated, chosen by us, found
    commands: tuple[str, ...]
    files: tuple[tuple[str, str], ...]  # description, path
    seconds: float


def write_reproduction(reproduction: Reproduction, folder: Path) -> None:
    """Writes reproduction.json and reproduction.md into ``folder``. Raises OSError if they cannot be written."""
    tables = [_plain(table) for table in reproduction.tables]
    write_result(folder, vars(reproduction) | {"tables": tables}, f"{REPRODUCTION}.json")
    write_atomic(folder / f"{REPRODUCTION}.md", markdown(reproduction))


def read_reproduction(folder: Path) -> Reproduction:
    """What ``write_reproduction`` wrote. Raises FileNotFoundError, and InputError if the file holds something else."""
    stored = update_words(read_result(folder, f"{REPRODUCTION}.json"))
    try:
        tables = tuple(
            Table.of_rows(table["title"], [Column(**column) for column in table["columns"]], table["rows"])
            for table in stored["tables"]
        )
        return Reproduction(**stored | {"tables": tables})
    except (KeyError, TypeError, AttributeError) as error:
        file = folder / f"{REPRODUCTION}.json"
        raise InputError(
            f"{file}: cannot be read ({describe_error(error)}); remove {folder} and run it again"
        ) from error


def show_reproduction(console: Console, reproduction: Reproduction, folder: Path) -> None:
    """Print the results; ``folder`` is where they were written."""
    for table in reproduction.tables:
        console.print()
        show_text(console, table.title, "bold")
        named = replace(table, names=sum(not column.origin for column in table.columns))
        show_table(console, named, gap=3, elsewhere=f"{REPRODUCTION}.md")
    console.print()
    print_fields(console, reproduction.notes)
    print_fields(console, [("took", f"{duration(reproduction.seconds)} on {reproduction.machine}")])
    print_fields(console, reproduction.files)
    print_fields(console, [("written to", str(folder / f"{REPRODUCTION}.md"))])


def markdown(reproduction: Reproduction) -> str:
    """The results as a section of recipes/README.md."""
    about = f"{reproduction.title}: {reproduction.claim}. Source: {reproduction.source}."
    lines = [f"### {reproduction.name}", "", about, ""]
    for table in reproduction.tables:
        lines += [f"**{table.title}**", "", to_markdown(table)]
    lines += [f"* {label}: {line}" for label, line in reproduction.notes]
    lines += [f"* took: {duration(reproduction.seconds)} on {reproduction.machine}", ""]
    return "\n".join(lines)


def _plain(table: Table) -> dict[str, Any]:
    columns = [
        {key: getattr(column, key) for key in ("heading", "origin", "values", "quantity", "minuend")}
        for column in table.columns
    ]
    return {"title": table.title, "columns": columns, "rows": table.rows}
