"""Models and their costs for the tests of plans: each is traced once, whatever is planned for it."""

from dataclasses import replace
from functools import cache

from training_runs import TINY, configure

from gpipe_cli.config.settings import TrainConfig
from gpipe_cli.planner.cost_model import predicted_costs
from gpipe_cli.planner.make_plan import make_plan
from gpipe_cli.planner.model_profile import ModelProfile, profile_model
from gpipe_cli.planner.plan import Plan
from gpipe_cli.planner.process_layout import Memory, layout_of

EVEN = (*TINY, "batch_size=8", "micro_batches=4")  # AmoebaNet of 7 layers, 2 samples in each micro-batch
CUSTOM = (*EVEN[2:], "model=custom", "model.target=custom_models:says_costs")  # 8 layers
HOURGLASS = (*EVEN[2:], "model=custom", "model.target=custom_models:hourglass")  # 17 layers with skips


@cache
def traced(*settings: str) -> ModelProfile:
    """The profile of a model; of EVEN's without any settings."""
    return profile_model(configure(*(settings or EVEN)))


def plan_of(config: TrainConfig, profile: ModelProfile, limit_bytes: int | None = None) -> Plan:
    """The plan by the data sheet of the hardware, with a limit to the memory of a stage if one is given."""
    layout = layout_of(config)
    if limit_bytes is not None:
        layout = replace(layout, memory=Memory(limit_bytes, 1))
    return make_plan(config, profile, predicted_costs(config, profile, layout), layout)
