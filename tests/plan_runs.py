"""Models and their costs for the tests of plans: each is traced once, whatever is planned for it."""

from functools import cache

from training_runs import TINY, configure

from gpipe_cli.pipeline.schedule.simulator import EdgeCost
from gpipe_cli.planner.cost_model import LayerSeconds, StepCosts, predicted_costs
from gpipe_cli.planner.model_profile import ModelProfile, profile_model
from gpipe_cli.planner.plan import Plan, make_plan

EVEN = (*TINY, "batch_size=8", "micro_batches=4")  # AmoebaNet of 7 layers, 2 samples in each micro-batch
CUSTOM = (*EVEN[2:], "model=custom", "model.target=custom_models:says_costs")  # 8 layers
MIB = 2**20


@cache
def traced(*settings: str) -> ModelProfile:
    """The profile of a model; of EVEN's without any settings."""
    return profile_model(configure(*(settings or EVEN)))


def planned(*settings: str, limit: float | None = None, costs: StepCosts | None = None) -> Plan:
    """A plan of EVEN's model with these settings, for stages of at most `limit` MiB."""
    config = configure(*EVEN, *settings)
    limit_bytes = None if limit is None else int(limit * MIB)
    return make_plan(config, traced(), costs or predicted_costs(config, traced()), limit_bytes)


def equal_costs(profile: ModelProfile, update: float = 0.0) -> StepCosts:
    """A second for each layer, two for its backward, free transfers."""
    count = len(profile.costs)
    layers = (LayerSeconds(1.0, 1.0, 2.0),) * count
    return StepCosts("none", "data_sheet", layers, (update,) * count, (EdgeCost(0.0, 0.0),) * (count - 1), ())
