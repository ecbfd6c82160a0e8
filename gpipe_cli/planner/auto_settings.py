"""Settings that the plan chooses: `partitions=auto`, `micro_batches=auto`, `recompute=auto`, `batch_size=auto`; and the
largest model that fits the memory, `gpipe plan solve=max_model`. All candidates are kept, to be shown and checked.
"""

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain, product
from operator import itemgetter
from typing import Any

from gpipe_cli.assembly.build import find_data
from gpipe_cli.config.groups import AmoebaNetConfig, ImagesConfig, TransformerLMConfig, TransformerNMTConfig, UNetConfig
from gpipe_cli.config.schema import bounds
from gpipe_cli.config.settings import AUTO, AUTO_BATCH, TrainConfig
from gpipe_cli.distributed.torchrun_env import Torchrun
from gpipe_cli.errors import InputError, NothingFitsError, format_value
from gpipe_cli.planner.cost_model import predicted_costs
from gpipe_cli.planner.data_sheet import number_of_gpus, with_data_sheet
from gpipe_cli.planner.make_plan import SHORTEST, CostsOf, fits, plan_step
from gpipe_cli.planner.model_profile import ModelProfile, check_single_samples, number_of_layers, profile_model
from gpipe_cli.planner.plan import Candidate, Choice, Plan
from gpipe_cli.planner.process_layout import TooLargeError, layout_of
from gpipe_cli.planner.step_schedule import mini_batch_samples
from gpipe_cli.schedule.named_schedules import AUTO_SCHEDULE, ORDERS, Order
from gpipe_cli.system.machine import usable_cores
from gpipe_cli.units import size

_TIE_FACTOR = 1.01  # accuracy of predictions: of candidates this close the first wins, with the smallest settings
_MAX_SAMPLES = 10_000_000  # the largest mini-batch that the settings allow
_SILENT_SECONDS = 5.0


_Change = tuple[tuple[str, Any], ...]  # settings and their new values


def choose(
    config: TrainConfig,
    auto: Collection[str],
    profile: ModelProfile,
    costs_of: CostsOf,
    torchrun: Torchrun | None = None,
    *,
    other_machine: bool = False,
) -> Plan:
    """The plan of `config` with the fastest values of the settings in `auto`, and what was compared; with a mini-batch
    in `auto`, the largest that fits.

    `torchrun`: this process, if torchrun started it; `other_machine`: the plan is for another machine, so the devices
    of this machine do not count.

    Raises:
        NothingFitsError: no candidate fits the memory limit; the message has the smallest change that would fit.
        InputError: there is nothing to choose from, or no candidate can be run.
    """
    planner = _Planner(profile, costs_of, torchrun)
    comparisons: list[Choice] = []
    if batch_keys := [key for key in AUTO_BATCH if key in auto]:
        if others := [key for key in AUTO if key in auto]:
            raise InputError(f"{batch_keys[0]}=auto: {others[0]}=auto cannot be chosen at the same time; give a number")
        comparisons.append(planner.largest_mini_batch(config, batch_keys[0]))
    elif auto:
        comparisons.append(planner.fastest(config, frozenset(auto), other_machine))
    chosen = comparisons[0].chosen if comparisons else planner.candidate("", config)
    assert chosen is not None
    if chosen.over is not None:
        raise planner.nothing_fits_error(chosen, "")
    return replace(chosen.made, choices=(*comparisons, *chosen.made.choices, *_recompute_choices(chosen.made)))


