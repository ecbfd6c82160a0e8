"""What the layers of a model cost on a machine: by the figures of a data sheet, or measured (paper section 2.1: c_i).

Everything that predicts (the cut, `gpipe plan`, the line after 20 steps) reads a `StepCosts`, wherever it comes from.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

from gpipe_cli.config import load_hardware
from gpipe_cli.hardware_settings import HardwareConfig
from gpipe_cli.pipeline.simulator import EdgeCost
from gpipe_cli.reporting.units import plural
from gpipe_cli.training.shapes import Shapes

_GIGA = 1e9


@dataclass(frozen=True, slots=True)
class LayerSeconds:
    """One layer, for one micro-batch."""

    forward: float  # that keeps nothing
    graph: float  # that keeps what the backward needs; a recomputation is one
    backward: float


@dataclass(frozen=True)
class StepCosts:
    """Seconds of every layer for one micro-batch, and what lies between them."""

    source: str  # one phrase: `figures of hardware=cpu`
    measured: bool
    layers: tuple[LayerSeconds, ...]
    updates: tuple[float, ...]  # of each layer, seconds per step
    edges: tuple[EdgeCost, ...]  # over each of the L - 1 places where a cut may be
    slowdown: tuple[float, ...]  # of a stage while 1, 2, ... of them compute; empty: none
    set_up: float = 0.0  # once a step, over all layers: batch norm's commit, the norms of gradients
    whose: str = ""  # who said how layers differ, where that is the user's word: `partition.costs`
    known: bool = True  # False: the figures are those of another device, and tell layers from each other only


def figured(
    shapes: Shapes, hardware: HardwareConfig, samples: float, *, threads: int, at_once: int, linked: bool
) -> StepCosts:
    """Seconds from FLOPs, bytes moved and the number of operations, for a micro-batch of `samples`.

    `at_once` stages can compute at the same time, others take turns with them; `linked`: what they send goes over
    links.
    """
    known = hardware.tflops is not None and hardware.memory_gb_per_second is not None
    hardware = hardware if known else load_hardware("h200")
    speed = threads if hardware.name == "cpu" else 1  # the figures are those of one thread
    assert hardware.tflops is not None
    assert hardware.memory_gb_per_second is not None
    per_flop, per_byte = 1 / (hardware.tflops * 1e12 * speed), 1 / (hardware.memory_gb_per_second * _GIGA * speed)
    each = (hardware.operation_microseconds or 0.0) * 1e-6
    layers = []
    updates = []
    for cost, weights in zip(shapes.costs, shapes.weights, strict=True):
        forward = cost.forward_flops * samples * per_flop + cost.forward_bytes * samples * per_byte
        backward = cost.backward_flops * samples * per_flop + cost.backward_bytes * samples * per_byte
        forward += cost.forward_operations * each
        layers.append(LayerSeconds(forward, forward, backward + cost.backward_operations * each))
        # weights, gradients and state are read, weights and state written
        moved = 2 * weights.weight_bytes + weights.gradient_bytes + 2 * weights.optimizer_bytes
        updates.append(moved * per_byte + weights.tensors * each if weights.trained else 0.0)
    latency = (hardware.link_microseconds or 0.0) * 1e-6
    per_sent = 0.0 if hardware.link_gb_per_second is None else 1 / (hardware.link_gb_per_second * _GIGA)
    edges = edge_costs(shapes, samples, latency if linked else 0.0, per_sent if linked else 0.0)
    source = f"hardware={hardware.name} figures"
    return StepCosts(source, False, tuple(layers), tuple(updates), edges, turns(at_once, len(layers)), known=known)


def shared_out(costs: StepCosts, given: Sequence[float], whose: str) -> StepCosts:
    """The same seconds in all, shared out among the layers as `given` says; `whose` says who gave it."""
    whole = [sum(values) for values in zip(*map(astuple, costs.layers), strict=True)]
    layers = tuple(LayerSeconds(*(seconds * cost / sum(given) for seconds in whole)) for cost in given)
    return replace(costs, layers=layers, source=f"{costs.source}, shared out by {whose}", whose=whose)


def turns(at_once: int, stages: int) -> tuple[float, ...]:
    """How much slower each of 1, 2, ... stages is if only `at_once` of them can compute at the same time."""
    return tuple(max(1.0, n / at_once) for n in range(1, stages + 1)) if at_once < stages else ()


def edge_costs(shapes: Shapes, samples: float, latency: float, per_byte: float) -> tuple[EdgeCost, ...]:
    """What a cut after each layer sends, activations on and gradients back."""
    edges = []
    whole = max(1, math.ceil(samples))
    for cost in shapes.costs[:-1]:
        sizes = [(t.bytes(whole, shapes.lengths) * samples / whole, t.has_gradient) for t in cost.outputs]
        on, back = sum(size for size, _ in sizes), sum(size for size, returns in sizes if returns)
        edges.append(EdgeCost(latency + on * per_byte, latency + back * per_byte if back else 0.0))
    return tuple(edges)


def measured_costs(
    shapes: Shapes, samples: int, processes: int, found: Mapping[str, Any], *, in_process: int | None = None
) -> StepCosts:
    """Seconds from what `processes` workers on one machine have measured for a micro-batch of `samples`.

    `in_process`: all stages are in one process, and so many of them compute at the same time.
    """
    alone = [LayerSeconds(*layer) for layer in found["alone"]]
    slowdown: tuple[float, ...] = ()
    if found["together"]:
        together = [LayerSeconds(*layer) for layer in found["together"]]
        ratio = max(1.0, sum(map(_all, together)) / sum(map(_all, alone)))
        # between one process and all of them, in proportion: what slows them down is each other's use of memory
        others = max(1, processes - 1)
        slowdown = tuple(1 + (ratio - 1) * n / others for n in range(others + 1))
    if in_process is not None:
        slowdown = turns(in_process, len(alone))
    latency, bandwidth = found["link"] or (0.0, 0.0)
    edges = edge_costs(shapes, samples, latency, 1 / bandwidth if bandwidth else 0.0)
    source = f"layers measured on this machine, {plural(samples, 'sample')} at a time"
    return StepCosts(source, True, tuple(alone), tuple(found["updates"]), edges, slowdown, found["set_up"])


def _all(seconds: LayerSeconds) -> float:
    return seconds.forward + seconds.graph + seconds.backward


def scaled(costs: StepCosts, share: float) -> StepCosts:
    """The same for a micro-batch that is smaller by this share."""
    if share == 1.0:
        return costs
    layers = tuple(LayerSeconds(s.forward * share, s.graph * share, s.backward * share) for s in costs.layers)
    edges = tuple(EdgeCost(e.forward_seconds * share, e.backward_seconds * share) for e in costs.edges)
    return replace(costs, layers=layers, edges=edges)
