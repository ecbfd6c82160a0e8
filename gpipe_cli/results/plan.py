"""The content of plan.json. Everything in it is predicted: times by a simulation, bytes from shapes.

With `cost=measured` the seconds of single layers are measured. Units are part of the names; None means unknown.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

PLAN = "plan.json"


@dataclass(frozen=True)
class PlannedLayer:
    """A layer; operations, bytes and seconds are those of the largest micro-batch."""

    name: str
    stage: int
    parameters: int
    forward_flops: int
    saved_bytes: int  # bytes that autograd keeps for the layer's backward
    boundary_bytes: int  # bytes that would be sent if a stage ended with the layer
    forward_seconds: float
    backward_seconds: float


@dataclass(frozen=True)
class PlannedMemory:
    """A stage's memory at its fullest moment."""

    weights_bytes: int  # parameters and buffers
    gradients_bytes: int
    optimizer_bytes: int  # the optimizer's state, and the moving average of the weights
    activations_bytes: int
    workspace_bytes: int  # memory that one layer's backward needs in addition
    total_bytes: int
    limit_bytes: int | None
    # for sums over replicas, gradients of tied weights in other stages, skips that wait to be taken up and, on a CPU,
    # for the checkpoint that is being written
    buffers_bytes: int = 0


@dataclass(frozen=True)
class PlannedStage:
    """A stage; operations, sent bytes and seconds are those of the largest micro-batch."""

    process: int
    layers: tuple[str, ...]
    parameters: int
    forward_flops: int
    boundary_bytes: int | None  # bytes sent to the next stage; None: the last stage
    forward_seconds: float
    backward_seconds: float
    recomputed: int  # number of micro-batches, of M, that are recomputed
    memory: PlannedMemory


@dataclass(frozen=True)
class PlannedSkip:
    """A long skip from one stage to another, of the largest micro-batch."""

    name: str
    from_stage: int
    to_stage: int
    bytes: int


@dataclass(frozen=True)
class PlannedTie:
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

    @property
    def limit_bytes(self) -> int | None:
        """The memory limit of each stage in bytes; None: unknown."""
        return self.memory_bytes and self.memory_bytes // (self.memory_stages or 1)


@dataclass(frozen=True)
class PlannedCandidate:
    """A value that was tried for a setting."""

    value: str
    step_seconds: float | None  # None: no plan
    memory_bytes: int | None  # memory of the fullest stage
    chosen: bool
    reason: str  # why there is no plan: `stage 2 is 1.5 GiB over`


@dataclass(frozen=True)
class PlannedChoice:
    """The values that were compared for a setting with `auto`."""

    setting: str
    rule: str  # the rule that chose the value
    candidates: tuple[PlannedCandidate, ...]


@dataclass(frozen=True)
class PlanResult:
    """A planned optimizer step."""

    kind: str  # predicted
    model_name: str
    dataset_name: str
    parameters: int
    layers: tuple[PlannedLayer, ...]
    stages: tuple[PlannedStage, ...]
    micro_batches: int
    replicas: int
    schedule: str
    recompute: str
    sample: str  # the word for a sample: `image`
    step_samples: int
    step_tokens: int | None
    hardware: PlannedHardware
    step_seconds: float
    samples_per_second: float
    tokens_per_second: float | None
    breakdown: dict[str, float]  # shares of the stage-time of a step, which add up to 1
    idle: float
    bubble: float
    ideal_bubble: float
    imbalance: float  # the slowest stage's seconds over the mean of all stages, less 1
    step_flops: int  # forwards and backwards of all micro-batches, without recomputation
    recomputed_flops: int
    # `step_flops` as a share of what all devices could do; recomputation does not count, as in "model FLOPs
    # utilization" (Chowdhery et al., 2022, PaLM, section 4.1).
    utilisation: float | None
    comparisons: tuple[PlannedChoice, ...]
    grid: tuple[str, ...] | None  # lines of the schedule's grid; None: too large
    files: dict[str, str]  # other files of the plan: what it is -> where it is
    skips: tuple[PlannedSkip, ...] = ()
    ties: tuple[PlannedTie, ...] = ()
    placement: str | None = None  # `looped`; None: one without a name
    device_bytes: tuple[int, ...] = ()  # peak memory of each device, whose stages are at their peaks at different times
    host_bytes: int | None = None  # page-locked on the hosts, of all stages, for checkpoints; None: not on GPUs

    @property
    def held_bytes(self) -> tuple[int, ...]:
        """The memory of each stage in bytes at its fullest moment."""
        return tuple(stage.memory.total_bytes for stage in self.stages)


@dataclass(frozen=True)
class SweptPlan:
    """A combination of settings in a sweep of plans."""

    settings: Mapping[str, object]  # settings that vary
    error: str | None  # why it cannot be planned
    plan: PlanResult | None

    def tree(self) -> dict[str, Any]:
        """The entries of the plan as in plan.json, together with the settings and the error."""
        return {"settings": self.settings, "error": self.error} | (asdict(self.plan) if self.plan else {})
