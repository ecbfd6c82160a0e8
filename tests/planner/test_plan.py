"""Plans: what a step will take and hold, for every cut, schedule and way to recompute."""

from itertools import pairwise

import pytest
from plan_runs import CUSTOM, EVEN, plan_of, traced
from training_runs import configure

from gpipe_cli.planner.cost_model import StepCosts
from gpipe_cli.planner.make_plan import make_plan
from gpipe_cli.planner.model_profile import ModelProfile
from gpipe_cli.planner.pipeline_spec import spec_from_plan
from gpipe_cli.planner.plan import Plan
from gpipe_cli.planner.process_layout import TooLargeError, layout_of
from gpipe_cli.schedule.schedule import Kind
from gpipe_cli.schedule.simulator import EdgeCost, StageCost

MIB = 2**20


def planned(*settings: str, limit: float | None = None) -> Plan:
    """A plan of EVEN's model with these settings, for stages of at most `limit` MiB."""
    config = configure(*EVEN, *settings)
    limit_bytes = None if limit is None else int(limit * MIB)
    return plan_of(config, traced(), limit_bytes)


def equal_costs(profile: ModelProfile) -> StepCosts:
    """A second for each layer, two for its backward, free transfers."""
    count = len(profile.costs)
    layers = (StageCost(1.0, 1.0, 2.0),) * count
    return StepCosts("none", "data_sheet", layers, (0.0,) * count, (EdgeCost(0.0, 0.0),) * (count - 1), ())


def fullest(plan: Plan) -> float:
    """MiB of the stage that holds most."""
    return max(stage.total_bytes for stage in plan.memory) / MIB


@pytest.mark.parametrize("k", [1, 2, 4])
def test_equal_stages_take_what_the_paper_says(k: int) -> None:
    profile = traced(*CUSTOM)
    config = configure(*CUSTOM, f"partitions={k}", "recompute=never")
    plan = make_plan(config, profile, equal_costs(profile), layout_of(config))
    assert plan.balance == (8 // k,) * k
    assert plan.imbalance == 0
    assert plan.step_seconds == pytest.approx((4 + k - 1) * 3 * 8 / k)
    assert plan.breakdown.bubble == pytest.approx((k - 1) / (4 + k - 1))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_auto_recomputes_no_more_than_it_must(schedule: str) -> None:
    never, always = (planned(f"schedule={schedule}", f"recompute={mode}") for mode in ("never", "except_last"))
    least, most = fullest(always), fullest(never)
    assert least < most
    ample = planned(f"schedule={schedule}", "recompute=auto", limit=most)
    assert sum(ample.recomputed) == 0
    assert ample.step_seconds <= never.step_seconds * (1 + 1e-9)
    counts = []
    for share in (0.0, 0.25, 0.5, 0.75):
        limit = least + share * (most - least)
        plan = planned(f"schedule={schedule}", "recompute=auto", limit=limit)
        assert fullest(plan) <= limit
        counts.append(sum(plan.recomputed))
        assert counts[-1] <= sum(always.recomputed)
    assert counts[0] > 0
    assert all(b <= a for a, b in pairwise(counts))


def test_the_cut_gives_way_to_a_limit() -> None:
    """Where the best cut does not fit, another one may."""
    free = planned("partitions=2", "recompute=never")
    limit = 0.99 * fullest(free)
    tight = planned("partitions=2", "recompute=never", limit=limit)
    assert fullest(tight) <= limit
    assert tight.balance != free.balance
    assert tight.step_seconds >= free.step_seconds


def test_a_devices_stages_share_its_memory() -> None:
    """In a V the first stage of a device holds its graphs long and its last one briefly: a limit fits that the first
    exceeds with what it may use of it."""
    ways = ("partitions=4", "placement=v", "stages_per_process=2", "partition.balance=[3,2,1,1]", "schedule=1f1b")
    free = planned(*ways, "recompute=never")
    enough = -(-max(free.device_bytes) // 2)
    assert max(stage.total_bytes for stage in free.memory) > enough
    tight = planned(*ways, "recompute=auto", limit=enough / MIB)
    assert (tight.device_bytes, tight.recomputed) == (free.device_bytes, (0,) * 4)
    assert sum(free.device_bytes) < sum(stage.total_bytes for stage in free.memory)
    with pytest.raises(TooLargeError) as error:
        planned(*ways, "recompute=never", limit=(enough - 1) / MIB)
    over = error.value
    assert (over.missing_bytes, over.stages, over.enough_bytes) == (max(free.device_bytes) - 2 * enough + 2, 2, enough)


def test_a_spec_is_the_plans() -> None:
    config = configure(*EVEN, "partitions=2", "recompute=auto", "hardware.memory_gib=0.002")
    plan = plan_of(config, traced())
    made = spec_from_plan(plan)
    assert tuple(len(names) for names in made.layer_names) == plan.balance
    assert made.recompute == plan.recompute
    assert not isinstance(plan.recompute, str)
    assert [len(stage) for stage in plan.recompute] == [
        sum(action.kind is Kind.R for action in actions) for actions in plan.schedule
    ]
