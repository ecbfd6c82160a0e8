"""Where the step of one variant is not that of another: the first place, in the order in which a step comes about.

Law 1 is about bits, so bits are compared, by digests: of every layer's outputs for each micro-batch, of every
gradient, and of what the step makes of weights and statistics.
"""

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from gpipe_cli.config.settings import PartitionConfig, TrainConfig
from gpipe_cli.pipeline.profile.layer_probes import Finding
from gpipe_cli.planner.placement import Placement

# What differs, the earliest cause first.
_OUTPUT, _AGAIN, _LOSS, _GRADIENT, _STATISTICS, _WEIGHT = range(6)


Verdict = Literal["reference", "identical", "within tolerance", "differs", "differs, as it must", "fails", "left out"]

# Of the gradients' norm: more than what another order of sums does to float32, less than what a lost micro-batch does.
TOLERANCE = 1e-5


Key = tuple[int, int, str, str, str]  # partitions, micro-batches, schedule, recomputation, executor


@dataclass(frozen=True)
class Row:
    """One way to run the mini-batch, and how what it gives compares with the reference of its schedule: one partition,
    nothing recomputed. Executor `pytorch` is no pipeline, but the untouched model. The reference of `1f1b`, and one
    with other micro-batches, compare with that of `gpipe`."""

    partitions: int
    micro_batches: int
    schedule: str
    recompute: str
    executor: str
    verdict: Verdict
    difference: float | None = None  # norm of the gradients' difference, as a share of the gradients' norm
    layer: str | None = None  # the first that differs, or the one that fails
    stage: int | None = None
    micro_batch: int | None = None
    text: str = ""  # what differs or fails, where and why, as far as it is known

    @property
    def key(self) -> Key:
        """Of the variant that it is the row of."""
        return (self.partitions, self.micro_batches, self.schedule, self.recompute, self.executor)

    @property
    def bad(self) -> bool:
        return self.verdict in ("differs", "fails")


@dataclass(frozen=True)
class Variant:
    """One way to run the mini-batch."""

    placement: Placement
    micro_batches: int
    schedule: Literal["gpipe", "1f1b"]
    recompute: Literal["always", "except_last", "never"]
    executor: Literal["in_process", "distributed", "pytorch"]  # pytorch: no pipeline, the model as it is

    def config(self, config: TrainConfig) -> TrainConfig:
        return replace(
            config,
            partitions=self.placement.partitions,
            partition=PartitionConfig(tuple(len(names) for names in self.placement.layer_names)),
            micro_batches=self.micro_batches,
            schedule=self.schedule,
            recompute=self.recompute,
            executor="in_process" if self.executor == "pytorch" else self.executor,
        )

    @property
    def key(self) -> Key:
        """Tells it from all other variants."""
        return (self.placement.partitions, self.micro_batches, self.schedule, self.recompute, self.executor)

    def row(self, verdict: Verdict, **more: Any) -> Row:
        return Row(*self.key, verdict, **more)


@dataclass(frozen=True)
class Digests:
    """What a step leaves of the stages of one process: digests by layer and micro-batch, or by name."""

    loss: float  # of the mini-batch
    outputs: dict[tuple[str, int], str] = field(default_factory=dict)
    again: dict[tuple[str, int], str] = field(default_factory=dict)  # of recomputations
    gradients: dict[str, str] = field(default_factory=dict)
    statistics: dict[str, str] = field(default_factory=dict)  # buffers after the step
    weights: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class LayersWatched:
    """Message to the parent, before the first variant: the mini-batch, and what its layers do."""

    findings: tuple[Finding, ...]
    draws: bool  # random numbers, as for dropout
    batch_norm: bool
    micro_batch_sizes: tuple[int, ...]


@dataclass(frozen=True)
class ReferenceDone:
    """Message to the parent: what later variants of a schedule are compared with."""

    schedule: str
    digests: Digests


@dataclass(frozen=True, order=True)
class Difference:
    """A place where something differs; ordered: the least is the first."""

    what: int
    place: int  # of the layer, forwards in the forward and backwards in the backward
    micro_batch: int
    stage: int
    layer: str
    name: str  # of the tensor


def within(variant: Variant, difference: float) -> Row:
    """The row of a variant whose sums have another order."""
    if difference == 0:
        return variant.row("identical")
    if not math.isfinite(difference):
        return variant.row("differs", text="its gradients, or those that it is compared with, are not finite numbers")
    return variant.row("within tolerance" if difference <= TOLERANCE else "differs", difference=difference)


def first_difference(placement: Placement, own: Digests, reference: Digests) -> Difference | None:
    """The first place in this process's stages where a variant is not its reference; None: nowhere."""
    layers = [name for names in placement.layer_names for name in names]
    stages = {name: stage for stage, names in enumerate(placement.layer_names) for name in names}
    places = {name: place for place, name in enumerate(layers)}
    found: list[Difference] = []
    for what, values in ((_OUTPUT, own.outputs), (_AGAIN, own.again)):
        for (layer, micro_batch), value in values.items():
            if reference.outputs.get((layer, micro_batch)) != value:
                found.append(Difference(what, places[layer], micro_batch, stages[layer], layer, ""))
    if own.loss != reference.loss:
        found.append(Difference(_LOSS, len(layers), 0, placement.partitions - 1, layers[-1], ""))
    for what, mine, theirs in (
        (_GRADIENT, own.gradients, reference.gradients),
        (_STATISTICS, own.statistics, reference.statistics),
        (_WEIGHT, own.weights, reference.weights),
    ):
        # a parameter without a gradient here may have one there
        for name in own.weights if what == _GRADIENT else mine:
            if mine.get(name) != theirs.get(name):
                layer = name.partition(".")[0]
                place = -places[layer] if what == _GRADIENT else places[layer]
                found.append(Difference(what, place, 0, stages[layer], layer, name))
    return min(found, default=None)


def differs(variant: Variant, first: Difference, distance: float) -> Row:
    texts = {
        _OUTPUT: f"micro-batch {first.micro_batch} leaves layer {first.layer} with other values",
        _AGAIN: f"layer {first.layer} gives other values when micro-batch {first.micro_batch} is recomputed",
        _LOSS: "the loss is another, though all layers gave the same",
        _GRADIENT: f"the gradient of {first.name} is another, though all layers gave the same",
        _STATISTICS: f"{first.name} is another after the step, though all gradients are the same",
        _WEIGHT: f"{first.name} is another after the step, though all gradients are the same",
    }
    return variant.row(
        "differs",
        difference=distance if math.isfinite(distance) else None,
        layer=first.layer,
        stage=first.stage,
        micro_batch=first.micro_batch if first.what in (_OUTPUT, _AGAIN) else None,
        text=texts[first.what],
    )
