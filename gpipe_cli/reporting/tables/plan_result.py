"""Converts a plan into the numbers of plan.json (`results/plan.py`)."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from gpipe_cli.config.settings import TrainConfig
from gpipe_cli.pipeline.profile.layer_cost import ActivationMemory
from gpipe_cli.pipeline.runtime.boundary import BoundaryTensor
from gpipe_cli.pipeline.runtime.routes import Route, routes
from gpipe_cli.pipeline.schedule.dependencies import grid
from gpipe_cli.pipeline.schedule.placement import name_of
from gpipe_cli.pipeline.schedule.simulator import ideal_bubble
from gpipe_cli.planner.auto_settings import Choice
from gpipe_cli.planner.data_sheet import computes_on_gpu, resolved
from gpipe_cli.planner.device_rates import computes_in, reached_tflops
from gpipe_cli.planner.model_profile import ModelProfile
from gpipe_cli.planner.plan import Plan
from gpipe_cli.planner.step_schedule import mini_batch_samples
from gpipe_cli.reporting.plots.timeline_values import idle
from gpipe_cli.reporting.run.description import model_name, words_of
from gpipe_cli.results.plan import (
    PlannedCandidate,
    PlannedChoice,
    PlannedHardware,
    PlannedLayer,
    PlannedMemory,
    PlannedSkip,
    PlannedStage,
    PlannedTie,
    PlanResult,
)

_GRID_STAGES, _GRID_TICKS = 16, 400  # a larger grid is unreadable


def plan_result(
    config: TrainConfig,
    profile: ModelProfile,
    plan: Plan,
    comparisons: Sequence[Choice],
    files: Mapping[str, str],
) -> PlanResult:
    """The numbers of the plan of `config`. `files`: the other files written, description -> path."""
    samples, partitions = mini_batch_samples(config, profile.lengths), len(plan.stages)
    tokens = samples * max(profile.lengths) if config.text else None
    hardware = _hardware(config, plan)
    peak = hardware.flops_per_second
    flops = round(sum(cost.flops for cost in profile.costs) * samples)
    layers = _layers(profile, plan)
    recomputed_flops = sum(
        recomputed * sum(cost.forward.flops for cost in profile.costs[first:end]) * samples / plan.micro_batches
        for recomputed, (first, end) in zip(plan.recomputed, plan.bounds, strict=True)
    )
    shares = asdict(plan.breakdown)
    recompute: str = config.recompute
    if recompute == "auto":
        recompute = f"auto ({sum(plan.recomputed)} of {partitions * plan.micro_batches} forwards)"
    devices = len(set(plan.device_of_stage))
    drawable = partitions <= _GRID_STAGES and max(map(len, plan.schedule.stages)) <= _GRID_TICKS
    lines = grid(plan.schedule, width=80, device_of_stage=plan.device_of_stage).splitlines() if drawable else []
    return PlanResult(
        kind="predicted",
        model_name=model_name(config),
        dataset_name=config.dataset.name,
        parameters=sum(layer.parameters for layer in layers),
        layers=layers,
        stages=_stages(profile, plan, layers, hardware.limit_bytes),
        skips=_skips(profile, plan),
        ties=_ties(profile, plan),
        micro_batches=plan.micro_batches,
        replicas=config.replicas,
        schedule=config.schedule if not plan.chosen_order else f"{config.schedule} ({plan.chosen_order})",
        recompute=recompute,
        sample=words_of(config.task).sample,
        step_samples=samples,
        step_tokens=tokens,
        hardware=hardware,
        placement=name_of(plan.device_of_stage),
        device_bytes=plan.device_bytes,
        host_bytes=sum(m.weights_bytes + m.optimizer_bytes for m in plan.memory) if computes_on_gpu(config) else None,
        step_seconds=plan.step_seconds,
        samples_per_second=samples / plan.step_seconds,
        tokens_per_second=None if tokens is None else tokens / plan.step_seconds,
        breakdown=shares,
        idle=idle(shares),
        bubble=plan.breakdown.bubble,
        ideal_bubble=ideal_bubble(devices, plan.micro_batches),
        imbalance=plan.imbalance,
        step_flops=flops,
        recomputed_flops=round(recomputed_flops),
        utilisation=None if peak is None else flops / (peak * devices * config.replicas * plan.step_seconds),
        comparisons=tuple(map(_choice, comparisons)),
        grid=tuple(lines) if lines else None,
        files=dict(files),
    )


def _layers(profile: ModelProfile, plan: Plan) -> tuple[PlannedLayer, ...]:
    activations = ActivationMemory(profile.costs, profile.inputs, plan.samples, profile.lengths)
    return tuple(
        PlannedLayer(
            name=cost.name,
            stage=stage,
            parameters=profile.weights[at].parameters,
            forward_flops=round(cost.forward.flops * plan.samples),
            saved_bytes=activations.held(at, at + 1).graph,
            boundary_bytes=_bytes(cost.outputs, profile, plan),
            forward_seconds=plan.costs.layers[at].graph,
            backward_seconds=plan.costs.layers[at].backward,
        )
        for stage, (first, end) in enumerate(plan.bounds)
        for at, cost in enumerate(profile.costs[first:end], first)
    )


def _stages(
    profile: ModelProfile, plan: Plan, layers: Sequence[PlannedLayer], limit_bytes: int | None
) -> tuple[PlannedStage, ...]:
    sent = {(route.sender, route.receiver): _bytes(route.tensors, profile, plan) for route in _routes(profile, plan)}
    # on another machine, each device has one process, whatever this machine would use
    process_of_stage = plan.layout.process_of_stage if plan.layout.here else plan.device_of_stage
    return tuple(
        PlannedStage(
            process=process_of_stage[k],
            layers=tuple(layer.name for layer in layers[first:end]),
            parameters=sum(layer.parameters for layer in layers[first:end]),
            forward_flops=round(sum(cost.forward.flops for cost in profile.costs[first:end]) * plan.samples),
            boundary_bytes=sent.get((k, k + 1)),
            forward_seconds=plan.stages[k].graph_seconds,
            backward_seconds=plan.stages[k].backward_seconds,
            recomputed=plan.recomputed[k],
            memory=PlannedMemory(
                **asdict(plan.memory[k]), total_bytes=plan.memory[k].total_bytes, limit_bytes=limit_bytes
            ),
        )
        for k, (first, end) in enumerate(plan.bounds)
    )


def _skips(profile: ModelProfile, plan: Plan) -> tuple[PlannedSkip, ...]:
    found = []
    for route in _routes(profile, plan):
        for name in dict.fromkeys(tensor.skip for tensor in route.tensors if tensor.skip):
            tensors = [tensor for tensor in route.tensors if tensor.skip == name]
            found.append(PlannedSkip(name, route.sender, route.receiver, _bytes(tensors, profile, plan)))
    return tuple(found)


def _ties(profile: ModelProfile, plan: Plan) -> tuple[PlannedTie, ...]:
    found = []
    for tied in profile.tied:
        stages = [k for k, (first, end) in enumerate(plan.bounds) if any(first <= at < end for at in tied.layers)]
        if len(stages) > 1:
            found.append(PlannedTie(tied.tie.name, tuple(stages), tied.gradient_bytes))
    return tuple(found)


def _routes(profile: ModelProfile, plan: Plan) -> Sequence[Route]:
    return routes([profile.costs[end - 1].outputs for _, end in plan.bounds[:-1]])


def _bytes(tensors: Sequence[BoundaryTensor], profile: ModelProfile, plan: Plan) -> int:
    return sum(tensor.bytes(plan.samples, profile.lengths) for tensor in tensors)


def _hardware(config: TrainConfig, plan: Plan) -> PlannedHardware:
    memory = plan.layout.memory
    hardware = resolved(config.hardware, plan.layout.devices)
    timed = plan.costs.basis == "timed_layers"  # then seconds do not come from a data sheet
    reached = None if hardware.tflops is None else reached_tflops(hardware, config.precision)
    peaks = {"float32": hardware.peak_tflops, "tf32": hardware.tf32_tflops, "bfloat16": hardware.bfloat16_tflops}

    def times(value: float | None, factor: float) -> float | None:
        return None if timed or value is None else value * factor

    return PlannedHardware(
        name=hardware.name,
        source=plan.costs.source,
        precision=config.precision,
        computes_in=computes_in(hardware.name, config.precision),
        peak_flops_per_second={name: None if peak is None else peak * 1e12 for name, peak in peaks.items()},
        flops_per_second=times(reached, 1e12 * (plan.layout.threads if hardware.name == "cpu" else 1)),
        memory_bytes=memory.device_bytes if memory else None,
        memory_stages=memory.stages if memory else None,
        link_bytes_per_second=times(hardware.link_gb_per_second, 1e9),
        link_latency_seconds=times(hardware.link_microseconds, 1e-6),
    )


def _choice(comparison: Choice) -> PlannedChoice:
    candidates = tuple(
        PlannedCandidate(
            value=one.value,
            step_seconds=one.plan.step_seconds if one.plan else None,
            memory_bytes=max(held.total_bytes for held in one.plan.memory) if one.plan else None,
            chosen=one is comparison.chosen,
            reason=one.reason,
        )
        for one in comparison.candidates
    )
    return PlannedChoice(comparison.setting, comparison.rule, candidates)
