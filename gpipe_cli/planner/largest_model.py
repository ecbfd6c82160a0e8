"""`gpipe plan solve=max_model`: the largest model that fits a memory, the question of the paper's Table 1."""

import time
from collections.abc import Callable
from dataclasses import replace

from gpipe_cli.config.model import AmoebaNetConfig, TransformerLMConfig, TransformerNMTConfig
from gpipe_cli.config.settings import TrainConfig
from gpipe_cli.config.typed import NothingFitsError
from gpipe_cli.planner.auto_settings import Candidate, Comparison, CostsOf, try_plan
from gpipe_cli.planner.devices import memory_limit
from gpipe_cli.planner.model_profile import ModelProfile, profile_model
from gpipe_cli.planner.plan import Plan

_MOST_LAYERS = 3000  # where a search ends: a larger model takes minutes to plan, and the paper's largest is smaller
_SILENT_SECONDS = 5.0


def solve_max_model(
    config: TrainConfig, costs_of: CostsOf, log: Callable[[str], None] = lambda line: None
) -> tuple[TrainConfig, ModelProfile, Plan, tuple[Comparison, ...]]:
    """The largest model that fits the memory limit, growing each of its sizes alone; the one with most parameters.

    `log` gets a line for every size that is tried after the first five seconds.

    Raises:
        NothingFitsError: not even the smallest model fits.
        ValueError: there is no limit, or the model has no sizes.
    """
    limit_bytes = memory_limit(config)
    if limit_bytes is None:
        raise ValueError(
            "solve=max_model: needs a limit; give hardware.memory_gib=8, or hardware=... with a memory of its own"
        )
    began = time.monotonic()
    comparisons = []
    for key, step, most in _sizes(config):
        tried: dict[int, Candidate] = {}

        def fits(guess: int, key: str = key, step: int = step, tried: dict[int, Candidate] = tried) -> bool:
            model = replace(config.model, **{key: guess * step})  # type: ignore[arg-type]  # a size is a whole number
            grown = replace(config, model=model)
            profile = profile_model(grown)
            tried[guess] = try_plan(str(guess * step), grown, profile, costs_of(grown, profile), limit_bytes)
            found = tried[guess].plan is not None
            if time.monotonic() - began > _SILENT_SECONDS:
                log(f"model.{key}={guess * step} {'fits' if found else 'does not fit'}")
            return found

        largest = _largest(fits, max(1, getattr(config.model, key) // step), most // step)
        end = "" if largest < most // step else f"; more than {most} were not tried"
        rule = f"the largest that fits, everything else as given{end}"
        candidates = tuple(tried[guess] for guess in sorted(tried))
        comparisons.append(Comparison(f"model.{key}", rule, candidates, tried.get(largest)))
    found = [comparison.chosen for comparison in comparisons if comparison.chosen is not None]
    if not found:
        reason = comparisons[0].candidates[0].reason
        raise NothingFitsError(
            f"solve=max_model: not even the smallest model fits ({reason}); use a larger hardware.memory_gib, more "
            "partitions or more micro_batches"
        )
    best = max(found, key=lambda grown: sum(cost.parameters for cost in grown.profile.costs))
    assert best.plan is not None
    return best.config, best.profile, best.plan, tuple(comparisons)


def _largest(fits: Callable[[int], bool], start: int, most: int) -> int:
    """The largest number up to `most` that fits, 0 if none does: by doubling from `start`, then by halving."""
    low, high = 0, None
    guess = min(start, most)
    while high is None or high - low > 1:
        if fits(guess):
            low = guess
            if low == most:
                return low
        else:
            high = guess
        guess = min(2 * low, most) if high is None else (low + high) // 2
    return low


def _sizes(config: TrainConfig) -> tuple[tuple[str, int, int], ...]:
    """The settings that make the model larger, the step of each, and where the search ends."""
    match config.model:
        case AmoebaNetConfig():
            return ("filters", 16, 1 << 14), ("normal_cells", 3, _MOST_LAYERS)
        case TransformerLMConfig() | TransformerNMTConfig():
            return (("layers", 1, _MOST_LAYERS),)
    raise ValueError(
        f"solve=max_model: model={config.model.name} has no size that can be varied; use amoebanet, transformer_lm or "
        "transformer_nmt"
    )
