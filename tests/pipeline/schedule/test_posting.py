"""When receives are posted: in the order of what is sent, in time, and never over something that is still kept.

That nothing deadlocks is shown by recipes/measurements/link_order.py, which test_measurements.py runs.
"""

from itertools import product

import pytest

from gpipe_cli.pipeline.schedule.dependencies import linearize, source
from gpipe_cli.pipeline.schedule.orders import SCHEDULES, build, forward_only
from gpipe_cli.pipeline.schedule.posting import postings
from gpipe_cli.pipeline.schedule.schedules import Action, Kind, Schedule, in_flight

OWNERS = [(0, 1), (0, 1, 2), (0, 0, 1, 1), (0, 1, 2, 3), (0, 1, 0, 1)]  # the last one: as in an interleaved schedule
PASSES = [*((name, mode) for name in SCHEDULES for mode in ("always", "except_last", "never")), ("evaluation", "")]


def schedules() -> list[tuple[Schedule, tuple[int, ...]]]:
    return [
        (forward_only(len(owners), m) if name == "evaluation" else build(name, len(owners), m, mode), owners)
        for owners, m, (name, mode) in product(OWNERS, (1, 2, 5, 9), PASSES)
    ]


@pytest.mark.parametrize("early", [False, True])
def test_every_receive_is_posted_in_time_and_in_the_order_of_its_edge(early: bool) -> None:
    for schedule, owners in schedules():
        order = linearize(schedule, owners)
        for process in set(owners):
            own = [action for action in order if owners[action.stage] == process]
            found = postings(schedule, owners, process, early=early)
            awaited = [a for a in own if (s := source(a, len(schedule))) and owners[s.stage] != process]
            assert sorted(posting.action for posting in found) == sorted(awaited)
            assert all(posting.after <= own.index(posting.action) for posting in found)
            assert [posting.after for posting in found] == sorted(posting.after for posting in found)
            for edge in {(a.kind, a.stage) for a in awaited}:
                posted = [p.action.micro_batch for p in found if (p.action.kind, p.action.stage) == edge]
                sender = edge[1] - 1 if edge[0] is Kind.F else edge[1] + 1
                assert posted == [a.micro_batch for a in schedule[sender] if a.kind is edge[0]]


@pytest.mark.parametrize("early", [False, True])
def test_a_buffer_is_free_before_it_is_received_into(early: bool) -> None:
    for schedule, owners in schedules():
        trains = any(action.kind is Kind.B for action in schedule[0])
        for process in set(owners):
            own = [action for action in linearize(schedule, owners) if owners[action.stage] == process]
            held: dict[tuple[Kind, int, int], int] = {}  # by buffer: until how many actions have been launched
            for posting in postings(schedule, owners, process, early=early):
                kind, stage, m = posting.action
                buffer = (kind, stage, posting.buffer)
                assert posting.freed == held.get(buffer, 0) <= posting.after
                reached = stage  # the last stage that may be handed what was received without a send
                step = 1 if kind is Kind.F else -1
                while 0 <= reached + step < len(owners) and owners[reached + step] == process:
                    reached += step
                ends = Kind.B if trains else Kind.F
                held[buffer] = 1 + max(own.index(Action(ends, s, m)) for s in (stage, reached))
            for (
                kind,
                stage,
                number,
            ) in held:  # no more than are in flight, one that arrives, and one for the other order
                assert number < (in_flight(schedule[stage]) + 2 if kind is Kind.F else 3)