@dataclass(frozen=True)
class _Planner:
    """Plans a model with different settings."""

    profile: ModelProfile
    costs_of: CostsOf
    torchrun: Torchrun | None  # this process, if torchrun started it

    def candidate(self, value: str, config: TrainConfig) -> Candidate:
        """The plan of `config` as a candidate that is shown as `value`."""
        try:
            return Candidate(value, config, plan_step(config, self.profile, self.costs_of, self.torchrun))
        except TooLargeError as error:
            reason = f"stage {error.stage} is {size(error.missing_bytes)} over"
            return Candidate(value, config, None, reason, error)

    def fits(self, config: TrainConfig) -> bool:
        """Whether a cut fits the memory."""
        return fits(config, self.profile, layout_of(config, self.torchrun))

    def fastest(self, config: TrainConfig, auto: frozenset[str], other_machine: bool) -> Choice:
        """The candidate with the shortest step. Raises NothingFitsError or InputError if there is none."""
        keys = [key for key in AUTO if key in auto]
        tried: list[Candidate] = []
        for variant in _candidates(config, auto, len(self.profile.costs), self.torchrun, other_machine):
            value = ", ".join(str(getattr(variant, key)) for key in keys)
            try:
                check_single_samples(variant, mini_batch_samples(variant, self.profile.lengths), self.profile)
                tried.append(self.candidate(value, variant))
            except InputError as error:
                tried.append(Candidate(value, variant, None, str(error)))
        fitting = [candidate for candidate in tried if candidate.plan is not None]
        if not fitting:
            prefix = f"{', '.join(keys)}=auto: none of {len(tried)} candidates "
            over = [(candidate.over.missing_bytes, candidate) for candidate in tried if candidate.over is not None]
            if not over:
                reason = tried[0].reason if tried else f"the model has only {len(self.profile.costs)} layers"
                raise InputError(f"{prefix}will do; {reason}")
            raise self.nothing_fits_error(min(over, key=itemgetter(0))[1], f"{prefix}fits; ")
        shortest = min(candidate.made.step_seconds for candidate in fitting)
        best = next(candidate for candidate in fitting if candidate.made.step_seconds <= shortest * _TIE_FACTOR)
        return Choice(", ".join(keys), SHORTEST, tuple(tried), best)

    def largest_mini_batch(self, config: TrainConfig, key: str) -> Choice:
        """The largest mini-batch with which a cut fits the memory, and the next larger mini-batch. The number of
        samples is a multiple of M R, and at most the training set's. `key`: `batch_size`, or `batch_tokens`, where all
        sentences have the maximum length.

        The chosen configuration includes the memory limit, so that its stages are cut for it.

        Raises:
            NothingFitsError: not even one sample per micro-batch fits; the message has the smallest change that would.
            InputError: the memory of the devices is not known.
        """
        with_limit = layout_of(replace(config, recompute="auto"), self.torchrun)  # without a limit, the devices' memory
        if with_data_sheet(config.hardware, with_limit.devices).memory_gib is None:
            use = "give hardware.memory_gib=8 or hardware=... with known memory"
            raise InputError(f"{key}=auto: needs a limit to the memory of a stage; {use}")
        if config.hardware.memory_gib is None:
            assert with_limit.limit_bytes is not None
            config = replace(config, hardware=replace(config.hardware, memory_gib=with_limit.limit_bytes / 2**30))
        micro_batch_limit = max(1, _training_samples(config) // (config.micro_batches * config.replicas))
        sized = partial(with_samples, config, self.profile, key)

        def plan_candidate(planner: _Planner, samples: int) -> Candidate:
            variant = sized(samples)
            return planner.candidate(str(getattr(variant, key)), variant)

        fitting = bisect_left(range(1, micro_batch_limit + 1), True, key=lambda samples: not self.fits(sized(samples)))
        chosen = plan_candidate(self, max(1, fitting))
        while chosen.over is not None and fitting > 1:  # schedule=auto may find another order by `costs_of`
            fitting -= 1
            chosen = plan_candidate(self, fitting)
        if chosen.over is not None:
            raise self.nothing_fits_error(chosen, f"{key}=auto: not even one sample per micro-batch fits; ")
        if fitting == micro_batch_limit:
            return Choice(key, "the most samples that there may be, which fit the memory", (chosen,), chosen)
        larger = plan_candidate(replace(self, costs_of=predicted_costs), fitting + 1)
        return Choice(key, "the largest that fits the memory", (chosen, larger), chosen)

    def nothing_fits_error(self, closest: Candidate, prefix: str) -> NothingFitsError:
        """The error that names the stage that exceeds the limit, by how much, and what to change: settings rather than
        the model, and both rather than the memory."""
        config, error = closest.config, closest.over
        assert error is not None
        given, balance = config.hardware.memory_gib, config.partition.balance
        automatic = f"recompute=auto: {size(error.memory.limit_bytes)} are here for a stage"
        limit = automatic if given is None else f"hardware.memory_gib={given:g}"
        cut = (
            "no cut fits; in the best one"
            if balance is None
            else f"partition.balance={format_value(balance)} does not fit;"
        )
        if config.partition.method == "lingvo":
            cut = "the cut of partition.method=lingvo does not fit;"
        remedies = [self.remedy(config) or "a smaller model"]
        if given is not None:
            enough = error.enough_bytes * error.memory.stages
            remedies.append(f"hardware.memory_gib={math.ceil(enough / 2**30 * 1e4) / 1e4:.10g}")
        elif remedies == ["a smaller model"]:
            remedies.append("a machine with more memory")
        where = f"{cut} stage {error.stage} of {config.partitions}"
        advice = f"use {' or '.join(remedies)}"
        return NothingFitsError(f"{prefix}{limit}: {where} needs {size(error.missing_bytes)} more; {advice}")

    def remedy(self, config: TrainConfig) -> str:
        """The mildest change with which a cut fits, as a user types it, or "". Only `schedule=auto` simulates steps."""

        @cache
        def suffices(changes: tuple[_Change, ...]) -> bool:
            settings = dict(chain(*changes))
            parts = {key.partition(".")[2]: settings.pop(key) for key in list(settings) if key.startswith("partition.")}
            settings["partition"] = replace(config.partition, **parts)
            try:
                return self.fits(replace(config, **settings))
            except InputError:  # two settings that do not go together
                return False

        changes = smallest_sufficient(_changes(config, self.profile), suffices)
        if not changes and (smaller := _smaller_mini_batches(config, self.profile)):
            changes = smallest_sufficient([smaller], suffices)
        return " ".join(f"{key}={format_value(value)}" for key, value in dict(chain(*changes)).items())


def smallest_sufficient(
    kinds: Sequence[Sequence[_Change]], enough: Callable[[tuple[_Change, ...]], bool]
) -> tuple[_Change, ...]:
    """The smallest changes that are `enough`; () if there are none. A single kind of change, if that is enough, and no
    more of it than needed. `kinds` has the preferred kind first, and of each kind the mildest change first. The last
    change of a kind saves the most memory, so a kind whose last change does not help is not tried in part."""

    def strongest(kinds: Iterable[Sequence[_Change]]) -> tuple[_Change, ...]:
        return tuple(kind[-1] for kind in kinds)

    needed = next(([kind] for kind in kinds if enough(strongest([kind]))), [])
    if not needed and kinds and enough(strongest(kinds)):
        needed = list(kinds)
        for kind in reversed(kinds):
            fewer = [other for other in needed if other is not kind]
            needed = fewer if enough(strongest(fewer)) else needed
    smallest = strongest(needed)
    for at, kind in enumerate(needed):
        milder = [(*smallest[:at], change, *smallest[at + 1 :]) for change in kind[:-1]]
        smallest = (*milder, smallest)[bisect_left(milder, True, key=enough)]
    return smallest


def _recompute_choices(plan: Plan) -> Iterator[Choice]:
    """How `recompute=auto` compares with modes that the user could have given; `schedule=auto` has no such modes."""
    config = plan.config
    if config.recompute == "auto" and config.schedule != AUTO_SCHEDULE:
        counts = ", ".join(map(str, plan.recomputed))
        auto = Candidate(f"auto: {counts} of {plan.micro_batches} per stage", config, plan)
        planner = _Planner(plan.profile, lambda *_: plan.costs, plan.layout.torchrun)
        cut = replace(config, partition=config.partition.with_balance(plan.balance))
        never, full = (planner.candidate(mode, replace(cut, recompute=mode)) for mode in ("never", "except_last"))
        yield Choice("recompute", "as few as fit the memory", (never, auto, full), auto)


def with_samples(config: TrainConfig, profile: ModelProfile, key: str, samples: int) -> TrainConfig:
    """The configuration with micro-batches of `samples` of the maximum length; `key`: one of AUTO_BATCH."""
    units = 1 if key == "batch_size" else max(profile.lengths)
    size: dict[str, Any] = {key: samples * config.micro_batches * config.replicas * units}
    return replace(config, **size)


def _training_samples(config: TrainConfig) -> int:
    """An upper bound of the number of training samples, exact for noise and for images on this machine. Text is not
    read, as learning its vocabulary may take minutes."""
    dataset = config.dataset
    if dataset.train_samples is not None:
        return dataset.train_samples
    if isinstance(dataset, ImagesConfig):
        with suppress(InputError):
            return find_data(replace(config, dataset=replace(dataset, download=False)))[0].samples
    return _MAX_SAMPLES


def _candidates(
    config: TrainConfig, auto: frozenset[str], layers: int, torchrun: Torchrun | None, other_machine: bool
) -> list[TrainConfig]:
    """The configurations to try: those with enough devices, and with a sample for every micro-batch.

    Raises InputError if `micro_batches` cannot be chosen.
    """
    partitions, micro_batches, replicas = [config.partitions], [config.micro_batches], [config.replicas]
    order = ORDERS.get(config.schedule, Order())
    stages_per_process = config.stages_per_process
    devices = 8 if other_machine else number_of_gpus(config) or usable_cores()  # 8 as in the paper
    if torchrun is not None:
        devices = torchrun.world_size
    numbers = [1, 2, 4, 8] if other_machine else range(1, devices * (stages_per_process or 2) + 1)
    if "partitions" in auto:
        partitions = [k for k in numbers if k <= layers]
    if "replicas" in auto:
        replicas = [r for r in numbers if r <= devices]
    if "micro_batches" in auto:
        if config.batch_size is None:
            raise InputError(
                f"micro_batches=auto: batch_tokens={config.batch_tokens} does not give the number of samples; "
                "give a number, e.g. micro_batches=4"
            )
        if config.batch_size == 1:
            raise InputError(
                "micro_batches=auto: batch_size=1 cannot be divided, there is nothing to choose; use micro_batches=1, "
                "or batch_size=2 or more"
            )
        # powers of two, and the batch size itself
        micro_batches = sorted({*(1 << n for n in range(config.batch_size.bit_length())), config.batch_size})
    candidates = []
    for k, r, m in product(partitions, replicas, micro_batches):
        processes = order.devices(k, stages_per_process) * r
        misfit = processes > devices if torchrun is None else processes != devices
        if not (misfit and not auto.isdisjoint(("partitions", "replicas"))) and r * m <= (config.batch_size or r * m):
            candidates.append(replace(config, partitions=k, replicas=r, micro_batches=m))
    return candidates


def _changes(config: TrainConfig, profile: ModelProfile) -> list[list[_Change]]:
    """Kinds of changes that save memory and leave the model and the mini-batch as they are, the cheapest kind first,
    and the mildest change of each kind first."""
    k, m, n = config.partitions, config.micro_batches, mini_batch_samples(config, profile.lengths) // config.replicas
    free: _Change = () if config.partition.balance is None else (("partition.balance", None),)
    if config.partition.method != "exact":
        free = (("partition.method", "exact"),)
    smaller = [m << power for power in range(1, n.bit_length()) if m << power <= n // 2]
    if m < n:
        with suppress(InputError):  # micro-batches of a single sample suit few models
            check_single_samples(replace(config, micro_batches=n), n * config.replicas, profile)
            smaller.append(n)
    more = range(k + 1, max(8, 2 * k) + 1) if k <= 8 else (k * 9 // 8, k * 5 // 4, k * 3 // 2, 2 * k)
    kinds: list[list[_Change]] = [
        [free] if free else [],
        [(("micro_batches", number),) for number in smaller],
        [(("recompute", "always"),)] if config.recompute == "never" else [],
        [(("partitions", number), *free) for number in more if number <= len(profile.costs)],
    ]
    return [kind for kind in kinds if kind]


def _smaller_mini_batches(config: TrainConfig, profile: ModelProfile) -> list[_Change]:
    """Half of the mini-batch, a quarter, ...; with fewer micro-batches where there are too few samples for all."""
    samples, m, replicas = mini_batch_samples(config, profile.lengths), config.micro_batches, config.replicas
    halves = range(1, samples.bit_length())
    if config.batch_tokens is not None:
        tokens = [config.batch_tokens >> power for power in halves]
        return [(("batch_tokens", number),) for number in tokens if number >= replicas * max(profile.lengths)]
    min_samples = min(2, samples // (replicas * m))  # samples of a micro-batch: batch norm may need two
    max_micro_batches = {samples >> power: (samples >> power) // (replicas * min_samples) for power in halves}
    return [
        (("batch_size", number), *((("micro_batches", fit),) if fit < m else ()))
        for number, fit in max_micro_batches.items()
        if fit
    ]


def solve_max_model(config: TrainConfig, log: Callable[[str], None] = lambda line: None) -> Plan:
    """The model with the most parameters that fits the memory limit, when each of its sizes grows alone: the question
    of the paper's Table 1. Steps are predicted by a data sheet, as every size would have to be timed.

    `log` is called with a line for every size that is tried after the first five seconds.

    Raises:
        NothingFitsError: not even the smallest model fits.
        InputError: without a limit, or for a model without sizes.
    """
    if layout_of(config).memory is None:
        raise InputError("solve=max_model: needs a limit; give hardware.memory_gib=8 or hardware=... with known memory")
    began = time.monotonic()

    def log_late(line: str) -> None:
        if time.monotonic() - began > _SILENT_SECONDS:
            log(line)

    comparisons = [_largest_size(config, key, step, log_late) for key, step in _sizes(config)]
    plans = [comparison.chosen.made for comparison in comparisons if comparison.chosen is not None]
    if not plans:
        reason = comparisons[0].candidates[0].reason
        raise NothingFitsError(
            f"solve=max_model: not even the smallest model fits ({reason}); use a larger hardware.memory_gib, more "
            "partitions or more micro_batches"
        )
    best = max(plans, key=lambda plan: sum(cost.parameters for cost in plan.profile.costs))
    return replace(best, choices=tuple(comparisons))


def _largest_size(config: TrainConfig, key: str, step: int, log: Callable[[str], None]) -> Choice:
    """The largest `model.<key>`, a multiple of `step`, with which the model fits."""
    tried: dict[int, Candidate] = {}

    def try_size(size: int) -> tuple[bool, float | None]:
        resized: dict[str, Any] = {key: size}
        grown = replace(config, model=replace(config.model, **resized))
        if number_of_layers(grown) < config.partitions:
            return True, None
        tried[size] = candidate = _Planner(profile_model(grown), predicted_costs, None).candidate(str(size), grown)
        log(f"model.{key}={size} {'does not fit' if candidate.over else 'fits'}")
        if candidate.over is not None:
            return False, candidate.over.enough_bytes / candidate.over.memory.limit_bytes
        limit_bytes = candidate.made.layout.limit_bytes
        assert limit_bytes is not None
        return True, max(stage.total_bytes for stage in candidate.made.memory) / limit_bytes

    allowed = int(bounds(config.model, key).maximum)
    most = allowed // step * step
    largest = secant_then_bisect(try_size, min(max(step, getattr(config.model, key) // step * step), most), step, most)
    end = "" if largest < most else f"; the setting allows no more than {allowed}"
    rule = f"the largest that fits, everything else as given{end}"
    return Choice(f"model.{key}", rule, tuple(tried[size] for size in sorted(tried)), tried.get(largest))


def secant_then_bisect(try_size: Callable[[int], tuple[bool, float | None]], guess: int, step: int, most: int) -> int:
    """The greatest multiple of `step`, up to `most`, that fits; 0 if none does. `try_size` returns whether a size
    fits, and the share of the memory that its fullest stage needs (None: not known, for too small a size).

    The first `guess` is followed by estimates of the size that fills the memory, up to the first size that does not
    fit; then estimates and halves alternate: where memory hardly grows with the size, estimates go astray.
    """
    shares: dict[int, float] = {}
    low, high = 0, most + step  # the answer is at least `low` and below `high`
    while high - low > step:
        fits, share = try_size(guess)
        if share is not None:
            shares[guess] = math.log(share)
        low, high = (guess, high) if fits else (low, guess)
        estimate = _full_size(shares) if shares else 0.0
        margin = (high - low) / 8
        if high > most:
            estimate = min(max(estimate, 2 * low), 16 * low)
        elif len(shares) % 2:
            estimate = (low + high) / 2
        else:
            estimate = min(max(estimate, low + margin), high - margin)
        guess = min(max(int(estimate) // step * step, low + step), high - step)
    return low


def _full_size(shares: Mapping[int, float]) -> float:
    """The size that would fill the memory if memory grew with a power of the size: as between the two sizes of `shares`
    (size -> the logarithm of its share of the memory) that come nearest to filling it; of a single size, the square."""
    first, *others = sorted(shares, key=lambda size: abs(shares[size]))
    power = (shares[first] - shares[others[0]]) / math.log(first / others[0]) if others else 2.0
    return first * math.exp(-shares[first] / max(power, 0.1))


def _sizes(config: TrainConfig) -> tuple[tuple[str, int], ...]:
    """The settings that make the model larger, each with its step."""
    match config.model:
        case AmoebaNetConfig():
            return ("filters", 16), ("normal_cells", 3)
        case UNetConfig():
            return ("base_channels", 8), ("num_convs", 1)
        case TransformerLMConfig() | TransformerNMTConfig():
            return (("layers", 1),)
    raise InputError(
        f"solve=max_model: model={config.model.name} has no size that can be varied; use amoebanet, unet, "
        "transformer_lm or transformer_nmt"
    )
