"""Models and their costs for the tests of plans: each is traced once, whatever is planned for it."""

from functools import cache

from training_runs import TINY, configure

from gpipe_cli.planner.model_profile import ModelProfile, profile_model

EVEN = (*TINY, "batch_size=8", "micro_batches=4")  # AmoebaNet of 7 layers, 2 samples in each micro-batch
CUSTOM = (*EVEN[2:], "model=custom", "model.target=custom_models:says_costs")  # 8 layers


@cache
def traced(*settings: str) -> ModelProfile:
    """The profile of a model; of EVEN's without any settings."""
    return profile_model(configure(*(settings or EVEN)))
