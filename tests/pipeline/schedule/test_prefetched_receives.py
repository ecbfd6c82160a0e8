"""When receives are posted: in the order of what is sent, in time, and never over something that is still kept.

That nothing deadlocks is shown by test_deadlocks.py.
"""

from itertools import pairwise, product

import pytest
from random_orders import random_orders
from schedule_runs import build

from gpipe_cli.pipeline.schedule.dependencies import linearize
from gpipe_cli.pipeline.schedule.named_schedules import SCHEDULES, forward_only
from gpipe_cli.pipeline.schedule.prefetched_receives import prefetched_receives
from gpipe_cli.pipeline.schedule.schedule import Kind, Schedule

OWNERS = [(0, 1), (0, 1, 2), (0, 0, 1, 1), (0, 1, 2, 3), (0, 1, 0, 1)]  # the last one: as in `interleaved`
PASSES = [*((name, mode) for name in SCHEDULES for mode in ("always", "except_last", "never")), ("evaluation", "")]


def schedules() -> list[tuple[Schedule, tuple[int, ...]]]:
    return [(one.schedule, one.device_of_stage) for one in random_orders(60, seed=0)] + [
        (
            forward_only(len(process_of_stage), m)
            if name == "evaluation"
            else build(name, len(process_of_stage), m, mode),
            process_of_stage,
        )
        for process_of_stage, m, (name, mode) in product(OWNERS, (1, 2, 5), PASSES)
        if name != "interleaved" or process_of_stage != (0, 0, 1, 1)  # its devices have stages that are not neighbours
    ]


def neighbours(stages: int) -> tuple[tuple[int, int], ...]:
    return tuple(pairwise(range(stages)))


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("skips", [(), ((0, 2), (0, 3), (1, 3))], ids=["neighbours", "skips"])
def test_every_receive_is_posted_in_time_and_in_the_order_of_its_edge(
    early: bool, skips: tuple[tuple[int, int], ...]
) -> None:
    for schedule, process_of_stage in schedules():
        pairs = (*neighbours(len(process_of_stage)), *(one for one in skips if one[1] < len(process_of_stage)))
        order = linearize(schedule, process_of_stage)
        for process in set(process_of_stage):
            own = [action for action in order if process_of_stage[action.stage] == process]
            found = prefetched_receives(schedule, process_of_stage, process, pairs, early=early)
            awaited = [
                (a, sender)
                for a in own
                for one, other in pairs
                for sender, receiver in ([(one, other)] if a.kind is Kind.F else [(other, one)])
                if a.stage == receiver and a.kind not in (Kind.R, Kind.W) and process_of_stage[sender] != process
            ]
            assert sorted((receive.action, receive.sender) for receive in found) == sorted(awaited)
            assert all(receive.after <= own.index(receive.action) for receive in found)
            assert [receive.after for receive in found] == sorted(receive.after for receive in found)
            for direction, stage, sender in {(a.kind.direction, a.stage, sender) for a, sender in awaited}:
                edge = (direction, stage, sender)
                posted = [p.action for p in found if (p.action.kind.direction, p.action.stage, p.sender) == edge]
                sent = [a.micro_batch for a in schedule.stages[sender] if a.kind.direction is direction]
                assert [a.micro_batch for a in posted] == sent


@pytest.mark.parametrize("early", [False, True])
def test_a_buffer_is_free_before_it_is_received_into(early: bool) -> None:
    for schedule, process_of_stage in schedules():
        for process in set(process_of_stage):
            own = [
                action for action in linearize(schedule, process_of_stage) if process_of_stage[action.stage] == process
            ]
            held: dict[tuple[Kind, int, int], int] = {}  # by buffer: until how many actions have been launched
            spans: dict[tuple[Kind, int], list[range]] = {}  # by edge: while which actions something received is kept
            for receive in prefetched_receives(
                schedule, process_of_stage, process, neighbours(len(process_of_stage)), early=early
            ):
                kind, stage, m = receive.action
                buffer = (kind.direction, stage, receive.buffer)
                assert receive.freed == held.get(buffer, 0) <= receive.after
                reached = stage  # the last stage that may be handed what was received without a send
                step = 1 if kind is Kind.F else -1
                while 0 <= reached + step < len(process_of_stage) and process_of_stage[reached + step] == process:
                    reached += step
                ends = (Kind.B, Kind.W) if schedule.trains else (Kind.F,)
                held[buffer] = 1 + max(own.index(a) for a in own if a.micro_batch == m and a.kind in ends
                                       and min(stage, reached) <= a.stage <= max(stage, reached))  # fmt: skip
                spans.setdefault(buffer[:2], []).append(range(own.index(receive.action), held[buffer]))
            for *edge, number in held:  # no more than are kept at once, one that arrives, and one more
                kept = max(sum(at in span for span in spans[edge[0], edge[1]]) for at in range(len(own)))
                assert number < 2 + kept
