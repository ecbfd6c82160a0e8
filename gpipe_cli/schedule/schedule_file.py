"""Schedules as CSV files, in the format of torch.distributed.pipelining (`_load_csv` in its schedules.py): a row per
device, a cell per action in order, `0F0`, `1B0`, `1I0`, `1W0`; empty cells are idle ticks.

A cell `(0F1;7B0)OVERLAP_F_B`, as torch's ScheduleDualPipeV has them, is performed in the order in which it is written,
which is what torch does unless a program overlaps the two itself. Cells with communication (`0SEND_F0`) or of sharded
weights (`0UNSHARD`), which torch writes unless it is told `compute_only`, are skipped: here both follow from the order.

Recomputations (`1R0`) are our extension. A file with any has to list all; for a file without, `recompute` decides.
"""

import csv
import io
import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path

from gpipe_cli.schedule.dependencies import ScheduleError, check, clock, topological_order
from gpipe_cli.schedule.schedule import Action, Kind, Schedule
from gpipe_cli.system.files import read_text

_ACTION = re.compile(r"([0-9]{1,6})([FRBIW])([0-9]{1,6})")
_OVERLAPPED_PAIR = re.compile(r"\(([^;()]+);([^;()]+)\)OVERLAP_F_B")
_COMMUNICATION = re.compile(r"[0-9]{1,6}(?:(?:SEND|RECV)_[FB][0-9]{1,6}|UNSHARD|RESHARD|REDUCE_GRAD)")


@lru_cache
def read_schedule(path: str, partitions: int, micro_batches: int) -> Schedule:
    """The schedule in the file `path`, which must have this number of `partitions` and of `micro_batches`.

    Raises ScheduleError, which reports what is wrong and where, but does not name the file.
    """
    rows = _parse_rows(path)
    if not rows:
        raise ScheduleError("has no action; gpipe plan write_schedule=FILE.csv writes some")
    schedule = Schedule(map(tuple, rows))
    _check_number("partitions", 1 + max(action.stage for row in rows for action in row), partitions)
    _check_number("micro_batches", schedule.micro_batches, micro_batches)
    check(schedule)
    if not schedule.trains:
        raise ScheduleError("has no backward; add a B, or an I and a W, for every F")
    return schedule


def _check_number(setting: str, number: int, given: int) -> None:
    if number != given:
        raise ScheduleError(f"has {number} {setting}, and {setting}={given}; use {setting}={number}")


def _parse_rows(path: str) -> list[list[Action]]:
    """The actions of each line that has any. Raises ScheduleError for a file that cannot be read, and for a cell that
    holds something else."""
    rows: list[list[Action]] = []
    parsed: dict[str, tuple[Action, ...]] = {"": ()}
    duplicates: set[str] = set()
    try:
        lines = csv.reader(io.StringIO(read_text(Path(path))))
        for cells in lines:
            row: list[Action] = []
            for column, cell in enumerate(map(str.strip, cells), start=1):
                if cell not in parsed:
                    if (actions := _parse_actions(cell)) is None:
                        where = f"line {lines.line_num}, cell {column}"
                        allowed = "empty, or a stage, one of F R B I W and a micro-batch: 0F0"
                        raise ScheduleError(f"{where} is {cell[:40]!r}; a cell is {allowed}")
                    row += parsed.setdefault(cell, actions)
                elif cell and cell not in duplicates:  # a duplicate is enough; the grid of a million takes minutes
                    row += parsed[cell]
                    duplicates.add(cell)
            if row:
                rows.append(row)
    except (OSError, csv.Error) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ScheduleError(f"cannot be read: {why}; gpipe plan write_schedule=FILE.csv writes one") from None
    return rows


def _parse_actions(cell: str) -> tuple[Action, ...] | None:
    """The actions of a cell; None if it is none."""
    if match := _ACTION.fullmatch(cell):
        return (Action(Kind(match[2]), int(match[1]), int(match[3])),)
    if match := _OVERLAPPED_PAIR.fullmatch(cell):
        first, second = map(_parse_actions, match.groups())
        return first + second if first and second else None
    return () if _COMMUNICATION.fullmatch(cell) else None


def schedule_to_csv(schedule: Schedule, row_of_stage: Sequence[int] = ()) -> str:
    """The schedule as CSV text, with a column per tick of the unit clock.
    `row_of_stage` gives the row of each stage, if rows of the schedule share a device."""
    if row_of_stage:
        rows: list[list[Action]] = [[] for _ in range(1 + max(row_of_stage))]
        for action in topological_order(schedule, row_of_stage):
            rows[row_of_stage[action.stage]].append(action)
        schedule = Schedule(map(tuple, rows))
    columns = []
    for row, ticks in zip(schedule, clock(schedule), strict=True):
        cells = [""] * (1 + max(ticks))
        for action, tick in zip(row, ticks, strict=True):
            cells[tick] = str(action)
        columns.append(cells)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows(zip(*zip_longest(*columns, fillvalue=""), strict=True))
    return text.getvalue()
