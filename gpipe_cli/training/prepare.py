"""What a command decides before anything runs: the settings that were left open, the plan, the layout."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from gpipe_cli.config import TrainConfig
from gpipe_cli.training.choosing import Choice, choose
from gpipe_cli.training.layout import Layout, make_layout
from gpipe_cli.training.planning import Plan
from gpipe_cli.training.shapes import Shapes, read_shapes, refuse_single_samples
from gpipe_cli.training.timing import step_costs


@dataclass(frozen=True)
class Prepared:
    """A run that could begin: every setting has its value."""

    config: TrainConfig
    shapes: Shapes
    plan: Plan
    layout: Layout
    choices: tuple[Choice, ...]

    @property
    def notes(self) -> tuple[tuple[str, str], ...]:
        """Whose the costs of the layers are, if not ours; what was chosen, and from what: lines of a banner."""
        whose = self.plan.costs.whose
        own = (("layer costs", f"given by {whose}"),) if whose else ()
        return (*own, *(("chosen", _words(choice)) for choice in self.choices))


def prepare(
    config: TrainConfig, auto: Collection[str], say: Callable[[str], None], *, elsewhere: bool = False
) -> Prepared:
    """Choose what is `auto`, plan the step, cut the model. `say` is told what takes seconds; `elsewhere`: the devices
    here do not count.

    Raises ValueError, one line, for what cannot be built, cut, placed or does not fit.
    """
    shapes = read_shapes(config)
    config, plan, choices = choose(
        config, auto, shapes, lambda candidate, seen: step_costs(candidate, seen, say), elsewhere=elsewhere
    )
    if config.batch_size is not None:
        refuse_single_samples(config, config.batch_size)
    return Prepared(config, shapes, plan, make_layout(config, shapes, plan), choices)


def _words(choice: Choice) -> str:
    """`micro_batches=8: 0.145 s a step predicted; compared 1: 0.31, 2: 0.20, 4: 0.16, 16: 0.15`"""
    chosen = choice.chosen
    assert chosen.plan is not None
    others = ", ".join(
        f"{tried.value}: {tried.reason if tried.plan is None else f'{tried.plan.step_seconds:.3g} s'}"
        for tried in choice.tried
        if not tried.chosen
    )
    names = choice.setting.replace(", ", " and ")
    step = f"{chosen.plan.step_seconds:.3g} s a step predicted"
    return f"{names} {chosen.value}: {step}; compared {others or 'with nothing'}"
