"""Plans the cells of a table in this process, so that a model, which takes seconds to trace, is traced only once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpipe_cli.config.settings import TrainConfig

if TYPE_CHECKING:  # recipes are listed without torch
    from gpipe_cli.planner.model_profile import ModelProfile
    from gpipe_cli.planner.plan import Plan


@dataclass(frozen=True)
class SimulatedPlan:
    """A plan as `gpipe plan` makes it from the figures of a device."""

    config: TrainConfig
    profile: "ModelProfile"
    plan: "Plan"
    samples: int  # N, the samples of the mini-batch

    @property
    def samples_per_second(self) -> float:
        return self.samples / self.plan.step_seconds


# Takes settings of `gpipe plan`; returns its configuration and the keys that the plan chooses. Raises InputError.
Configure = Callable[[Sequence[str]], tuple[TrainConfig, Sequence[str]]]
# Takes settings of `gpipe plan`; returns its plan. Raises InputError as the command does.
Simulate = Callable[[Sequence[str]], SimulatedPlan]


def make_simulator(configure: Configure) -> Simulate:
    """A function from settings to a plan; ``configure`` turns the settings into a configuration."""
    from gpipe_cli.planner.auto_settings import choose
    from gpipe_cli.planner.cost_model import predicted_costs
    from gpipe_cli.planner.model_profile import profile_model

    def simulate(settings: Sequence[str]) -> SimulatedPlan:
        config, auto = configure(settings)
        profile = profile_model(config)
        plan = choose(config, auto, profile, predicted_costs, other_machine=True)
        return SimulatedPlan(plan.config, profile, plan, plan.step_samples)

    return simulate
