"""A plan for K, M and a schedule: the cut, what is recomputed, and the time and memory of a step, before anything is
allocated (sections 2 and 3 of the paper). A run begins with the same plan, so it measures what was predicted.

plan.json holds a plan's `tree`. Everything in it is predicted: times by a simulation, bytes from shapes. With
`cost=profile` the seconds of single layers are measured. Units are part of the names; None means unknown.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from gpipe_cli.config.groups import model_name
from gpipe_cli.config.settings import SAMPLE_WORDS, TrainConfig
from gpipe_cli.data.micro_batches import shard_of
from gpipe_cli.pipeline.profile.layer_cost import ActivationMemory
from gpipe_cli.pipeline.runtime.boundary import BoundaryTensor
from gpipe_cli.pipeline.runtime.routes import Route, routes
from gpipe_cli.planner.cost_model import MeasuredCosts
from gpipe_cli.planner.cut import Cut
from gpipe_cli.planner.data_sheet import computes_on_gpu, with_data_sheet
from gpipe_cli.planner.device_rates import achieved_tflops, effective_precision
from gpipe_cli.planner.model_profile import profile_model
from gpipe_cli.planner.process_layout import TooLargeError
from gpipe_cli.planner.stage_memory import MemoryModel, StageMemory
from gpipe_cli.planner.step_schedule import mini_batch_samples, schedule_for
from gpipe_cli.schedule.breakdown import Breakdown
from gpipe_cli.schedule.dependencies import grid
from gpipe_cli.schedule.placement import placement_name
from gpipe_cli.schedule.schedule import RecomputePlan, Schedule
from gpipe_cli.schedule.simulator import StageCost, ideal_bubble
from gpipe_cli.schedule.timeline import Timeline

PLAN = "plan.json"
_STEADY = 0.1  # timings whose quartiles are closer, as a part of their mean, do not scatter
_GRID_STAGES, _GRID_TICKS = 16, 400  # a larger grid is unreadable


@dataclass(frozen=True)
class PlannedLayer:
    """A layer; operations, bytes and seconds are for the largest micro-batch."""

    name: str
    stage: int
    parameters: int
    forward_flops: int
    saved_bytes: int  # bytes that autograd saves for the layer's backward
    boundary_bytes: int  # bytes that would be sent if a stage ended with the layer
    forward_seconds: float
    backward_seconds: float


@dataclass(frozen=True)
class PlannedStage:
    """A stage; operations, sent bytes and seconds are for the largest micro-batch."""

    process: int
    layers: tuple[str, ...]
    parameters: int
    forward_flops: int
    boundary_bytes: int | None  # bytes sent to the next stage; None: the last stage
    forward_seconds: float
    backward_seconds: float
    recomputed: int  # number of micro-batches, of M, that are recomputed
    memory: StageMemory

    def tree(self, limit_bytes: int | None) -> dict[str, Any]:
        """The entry of plan.json; `limit_bytes`: the memory limit of a stage."""
        memory = self.memory._asdict()
        buffers_bytes = memory.pop("buffers_bytes")
        memory |= {"total_bytes": self.memory.total_bytes, "limit_bytes": limit_bytes, "buffers_bytes": buffers_bytes}
        return asdict(self) | {"memory": memory}


class PlannedSkip(NamedTuple):
    """A long skip from one stage to another, of the largest micro-batch."""

    name: str
    from_stage: int
    to_stage: int
    bytes: int


class PlannedTie(NamedTuple):
    """A weight that layers of several stages have; each sends the others its gradient, once a step."""

    name: str
    stages: tuple[int, ...]
    bytes: int


@dataclass(frozen=True)
class PlannedHardware:
    """One device of the machine that is planned for, and its link to the next device."""

    name: str
    source: str  # source of the layers' seconds: `hardware=h100 figures`
    precision: str
    computes_in: str  # the type in which products and convolutions are computed
    peak_flops_per_second: dict[str, float | None]  # precision -> peak of the data sheet
    flops_per_second: float | None  # assumed in the plan; None: the layers were timed
    memory_bytes: int | None
    memory_stages: int | None  # number of stages that share the memory
    link_bytes_per_second: float | None
    link_latency_seconds: float | None


@dataclass(frozen=True)
class Plan(Cut):
    """A planned step: a cut with what is recomputed, simulated."""

    recompute: RecomputePlan
    stage_costs: tuple[StageCost, ...]
    schedule: Schedule  # the actions of a step, with recomputation
    recomputed: tuple[int, ...]  # number of recomputed micro-batches
    timeline: Timeline
    step_seconds: float  # updates and set-up included
    breakdown: Breakdown
    memory: tuple[StageMemory, ...]  # of each stage at its own fullest moment
    device_bytes: tuple[int, ...]  # of each device at its fullest moment, when not all of its stages are at theirs
    chosen_order: str = ""  # the name of the order that schedule=auto chose
    choices: "tuple[Choice, ...]" = ()  # what was compared for settings with `auto`, or by `solve`
    files: Mapping[str, str] = field(default_factory=dict)  # other files of the plan: what it is -> where it is

    @property
    def step_range(self) -> tuple[float, float] | None:
        """The seconds between which a step is predicted to take, if timings of its layers scattered by more than a
        tenth: from `step_seconds`, or their lower quartile, to their upper one. None if they did not, or nothing was
        timed."""
        low, high = self.costs.rates.scatter if isinstance(self.costs.rates, MeasuredCosts) else (1.0, 1.0)
        if high - low < _STEADY:
            return None
        return min(1.0, low) * self.step_seconds, max(1.0, high) * self.step_seconds

    @property
    def held_bytes(self) -> tuple[int, ...]:
        """The memory of each stage in bytes at its fullest moment."""
        return tuple(stage.total_bytes for stage in self.memory)

    @property
    def saved_bytes(self) -> tuple[int, ...]:
        """The peak bytes of activations that autograd saves on each stage."""
        return self.memory_model.peak_saved_bytes(self.schedule, self.bounds)

    def saved_bytes_of(self, samples: int, lengths: tuple[int, ...]) -> tuple[int, ...]:
        """The same for a mini-batch of `samples` padded to these lengths."""
        profile = self.profile if lengths == self.profile.lengths else profile_model(self.config, lengths=lengths)
        sizes = shard_of(samples, self.config.micro_batches, self.config.replicas).sizes
        schedule = schedule_for(self.order, len(sizes), self.recompute)
        return MemoryModel(self.config, profile, sizes).peak_saved_bytes(schedule, self.bounds)

    @property
    def host_bytes(self) -> int | None:
        """Page-locked bytes on the hosts, of all stages, for checkpoints; None: not on GPUs."""
        if not computes_on_gpu(self.config):
            return None
        return sum(stage.weights_bytes + stage.optimizer_bytes for stage in self.memory)

    @property
    def step_samples(self) -> int:
        """N, the samples of the mini-batch."""
        return mini_batch_samples(self.config, self.profile.lengths)

    @property
    def step_tokens(self) -> int | None:
        """The tokens of a mini-batch whose sentences have the greatest lengths; None for images."""
        return self.step_samples * max(self.profile.lengths) if self.config.text else None

    @property
    def samples_per_second(self) -> float:
        return self.step_samples / self.step_seconds

    @property
    def tokens_per_second(self) -> float | None:
        return None if self.step_tokens is None else self.step_tokens / self.step_seconds

    @property
    def parameters(self) -> int:
        return sum(weights.parameters for weights in self.profile.weights)

    @property
    def ideal_bubble(self) -> float:
        return ideal_bubble(len(self.device_bytes), self.micro_batches)

    @property
    def step_flops(self) -> float:
        """FLOPs of the forwards and backwards of all micro-batches, without recomputation."""
        return sum(cost.flops for cost in self.profile.costs) * self.step_samples

    def flops_per_second(self, samples_per_second: float | None, tokens_per_second: float | None) -> float | None:
        """Achieved FLOP/s at a speed in samples or, for text, in tokens without padding; None if that speed is None."""
        speed, planned = samples_per_second, self.step_samples
        if self.step_tokens is not None:
            speed, planned = tokens_per_second, self.step_tokens
        return None if speed is None else self.step_flops / planned * speed

    @property
    def recomputed_flops(self) -> int:
        return round(
            sum(
                recomputed * self._forward_flops(first, end) * self.step_samples / self.micro_batches
                for recomputed, (first, end) in zip(self.recomputed, self.bounds, strict=True)
            )
        )

    @property
    def utilisation(self) -> float | None:
        """`step_flops` as a share of what all devices could do; recomputation does not count, as in "model FLOPs
        utilization" (Chowdhery et al., 2022, PaLM, section 4.1)."""
        if (peak := self.hardware.flops_per_second) is None:
            return None
        devices = len(self.device_bytes) * self.config.replicas
        return round(self.step_flops) / (peak * devices * self.step_seconds)

    @property
    def schedule_name(self) -> str:
        """`1f1b`; with the order that was chosen, `auto (found)`."""
        return f"{self.config.schedule} ({self.chosen_order})" if self.chosen_order else self.config.schedule

    @property
    def recompute_name(self) -> str:
        """`always`; for `auto`, with the number of forwards that are repeated."""
        forwards = len(self.balance) * self.micro_batches
        of_auto = f" ({sum(self.recomputed)} of {forwards} forwards)" if self.config.recompute == "auto" else ""
        return f"{self.config.recompute}{of_auto}"

    @property
    def grid(self) -> Sequence[str] | None:
        """The lines of the schedule's grid; None: too large."""
        if len(self.balance) > _GRID_STAGES or max(map(len, self.schedule.stages)) > _GRID_TICKS:
            return None
        return grid(self.schedule, width=80, device_of_stage=self.device_of_stage).splitlines()

    @cached_property
    def layers(self) -> tuple[PlannedLayer, ...]:
        profile = self.profile
        activations = ActivationMemory(profile.costs, profile.inputs, self.samples, profile.lengths)
        return tuple(
            PlannedLayer(
                name=cost.name,
                stage=stage,
                parameters=profile.weights[at].parameters,
                forward_flops=round(cost.forward.flops * self.samples),
                saved_bytes=activations.saved_amounts(at, at + 1).graph,
                boundary_bytes=self._bytes(cost.outputs),
                forward_seconds=self.costs.layers[at].graph_seconds,
                backward_seconds=self.costs.layers[at].backward_seconds,
            )
            for stage, (first, end) in enumerate(self.bounds)
            for at, cost in enumerate(profile.costs[first:end], first)
        )

    @cached_property
    def stages(self) -> tuple[PlannedStage, ...]:
        sent = {(route.sender, route.receiver): self._bytes(route.tensors) for route in self._routes}
        # on another machine, each device has one process, whatever this machine would use
        rank_of_stage = self.layout.rank_of_stage if self.layout.is_local else self.device_of_stage
        return tuple(
            PlannedStage(
                process=rank_of_stage[k],
                layers=tuple(cost.name for cost in self.profile.costs[first:end]),
                parameters=sum(weights.parameters for weights in self.profile.weights[first:end]),
                forward_flops=round(self._forward_flops(first, end) * self.samples),
                boundary_bytes=sent.get((k, k + 1)),
                forward_seconds=self.stage_costs[k].graph_seconds,
                backward_seconds=self.stage_costs[k].backward_seconds,
                recomputed=self.recomputed[k],
                memory=self.memory[k],
            )
            for k, (first, end) in enumerate(self.bounds)
        )

    @property
    def skips(self) -> tuple[PlannedSkip, ...]:
        return tuple(
            PlannedSkip(
                name,
                route.sender,
                route.receiver,
                self._bytes([tensor for tensor in route.tensors if tensor.skip == name]),
            )
            for route in self._routes
            for name in dict.fromkeys(tensor.skip for tensor in route.tensors if tensor.skip)
        )

    @property
    def ties(self) -> tuple[PlannedTie, ...]:
        return tuple(
            PlannedTie(tied.tie.name, stages, tied.gradient_bytes)
            for tied in self.profile.tied
            if len(stages := self.stages_with(tied.layers)) > 1
        )

    @cached_property
    def hardware(self) -> PlannedHardware:
        memory, precision = self.layout.memory, self.config.precision
        hardware = with_data_sheet(self.config.hardware, self.layout.devices)
        timed = self.costs.cost_source == "timed_layers"  # then seconds do not come from a data sheet
        achieved = None if hardware.tflops is None else achieved_tflops(hardware, precision)
        peaks = {"float32": hardware.peak_tflops, "tf32": hardware.tf32_tflops, "bfloat16": hardware.bfloat16_tflops}

        def times(value: float | None, factor: float) -> float | None:
            return None if timed or value is None else value * factor

        return PlannedHardware(
            name=hardware.name,
            source=self.costs.source,
            precision=precision,
            computes_in=effective_precision(hardware.name, precision),
            peak_flops_per_second={name: None if peak is None else peak * 1e12 for name, peak in peaks.items()},
            flops_per_second=times(achieved, 1e12 * (self.layout.threads if hardware.name == "cpu" else 1)),
            memory_bytes=memory.device_bytes if memory else None,
            memory_stages=memory.stages if memory else None,
            link_bytes_per_second=times(hardware.link_gb_per_second, 1e9),
            link_latency_seconds=times(hardware.link_microseconds, 1e-6),
        )

    def tree(self) -> dict[str, Any]:
        """The content of plan.json."""
        return {
            "kind": "predicted",
            "model_name": model_name(self.config.model),
            "dataset_name": self.config.dataset.name,
            "parameters": self.parameters,
            "layers": list(map(asdict, self.layers)),
            "stages": [stage.tree(self.layout.limit_bytes) for stage in self.stages],
            "micro_batches": self.micro_batches,
            "replicas": self.config.replicas,
            "schedule": self.schedule_name,
            "recompute": self.recompute_name,
            "sample": SAMPLE_WORDS[self.config.task],
            "step_samples": self.step_samples,
            "step_tokens": self.step_tokens,
            "hardware": asdict(self.hardware),
            "step_seconds": self.step_seconds,
            "samples_per_second": self.samples_per_second,
            "tokens_per_second": self.tokens_per_second,
            "breakdown": self.breakdown._asdict(),
            "idle": self.breakdown.idle,
            "bubble": self.breakdown.bubble,
            "ideal_bubble": self.ideal_bubble,
            "imbalance": self.imbalance,
            "step_flops": round(self.step_flops),
            "recomputed_flops": self.recomputed_flops,
            "utilisation": self.utilisation,
            "comparisons": [choice.tree() for choice in self.choices],
            "grid": self.grid,
            "files": self.files,
            "skips": [skip._asdict() for skip in self.skips],
            "ties": [tie._asdict() for tie in self.ties],
            "placement": placement_name(self.device_of_stage),  # `looped`; None: one without a name
            "device_bytes": self.device_bytes,
            "host_bytes": self.host_bytes,
        }

    @property
    def _routes(self) -> Sequence[Route]:
        return routes([self.profile.costs[end - 1].outputs for _, end in self.bounds[:-1]])

    def _bytes(self, tensors: Sequence[BoundaryTensor]) -> int:
        """The bytes of the largest micro-batch."""
        return sum(tensor.bytes(self.samples, self.profile.lengths) for tensor in tensors)

    def _forward_flops(self, first: int, end: int) -> float:
        """FLOPs of a sample."""
        return sum(cost.forward.flops for cost in self.profile.costs[first:end])


