"""Schedules on a V: their steps and what devices hold, by a clock on which F, I and W of a stage take one tick."""

import itertools

import pytest

from gpipe_cli.schedule.named_schedules import ORDERS, order
from gpipe_cli.schedule.placement import place
from gpipe_cli.schedule.schedule import Kind, Schedule
from gpipe_cli.schedule.simulator import StageCost, simulate
from gpipe_cli.schedule.v_schedules import MAX_IN_FLIGHT

# Ticks of a device without work, and the most graphs of half a device's layers that one holds from F to W. A row per
# stage has stages of twice the size, on as many devices.
TABLE = """
P  M  1f1b     zero_bubble interleaved zbv     v_half  v_min
2  4   6/ 4     2/ 4        3/ 5        1/ 4    1/ 4    1/ 4
4  4  18/ 8     6/ 8        9/ 8        3/ 8    6/ 6   11/ 4
4  8  18/ 8     6/ 8        9/11        3/ 8    6/ 6   11/ 4
8  8  42/16    14/16       21/16        7/16   18/10   27/ 8
8 32  42/16    14/16       21/23        7/16   18/10   27/ 8
"""


def ticks(schedule: Schedule, of_stage: int = 1) -> float:
    """The ticks of a step, in which an F of a stage takes `of_stage` ticks."""
    cost = StageCost(of_stage, of_stage, 2 * of_stage, of_stage, of_stage)
    return simulate(schedule, [cost] * len(schedule.stages)).step_seconds


def graphs(schedule: Schedule) -> int:
    """The most graphs that a row holds, from F to W."""
    more = [[(a.kind is Kind.F) - (a.kind in (Kind.B, Kind.W)) for a in row] for row in schedule]
    return max(max(itertools.accumulate(row)) for row in more)


def even_idle(name: str, devices: int, micro_batches: int) -> int:
    """The closed forms for 2 P stages on P >= 3 devices: idle ticks of each device."""
    p, m = devices, micro_batches
    if MAX_IN_FLIGHT[name](p) >= min(MAX_IN_FLIGHT["zbv"](p), 2 * m):
        return max(p - 1, 3 * p - 1 - 2 * m, 4 * p - 1 - 4 * m)
    if MAX_IN_FLIGHT[name](p) >= MAX_IN_FLIGHT["v_half"](p):
        return 3 * p - 4 - 2 * (p % 2 == 0)
    return 4 * p - 5 + 2 * (p % 3 == 0)


@pytest.mark.parametrize("line", TABLE.strip().splitlines()[1:])
def test_idle_ticks_and_graphs(line: str) -> None:
    (devices, micro_batches), expected = map(int, line[:5].split()), line[5:].replace("/ ", "/").split()
    found = []
    for name in TABLE.split()[2:8]:
        each = 2 if ORDERS[name].placement else 1
        schedule = order(name, each * devices, micro_batches, devices)
        idle = ticks(schedule, 2 // each) - 6 * micro_batches
        found.append(f"{idle:.0f}/{graphs(schedule) * 2 // each}")
    assert found == expected


def test_a_step_in_a_v() -> None:
    """More memory is never slower; an odd number of stages is the V without the second stage of the last device; no
    step is slower than 1f1b's on as many devices."""
    for devices, micro_batches in itertools.product((1, 2, 3, 4, 5, 6, 9), (1, 2, 3, 7, 12)):
        for partitions in (2 * devices - 1, 2 * devices):
            before = 0.0
            for name, most in MAX_IN_FLIGHT.items():
                schedule = order(name, partitions, micro_batches)
                assert schedule.row_of_stage == place("v", partitions, devices)
                assert graphs(schedule) <= most(devices)
                step = ticks(schedule)
                assert before <= step <= 6 * (micro_batches + devices - 1)
                before = step
                if partitions % 2 == 0 and devices > 2:
                    assert step == 6 * micro_batches + even_idle(name, devices, micro_batches)
                elif name == "zbv" and devices > 1 and micro_batches >= devices:
                    assert step == 6 * micro_batches + devices - 1 - partitions % 2  # what bounds any order


@pytest.mark.parametrize(("devices", "micro_batches", "name"), [(3, 2, "zbv"), (3, 4, "v_half"), (4, 3, "v_min")])
def test_no_order_with_as_many_graphs_is_faster(devices: int, micro_batches: int, name: str) -> None:
    """Found by trying all orders in which every stage begins with micro-batch 0."""
    step = int(ticks(order(name, 2 * devices, micro_batches)))
    most = MAX_IN_FLIGHT[name](devices)
    assert exists(devices, micro_batches, most, step)
    assert not exists(devices, micro_batches, most, step - 1)


def exists(devices: int, micro_batches: int, most: int, steps: int) -> bool:
    """Whether any order that holds at most `most` graphs on a device takes at most `steps` ticks."""
    stages, last = 2 * devices, 2 * devices - 1
    of_device = [(device, last - device) for device in range(devices)]
    states = {((0,) * stages, (0,) * stages, (0,) * stages)}  # the F, I and W that each stage has performed
    for left in reversed(range(steps)):
        after = set()
        for f, i, w in states:
            choices: list[list[tuple[int, int] | None]] = []
            for own in of_device:
                room = sum(f[k] - w[k] for k in own) < most
                forwards = [(0, k) for k in own if room and f[k] < micro_batches and (k == 0 or f[k - 1] > f[k])]
                others = [(1, k) for k in own if i[k] < f[k] and (k == last or i[k + 1] > i[k])]
                others += [(2, k) for k in own if w[k] < i[k]]
                choices.append([*forwards, *others, *([] if others else [None])])  # to delay an I or W gains nothing
            for chosen in itertools.product(*choices):
                counts = [list(f), list(i), list(w)]
                for kind, stage in filter(None, chosen):
                    counts[kind][stage] += 1
                work = max(6 * micro_batches - sum(done[k] for done in counts for k in own) for own in of_device)
                path = sum(k < micro_batches for done in counts[:2] for k in done)  # what the last micro-batch needs
                if max(work, path + 1 if path else 0) <= left:
                    after.add(tuple(map(tuple, counts)))
        states = after
    return bool(states)
