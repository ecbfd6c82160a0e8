"""The results in recipes/README.md: the text between two comments there comes from a reproduction of all recipes."""

from collections.abc import Sequence

from gpipe_cli.reporting.tables.recipe import Reproduction, markdown
from gpipe_cli.reporting.tables.table import Column, Table, to_markdown
from gpipe_cli.units import duration

README = "README.md"
BEGIN, END = "<!-- written by gpipe reproduce all -->", "<!-- until here -->"


def with_results(readme: str, reproductions: Sequence[Reproduction]) -> str:
    """``readme`` with these results in place of the text between its two comments."""
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{_results(reproductions)}{END}{after}"


def _results(reproductions: Sequence[Reproduction]) -> str:
    seconds = duration(sum(one.seconds for one in reproductions))
    machines = "; ".join(dict.fromkeys(one.machine for one in reproductions))
    columns = [
        Column("recipe", cells=[f"[{one.name}]({one.name}.yaml)" for one in reproductions]),
        Column("reproduces", cells=[one.title for one in reproductions]),
        Column("the paper's scale takes", cells=[one.needs for one in reproductions]),
        Column("scale", cells=[one.scale for one in reproductions]),
        Column("minutes", cells=[f"{one.seconds / 60:.1f}" for one in reproductions], number=True),
    ]
    lines = [f"All recipes took {seconds} on {machines}.", "", to_markdown(Table("", columns))]
    return "\n".join([*lines, *map(markdown, reproductions)])