@dataclass(frozen=True)
class Candidate:
    """One value that was tried; `plan` is None if it does not fit or is impossible, for this `reason`."""

    value: str  # `8`, `except_last`
    config: TrainConfig
    plan: Plan | None
    reason: str = ""  # `stage 2 is 1.5 GiB over`
    over: TooLargeError | None = None  # how far the fullest stage of the best cut is over the limit

    @property
    def made(self) -> Plan:
        """The plan of a candidate that fits."""
        assert self.plan is not None
        return self.plan


@dataclass(frozen=True)
class Choice:
    """The values that were compared for a setting."""

    setting: str  # `micro_batches`
    rule: str  # the rule that chose a value: `the shortest predicted step that fits`
    candidates: tuple[Candidate, ...]
    chosen: Candidate | None  # None: not even the smallest model fits

    def tree(self) -> dict[str, Any]:
        """The entry of plan.json; `memory_bytes`: of the fullest stage."""
        candidates = [
            {
                "value": tried.value,
                "step_seconds": tried.plan and tried.plan.step_seconds,
                "memory_bytes": tried.plan and max(tried.plan.held_bytes),
                "chosen": tried is self.chosen,
                "reason": tried.reason,
            }
            for tried in self.candidates
        ]
        return {"setting": self.setting, "rule": self.rule, "candidates": candidates}
