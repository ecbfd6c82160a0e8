"""From plans and timelines to what the reports show of them: the one place where the two rooms' words meet."""

from collections.abc import Sequence
from dataclasses import asdict

from gpipe_cli.config.hardware import HardwareConfig
from gpipe_cli.config.settings import TrainConfig, load_hardware
from gpipe_cli.pipeline.profile.activation_memory import ActivationMemory
from gpipe_cli.pipeline.schedule.breakdown import Breakdown
from gpipe_cli.pipeline.schedule.order import grid
from gpipe_cli.pipeline.schedule.simulator import ideal_bubble
from gpipe_cli.pipeline.schedule.timeline import Timeline
from gpipe_cli.planner.data_sheet import resolved
from gpipe_cli.planner.model_profile import ModelProfile
from gpipe_cli.planner.placement import Placement, threads_of
from gpipe_cli.planner.plan import Plan, StageBytes, mini_batch_samples
from gpipe_cli.planner.search import Choice
from gpipe_cli.reporting.plan_view import (
    Candidate,
    Comparison,
    HardwareView,
    LayerView,
    PlanView,
    StageMemory,
    StageView,
)
from gpipe_cli.reporting.run.description import Prediction, StepFlops
from gpipe_cli.reporting.timeline_view import Bar, TimelineKind, TimelineView

_GRID_STAGES, _GRID_TICKS = 16, 400  # nobody reads a larger one


def timeline_view(
    title: str,
    kind: TimelineKind,
    timeline: Timeline,
    shares: Breakdown,
    step_seconds: float,
    begin_seconds: float = 0.0,
) -> TimelineView:
    """A timeline as it is drawn; `begin_seconds` is when the step began on its clock."""
    stages = []
    for k, spans in enumerate(timeline.stages):
        bars = [
            Bar(
                s.action.kind.value,
                s.action.micro_batch,
                s.start_seconds - begin_seconds,
                s.end_seconds - begin_seconds,
            )
            for s in spans
        ]
        for event in timeline.events[k] if timeline.events else ():
            about = event.action.micro_batch if event.action is not None else None
            bars.append(
                Bar(event.what.value, about, event.start_seconds - begin_seconds, event.end_seconds - begin_seconds)
            )
        stages.append(tuple(sorted(bars, key=lambda bar: (bar.start_seconds, bar.end_seconds))))
    return TimelineView(title, kind, tuple(stages), step_seconds, asdict(shares))


def predicted_view(title: str, plan: Plan) -> TimelineView:
    begin_seconds = plan.timeline.start_seconds
    return timeline_view(title, "predicted", plan.timeline, plan.breakdown, plan.step_seconds, begin_seconds)


def prediction(plan: Plan) -> Prediction:
    return Prediction(
        source=plan.costs.source,
        measured=plan.costs.measured,
        step_seconds=plan.step_seconds,
        breakdown=asdict(plan.breakdown),
        memory_bytes=tuple(stage.total for stage in plan.memory),
        activation_bytes=plan.saved_bytes,
    )


def step_flops(config: TrainConfig, shapes: ModelProfile, layout: Placement) -> StepFlops:
    """What the model needs of a full mini-batch, and what the devices that it runs on could do."""
    samples = mini_batch_samples(config, shapes.lengths)
    peak, source = _peak(config.hardware, layout)
    return StepFlops(
        step=sum(cost.flops for cost in shapes.costs) * samples,
        samples=samples,
        tokens=samples * max(shapes.lengths) if config.task != "classification" else None,
        peak_per_second=peak,
        peak_source=source,
    )


def _peak(hardware: HardwareConfig, layout: Placement) -> tuple[float | None, str]:
    """Operations a second of all devices in use, and where the figure comes from; or None, and why it is not known.

    The peak of a machine that the settings name but that is not here says nothing of what ran here.
    """
    device = layout.devices[0]
    here = resolved(load_hardware("auto"), device).name  # auto: a GPU without a file
    figures = resolved(hardware, device)
    if hardware.name not in ("auto", here) and (here != "auto" or device == "cpu"):
        return None, f"hardware={hardware.name} is not what it ran on, so its peak says nothing; leave it out"
    if figures.peak_tflops is None:
        what = "this CPU" if device == "cpu" else "this GPU"
        return None, f"the peak of {what} is not known; hardware.peak_tflops=... says it"
    # under torchrun machines count their GPUs from 0, each
    devices = layout.processes if layout.distributed and device != "cpu" else len(set(layout.devices))
    each = f"{figures.peak_tflops:g} TFLOP/s"
    given = figures.peak_tflops != load_hardware(figures.name).peak_tflops
    name = "hardware.peak_tflops" if given else figures.name
    return figures.peak_tflops * 1e12 * devices, f"{each} ({name})" if devices == 1 else f"{devices} x {each} ({name})"


