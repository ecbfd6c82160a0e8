"""What layers cost on a machine (c_i in section 2.1 of the paper), predicted by a device's rates or measured.
All predictions read these `StepCosts`: the cut, `gpipe plan`, and the line that a run prints after 20 steps.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace

from gpipe_cli.config.settings import TrainConfig
from gpipe_cli.config.typed import show
from gpipe_cli.errors import InputError
from gpipe_cli.pipeline.profile.layer_cost import OperationKind, Operations, Work
from gpipe_cli.pipeline.runtime.boundary import BoundaryTensor
from gpipe_cli.pipeline.schedule.partitioner import SkipSends
from gpipe_cli.pipeline.schedule.simulator import EdgeCost, TieCost
from gpipe_cli.planner.data_sheet import resolved
from gpipe_cli.planner.device_rates import Basis, DeviceRates, Figures, rates_of_sheet
from gpipe_cli.planner.layout import Layout
from gpipe_cli.planner.model_profile import ModelProfile
from gpipe_cli.planner.step_schedule import mean_micro_batch
from gpipe_cli.units import plural


@dataclass(frozen=True, slots=True)
class LayerSeconds:
    """Seconds of one layer for one micro-batch."""

    forward: float  # a forward that keeps nothing
    graph: float  # a forward that keeps what the backward needs, such as a recomputation
    backward: float
    inputs: float = 0.0  # gradients of inputs, which the previous stage waits for; 0 if backwards are not split
    weights: float = 0.0  # gradients of weights


@dataclass(frozen=True)
class StepCosts:
    """Seconds of every layer and of every transfer between layers, for one micro-batch unless noted."""

    source: str  # one phrase: `hardware=cpu figures`
    basis: Basis
    layers: tuple[LayerSeconds, ...]
    updates: tuple[float, ...]  # seconds per step of the update of each layer's weights
    edges: tuple[EdgeCost, ...]  # transfers at each of the L - 1 places where the model may be cut
    slowdown: tuple[float, ...]  # factor of a device's seconds while 1, 2, ... devices compute; (): none
    set_up: float = 0.0  # seconds once a step, over all layers: batch norm's commit, the norms of gradients
    sums: tuple[float, ...] = ()  # seconds per step to sum each layer's gradients over replicas; (): one replica
    skips: tuple[SkipSends, ...] = ()  # of each skip, seconds per micro-batch
    ties: tuple[TieCost, ...] = ()  # of each trained tied weight; `stages` are numbers of layers until the cut is known
    figures: Figures | None = None  # the device's measured figures, if it was timed
    weighted_by: str = ""  # where the user gives the relative costs of layers, if at all: `partition.costs`
    rates: DeviceRates | None = None  # rates that predicted the costs; None: the costs were measured
    together: tuple[float, int] = (1.0, 1)  # (f, n): everything is slower by the factor f while n processes compute
    calibration: float = 1.0  # measured over predicted in earlier runs of the model here; a factor of all seconds
    spread: tuple[float, float] = (1.0, 1.0)  # lowest and highest factor by which the seconds varied

    def calibrated(self, factor: float) -> "StepCosts":
        """These costs with all seconds times `factor`, which leaves the cut and the shares of a step as they are."""

        def scaled(values: tuple[float, ...]) -> tuple[float, ...]:
            return tuple(factor * seconds for seconds in values)

        return replace(
            self,
            layers=tuple(LayerSeconds(*scaled(astuple(layer))) for layer in self.layers),
            updates=scaled(self.updates),
            edges=tuple(EdgeCost(*scaled(astuple(edge))) for edge in self.edges),
            set_up=factor * self.set_up,
            sums=scaled(self.sums),
            skips=tuple(
                replace(skip, forward=factor * skip.forward, backward=factor * skip.backward) for skip in self.skips
            ),
            ties=tuple(replace(tie, seconds=factor * tie.seconds) for tie in self.ties),
            calibration=factor * self.calibration,
        )


def predicted_costs(
    config: TrainConfig,
    profile: ModelProfile,
    layout: Layout,
    rates: DeviceRates | None = None,
    *,
    samples: float | None = None,
    linked: bool = False,
) -> StepCosts:
    """The costs of a micro-batch of `samples` (default: a mean one) by `rates` (default: the hardware's data sheet),
    divided among layers by the user's costs, if given. `linked`: as if stages were on several devices.

    Raises InputError if the user gives more or fewer costs than there are layers.
    """
    if rates is None:
        rates = rates_of_sheet(resolved(config.hardware, layout.devices), layout.threads, config.precision)
    if samples is None:
        samples = mean_micro_batch(config, profile.lengths)
    layers = []
    updates = []
    for cost, weights in zip(profile.costs, profile.weights, strict=True):
        forward, graph = (each.seconds(cost.forward, samples) for each in (rates.forward, rates.graph))
        works = (cost.backward,) if cost.halves is None else (cost.backward, cost.halves.inputs, cost.halves.weights)
        layers.append(LayerSeconds(forward, graph, *(rates.backward.seconds(work, samples) for work in works)))
        # weights, gradients and state are read, weights and state written
        moved = 2 * weights.weight_bytes + weights.gradient_bytes + 2 * weights.optimizer_bytes
        update = Work({OperationKind.ELEMENTWISE: Operations(weights.tensors, fixed_bytes=moved)})
        updates.append(rates.backward.seconds(update, 1) if weights.gradient_bytes else 0.0)
    linked = linked or len(set(layout.device_of_stage)) > 1
    latency, per_byte = (rates.link_seconds, rates.link_byte_seconds) if linked else (0.0, 0.0)
    costs = StepCosts(
        rates.source,
        rates.basis,
        tuple(layers),
        tuple(updates),
        _edge_costs(profile, samples, latency, per_byte),
        slowdowns(layout.at_once, len(layers), rates.slowdown, rates.together, config.replicas),
        rates.tensor_seconds * sum(weights.tensors for weights in profile.weights if weights.gradient_bytes),
        _sums_over_replicas(profile, config.replicas, rates.link_byte_seconds),
        _skip_costs(profile, samples, latency, per_byte),
        _tie_costs(profile, latency, per_byte),
        rates.figures,
        rates=rates,
        together=(rates.slowdown, rates.together),
        spread=rates.spread,
    )
    given = config.partition.costs
    if given is not None and len(given) != len(profile.costs):
        raise InputError(
            f"partition.costs={show(given)}: there are {len(given)} for {len(profile.costs)} layers; give one for "
            "each, or null for our own"
        )
    if given is not None:
        return _weighted(costs, given, "partition.costs")
    return costs if profile.own_costs is None else _weighted(costs, profile.own_costs, "gpipe_cost of the layers")


def _sums_over_replicas(profile: ModelProfile, replicas: int, per_byte: float) -> tuple[float, ...]:
    """The seconds to sum the gradients of each layer over replicas, each of which sends and receives 2 (R - 1) / R of
    them; () if there is one replica."""
    if replicas == 1:
        return ()
    share = 2 * (replicas - 1) / replicas
    return tuple(share * weights.gradient_bytes * per_byte for weights in profile.weights)


def _tie_costs(profile: ModelProfile, latency: float, per_byte: float) -> tuple[TieCost, ...]:
    """Each stage sends its gradient of a tied weight to all others with it, and receives theirs meanwhile."""
    return tuple(
        TieCost(tied.layers, latency + (len(tied.layers) - 1) * tied.gradient_bytes * per_byte)
        for tied in profile.tied
        if tied.gradient_bytes
    )


def _weighted(costs: StepCosts, given: Sequence[float], setting: str) -> StepCosts:
    """A cost model with the same total seconds, divided among layers in proportion to the costs `given`."""
    whole = [sum(values) for values in zip(*map(astuple, costs.layers), strict=True)]
    layers = tuple(LayerSeconds(*(seconds * cost / sum(given) for seconds in whole)) for cost in given)
    return replace(costs, layers=layers, source=f"{costs.source}, shared out by {setting}", weighted_by=setting)


def slowdowns(
    at_once: int, stages: int, slowdown: float = 1.0, together: int = 1, replicas: int = 1
) -> tuple[float, ...]:
    """How much slower a device is while 1, 2, ... devices of each of the `replicas` compute; (): no slowdown.
    Only `at_once` of all devices can compute at the same time, and `together` of them slow each other down by
    `slowdown`, as they share memory; fewer do so in proportion."""
    if at_once >= stages * replicas and slowdown == 1.0:
        return ()
    others = max(1, together - 1)
    return tuple(
        (1 + (slowdown - 1) * min(n - 1, others) / others) * max(1.0, n / at_once)
        for n in range(replicas, stages * replicas + 1, replicas)
    )


def _edge_costs(profile: ModelProfile, samples: float, latency: float, per_byte: float) -> tuple[EdgeCost, ...]:
    """The cost of sending over a cut after each layer: activations to the next stage, gradients back."""
    return tuple(
        EdgeCost(*_sent((t for t in cost.outputs if not t.skip), profile, samples, latency, per_byte))
        for cost in profile.costs[:-1]
    )


def _skip_costs(profile: ModelProfile, samples: float, latency: float, per_byte: float) -> tuple[SkipSends, ...]:
    """The costs of sending each skip of the model, and its gradient back."""
    found = []
    for skip in profile.skips:
        tensors = [t for t in profile.costs[skip.stash].outputs if t.skip == skip.name]
        found.append(SkipSends(skip.stash, skip.pop, *_sent(tensors, profile, samples, latency, per_byte)))
    return tuple(found)


def _sent(
    tensors: Iterable[BoundaryTensor], profile: ModelProfile, samples: float, latency: float, per_byte: float
) -> tuple[float, float]:
    """The seconds of sending tensors on, and their gradients back, for a micro-batch of `samples`."""
    whole = max(1, math.ceil(samples))
    sizes = [(t.bytes(whole, profile.lengths) * samples / whole, t.has_gradient) for t in tensors]
    forward, back = sum(size for size, _ in sizes), sum(size for size, returns in sizes if returns)
    return latency + forward * per_byte, latency + back * per_byte if back else 0.0


# The seconds of each layer: forward, forward that keeps its graph, backward; if that is split, also its halves for the
# inputs and for the weights.
Pass = list[tuple[float, ...]]


@dataclass(frozen=True)
class LayerTimes:
    """The measured seconds of the layers for one micro-batch (`benchmark/layer_benchmark.py`)."""

    alone: Pass  # while one process computes
    together: Pass | None  # while all processes compute; None if there is only one
    updates: list[float]  # seconds of the update of each layer's weights
    set_up: float  # once a step
    link: tuple[float, float] | None  # latency in seconds, bandwidth in bytes per second; None: nothing is sent
    figures: Figures | None = None  # the device's measured figures
    spread: tuple[float, float] = (1.0, 1.0)  # a short and a long pass (10th, 90th percentile), relative to the mean

    @property
    def slowdown(self) -> float:
        """How much longer layers take while all processes compute than while one of them does."""
        return max(1.0, sum(map(sum, self.together)) / sum(map(sum, self.alone))) if self.together else 1.0


def measured_costs(
    profile: ModelProfile,
    samples: float,
    at_once: int,
    times: LayerTimes,
    replicas: int = 1,
    sum_byte_seconds: float = 0.0,
) -> StepCosts:
    """The costs of a mean micro-batch of `samples`, from what workers measured with `samples` rounded up.

    `at_once`: how many workers, or stages of the only worker, compute at the same time; `sum_byte_seconds`: seconds per
    byte sent to another replica.
    """
    timed = math.ceil(samples)
    layers = tuple(LayerSeconds(*(seconds * (samples / timed) for seconds in layer)) for layer in times.alone)
    slowdown = slowdowns(at_once, len(layers), times.slowdown, at_once, replicas)
    latency, bandwidth = times.link or (0.0, 0.0)
    per_byte = 1 / bandwidth if bandwidth else 0.0
    edges = _edge_costs(profile, samples, latency, per_byte)
    source = f"layers measured on this machine, {plural(timed, 'sample')} at a time"
    sums = _sums_over_replicas(profile, replicas, sum_byte_seconds)
    skips, ties = _skip_costs(profile, samples, latency, per_byte), _tie_costs(profile, latency, per_byte)
    return StepCosts(
        source, "timed_layers", layers, tuple(times.updates), edges, slowdown, times.set_up, sums, skips, ties,
        times.figures,
        together=(times.slowdown, at_once), spread=times.spread,
    )  # fmt: skip
