"""`gpipe plan solve=memory_time`: the memory of the fullest device against the time of a step, over schedules,
placements, recomputation and M. The paper trades one for the other by recomputation and by M (section 2.3); the
schedules after it do so by the order of a step.

All candidates use the same number of devices, and are compared with what no step on so many devices can beat.
"""

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from gpipe_cli.config.settings import TrainConfig
from gpipe_cli.config.typed import NothingFitsError, show
from gpipe_cli.errors import InputError
from gpipe_cli.pipeline.schedule.breakdown import Breakdown
from gpipe_cli.pipeline.schedule.lower_bound import LowerBound, lower_bound
from gpipe_cli.pipeline.schedule.named_schedules import AUTO_SCHEDULE, ORDERS, Order
from gpipe_cli.pipeline.schedule.placement import PLACEMENTS, name_of
from gpipe_cli.pipeline.schedule.schedule import Schedule
from gpipe_cli.planner.layout import layout_of
from gpipe_cli.planner.model_profile import ModelProfile, profile_model, refuse_single_samples
from gpipe_cli.planner.plan import CostsOf, Plan, TooLargeError, plan_step, stage_cost
from gpipe_cli.planner.step_schedule import mini_batch_samples
from gpipe_cli.units import plural, size

AXES = ("schedule", "placement", "recompute", "micro_batches", "stages_per_process")  # what varies, unless it is given
_MOST_MICRO_BATCHES = 4096  # of all stages together, K M: a step of more takes seconds to simulate
_MOST_FOR_AUTO = 64  # K M up to which schedule=auto searches, as it simulates dozens of orders
_SILENT_SECONDS = 5.0


@dataclass(frozen=True)
class Point:
    """A candidate; a plan of its `config` predicts the same bytes and seconds."""

    config: TrainConfig
    settings: dict[str, object]  # the settings that lead from the user's configuration to this one
    placement: str
    balance: tuple[int, ...]
    stages_per_device: int
    memory_bytes: int  # of the fullest device, at its peak
    step_seconds: float
    breakdown: Breakdown
    fits: bool  # whether it is within the limit; without a limit all are
    searched: Schedule | None  # what schedule=auto has found


@dataclass(frozen=True)
class Curve:
    """All points that were tried, the simplest first."""

    points: tuple[Point, ...]
    devices: int  # P
    bound: LowerBound  # of a step on P devices, the least of those of all numbers of micro-batches
    bound_micro_batches: int  # M at which it is that low
    limit_bytes: int | None  # of a device

    @property
    def front(self) -> tuple[Point, ...]:
        """The points than which no other has less memory and is at least as fast, or is faster with at most as much;
        of equal ones the first. The least memory comes first."""
        found: list[Point] = []
        for point in sorted(self.points, key=lambda one: (one.memory_bytes, one.step_seconds)):
            if not found or point.step_seconds < found[-1].step_seconds:
                found.append(point)
        return tuple(found)

    @property
    def fastest(self) -> Point:
        """The fastest point that fits."""
        return min((point for point in self.front if point.fits), key=lambda point: point.step_seconds)


def solve_memory_time(
    config: TrainConfig, given: Collection[str], costs_of: CostsOf, log: Callable[[str], None] = lambda line: None
) -> tuple[ModelProfile, Plan, Curve]:
    """The curve of `config`, and the plan of its fastest point that fits with the model's profile.

    `given`: the settings that the user gave; those in AXES do not vary. `log` is called with the progress every five
    seconds.

    Raises:
        NothingFitsError: no candidate fits the memory limit; one line with the limit that would do.
        InputError: no candidate can be planned; the first one's error.
    """
    layout = layout_of(config)
    devices, limit_bytes = len(set(layout.device_of_stage)), None
    if layout.limit_bytes is not None:
        limit_bytes = layout.limit_bytes * max(map(layout.device_of_stage.count, layout.device_of_stage))
    candidates = list(_candidates(config, given, devices, limit_bytes is not None))
    points: list[Point] = []
    bounds: list[tuple[LowerBound, int]] = []
    best: Plan | None = None
    keeps_all = set[tuple[object, ...]]()  # the settings, but for `recompute`, with which nothing has to be recomputed
    refused: InputError | None = None
    told = time.monotonic()
    for number, one in enumerate(candidates, 1):
        others = (one.schedule, one.placement, one.partitions, one.micro_batches)
        if one.recompute == "auto" and others in keeps_all:
            continue
        try:
            planned, plan = _planned(one, costs_of)
        except InputError as error:
            refused = refused or error
            continue
        if len(set(plan.device_of_stage)) != devices:
            continue
        point = _point(config, planned, plan, limit_bytes)
        if point.fits and one.recompute == "never":
            keeps_all.add(others)
        points.append(point)
        bounds.append((_bound(planned, plan), plan.micro_batches))
        if point.fits and (best is None or _speed(plan) < _speed(best)):
            best = plan
        if time.monotonic() - told > _SILENT_SECONDS:
            told = time.monotonic()
            log(f"planned {number} of {len(candidates)} candidates")
    if not points:
        raise refused or InputError("solve=memory_time: there is nothing to try")
    if best is None:
        assert limit_bytes is not None
        least = min(points, key=lambda point: point.memory_bytes)
        with_settings = " ".join(f"{key}={show(value)}" for key, value in least.settings.items())
        none = f"none of {plural(len(points), 'candidate')} fits {size(limit_bytes)} on each device"
        use = f"use more than {size(least.memory_bytes)}, which {with_settings} takes, or more partitions"
        raise NothingFitsError(f"solve=memory_time: {none}; {use}")
    bound, of = min(bounds, key=lambda pair: pair[0].seconds)
    curve = Curve(tuple(points), devices, bound, of, limit_bytes)
    return profile_model(curve.fastest.config), best, curve


