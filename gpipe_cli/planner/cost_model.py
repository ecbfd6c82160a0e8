"""What the layers of a model cost on a machine: by the rates of a device, or measured (paper section 2.1: c_i).

Everything that predicts (the cut, `gpipe plan`, the line after 20 steps) reads a `StepCosts`, wherever it comes from.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

from gpipe_cli.pipeline.profile.layer_cost import OperationKind, Operations, Work
from gpipe_cli.pipeline.schedule.simulator import EdgeCost
from gpipe_cli.planner.device_rates import Speeds
from gpipe_cli.planner.model_profile import ModelProfile
from gpipe_cli.units import plural


@dataclass(frozen=True, slots=True)
class LayerSeconds:
    """One layer, for one micro-batch."""

    forward: float  # that keeps nothing
    graph: float  # that keeps what the backward needs; a recomputation is one
    backward: float


@dataclass(frozen=True)
class StepCosts:
    """Seconds of every layer for one micro-batch, and what lies between them."""

    source: str  # one phrase: `hardware=cpu figures`
    measured: bool
    layers: tuple[LayerSeconds, ...]
    updates: tuple[float, ...]  # of each layer, seconds per step
    edges: tuple[EdgeCost, ...]  # over each of the L - 1 places where a cut may be
    slowdown: tuple[float, ...]  # of a stage while 1, 2, ... of them compute; empty: none
    set_up: float = 0.0  # once a step, over all layers: batch norm's commit, the norms of gradients
    whose: str = ""  # who said how layers differ, where that is the user's word: `partition.costs`
    timed: bool = False  # the figures of `hardware` have no part in the seconds
    known: bool = True  # False: the figures are those of another device, and tell layers from each other only


def figured(shapes: ModelProfile, speeds: Speeds, samples: float, *, at_once: int, linked: bool) -> StepCosts:
    """Seconds from FLOPs, bytes moved and the number of operations, for a micro-batch of `samples`.

    `at_once` stages can compute at the same time, others take turns with them; `linked`: what they send goes over
    links.
    """
    layers = []
    updates = []
    for cost, weights in zip(shapes.costs, shapes.weights, strict=True):
        forward, graph = (rates.seconds(cost.forward, samples) for rates in (speeds.forward, speeds.graph))
        layers.append(LayerSeconds(forward, graph, speeds.backward.seconds(cost.backward, samples)))
        # weights, gradients and state are read, weights and state written
        moved = 2 * weights.weight_bytes + weights.gradient_bytes + 2 * weights.optimizer_bytes
        update = Work({OperationKind.ELEMENTWISE: Operations(weights.tensors, fixed_bytes=moved)})
        updates.append(speeds.update.seconds(update, 1) if weights.trained else 0.0)
    edges = edge_costs(
        shapes, samples, speeds.link_seconds if linked else 0.0, speeds.link_byte_seconds if linked else 0.0
    )
    slowdown = turns(at_once, len(layers), speeds.slowdown, speeds.together)
    set_up = speeds.tensor_seconds * sum(weights.tensors for weights in shapes.weights if weights.trained)
    return StepCosts(
        speeds.source, False, tuple(layers), tuple(updates), edges, slowdown, set_up,
        timed=speeds.timed, known=speeds.known,
    )  # fmt: skip


def shared_out(costs: StepCosts, given: Sequence[float], whose: str) -> StepCosts:
    """The same seconds in all, shared out among the layers as `given` says; `whose` says who gave it."""
    whole = [sum(values) for values in zip(*map(astuple, costs.layers), strict=True)]
    layers = tuple(LayerSeconds(*(seconds * cost / sum(given) for seconds in whole)) for cost in given)
    return replace(costs, layers=layers, source=f"{costs.source}, shared out by {whose}", whose=whose)


def turns(at_once: int, stages: int, slowdown: float = 1.0, together: int = 1) -> tuple[float, ...]:
    """How much slower each of 1, 2, ... stages is if only `at_once` of them can compute at the same time, and
    `together` of them slow each other down by `slowdown`, as they share memory: in proportion, if they are fewer."""
    if at_once >= stages and slowdown == 1.0:
        return ()
    others = max(1, together - 1)
    return tuple(
        (1 + (slowdown - 1) * min(n - 1, others) / others) * max(1.0, n / at_once) for n in range(1, stages + 1)
    )


def edge_costs(shapes: ModelProfile, samples: float, latency: float, per_byte: float) -> tuple[EdgeCost, ...]:
    """What a cut after each layer sends, activations on and gradients back."""
    edges = []
    whole = max(1, math.ceil(samples))
    for cost in shapes.costs[:-1]:
        sizes = [(t.bytes(whole, shapes.lengths) * samples / whole, t.has_gradient) for t in cost.outputs]
        on, back = sum(size for size, _ in sizes), sum(size for size, returns in sizes if returns)
        edges.append(EdgeCost(latency + on * per_byte, latency + back * per_byte if back else 0.0))
    return tuple(edges)


def measured_costs(
    shapes: ModelProfile, samples: int, processes: int, found: Mapping[str, Any], *, in_process: int | None = None
) -> StepCosts:
    """Seconds from what `processes` workers on one machine have measured for a micro-batch of `samples`.

    `in_process`: all stages are in one process, and so many of them compute at the same time.
    """
    alone = [LayerSeconds(*layer) for layer in found["alone"]]
    ratio = slowdown_of(found)
    slowdown = turns(processes, processes, ratio, processes) if in_process is None else turns(in_process, len(alone))
    latency, bandwidth = found["link"] or (0.0, 0.0)
    edges = edge_costs(shapes, samples, latency, 1 / bandwidth if bandwidth else 0.0)
    source = f"layers measured on this machine, {plural(samples, 'sample')} at a time"
    return StepCosts(source, True, tuple(alone), tuple(found["updates"]), edges, slowdown, found["set_up"], timed=True)


def slowdown_of(found: Mapping[str, Any]) -> float:
    """How much longer layers take while all processes compute than while one of them does."""
    if not found["together"]:
        return 1.0
    return max(1.0, sum(map(sum, found["together"])) / sum(map(sum, found["alone"])))


def scaled(costs: StepCosts, share: float) -> StepCosts:
    """The same for a micro-batch that is smaller by this share."""
    if share == 1.0:
        return costs
    layers = tuple(LayerSeconds(s.forward * share, s.graph * share, s.backward * share) for s in costs.layers)
    edges = tuple(EdgeCost(e.forward_seconds * share, e.backward_seconds * share) for e in costs.edges)
    return replace(costs, layers=layers, edges=edges)
