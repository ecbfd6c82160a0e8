"""Numbers of the tables that set the paper's results beside ours.

A difference is taken only where both numbers are of the same data and size: what runs at a desk has none.
"""

NONE = "-"


def number(value: float | None, digits: int) -> str:
    """`2.58`; `-` if there is none."""
    return NONE if value is None else f"{value:,.{digits}f}"


def percents(share: float | None) -> str:
    """`84.40 %` for 0.844; `-` if there is none."""
    return NONE if share is None else f"{100 * share:.2f} %"


def difference(ours: float | None, paper: float | None, desk: bool, digits: int = 2) -> str:
    """Ours minus the paper's, `-0.42`; `-` at a desk, or where one of them is missing."""
    return NONE if desk or ours is None or paper is None else f"{round(ours - paper, digits) + 0.0:+.{digits}f}"
