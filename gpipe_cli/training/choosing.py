"""Settings that are left to the plan: `partitions=auto`, `micro_batches=auto`, `solve=max_model` (Table 1 of the paper).

Each candidate gets a plan of its own, and what was compared is kept: a choice that cannot be explained is not trusted.
"""

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

import torch

from gpipe_cli.config import TrainConfig
from gpipe_cli.model_settings import AmoebaNetConfig, TransformerLMConfig, TransformerNMTConfig
from gpipe_cli.pipeline.tracing import run_shapes
from gpipe_cli.training.build import build_model
from gpipe_cli.training.costs import StepCosts
from gpipe_cli.training.layout import costs_by_figures, memory_limit, torchrun_world, usable_cores
from gpipe_cli.training.planning import Plan, TooLargeError, make_plan, mini_batch_samples
from gpipe_cli.training.shapes import Shapes, read_shapes

AUTO = ("partitions", "micro_batches")  # settings that may be `auto` and are numbers otherwise
_AS_GOOD = 1.01  # a prediction is not more exact than this: of candidates as good, the one that asks for least
_MOST_LAYERS = 3000  # where a search for the largest model ends: minutes away, and past the paper's largest
_SILENT_SECONDS = 5.0

CostsOf = Callable[[TrainConfig, Shapes], StepCosts]


@dataclass(frozen=True)
class Tried:
    """One candidate; `plan` is None where it does not fit, and `reason` says why."""

    value: str
    plan: Plan | None
    reason: str = ""
    chosen: bool = False
    over_bytes: int = 0  # by which its fullest stage misses the limit


@dataclass(frozen=True)
class _Grown:
    """A model of another size."""

    config: TrainConfig
    shapes: Shapes
    one: Tried


@dataclass(frozen=True)
class Choice:
    """How a setting got its value."""

    setting: str
    rule: str
    tried: tuple[Tried, ...]

    @property
    def chosen(self) -> Tried:
        return next(tried for tried in self.tried if tried.chosen)


def choose(
    config: TrainConfig, auto: Collection[str], shapes: Shapes, costs_of: CostsOf
) -> tuple[TrainConfig, Plan, tuple[Choice, ...]]:
    """The fastest of all values of the settings in `auto`, and its plan; without any, the plan of `config`.

    Raises:
        ValueError: nothing fits, or there is nothing to choose from; one line.
    """
    if not auto:
        return config, plan_or_refuse(config, shapes, costs_of), ()
    if "micro_batches" in auto:
        _refuse_no_choice(config)
    tried: list[tuple[TrainConfig, Tried]] = []
    for candidate in _candidates(config, auto, len(shapes.costs)):
        value = ", ".join(str(getattr(candidate, key)) for key in AUTO if key in auto)
        try:
            _refuse_single_samples(candidate, shapes)
            tried.append((candidate, _try(candidate, value, shapes, costs_of)))
        except ValueError as error:
            tried.append((candidate, Tried(value, None, str(error))))
    fitting = [(candidate, one.plan) for candidate, one in tried if one.plan is not None]
    setting = ", ".join(key for key in AUTO if key in auto)
    if not fitting:
        nearest = min(tried, key=lambda pair: pair[1].over_bytes or 1 << 62)
        if not nearest[1].over_bytes:
            raise ValueError(f"{setting}=auto: none of {len(tried)} candidates will do; {nearest[1].reason}")
        raise _refusal(nearest[0], shapes, costs_of, f"{setting}=auto: none of {len(tried)} candidates fits; ")
    fastest = min(plan.step_seconds for _, plan in fitting)
    best, plan = next(pair for pair in fitting if pair[1].step_seconds <= fastest * _AS_GOOD)
    marked = tuple(replace(one, chosen=one.plan is plan) for _, one in tried)
    return best, plan, (Choice(setting, "the shortest predicted step that fits", marked),)


