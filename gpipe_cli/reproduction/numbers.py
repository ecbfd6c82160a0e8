"""Numbers of the tables that set the paper's results beside ours.

A difference is taken only where both numbers are of the same data and size: what runs at a desk has none, and what runs
with a setting of the user that may have changed either has none.
"""

from collections.abc import Iterable, Sequence

from gpipe_cli.config.setting_owners import key_of
from gpipe_cli.reporting.tables.table import Column, Table

NONE = "-"
# How a training is run, which its result does not depend on (the recipe `consistency`).
SAME_RESULT = ("partitions", "partition", "schedule", "recompute")
# Where and how long something runs, and where data lie: settings that leave size and data as they are. All others may
# change them. Of a group, `checkpoint`, all that is in it.
_HARMLESS = (
    "output", "device", "executor", "threads", "data_workers", "memory_format", "timeout_seconds", "cost", "seed",
    "checkpoint", "dataset.root", "dataset.cache", "dataset.download", "warm_up_steps", "steps", "rounds",
)  # fmt: skip


def changing(given: Iterable[str], harmless: Sequence[str] = ()) -> tuple[str, ...]:
    """Those of a user's settings that may have changed what the numbers are of; ``harmless`` more that do not."""
    kept = (*_HARMLESS, *harmless)
    return tuple(one for one in given if not any(f"{key_of(one)}.".startswith(f"{key}.") for key in kept))


def number(value: float | None, digits: int) -> str:
    """`2.58`; `-` if there is none."""
    return NONE if value is None else f"{value:,.{digits}f}"


def percents(share: float | None) -> str:
    """`84.40 %` for 0.844; `-` if there is none."""
    return NONE if share is None else f"{100 * share:.2f} %"


def difference(ours: float | None, paper: float | None, comparable: bool, digits: int = 2) -> str:
    """Ours minus the paper's, `-0.42`; `-` where they are not of the same data and size, or one of them is missing."""
    if not comparable or ours is None or paper is None:
        return NONE
    return f"{round(ours - paper, digits) + 0.0:+.{digits}f}"


def differences(
    heading: str, ours: Sequence[float | None], paper: Sequence[float], comparable: bool, digits: int = 2
) -> Column:
    """The column of the difference of each row."""
    cells = [difference(mine, theirs, comparable, digits) for mine, theirs in zip(ours, paper, strict=True)]
    return Column(heading, "difference", cells)


def beside(title: str, rows: Sequence[tuple[str, ...]]) -> Table:
    """A table of rows that are each a name, the paper's number, ours and the difference."""
    columns = Column(""), Column("", "paper"), Column("", "measured"), Column("", "difference")
    return Table.of_rows(title, columns, tuple(rows))
