"""Plans of a table's cells, made in this process, so that a model, which takes seconds to trace, is traced once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpipe_cli.config.settings import TrainConfig

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
    """A function that plans the configuration that ``configure`` makes of settings."""
    from gpipe_cli.planner.auto_settings import choose
    from gpipe_cli.planner.cost_model import predicted_costs
    from gpipe_cli.planner.model_profile import profile_model
    from gpipe_cli.planner.step_schedule import mini_batch_samples

    def simulate(settings: Sequence[str]) -> Simulated:
        config, auto = configure(settings)
        profile = profile_model(config)
        chosen, plan, _ = choose(config, auto, profile, predicted_costs, elsewhere=True)
        return Simulated(chosen, profile, plan, mini_batch_samples(chosen, profile.lengths))

    return simulate