def plan_or_refuse(config: TrainConfig, shapes: Shapes, costs_of: CostsOf) -> Plan:
    """The plan of settings that are all given. Raises ValueError, one line with the smallest change that would fit."""
    try:
        return make_plan(config, shapes, costs_of(config, shapes), memory_limit(config))
    except TooLargeError:
        raise _refusal(config, shapes, costs_of, "") from None


def solve_max_model(
    config: TrainConfig, costs_of: CostsOf, say: Callable[[str], None] = lambda line: None
) -> tuple[TrainConfig, Shapes, Plan, tuple[Choice, ...]]:
    """The largest model that fits the memory limit, growing each of its sizes alone; the one with most parameters.

    `say` is told of every size that was tried, once seconds have gone by.

    Raises:
        ValueError: there is no limit, the model has no sizes, or not even the smallest one fits.
    """
    if memory_limit(config) is None:
        raise ValueError(
            "solve=max_model: needs a limit; give hardware.memory_gib=8, or hardware=... with a memory of its own"
        )
    began = time.monotonic()
    found: list[_Grown] = []
    choices = []
    for key, step, most in _sizes(config):
        tried: dict[int, _Grown] = {}

        def fits(guess: int, key: str = key, step: int = step, tried: dict[int, _Grown] = tried) -> bool:
            model = replace(config.model, **{key: guess * step})  # type: ignore[arg-type]  # a size is a whole number
            candidate = replace(config, model=model)
            shapes = read_shapes(candidate, build_model(candidate))
            one = _try(candidate, str(guess * step), shapes, costs_of)
            tried[guess] = _Grown(candidate, shapes, one)
            if time.monotonic() - began > _SILENT_SECONDS:
                say(f"model.{key}={guess * step} {'fits' if one.plan else 'does not fit'}")
            return one.plan is not None

        start = max(1, getattr(config.model, key) // step)
        largest = _largest(fits, start, most // step)
        end = "" if largest < most // step else f"; more than {most} were not tried"
        choices.append((key, largest, tried, end))
        if largest:
            found.append(tried[largest])
    if not found:
        reason = next(grown.one.reason for _, _, tried, _ in choices for _, grown in sorted(tried.items()))
        raise ValueError(
            f"hardware.memory_gib={config.hardware.memory_gib:g}: not even the smallest model fits ({reason}); use more "
            "partitions, more micro_batches or recompute=always"
        )
    best = max(found, key=lambda grown: sum(cost.parameters for cost in grown.shapes.costs))
    assert best.one.plan is not None
    shown = tuple(
        Choice(
            f"model.{key}",
            f"the largest that fits, everything else as given{end}",
            tuple(replace(grown.one, chosen=at == largest) for at, grown in sorted(tried.items())),
        )
        for key, largest, tried, end in choices
    )
    return best.config, best.shapes, best.one.plan, shown


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


def _try(config: TrainConfig, value: str, shapes: Shapes, costs_of: CostsOf) -> Tried:
    try:
        return Tried(value, make_plan(config, shapes, costs_of(config, shapes), memory_limit(config)))
    except TooLargeError as error:
        reason = f"stage {error.stage} is {_gib(error.missing_bytes)} over"
        return Tried(value, None, reason, over_bytes=error.missing_bytes)


def _sizes(config: TrainConfig) -> tuple[tuple[str, int, int], ...]:
    """The settings of the model that say how large it is, the step that they go in, and where a search ends."""
    match config.model:
        case AmoebaNetConfig():
            return ("filters", 16, 1 << 14), ("normal_cells", 3, _MOST_LAYERS)
        case TransformerLMConfig() | TransformerNMTConfig():
            return (("layers", 1, _MOST_LAYERS),)
    raise ValueError(
        f"solve=max_model: model={config.model.name} has no size that can be varied; use amoebanet, transformer_lm or "
        "transformer_nmt"
    )


def _candidates(config: TrainConfig, auto: Collection[str], layers: int) -> Iterator[TrainConfig]:
    whole = config.batch_size or 1
    partitions = (
        [k for k in _numbers_of_devices(config) if k <= layers] if "partitions" in auto else [config.partitions]
    )
    # powers of two, and the batch size itself
    halves = sorted({*(1 << n for n in range(whole.bit_length()) if 1 << n <= whole), whole})
    for k in partitions:
        for m in halves if "micro_batches" in auto else [config.micro_batches]:
            yield replace(config, partitions=k, micro_batches=m)


def _numbers_of_devices(config: TrainConfig) -> list[int]:
    world = torchrun_world()
    if world not in (None, 1):
        return [int(world or 1)]
    if config.hardware.name != "auto":  # a machine that is not here: the paper's numbers
        return [1, 2, 4, 8]
    gpus = 0 if config.device == "cpu" else torch.cuda.device_count()
    return list(range(1, (gpus or usable_cores()) + 1))


def _refuse_no_choice(config: TrainConfig) -> None:
    if config.batch_size is None:
        raise ValueError(
            f"micro_batches=auto: batch_tokens={config.batch_tokens} does not say how many samples there are to divide; "
            "give a number, e.g. micro_batches=4"
        )
    if config.batch_size == 1:
        raise ValueError(
            "micro_batches=auto: batch_size=1 cannot be divided, there is nothing to choose; use micro_batches=1, or "
            "batch_size=2 or more"
        )


def _refuse_single_samples(config: TrainConfig, shapes: Shapes) -> None:
    """Raises ValueError where micro-batches have one sample, and batch norm would see one value per channel."""
    if mini_batch_samples(config, shapes.lengths) // config.micro_batches == 1:
        run_shapes(build_model(config), shapes.inputs, shapes.lengths)


def _refusal(config: TrainConfig, shapes: Shapes, costs_of: CostsOf, prefix: str) -> ValueError:
    """Which stage is how much over the limit, and the smallest change that would fit."""
    limit = memory_limit(config)
    assert limit is not None
    costs = costs_of(config, shapes)
    try:
        make_plan(config, shapes, costs, limit)
        raise AssertionError("it fits")
    except TooLargeError as error:
        stage, missing = error.stage, error.missing_bytes
    unlimited = make_plan(replace(config, recompute="except_last" if config.recompute == "auto" else config.recompute,
                                  hardware=replace(config.hardware, memory_gib=None)), shapes, costs, None)  # fmt: skip
    enough = max(stage.total for stage in unlimited.memory)
    remedies = [f"hardware.memory_gib={enough / 2**30 + 0.005:.2f}"]
    for changed, words in _changes(config, len(shapes.costs)):
        try:  # what a layer takes does not matter to what fits: figures are enough
            make_plan(changed, shapes, costs_by_figures(changed, shapes), limit)
        except ValueError:
            continue
        remedies.insert(0, words)
        break
    return ValueError(
        f"{prefix}hardware.memory_gib={limit / 2**30:g}: no cut fits; in the best one stage {stage} of "
        f"{config.partitions} needs {_gib(missing)} more; use {' or '.join(remedies)}"
    )


def _changes(config: TrainConfig, layers: int) -> Iterator[tuple[TrainConfig, str]]:
    """Changes that save memory, the smallest first."""
    if config.recompute not in ("auto", "always", "except_last"):
        yield replace(config, recompute="auto"), "recompute=auto"
    m = config.micro_batches
    while config.batch_size is not None and m < config.batch_size:
        m = min(2 * m, config.batch_size)
        yield replace(config, micro_batches=m, recompute="auto"), f"micro_batches={m} with recompute=auto"
    for k in range(config.partitions + 1, min(layers, 8 * config.partitions) + 1):
        yield replace(config, partitions=k, partition=replace(config.partition, balance=None)), f"partitions={k}"


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
