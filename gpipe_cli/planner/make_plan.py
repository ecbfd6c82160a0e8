"""Makes plans: cuts the model, orders the actions of a step, and simulates it."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from gpipe_cli.config.settings import TrainConfig, single_device_baseline
from gpipe_cli.distributed.torchrun_env import Torchrun
from gpipe_cli.errors import InputError
from gpipe_cli.planner.cost_model import MeasuredCosts, StepCosts, predicted_costs
from gpipe_cli.planner.cut import Cut, best_cut
from gpipe_cli.planner.model_profile import ModelProfile
from gpipe_cli.planner.plan import Candidate, Choice, Plan
from gpipe_cli.planner.process_layout import Layout, TooLargeError, layout_of
from gpipe_cli.planner.stage_memory import StageMemory
from gpipe_cli.planner.step_schedule import schedule_for
from gpipe_cli.schedule.breakdown import breakdown
from gpipe_cli.schedule.named_schedules import AUTO_SCHEDULE
from gpipe_cli.schedule.placement import stages_of_devices
from gpipe_cli.schedule.recomputation import DoesNotFitError, find_fewest_recomputations
from gpipe_cli.schedule.schedule import Kind, RecomputePlan, Schedule
from gpipe_cli.schedule.search import Problem, search_order
from gpipe_cli.schedule.simulator import EdgeCost, StageCost, TieCost, simulate

SHORTEST = "the shortest predicted step that fits"
_SHOWN = 3  # number of the fastest orders of schedule=auto that are shown next to the named ones


CostsOf = Callable[[TrainConfig, ModelProfile, Layout], StepCosts]


def plan_step(
    config: TrainConfig, profile: ModelProfile, costs_of: CostsOf = predicted_costs, torchrun: Torchrun | None = None
) -> Plan:
    """The plan of `config` for its own layout; `torchrun`: this process, if torchrun started it.

    Raises what `layout_of`, `costs_of` and `make_plan` raise.
    """
    layout = layout_of(config, torchrun)
    return make_plan(config, profile, costs_of(config, profile, layout), layout)


def make_plan(config: TrainConfig, profile: ModelProfile, costs: StepCosts, layout: Layout) -> Plan:
    """Cut the model for `config`, order the actions of a step and simulate it; `costs` are for a mean micro-batch.

    Raises:
        TooLargeError: no cut stays below the layout's limit to the memory on every stage.
        InputError: as in `best_cut`.
    """
    cut = best_cut(config, profile, costs, layout)
    if config.schedule == AUTO_SCHEDULE and (chosen := _fastest_order(cut)) is not None:
        return chosen
    return _simulate(cut, _recompute(cut))


def baseline_of(plan: Plan) -> Plan | None:
    """The single-device baseline: it takes the mini-batch whole and recomputes nothing, with all threads of the
    machine. None if that does not fit the device's memory, where it is known."""
    config = single_device_baseline(plan.config)
    try:
        layout = layout_of(replace(config, recompute="auto"))  # with the device's memory as the limit
    except InputError:  # the memory is unknown
        layout = layout_of(config)
    times = plan.costs.rates if isinstance(plan.costs.rates, MeasuredCosts) else None
    try:
        return make_plan(config, plan.profile, predicted_costs(config, plan.profile, layout, times), layout)
    except TooLargeError:
        return None


def fits(config: TrainConfig, profile: ModelProfile, layout: Layout) -> bool:
    """Whether a cut fits the memory. That does not depend on the seconds of layers, so a data sheet is enough. A step
    is simulated only for `schedule=auto`, which may find an order that needs less memory than any named order."""
    costs = predicted_costs(config, profile, layout)
    try:
        cut = best_cut(config, profile, costs, layout)
        if config.schedule == AUTO_SCHEDULE:
            return search_order(_problem(cut))[0] is not None
        _check_memory(cut, _recompute(cut))
    except InputError:
        return False
    return True


def _recompute(cut: Cut) -> RecomputePlan:
    """The setting or, for `auto`, none if that fits, and as little as fits each stage's share of its device's memory;
    `except_last` if nothing fits."""
    if cut.config.recompute != "auto":
        return cut.config.recompute
    if len(set(cut.device_of_stage)) < len(cut.balance):
        with suppress(TooLargeError):
            _check_memory(cut, "never")
            return "never"
    model, limit_bytes = cut.memory_model, cut.layout.limit_bytes
    if limit_bytes is None:
        return "never"
    try:
        budget = model.activation_budget(cut.bounds, limit_bytes)
        return find_fewest_recomputations(cut.order.first(cut.micro_batches), model.largest(cut.bounds), budget)
    except DoesNotFitError:
        return "except_last"