def layer_seconds_of(plan: Plan) -> tuple[tuple[tuple[float, float], ...], ...]:
    """Of each stage, and of each of its layers: forward and backward of one micro-batch, as predicted."""
    return tuple(
        tuple((layer.graph, layer.backward) for layer in plan.costs.layers[first:end]) for first, end in plan.bounds
    )


def plan_view(
    config: TrainConfig,
    model_name: str,
    shapes: ModelProfile,
    plan: Plan,
    hardware: HardwareConfig,
    limit_bytes: int | None,
    choices: Sequence[Choice],
    files: Sequence[tuple[str, str]],
) -> PlanView:
    """What `gpipe plan` shows; `hardware` are the figures that hold."""
    text = config.task != "classification"
    samples = mini_batch_samples(config, shapes.lengths)
    tokens = samples * max(shapes.lengths) if text else None
    costs, sizes = shapes.costs, plan.samples
    memory = ActivationMemory(costs, shapes.inputs, sizes, shapes.lengths)
    sent = [sum(t.bytes(sizes, shapes.lengths) for t in cost.outputs) for cost in costs]
    stages = []
    for k, (first, end) in enumerate(plan.bounds):
        stages.append(
            StageView(
                layers=tuple(cost.name for cost in costs[first:end]),
                parameters=sum(cost.parameters for cost in costs[first:end]),
                forward_flops=round(sum(cost.forward.flops for cost in costs[first:end]) * sizes),
                boundary_bytes=sent[end - 1] if end < len(costs) else None,
                forward_seconds=plan.stages[k].graph_seconds,
                backward_seconds=plan.stages[k].backward_seconds,
                recomputed=plan.recomputed[k],
                memory=stage_memory(plan.memory[k]),
            )
        )
    stage_of = [k for k, size in enumerate(plan.balance) for _ in range(size)]
    layers = tuple(
        LayerView(
            name=cost.name,
            stage=stage_of[at],
            parameters=cost.parameters,
            forward_flops=round(cost.forward.flops * sizes),
            saved_bytes=memory.graph_bytes(at, at + 1),
            boundary_bytes=sent[at],
            forward_seconds=plan.costs.layers[at].graph,
            backward_seconds=plan.costs.layers[at].backward,
        )
        for at, cost in enumerate(costs)
    )
    again = sum(
        plan.recomputed[k] * sum(cost.forward.flops for cost in costs[first:end]) * samples / plan.micro_batches
        for k, (first, end) in enumerate(plan.bounds)
    )
    drawable = len(plan.schedule) <= _GRID_STAGES and max(map(len, plan.schedule)) <= _GRID_TICKS
    return PlanView(
        model_name=model_name,
        dataset_name=config.dataset.name,
        layers=layers,
        stages=tuple(stages),
        micro_batches=plan.micro_batches,
        schedule=config.schedule,
        recompute=_recompute(config, plan),
        step_samples=samples,
        hardware=_hardware_view(hardware, plan, limit_bytes, threads_of(config)),
        step_seconds=plan.step_seconds,
        ideal_bubble=ideal_bubble(len(plan.stages), plan.micro_batches),
        breakdown=asdict(plan.breakdown),
        step_flops=round(sum(cost.flops for cost in costs) * samples),
        recomputed_flops=round(again),
        imbalance=plan.imbalance,
        sample={"language_model": "sequence", "translation": "sentence"}.get(config.task, "sample"),
        step_tokens=tokens,
        comparisons=tuple(_comparison(choice, samples) for choice in choices),
        grid=grid(plan.schedule, width=80) if drawable else None,
        files=tuple(files),
    )


def _recompute(config: TrainConfig, plan: Plan) -> str:
    if config.recompute != "auto":
        return config.recompute
    return f"auto ({sum(plan.recomputed)} of {len(plan.stages) * plan.micro_batches} forwards)"


def _hardware_view(hardware: HardwareConfig, plan: Plan, limit_bytes: int | None, threads: int) -> HardwareView:
    timed = plan.costs.timed

    def times(value: float | None, factor: float) -> float | None:
        return None if value is None else value * factor

    return HardwareView(
        name=hardware.name,
        source=plan.costs.source,
        flops_per_second=None if timed else times(hardware.tflops, 1e12 * (threads if hardware.name == "cpu" else 1)),
        memory_bytes=limit_bytes,
        link_bytes_per_second=None if timed else times(hardware.link_gb_per_second, 1e9),
        link_latency_seconds=None if timed else times(hardware.link_microseconds, 1e-6),
    )


def stage_memory(stage: StageBytes) -> StageMemory:
    return StageMemory(stage.weights, stage.gradients, stage.optimizer, stage.activations, stage.workspace)


def _comparison(choice: Choice, samples: int) -> Comparison:
    return Comparison(
        choice.setting,
        choice.rule,
        tuple(
            Candidate(
                value=tried.value,
                step_seconds=None if tried.plan is None else tried.plan.step_seconds,
                memory_bytes=None if tried.plan is None else max(stage.total for stage in tried.plan.memory),
                chosen=tried.chosen,
                reason=tried.reason,
            )
            for tried in choice.tried
        ),
    )
