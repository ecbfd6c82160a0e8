"""Nothing is received over something that is still kept. That receives are in an order that ends is shown by
test_deadlocks.py."""

from itertools import pairwise

import pytest
from random_orders import random_orders

from gpipe_cli.schedule.dependencies import topological_order
from gpipe_cli.schedule.prefetched_receives import prefetched_receives
from gpipe_cli.schedule.schedule import Kind


@pytest.mark.parametrize("post_eagerly", [False, True])
def test_a_buffer_is_free_before_it_is_received_into(post_eagerly: bool) -> None:
    for one in random_orders(60, seed=0):
        schedule, rank_of_stage = one.schedule, one.device_of_stage
        for process in set(rank_of_stage):
            own = [
                action
                for action in topological_order(schedule, rank_of_stage)
                if rank_of_stage[action.stage] == process
            ]
            held: dict[tuple[Kind, int, int], int] = {}  # by buffer: until how many actions have been launched
            spans: dict[tuple[Kind, int], list[range]] = {}  # by edge: while which actions something received is kept
            for receive in prefetched_receives(
                schedule, rank_of_stage, process, tuple(pairwise(range(len(rank_of_stage)))), post_eagerly=post_eagerly
            ):
                kind, stage, m = receive.action
                buffer = (kind.direction, stage, receive.buffer)
                assert receive.freed == held.get(buffer, 0) <= receive.after
                reached = stage  # the last stage that may be handed what was received without a send
                step = 1 if kind is Kind.F else -1
                while 0 <= reached + step < len(rank_of_stage) and rank_of_stage[reached + step] == process:
                    reached += step
                held[buffer] = 1 + max(own.index(a) for a in own if a.micro_batch == m and a.kind in (Kind.B, Kind.W)
                                       and min(stage, reached) <= a.stage <= max(stage, reached))  # fmt: skip
                spans.setdefault(buffer[:2], []).append(range(own.index(receive.action), held[buffer]))
            for *edge, number in held:  # no more than are kept at the same time, one that arrives, and one more
                kept = max(sum(at in span for span in spans[edge[0], edge[1]]) for at in range(len(own)))
                assert number < 2 + kept