def _speed(plan: Plan) -> tuple[float, int]:
    """What is less for a better plan, of two equally fast ones for that with less memory, as on the front."""
    return plan.step_seconds, max(plan.device_bytes)


def _planned(config: TrainConfig, costs_of: CostsOf) -> tuple[TrainConfig, Plan]:
    """The configuration of a point and its plan: what does not fit is planned without a limit. Raises InputError if it
    cannot be planned."""
    profile = profile_model(config)
    refuse_single_samples(config, mini_batch_samples(config, profile.lengths), profile)
    try:
        return config, plan_step(config, profile, costs_of)
    except TooLargeError:
        if config.recompute == "auto":
            raise
        config = replace(config, hardware=replace(config.hardware, memory_gib=None))
        return config, plan_step(config, profile, costs_of)


def _candidates(config: TrainConfig, given: Collection[str], devices: int, limited: bool) -> Iterator[TrainConfig]:
    """The configurations to try, the simplest first. Some of them cannot be planned, or use other devices."""
    stages = [(config.partitions, config.stages_per_process)]
    if config.stages_per_process is None and 1 < config.partitions == devices:
        stages.append((2 * devices, 2))
    schedules = [config.schedule] if "schedule" in given else [*ORDERS, AUTO_SCHEDULE]
    modes: list[Any] = ["never", "except_last", "always", *(["auto"] if limited else [])]
    modes = [config.recompute] if "recompute" in given else modes
    by_hand = config.stages_per_process is not None
    numbers = [config.micro_batches] if "micro_batches" in given else _micro_batches(config)
    for (partitions, each), schedule in product(stages, schedules):
        several = partitions > devices
        placements = [config.placement] if "placement" in given else _placements(schedule, several, by_hand)
        for placement, mode, m in product(placements, modes, numbers):
            searched = schedule == AUTO_SCHEDULE
            if len(modes) > 1 and ((mode == "except_last" and m == 1) or (mode == "always" and searched)):
                continue  # the first is the same as never, the second has no less memory than except_last
            if partitions * m > (_MOST_FOR_AUTO if searched else _MOST_MICRO_BATCHES) and m != config.micro_batches:
                continue
            changes: dict[str, Any] = {"schedule": schedule, "placement": placement, "recompute": mode}
            changes |= {"partitions": partitions, "stages_per_process": each, "micro_batches": m}
            try:
                yield replace(config, **changes)
            except InputError:  # settings that do not go together, such as compile=true and a split backward
                if len(schedules) == len(placements) == len(modes) == 1:
                    raise


def _placements(schedule: str, several: bool, by_hand: bool) -> list[Any]:
    """The placements that suit a schedule: those of devices with one stage each do not differ, and schedule=auto itself
    compares them. `by_hand`: the user says how many stages a device has; consecutive ones are worth a try only then, as
    they could be one stage."""
    order = ORDERS.get(schedule, Order())
    if not several:
        return [] if order.placement else [None]
    chosen = order.placement or schedule == AUTO_SCHEDULE
    return [None] if chosen else [name for name in PLACEMENTS if by_hand or name != "neighbours"]


def _micro_batches(config: TrainConfig) -> list[int]:
    """1, 2, 4, ... up to a sample in each, and the number that the settings have."""
    whole = (config.batch_size or config.batch_tokens or 1) // config.replicas
    return sorted({*(1 << power for power in range(whole.bit_length())), config.micro_batches})


def _point(given: TrainConfig, config: TrainConfig, plan: Plan, limit_bytes: int | None) -> Point:
    settings: dict[str, object] = {key: getattr(config, key) for key in ("partitions", *AXES)}
    settings = {key: value for key, value in settings.items() if value is not None or getattr(given, key) is not None}
    if plan.layout.here and plan.layout.on_cpu and plan.layout.threads > 1:
        settings["threads"] = plan.layout.threads  # a plan of one configuration may choose fewer
    if config.hardware.memory_gib != given.hardware.memory_gib:
        settings["hardware.memory_gib"] = config.hardware.memory_gib
    return Point(
        config,
        settings,
        name_of(plan.device_of_stage) or str(config.placement),  # a file's has no name
        plan.balance,
        max(map(plan.device_of_stage.count, plan.device_of_stage)),
        max(plan.device_bytes),
        plan.step_seconds,
        plan.breakdown,
        limit_bytes is None or max(plan.device_bytes) <= limit_bytes,
        plan.schedule if config.schedule == AUTO_SCHEDULE else None,
    )


def _bound(config: TrainConfig, plan: Plan) -> LowerBound:
    """The bound for this number of micro-batches and these costs, with the set-up, which all devices share."""
    costs, devices = plan.costs, len(set(plan.device_of_stage))
    layers = [stage_cost(costs, at, at + 1) for at in range(len(costs.layers))]
    found = lower_bound(layers, devices, plan.micro_batches, costs.slowdown, split=config.splits_backward)
    set_up = costs.set_up / devices
    return LowerBound(found.seconds + set_up, found.work_seconds + set_up)
