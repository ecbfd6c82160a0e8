"""Plans of a table's cells, made in this process, so that a model, which takes seconds to trace, is traced once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gpipe_cli.config.settings import PartitionConfig, TrainConfig, to_yaml

if TYPE_CHECKING:  # recipes are listed without torch
    from gpipe_cli.planner.model_profile import ModelProfile
    from gpipe_cli.planner.plan import Plan


@dataclass(frozen=True)
class Simulated:
    """A plan as `gpipe plan` makes it from the figures of a device."""

    config: TrainConfig
    profile: "ModelProfile"
    plan: "Plan"
    samples: int  # N, the samples of the mini-batch

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.plan.step_seconds


# The configuration of `gpipe plan` with these settings, and those that the plan is to choose. Raises InputError.
Configure = Callable[[Sequence[str]], tuple[TrainConfig, Sequence[str]]]
# The plan of these settings. Raises InputError as `gpipe plan` does.
Simulate = Callable[[Sequence[str]], Simulated]


def simulating(configure: Configure) -> Simulate:
    """A function that plans the configuration that ``configure`` makes of settings; it traces each model once."""
    from gpipe_cli.planner.auto_settings import choose
    from gpipe_cli.planner.cost_model import predicted_costs
    from gpipe_cli.planner.model_profile import profile_model
    from gpipe_cli.planner.step_schedule import mini_batch_samples

    profiles: dict[str, ModelProfile] = {}

    def simulate(settings: Sequence[str]) -> Simulated:
        config, auto = configure(settings)
        alike = _traced_alike(config)
        key = to_yaml(alike)
        if key not in profiles:
            profiles[key] = profile_model(alike)
        chosen, plan, _ = choose(config, auto, profiles[key], predicted_costs, elsewhere=True)
        return Simulated(chosen, profiles[key], plan, mini_batch_samples(chosen, profiles[key].lengths))

    return simulate


def _traced_alike(config: TrainConfig) -> TrainConfig:
    """One configuration for all that share a profile, which does not depend on K, M, N or the cut."""
    return replace(
        config, partitions=1, micro_batches=1, replicas=1, batch_size=1, batch_tokens=None, recompute="never",
        stages_per_process=None, partition=PartitionConfig(None), hardware=replace(config.hardware, memory_gib=None),
        schedule="zero_bubble" if config.splits_backward else "gpipe",
    )  # fmt: skip
