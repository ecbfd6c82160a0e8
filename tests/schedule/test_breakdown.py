"""The shares of a step: closed forms where there are any, and nothing lost or counted twice where there are none."""

import itertools
import random

import pytest
from schedule_runs import build

from gpipe_cli.schedule.breakdown import Breakdown, breakdown
from gpipe_cli.schedule.named_schedules import SCHEDULES
from gpipe_cli.schedule.schedule import RECOMPUTE_MODES
from gpipe_cli.schedule.simulator import EdgeCost, StageCost, simulate

SHAPES = list(itertools.product((1, 2, 3, 5), (1, 2, 4, 9)))


def test_unequal_stages() -> None:
    """Bubble (K - 1) sum c, imbalance (M - 1) sum (max c - c_k), of K (sum c + (M - 1) max c)."""
    random_ = random.Random(0)
    for k, m in SHAPES:
        forward = [random_.randint(1, 9) for _ in range(k)]
        cost = [3 * f for f in forward]
        found = breakdown(simulate(build("gpipe", k, m, "never"), [StageCost(f, f, 2 * f) for f in forward]), m)
        whole = k * (sum(cost) + (m - 1) * max(cost))
        assert found.bubble == pytest.approx((k - 1) * sum(cost) / whole)
        assert found.imbalance == pytest.approx((m - 1) * sum(max(cost) - c for c in cost) / whole)
        assert found.compute == pytest.approx(m * sum(cost) / whole)


def test_updates_and_the_rest_of_the_step() -> None:
    """Of 20 s: actions end at 4; stage 1 updates for 2 s from 3 on, stage 0 for 3 s from 4 on."""
    stages = [StageCost(1, 1, 1, update_seconds=3), StageCost(1, 1, 1, update_seconds=2)]
    timeline = simulate(build("gpipe", 2, 1, "never"), stages)
    found = breakdown(timeline, 1, step_seconds=20)
    expected = Breakdown(
        compute=4 / 40,
        recompute=0,
        bubble=3 / 40,  # stage 0 from 1 to 3, stage 1 from 0 to 1; what it updates before 4 is not idle
        imbalance=0,
        transfer=0,
        update=5 / 40,
        set_up=(13 + 15) / 40,
    )
    assert found == pytest.approx(expected)
    short = breakdown(timeline, 1)  # until 7, when stage 0 has updated; stage 1 has since 5
    assert short == pytest.approx((4 / 14, 0, 3 / 14, 0, 0, 5 / 14, 2 / 14))


def test_the_shares_add_up_to_one() -> None:
    random_ = random.Random(1)
    for name, recompute, (k, m) in itertools.product(SCHEDULES, RECOMPUTE_MODES, SHAPES):
        stages = [StageCost(*(random_.random() for _ in range(6))) for _ in range(k)]
        edges = {(n, n + 1): EdgeCost(random_.random() / 2, random_.random() / 2) for n in range(k - 1)}
        timeline = simulate(build(name, k, m, recompute), stages, edges, [1.0, 1.3])
        for step in (None, timeline.step_seconds + 2):
            found = breakdown(timeline, m, step)
            assert sum(found) == pytest.approx(1, abs=1e-12)
            assert min(found) >= 0
            if recompute == "never":
                assert found.recompute == 0
