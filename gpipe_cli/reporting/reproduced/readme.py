"""The results in recipes/README.md: a table of all claims, then the paper's tables about pipelines."""

from collections.abc import Sequence
from dataclasses import replace

from gpipe_cli.reporting.reproduced.page import CLAIMS, claims
from gpipe_cli.reporting.tables.recipe import Reproduction, markdown
from gpipe_cli.reporting.tables.table import Column, Table, to_markdown
from gpipe_cli.units import duration

README = "README.md"
BEGIN, END = "<!-- written by gpipe reproduce all -->", "<!-- until here -->"  # the comments that enclose the results
_LEFT_OUT = ("scale", "our choice")  # labels of notes that only gpipe reproduce NAME prints


def with_results(readme: str, reproductions: Sequence[Reproduction]) -> str:
    """``readme`` with these results in place of the text between its comments BEGIN and END."""
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{_results(reproductions)}{END}{after}"


def _results(reproductions: Sequence[Reproduction]) -> str:
    seconds = duration(sum(one.seconds for one in reproductions))
    machines = "; ".join(dict.fromkeys(one.machine for one in reproductions))
    rows = []
    for one in reproductions:
        recipe = f"[{one.name}]({one.name}.yaml)"
        for row in claims(one):
            rows.append((recipe, *row))
            recipe = ""
    table = to_markdown(Table.of_rows("", [Column("recipe"), *CLAIMS], rows))
    sections = [
        markdown(replace(one, notes=tuple(note for note in one.notes if note[0] not in _LEFT_OUT)))
        for one in reproductions
        if _has_section(one)
    ]
    return "\n".join([f"All recipes took {seconds} on {machines}.", "", table, *sections])


def _has_section(one: Reproduction) -> bool:
    """Whether numbers of the paper stand in rows for each K, or beside what was not run: of a training the row among
    the claims says all, and what is not in the paper is printed by its command."""
    columns = [column for table in one.tables for column in table.columns]
    pipelines = any(column.heading == "K" or column.origin in ("planned", "simulated") for column in columns)
    return pipelines and any(column.origin == "paper" for column in columns)
