"""The schedules, drawn, and what they imply."""

import itertools
import re

import pytest
from schedule_runs import build

from gpipe_cli.schedule.dependencies import check, grid
from gpipe_cli.schedule.named_schedules import ORDERS, SCHEDULES
from gpipe_cli.schedule.schedule import (
    RECOMPUTE_MODES,
    SENDS_GRADIENT,
    Kind,
)

SHAPES = [(k, m) for k in range(1, 7) for m in (1, 2, 3, 4, 7, 12)]


DRAWN = """
gpipe, never: Figure 2(c) of the paper
stage 0 | F0 F1 F2 F3 .  .  .  .  .  .  B3 B2 B1 B0
stage 1 | .  F0 F1 F2 F3 .  .  .  .  B3 B2 B1 B0
stage 2 | .  .  F0 F1 F2 F3 .  .  B3 B2 B1 B0
stage 3 | .  .  .  F0 F1 F2 F3 B3 B2 B1 B0

gpipe, always: recomputation fills the wait for the gradient
stage 0 | F0 F1 R1 .  .  .  .  B1 R0 B0
stage 1 | .  F0 F1 R1 .  .  B1 R0 B0
stage 2 | .  .  F0 F1 R1 B1 R0 B0

1f1b, never
stage 0 | F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
stage 1 | .  F0 F1 .  B0 F2 B1 F3 B2 .  B3
stage 2 | .  .  F0 B0 F1 B1 F2 B2 F3 B3

1f1b, except_last: the last stage keeps everything
stage 0 | F0 F1 R0 B0 F2 R1 B1 R2 B2
stage 1 | .  F0 B0 F1 B1 F2 B2

zero_bubble, never: weights wait until nothing else can be done
stage 0 | F0 F1 F2 .  .  B0 F3 B1 .  .  B2 .  B3
stage 1 | .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
stage 2 | .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

interleaved, never
device 0 | 0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 .   2B2 .   2B3 0B2 0B3
device 1 | .   1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3
"""


@pytest.mark.parametrize("drawn", DRAWN.strip().split("\n\n"), ids=lambda drawn: drawn.partition("\n")[0])
def test_schedules_as_they_are_drawn(drawn: str) -> None:
    what, picture = drawn.split("\n", 1)
    name, recompute = what.partition(":")[0].split(", ")
    partitions = (picture.count("\n") + 1) * (2 if name == "interleaved" else 1)
    assert grid(build(name, partitions, 1 + max(map(int, re.findall(r"F(\d)", picture))), recompute)) == picture


def test_one_stage_and_few_micro_batches() -> None:
    schedule = build("gpipe", 3, 4, "except_last")
    assert " ".join(map(str, schedule[1])) == "1F0 1F1 1F2 1F3 1B3 1R2 1B2 1R1 1B1 1R0 1B0"
    assert build("zero_bubble", 1, 3, "always") == build("1f1b", 1, 3, "always")
    assert " ".join(map(str, build("zero_bubble", 2, 2, "always")[1])) == "1F0 1R0 1I0 1F1 1R1 1I1 1W0 1W1"


def test_every_schedule_passes_its_own_check() -> None:
    """Also without its last micro-batches, as for a mini-batch that has fewer."""
    for name, recompute, (partitions, micro_batches) in itertools.product(SCHEDULES, RECOMPUTE_MODES, SHAPES):
        schedule = build(name, partitions, micro_batches, recompute)
        check(schedule)
        assert (len(schedule.stages), schedule.micro_batches) == (partitions, micro_batches)
        assert bool(schedule.split) == (ORDERS[name].splits and partitions > 1)
        upwards = list(range(micro_batches))
        for stage, actions in enumerate(schedule.stages):
            for kinds in (
                SENDS_GRADIENT,
                (Kind.B, Kind.W),
            ):  # only the first stage has both whole and split backwards
                back = [a.micro_batch for a in actions if a.kind in kinds]
                assert back == (upwards[::-1] if name == "gpipe" else upwards)
            assert stage == 0 or not schedule.split or all(a.kind is not Kind.B for a in actions)
        for row in schedule:  # an R stands directly before its backward, also among actions of other stages
            for before, after in itertools.pairwise(row):
                if before.kind is Kind.R:
                    assert after.kind in SENDS_GRADIENT
                    assert after[1:] == before[1:]
        for fewer in upwards[1:]:
            first = schedule.first(fewer)
            check(first)
            assert {a for row in first for a in row} == {a for row in schedule for a in row if a.micro_batch < fewer}
