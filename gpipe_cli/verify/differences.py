"""Where the step of one variant is not that of another: the first place, in the order in which a step comes about.

Law 1 is about bits, so bits are compared, by digests: of every layer's outputs for each micro-batch, of every
gradient, and of what the step makes of weights and statistics.
"""

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, NamedTuple

from gpipe_cli.pipeline.profile.layer_probes import Finding
from gpipe_cli.planner.placement import Placement

Schedule = Literal["gpipe", "1f1b"]
Mode = Literal["never", "except_last", "always"]
Executor = Literal["in_process", "pytorch", "distributed"]  # pytorch: no pipeline, the model as it is
SCHEDULES: tuple[Schedule, ...] = ("gpipe", "1f1b")
MODES: tuple[Mode, ...] = ("never", "except_last", "always")
EXECUTORS: tuple[Executor, ...] = ("in_process", "pytorch", "distributed")
Verdict = Literal["reference", "identical", "within tolerance", "differs", "differs, as it must", "fails", "left out"]

# Of the gradients' norm: more than what another order of sums does to float32, less than what a lost micro-batch does.
TOLERANCE = 1e-5


class Variant(NamedTuple):
    """One way to run the mini-batch."""

    partitions: int
    micro_batches: int
    schedule: Schedule
    recompute: Mode
    executor: Executor


@dataclass(frozen=True)
class Row:
    """A variant, and how what it gives compares with the reference of its schedule: one partition, nothing recomputed.
    The reference of `1f1b`, and one with other micro-batches, compare with that of `gpipe`."""

    partitions: int
    micro_batches: int
    schedule: Schedule
    recompute: Mode
    executor: Executor
    verdict: Verdict
    difference: float | None = None  # norm of the gradients' difference, as a share of the gradients' norm
    layer: str | None = None  # the first that differs, or the one that fails
    stage: int | None = None
    micro_batch: int | None = None
    text: str = ""  # what differs or fails, where and why, as far as it is known

    @property
    def variant(self) -> Variant:
        return Variant(self.partitions, self.micro_batches, self.schedule, self.recompute, self.executor)

    @property
    def bad(self) -> bool:
        return self.verdict in ("differs", "fails")


class What(IntEnum):
    """What a step leaves, in the order in which it comes about."""

    OUTPUT = 0
    RECOMPUTED_OUTPUT = 1
    LOSS = 2
    GRADIENT = 3
    BUFFER = 4
    WEIGHT = 5


class Place(NamedTuple):
    """Where something can differ; ordered: the least is the first."""

    what: What
    order: int  # number of the layer in the model; in the backward, minus that
    micro_batch: int  # of an output
    layer: str
    name: str = ""  # of a parameter or a buffer


Digests = dict[Place, str]  # of what a step leaves of the stages of one process; "": there is no gradient


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
    loss: float  # of the mini-batch
    digests: Digests


def first_difference(own: Digests, reference: Digests) -> Place | None:
    """The first place in this process's stages where a variant is not its reference; None: nowhere."""

    def referred(place: Place) -> Place:
        return place._replace(what=What.OUTPUT) if place.what is What.RECOMPUTED_OUTPUT else place

    return min((place for place, value in own.items() if value != reference.get(referred(place))), default=None)


def within(variant: Variant, difference: float) -> Row:
    """The row of a variant whose sums have another order."""
    if difference == 0:
        return Row(*variant, "identical")
    if not math.isfinite(difference):
        return Row(*variant, "differs", text="its gradients, or those that it is compared with, are not finite numbers")
    return Row(*variant, "within tolerance" if difference <= TOLERANCE else "differs", difference)


def differs(variant: Variant, placement: Placement, first: Place, distance: float) -> Row:
    match first.what:
        case What.OUTPUT:
            text = f"micro-batch {first.micro_batch} leaves layer {first.layer} with other values"
        case What.RECOMPUTED_OUTPUT:
            text = f"layer {first.layer} gives other values when micro-batch {first.micro_batch} is recomputed"
        case What.LOSS:
            text = "the loss is another, though all layers gave the same"
        case What.GRADIENT:
            text = f"the gradient of {first.name} is another, though all layers gave the same"
        case What.BUFFER | What.WEIGHT:
            text = f"{first.name} is another after the step, though all gradients are the same"
    return Row(
        *variant,
        "differs",
        difference=distance if math.isfinite(distance) else None,
        layer=first.layer,
        stage=next(k for k, names in enumerate(placement.layer_names) if first.layer in names),
        micro_batch=first.micro_batch if first.what in (What.OUTPUT, What.RECOMPUTED_OUTPUT) else None,
        text=text,
    )
