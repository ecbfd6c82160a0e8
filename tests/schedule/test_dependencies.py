"""Schedules put in order, drawn on a unit clock, and refused with their grid if they cannot run."""

import itertools
import random
from collections.abc import Sequence

import pytest
from schedule_runs import build, parse

from gpipe_cli.errors import InputError
from gpipe_cli.schedule.dependencies import check, topological_order
from gpipe_cli.schedule.named_schedules import SCHEDULES
from gpipe_cli.schedule.schedule import RECOMPUTE_MODES, Action, Kind, Schedule


def test_linearize_is_an_order_in_which_one_process_can_run_everything() -> None:
    for name, recompute, partitions, micro_batches in itertools.product(
        SCHEDULES, RECOMPUTE_MODES, (1, 3, 4, 6), (1, 2, 5)
    ):
        schedule = build(name, partitions, micro_batches, recompute)
        # a device for each row; rows that share one; all of them on one
        for device_of_stage in (schedule.row_of_stage, [row // 2 for row in schedule.row_of_stage], [0] * partitions):
            order = topological_order(schedule, device_of_stage)
            done: set[Action] = set()
            for a in order:
                assert schedule.source(a) in {None, *done}
                done.add(a)
            for row in schedule:
                stages = {a.stage for a in row}
                assert tuple(a for a in order if a.stage in stages) == row


def test_linearize_launches_breadth_first_over_devices_and_depth_first_on_each() -> None:
    one, pairs = build("gpipe", 3, 3, "never"), build("gpipe", 4, 2, "never")
    order = " ".join(map(str, topological_order(one)))
    assert order == "0F0 0F1 1F0 0F2 1F1 2F0 1F2 2F1 2F2 2B2 2B1 1B2 2B0 1B1 0B2 1B0 0B1 0B0"
    order = " ".join(map(str, topological_order(pairs, (0, 0, 1, 1))))
    assert order == "0F0 1F0 0F1 2F0 1F1 3F0 2F1 3F1 3B1 2B1 3B0 1B1 2B0 0B1 1B0 0B0"


@pytest.mark.parametrize(
    ("broken", "message", "picture"),
    [
        ("0F0 0F1\n1F0", "1F1 is missing; add it to stage 1", "stage 0 | F0 F1\nstage 1 > .  F0"),
        (
            "0F0 0F1\n1F0 0B0",
            "0B0 is in row 1, and stage 0 in row 0; put all actions of a stage into one row",
            "device 0 | 0F0  0F1\ndevice 1 > .    1F0  0B0!",
        ),
        ("0B0 0F0", "0B0 comes before 0F0", "stage 0 > B0! F0!"),
        ("0F0 0I0 0W0 0B0", "0B0 and 0I0 are two backwards of one micro-batch", "stage 0 > F0  I0! W0  B0!"),
        (
            "0F0 0F1 0B0 0B1\n1F0 1F1 1B1 1B0",
            "stage 1 sends after 1B1 when stage 0 receives for 0B0",
            "stage 0 > F0  F1  .   .   .   B0! B1\nstage 1 > .   F0  F1  B1! B0",
        ),
        (
            "0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1",
            "deadlock (0B0 waits for 1B0; 1F1 waits for 0F1)",
            "stage 0 > F0  B0! F1  B1\nstage 1 > .   F0  F1! B0  B1",
        ),
    ],
)
def test_check_refuses_and_points(broken: str, message: str, picture: str) -> None:
    with pytest.raises(InputError, match="schedule: ") as error:
        check(parse(broken))
    first_line, shown = str(error.value).split("\n", 1)
    assert message in first_line
    assert shown == picture


def test_check_finds_any_single_damage() -> None:
    """Leave one action out, put one in twice, or swap two neighbours of a row: refused, or still the same step."""
    random_ = random.Random(0)
    for name, recompute in itertools.product(SCHEDULES, RECOMPUTE_MODES):
        schedule = build(name, 4, 3, recompute)
        for number, row in enumerate(schedule):

            def damaged(actions: Sequence[Action], at: int = number, whole: Schedule = schedule) -> Schedule:
                return Schedule((*whole[:at], tuple(actions), *whole[at + 1 :]))

            for i, gone in enumerate(row):
                rest = row[:i] + row[i + 1 :]
                if gone.kind is not Kind.R:  # without an R the forward keeps its graph: another valid schedule
                    with pytest.raises(InputError, match="schedule: "):
                        check(damaged(rest))
                where = random_.randrange(len(rest) + 1)
                with pytest.raises(InputError, match="schedule: "):
                    check(damaged((*row[:where], gone, *row[where:])))
            for i in range(len(row) - 1):
                swapped = [*row[:i], row[i + 1], row[i], *row[i + 2 :]]
                try:
                    check(damaged(swapped))
                except ValueError:
                    continue
                # accepted, so it must run
                assert sorted(topological_order(damaged(swapped))) == sorted(topological_order(schedule))
                one, other = row[i : i + 2]
                assert (one.kind, one.stage) != (other.kind, other.stage) or one.kind is Kind.W
