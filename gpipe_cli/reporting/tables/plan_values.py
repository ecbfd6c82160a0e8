"""A plan as `gpipe plan` shows it and plan.json keeps it: what a run would take (Tables 1 and 2 of the paper).

Everything in here is predicted: times come from a simulation, bytes from shapes. Nothing measured stands in it but,
with ``cost=measured``, the seconds of single layers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from gpipe_cli.config.settings import TrainConfig
from gpipe_cli.pipeline.profile.activation_memory import ActivationMemory
from gpipe_cli.pipeline.schedule.dependencies import grid
from gpipe_cli.pipeline.schedule.simulator import ideal_bubble
from gpipe_cli.planner.auto_settings import Comparison
from gpipe_cli.planner.data_sheet import resolved
from gpipe_cli.planner.devices import Devices, memory_limit
from gpipe_cli.planner.model_profile import ModelProfile
from gpipe_cli.planner.plan import Plan
from gpipe_cli.planner.stage_memory import StageMemory
from gpipe_cli.planner.step_schedule import mini_batch_samples
from gpipe_cli.reporting.plots.timeline_values import SHARES, TimelineView, idle, timeline_view

_GRID_STAGES, _GRID_TICKS = 16, 400  # a larger one cannot be read


@dataclass(frozen=True)
class HardwareView:
    """One device and one link of the machine that is planned for; None: the figure is not known."""

    name: str  # of the preset: `h200`
    source: str  # of the seconds, one phrase: `hardware=h200 figures`, `layers measured on this machine`
    flops_per_second: float | None  # peak of one device; the base of the utilisation
    memory_bytes: int | None  # of one device; what a stage must stay below
    link_bytes_per_second: float | None
    link_latency_seconds: float | None


@dataclass(frozen=True)
class LayerView:
    """One of the L layers, in order; operations and bytes are those of one micro-batch, the largest if uneven."""

    name: str
    stage: int
    parameters: int
    forward_flops: int
    saved_bytes: int  # activations that autograd keeps for the backward
    boundary_bytes: int  # what goes over the cut, if there is one after this layer
    forward_seconds: float
    backward_seconds: float


@dataclass(frozen=True)
class StageView:
    """One of the K stages, in order; operations, bytes sent and seconds are those of one micro-batch."""

    layers: tuple[str, ...]  # names
    parameters: int
    forward_flops: int
    boundary_bytes: int | None  # activations sent to the next stage; None: the last one
    forward_seconds: float
    backward_seconds: float
    recomputed: int  # of the M micro-batches
    memory: StageMemory


@dataclass(frozen=True)
class PlanView:
    """A plan: what would run (settings), on what (hardware), and what that would take (all else)."""

    model_name: str
    dataset_name: str
    layers: tuple[LayerView, ...]
    stages: tuple[StageView, ...]
    micro_batches: int  # M
    schedule: str
    recompute: str  # mode; with `auto` what it means here: `auto (3 of 32 forwards)`
    step_samples: float  # samples, sentences or sequences of one mini-batch; a mean where it is cut by tokens
    hardware: HardwareView
    # Predicted, of one optimizer step.
    step_seconds: float
    ideal_bubble: float  # (K-1)/(M+K-1)
    breakdown: Mapping[str, float]  # SHARES -> share of stage-time, 0 to 1
    step_flops: int  # that must be done: forwards and backwards of all micro-batches, without recomputation
    recomputed_flops: int  # on top of these
    imbalance: float  # slowest stage / mean of the stages - 1: how far the best cut is from perfect balance
    # Text.
    sample: str = "sample"  # what one of step_samples is called: `sequence`, `sentence`
    step_tokens: float | None = None  # tokens of one mini-batch; None for images
    comparisons: tuple[Comparison, ...] = ()  # for settings that are `auto` or were solved for
    grid: str | None = None  # of the schedule; None: too large to be read
    files: tuple[tuple[str, str], ...] = ()  # written beside plan.json: label (`picture`), path

    def __post_init__(self) -> None:
        assert set(self.breakdown) == set(SHARES), sorted(self.breakdown)

    @property
    def parameters(self) -> int:
        return sum(stage.parameters for stage in self.stages)

    @property
    def samples_per_second(self) -> float:
        return self.step_samples / self.step_seconds

    @property
    def tokens_per_second(self) -> float | None:
        return None if self.step_tokens is None else self.step_tokens / self.step_seconds

    @property
    def utilisation(self) -> float | None:
        """Operations that must be done over those that all K devices could do in a step; None: no peak is known.

        Recomputation is not counted as useful, as in "model FLOPs utilization" (Chowdhery et al., 2022, PaLM,
        section 4.1).
        """
        peak = self.hardware.flops_per_second
        return None if peak is None else self.step_flops / (peak * len(self.stages) * self.step_seconds)


def plan_view(
    config: TrainConfig,
    model_name: str,
    profile: ModelProfile,
    plan: Plan,
    devices: Devices,
    comparisons: Sequence[Comparison],
    files: Sequence[tuple[str, str]],
) -> PlanView:
    """What `gpipe plan` shows of the plan of `config`."""
    samples = mini_batch_samples(config, profile.lengths)
    costs = profile.costs
    recomputed_flops = sum(
        plan.recomputed[k] * sum(cost.forward.flops for cost in costs[first:end]) * samples / plan.micro_batches
        for k, (first, end) in enumerate(plan.bounds)
    )
    drawable = len(plan.schedule) <= _GRID_STAGES and max(map(len, plan.schedule)) <= _GRID_TICKS
    layers = _layers(profile, plan)
    return PlanView(
        model_name=model_name,
        dataset_name=config.dataset.name,
        layers=layers,
        stages=tuple(_stage(profile, plan, layers, k) for k in range(len(plan.stages))),
        micro_batches=plan.micro_batches,
        schedule=config.schedule,
        recompute=_recompute(config, plan),
        step_samples=samples,
        hardware=_hardware(config, plan, devices),
        step_seconds=plan.step_seconds,
        ideal_bubble=ideal_bubble(len(plan.stages), plan.micro_batches),
        breakdown=asdict(plan.breakdown),
        step_flops=round(sum(cost.flops for cost in costs) * samples),
        recomputed_flops=round(recomputed_flops),
        imbalance=plan.imbalance,
        sample={"language_model": "sequence", "translation": "sentence"}.get(config.task, "sample"),
        step_tokens=None if config.task == "classification" else samples * max(profile.lengths),
        comparisons=tuple(comparisons),
        grid=grid(plan.schedule, width=80) if drawable else None,
        files=tuple(files),
    )


def _layers(profile: ModelProfile, plan: Plan) -> tuple[LayerView, ...]:
    memory = ActivationMemory(profile.costs, profile.inputs, plan.samples, profile.lengths)
    stages = [k for k, size in enumerate(plan.balance) for _ in range(size)]
    return tuple(
        LayerView(
            name=cost.name,
            stage=stages[at],
            parameters=cost.parameters,
            forward_flops=round(cost.forward.flops * plan.samples),
            saved_bytes=memory.graph_bytes(at, at + 1),
            boundary_bytes=sum(t.bytes(plan.samples, profile.lengths) for t in cost.outputs),
            forward_seconds=seconds.graph,
            backward_seconds=seconds.backward,
        )
        for at, (cost, seconds) in enumerate(zip(profile.costs, plan.costs.layers, strict=True))
    )


def _stage(profile: ModelProfile, plan: Plan, layers: Sequence[LayerView], k: int) -> StageView:
    first, end = plan.bounds[k]
    own = layers[first:end]
    return StageView(
        layers=tuple(layer.name for layer in own),
        parameters=sum(layer.parameters for layer in own),
        forward_flops=round(sum(cost.forward.flops for cost in profile.costs[first:end]) * plan.samples),
        boundary_bytes=own[-1].boundary_bytes if end < len(layers) else None,
        forward_seconds=plan.stages[k].graph_seconds,
        backward_seconds=plan.stages[k].backward_seconds,
        recomputed=plan.recomputed[k],
        memory=plan.memory[k],
    )


def _recompute(config: TrainConfig, plan: Plan) -> str:
    if config.recompute != "auto":
        return config.recompute
    return f"auto ({sum(plan.recomputed)} of {len(plan.stages) * plan.micro_batches} forwards)"


def _hardware(config: TrainConfig, plan: Plan, devices: Devices) -> HardwareView:
    hardware = resolved(config.hardware, devices.stages[0])
    timed = plan.costs.basis in ("timed_machine", "timed_layers")  # then no data sheet is behind the seconds

    def times(value: float | None, factor: float) -> float | None:
        return None if timed or value is None else value * factor

    return HardwareView(
        name=hardware.name,
        source=plan.costs.source,
        flops_per_second=times(hardware.tflops, 1e12 * (devices.threads if hardware.name == "cpu" else 1)),
        memory_bytes=memory_limit(config, devices),
        link_bytes_per_second=times(hardware.link_gb_per_second, 1e9),
        link_latency_seconds=times(hardware.link_microseconds, 1e-6),
    )


def predicted_view(title: str, plan: Plan) -> TimelineView:
    """The simulated step, as it is drawn."""
    begin_seconds = plan.timeline.start_seconds
    return timeline_view(title, "predicted", plan.timeline, plan.breakdown, plan.step_seconds, begin_seconds)


def plan_json(view: PlanView) -> dict[str, Any]:
    """What plan.json holds: every value of the view, units in the names, and what follows from them."""
    plain = asdict(replace(view, comparisons=()))  # a candidate's plan is no value of the file
    for stage, seen in zip(plain["stages"], view.stages, strict=True):
        stage["memory"]["total_bytes"] = seen.memory.total_bytes
        stage["memory"]["limit_bytes"] = view.hardware.memory_bytes
    return {
        "kind": "predicted",
        **plain,
        "comparisons": [_comparison_json(comparison) for comparison in view.comparisons],
        "files": dict(view.files),
        "grid": None if view.grid is None else view.grid.splitlines(),
        "idle": idle(view.breakdown),
        "bubble": view.breakdown["bubble"],
        "parameters": view.parameters,
        "samples_per_second": view.samples_per_second,
        "tokens_per_second": view.tokens_per_second,
        "utilisation": view.utilisation,
    }


def _comparison_json(comparison: Comparison) -> dict[str, Any]:
    keys = ("value", "step_seconds", "memory_bytes", "chosen", "reason")
    candidates = [{key: getattr(candidate, key) for key in keys} for candidate in comparison.candidates]
    return {"setting": comparison.setting, "rule": comparison.rule, "candidates": candidates}