def _check_memory(cut: Cut, recompute: RecomputePlan) -> tuple[tuple[StageMemory, ...], tuple[int, ...]]:
    """The memory of stages, and the peak bytes of devices. Raises TooLargeError if these exceed the limits of the
    stages."""
    schedule = schedule_for(cut.order, cut.micro_batches, recompute)
    held = cut.memory_model.stages(schedule, cut.bounds, cut.device_of_stage)
    peaks = cut.memory_model.devices(held, schedule, cut.bounds, cut.device_of_stage)
    if (limit := cut.layout.memory) is not None:
        device_stages = stages_of_devices(cut.device_of_stage)
        missing_bytes, _, stage, device = max(
            (peaks[device] - len(stages) * limit.limit_bytes, held[k].total_bytes, k, device)
            for device, stages in enumerate(device_stages)
            for k in stages
        )
        if missing_bytes > 0:
            raise TooLargeError(stage, missing_bytes, limit, len(device_stages[device]))
    return held, peaks


def _fastest_order(cut: Cut) -> Plan | None:
    """The plan with the fastest order, found by search or named; None if no order fits."""
    best, tried = search_order(_problem(cut))
    if best is None:
        return None

    def candidate(name: str, schedule: Schedule, fits: bool) -> Candidate:
        plan = _simulate(replace(cut, order=schedule), _recomputed_sets(schedule)) if fits else None
        return Candidate(name, cut.config, plan, "" if fits else "does not fit")

    compared = {
        result.name: candidate(result.name, result.schedule, result.fits)
        for result in tried
        if result is best or result.is_named or result in tried[:_SHOWN]
    }
    chosen = compared[best.name]
    choice = Choice("schedule", SHORTEST, tuple(compared.values()), chosen)
    return replace(chosen.made, chosen_order=best.name, choices=(choice,))


def _problem(cut: Cut) -> Problem:
    config, layout = cut.config, cut.layout
    stages = _stages(cut)
    budgets, stage_budgets = None, list[int]()
    if layout.limit_bytes is not None:
        budgets = cut.memory_model.activation_budget(cut.bounds, layout.limit_bytes, layout.device_of_stage)
        if cut.memory_model.replays:
            stage_budgets = cut.memory_model.activation_budget(cut.bounds, layout.limit_bytes)
    split = config.splits_backward and any(stage.weights_seconds for stage in stages)
    # all M: a mini-batch of text may have more micro-batches than the planned one of the longest sentences
    return Problem(
        stages, _edges(cut), cut.costs.slowdown, cut.device_of_stage, config.micro_batches,
        cut.memory_model.largest(cut.bounds), budgets, config.recompute, split, _ties(cut), stage_budgets,
    )  # fmt: skip


def _simulate(cut: Cut, recompute: RecomputePlan) -> Plan:
    """The plan of a step with these actions. Raises TooLargeError if a device exceeds the limit."""
    device_of_stage = cut.device_of_stage
    held, device_bytes = _check_memory(cut, recompute)
    stages = _stages(cut)
    # not checked: our own orders are as they should be, and a file was checked when it was read
    schedule = schedule_for(cut.order, cut.micro_batches, recompute)
    timeline = simulate(schedule, stages, _edges(cut), cut.costs.slowdown, device_of_stage, _ties(cut))
    set_up_seconds = cut.costs.set_up / len(set(device_of_stage))
    step_seconds = timeline.step_end_seconds - timeline.start_seconds + set_up_seconds
    return Plan(
        **vars(cut),
        recompute=recompute,
        stage_costs=stages,
        schedule=schedule,
        recomputed=tuple(map(len, _recomputed_sets(schedule))),
        timeline=timeline,
        step_seconds=step_seconds,
        breakdown=breakdown(timeline, cut.micro_batches, step_seconds),
        memory=held,
        device_bytes=device_bytes,
    )


def _stages(cut: Cut) -> tuple[StageCost, ...]:
    costs = cut.costs
    return tuple(
        StageCost(*map(sum, zip(*costs.layers[first:end], strict=True)))._replace(
            update_seconds=sum(costs.updates[first:end]), sum_seconds=sum(costs.sums[first:end])
        )
        for first, end in cut.bounds
    )


def _edges(cut: Cut) -> dict[tuple[int, int], EdgeCost]:
    """The cost of each edge from a stage to the next, and of the skips from a stage past others."""
    stage_of = [k for k, size in enumerate(cut.balance) for _ in range(size)]
    edges = {(k, k + 1): cut.costs.edges[end - 1] for k, (_, end) in enumerate(cut.bounds[:-1])}
    for skip in cut.costs.skips:
        ends = stage_of[skip.stash], stage_of[skip.pop]
        if ends[0] < ends[1]:  # a skip to the next stage is in one message with what the next layer gets
            forward, backward = edges.get(ends, (0.0, 0.0))
            edges[ends] = EdgeCost(forward + skip.forward, backward + skip.backward)
    return edges


def _ties(cut: Cut) -> tuple[TieCost, ...]:
    """The tied weights, each with its stages."""
    return tuple(tie._replace(stages=cut.stages_with(tie.stages)) for tie in cut.costs.ties)


def _recomputed_sets(schedule: Schedule) -> tuple[frozenset[int], ...]:
    """The recomputed micro-batches of each stage."""
    return tuple(frozenset(a.micro_batch for a in actions if a.kind is Kind.R) for actions in schedule.stages)
