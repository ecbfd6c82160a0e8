"""The results in recipes/README.md: a table of all claims, then the paper's tables about pipelines."""

from collections.abc import Sequence
from dataclasses import replace

from gpipe_cli.reporting.reproduced.page import CLAIMS, claim_rows
from gpipe_cli.reporting.tables.recipe import Reproduction, markdown
from gpipe_cli.reporting.tables.table import Column, Table, to_markdown
from gpipe_cli.units import duration

README = "README.md"
BEGIN, END = "<!-- written by gpipe reproduce all -->", "<!-- until here -->"  # the comments that enclose the results
_OMITTED_NOTES = ("scale", "our choice")  # labels of notes that only gpipe reproduce NAME prints


def insert_results(readme: str, reproductions: Sequence[Reproduction]) -> str:
    """``readme`` with these results instead of the text between its comments BEGIN and END."""
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{_results(reproductions)}{END}{after}"


def _results(reproductions: Sequence[Reproduction]) -> str:
    seconds = duration(sum(reproduction.seconds for reproduction in reproductions))
    machines = "; ".join(dict.fromkeys(reproduction.machine for reproduction in reproductions))
    rows = []
    for reproduction in reproductions:
        recipe = f"[{reproduction.name}]({reproduction.name}.yaml)"
        for row in claim_rows(reproduction):
            rows.append((recipe, *row))
            recipe = ""
    table = to_markdown(Table.of_rows("", [Column("recipe"), *CLAIMS], rows))
    sections = []
    for reproduction in filter(_has_section, reproductions):
        notes = tuple(note for note in reproduction.notes if note[0] not in _OMITTED_NOTES)
        sections.append(markdown(replace(reproduction, notes=notes)))
    return "\n".join([f"All recipes took {seconds} on {machines}.", "", table, *sections])


def _has_section(reproduction: Reproduction) -> bool:
    """Whether the tables have numbers of the paper in rows for each K, or next to numbers that were not run. The claims
    suffice for a training; tables without numbers of the paper are printed by their command."""
    columns = [column for table in reproduction.tables for column in table.columns]
    pipelines = any(column.heading == "K" or column.origin in ("planned", "simulated") for column in columns)
    return pipelines and any(column.origin == "paper" for column in columns)
