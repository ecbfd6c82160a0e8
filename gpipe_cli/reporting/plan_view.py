"""A plan as it is shown and as plan.json keeps it: what a run would take, before there is a run (Table 1 of the paper).

Plain values, made by whoever planned. Everything in here is predicted: times come from a simulation, bytes from
shapes. Nothing measured stands in this table but, with ``cost=measured``, the seconds of single layers.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from gpipe_cli.reporting.timeline_view import SHARES, idle


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
    forward_seconds: float | None = None
    backward_seconds: float | None = None


@dataclass(frozen=True)
class StageMemory:
    """Bytes of a stage at its fullest moment."""

    weights_bytes: int  # parameters and buffers
    gradients_bytes: int
    optimizer_bytes: int  # its state, and the moving average of the weights
    activations_bytes: int  # the most held at once for backwards, a recomputed micro-batch's included
    workspace_bytes: int  # of one layer's backward

    @property
    def total_bytes(self) -> int:
        return (
            self.weights_bytes
            + self.gradients_bytes
            + self.optimizer_bytes
            + self.activations_bytes
            + self.workspace_bytes
        )


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
class Candidate:
    """One value that was tried for a setting that is `auto`."""

    value: str  # `8`, `except_last`
    step_seconds: float | None  # None: it does not fit or cannot be
    memory_bytes: int | None  # of the fullest stage
    chosen: bool = False
    reason: str = ""  # why it was not taken, where the numbers do not tell: `stage 2 is 1.5 GiB over its memory`


@dataclass(frozen=True)
class Comparison:
    """What was compared to choose one setting."""

    setting: str  # `micro_batches`
    rule: str  # how it was chosen: `the shortest step that fits`
    candidates: tuple[Candidate, ...]


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
    # What else there is to say.
    comparisons: tuple[Comparison, ...] = ()  # for settings that are `auto` or were solved for
    grid: str | None = None  # of the schedule; None: too large for anybody to read
    notes: tuple[tuple[str, str], ...] = ()  # more lines below the results: label, fact
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


def plan_json(view: PlanView) -> dict[str, Any]:
    """What plan.json holds: every value of the view, units in the names, and what follows from them."""
    plain = asdict(view)
    for stage, seen in zip(plain["stages"], view.stages, strict=True):
        stage["memory"]["total_bytes"] = seen.memory.total_bytes
        stage["memory"]["limit_bytes"] = view.hardware.memory_bytes
    plain["files"] = dict(view.files)
    plain["notes"] = [list(note) for note in view.notes]
    plain["grid"] = None if view.grid is None else view.grid.splitlines()
    return {
        "kind": "predicted",
        **plain,
        "idle": idle(view.breakdown),
        "bubble": view.breakdown["bubble"],
        "parameters": view.parameters,
        "samples_per_second": view.samples_per_second,
        "tokens_per_second": view.tokens_per_second,
        "utilisation": view.utilisation,
    }
