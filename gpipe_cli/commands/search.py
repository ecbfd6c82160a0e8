"""`-m hydra/sweeper=optuna`: Optuna chooses the settings of each run of a sweep by the results of those before it.

Optuna only proposes settings and is told their results (`study.ask`, `study.tell`); the sweep does the rest. With a
seed, equal results lead to equal choices, so an interrupted search resumes by asking for all its settings again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from gpipe_cli.commands.command_line import SWEEPER, CommandLine, values_of
from gpipe_cli.commands.composing import sweep_values
from gpipe_cli.config.settings import container
from gpipe_cli.config.typed import Count, RefusedError, one_line, show, typed
from gpipe_cli.results.measures import MEASURES
from gpipe_cli.results.run import RunResult

FOUND = "optimization_results.yaml"  # a file in the sweep's folder with the best run's settings and objective


@dataclass(frozen=True)
class SamplerSettings:
    """How settings are chosen: by tpe, a Parzen estimator that learns from the runs before, or at random."""

    name: Literal["tpe", "random"] = "tpe"
    seed: int | None = 0  # None: other choices every time, so that a search cannot be resumed


@dataclass(frozen=True)
class SearchSettings:
    """The settings `hydra.sweeper.*` of a search; `gpipe train --help` names them."""

    direction: Literal["maximize", "minimize"] = "maximize"  # whether a larger `objective` is better
    n_trials: Count = 20  # runs in all
    study_name: str | None = None
    storage: str | None = None  # Optuna's storage of the study, sqlite:///study.db; None: memory
    sampler: SamplerSettings = SamplerSettings()


class Search:
    """A sweep's search: an Optuna study and the settings that it chooses."""

    def __init__(self, settings: SearchSettings, line: CommandLine, more: Mapping[str, str] | None) -> None:
        """`more`: settings of a file, searched beside the typed ones. Raises RefusedError if Optuna is not installed or
        cannot search them."""
        if line.overrides.get("dry_run") is True:
            raise RefusedError("dry_run", True, "a search needs the results of its runs; leave it out")
        try:
            import optuna
            from optuna.distributions import IntDistribution  # noqa: F401  version 2 lacks it
        except ImportError as error:
            why = "needs Optuna 4 or newer, which is not installed; pip install -U optuna"
            raise RefusedError(SWEEPER, "optuna", why) from error
        optuna.logging.set_verbosity(optuna.logging.ERROR)  # our table says which runs failed
        self.n_trials = settings.n_trials
        self._failed = optuna.trial.TrialState.FAIL
        self._fixed: list[str] = []
        self._space: dict[str, Any] = {}
        for key, (o, values) in sweep_values(line, more).items():
            if o.is_sweep_override():
                self._space[key] = _distribution(o, values)
            elif not o.is_hydra_override():
                self._fixed += values
        samplers = {"tpe": optuna.samplers.TPESampler, "random": optuna.samplers.RandomSampler}
        try:
            self._study = optuna.create_study(
                study_name=settings.study_name,
                storage=settings.storage,
                sampler=samplers[settings.sampler.name](seed=settings.sampler.seed),
                direction=settings.direction,
                load_if_exists=True,
            )
        except Exception as error:  # each storage has a library with exceptions of its own
            if settings.storage is None:
                raise
            why = f"Optuna cannot use it ({one_line(error)}); give another, or leave it out"
            raise RefusedError("hydra.sweeper.storage", settings.storage, why) from error

    def ask(self) -> tuple[Any, tuple[str, ...]]:
        """The next trial, and the settings of its run."""
        trial = self._study.ask(self._space)
        return trial, (*self._fixed, *(f"{key}={value}" for key, value in trial.params.items()))

    def tell(self, trial: Any, objective: float | None) -> None:
        """Tell Optuna the result of a trial; None: its run failed, or has no objective."""
        if objective is None:
            self._study.tell(trial, state=self._failed)
        else:
            self._study.tell(trial, objective)

    def write_best(self, folder: Path) -> None:
        """Write FOUND, if any run has an objective."""
        if self._study.get_trials(states=[type(self._failed).COMPLETE]):
            best = self._study.best_trial
            params = values_of([f"{key}={value}" for key, value in best.params.items()])
            found = {"name": "optuna", "best_params": params, "best_value": best.value}
            OmegaConf.save(OmegaConf.create(found), folder / FOUND)


def search_of(line: CommandLine, tree: DictConfig) -> Search | None:
    """The search of a sweep, None if it runs all combinations; Hydra's part of `tree` may name more settings to search.
    Raises RefusedError for bounds where nothing is searched."""
    more = tree.hydra.sweeper.get("params")
    if not line.searches:
        line.refuse_search(f"bounds are for a search; add {SWEEPER}=optuna, or give the values one by one")
        return None
    given = OmegaConf.create({})
    for o in (o for o in line.parsed if o.key_or_group.startswith(SWEEPER.replace("/", "."))):
        OmegaConf.update(given, o.key_or_group, o.value())
    if (name := line.overrides.get(f"{SWEEPER}/sampler")) is not None:
        OmegaConf.update(given, "hydra.sweeper.sampler.name", name)
    return Search(
        typed(SearchSettings, container(given).get("hydra", {}).get("sweeper", {}), "hydra.sweeper"), line, more
    )


def _distribution(o: Override, values: Sequence[str]) -> Any:
    """Optuna's distribution for a setting: an interval, a range with a step, or some values. Raises RefusedError."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    value: Any = o.value()
    try:
        if o.is_interval_sweep():
            bounds, step = (value.start, value.end), None
        elif o.is_range_sweep() and not value.shuffle:
            found = sorted(float(one) if "." in one or "e" in one else int(one) for one in values)
            bounds, step = (found[0], found[-1]), abs(value.step)
        else:
            return CategoricalDistribution(list(values))
        log = "log" in value.tags
        if all(isinstance(one, int) for one in bounds):
            return IntDistribution(*bounds, log=log, step=step or 1)
        return FloatDistribution(*bounds, log=log, step=step)
    except ValueError as error:
        why = f"{one_line(error)}; give bounds in ascending order, or the values one by one"
        raise RefusedError(o.key_or_group, o.get_value_string(), why) from error


def best_of(folder: Path) -> str:
    """The settings of a search's best run and their objective, as text; "" where nothing was searched."""
    if not (file := folder / FOUND).is_file():
        return ""
    found = OmegaConf.load(file)
    settings = " ".join(f"{key}={show(value)}" for key, value in found.best_params.items())
    return f"{settings}: {found.best_value:.6g} ({file})"


def objective(command: str, result: RunResult | None) -> float | None:
    """The objective of a search: the measured speed for bench, else top-1 accuracy on the test set or, for text, minus
    the test loss; None where a run has none."""
    if command == "bench":
        return None if result is None else result.speed
    top1, loss = (MEASURES[key].value(result) for key in ("test_top1", "test_loss"))
    return top1 if top1 is not None else None if loss is None else -loss
