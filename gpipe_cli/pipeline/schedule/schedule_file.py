"""Schedules as CSV files, in the format of torch.distributed.pipelining (`_load_csv` with `compute_only` in its
schedules.py): a row per device, a cell per action in order, `0F0`, `1B0`, `1I0`, `1W0`; empty cells are idle ticks.

Recomputations (`1R0`) are our extension. A file with any has to list all; for a file without, `recompute` decides.
"""

import csv
import io
import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path

from gpipe_cli.pipeline.schedule.dependencies import ScheduleError, check, clock, linearize
from gpipe_cli.pipeline.schedule.schedule import Action, Kind, Row, Schedule
from gpipe_cli.system.files import read_text

_CELL = re.compile(r"([0-9]{1,6})([FRBIW])([0-9]{1,6})")


@lru_cache
def read_schedule(path: str, partitions: int, micro_batches: int) -> Schedule:
    """The schedule in the file `path`, which must have this number of `partitions` and of `micro_batches`.

    Raises ScheduleError, which says what is wrong and where, but does not name the file.
    """
    try:
        rows = _rows(read_text(Path(path)))
    except (OSError, csv.Error) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ScheduleError(f"cannot be read: {why}; gpipe plan write_schedule=FILE.csv writes one") from None
    if not rows:
        raise ScheduleError("has no action; gpipe plan write_schedule=FILE.csv writes some")
    schedule = Schedule(rows)
    for setting, has, given in (
        ("partitions", 1 + max(action.stage for row in rows for action in row), partitions),
        ("micro_batches", schedule.micro_batches, micro_batches),
    ):
        if has != given:
            raise ScheduleError(f"has {has} {setting}, and {setting}={given}; use {setting}={has}")
    check(schedule)
    if not schedule.trains:
        raise ScheduleError("has no backward; add a B, or an I and a W, for every F")
    return schedule


def _rows(text: str) -> list[Row]:
    """The actions of each line that has any. Raises ScheduleError for a cell that is not an action, and csv.Error."""
    lines = csv.reader(io.StringIO(text))
    rows: list[Row] = []
    actions: dict[str, Action] = {}  # cell -> action
    twice: set[str] = set()
    for cells in lines:
        row = []
        for column, cell in enumerate(map(str.strip, cells), start=1):
            if cell in actions:
                if cell not in twice:  # one duplicate is error enough; the grid of a million would take minutes
                    row.append(actions[cell])
                twice.add(cell)
            elif match := _CELL.fullmatch(cell):
                actions[cell] = Action(Kind(match[2]), int(match[1]), int(match[3]))
                row.append(actions[cell])
            elif cell:
                raise ScheduleError(
                    f"line {lines.line_num}, cell {column} is {cell[:40]!r}; a cell is empty, or a stage, one "
                    "of F R B I W and a micro-batch: 0F0"
                )
        if row:
            rows.append(tuple(row))
    return rows


def csv_of(schedule: Schedule, row_of_stage: Sequence[int] = ()) -> str:
    """The schedule as CSV text, with a column per tick of a clock on which every action takes one.
    `row_of_stage` gives the row of each stage, if rows of the schedule share a device."""
    if row_of_stage:
        of_devices: list[list[Action]] = [[] for _ in range(1 + max(row_of_stage))]
        for action in linearize(schedule, row_of_stage):
            of_devices[row_of_stage[action.stage]].append(action)
        schedule = Schedule(map(tuple, of_devices))
    columns = []
    for row, at in zip(schedule, clock(schedule), strict=True):
        cells = [""] * (1 + max(at))
        for action, tick in zip(row, at, strict=True):
            cells[tick] = str(action)
        columns.append(cells)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows(zip(*zip_longest(*columns, fillvalue=""), strict=True))
    return text.getvalue()
