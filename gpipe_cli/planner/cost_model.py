"""What layers cost on a machine (c_i in section 2.1 of the paper), by a device's data sheet or measured. All
predictions read these `StepCosts`: the cut, `gpipe plan`, and what a run prints after 20 steps.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from gpipe_cli.config.settings import TrainConfig
from gpipe_cli.errors import InputError, format_value
from gpipe_cli.pipeline.profile.layer_cost import OperationCounts, OperationKind, Operations
from gpipe_cli.pipeline.runtime.boundary import BoundaryTensor
from gpipe_cli.planner.data_sheet import computes_on_gpu, replays_graphs, with_data_sheet
from gpipe_cli.planner.device_rates import CostSource, DeviceRates, rates_of_data_sheet
from gpipe_cli.planner.model_profile import ModelProfile
from gpipe_cli.planner.process_layout import Layout
from gpipe_cli.planner.step_schedule import mean_micro_batch
from gpipe_cli.schedule.partitioner import SkipSends
from gpipe_cli.schedule.simulator import EdgeCost, StageCost, TieCost


@dataclass(frozen=True)
class MeasuredCosts:
    """The measured seconds of the layers (`benchmark/layer_benchmark.py`), for micro-batches of two sizes; between and
    beyond these the seconds of a layer are linear in the size."""

    samples: tuple[int, int]  # samples of the smaller and of the larger micro-batch
    # per layer, for both sizes: a forward, a forward that saves its graph, a backward, and its halves if it is split
    seconds: tuple[Sequence[Sequence[float]], Sequence[Sequence[float]]]
    updates: Sequence[float]  # seconds per step of the update of each layer's weights
    set_up: float  # seconds of work that is done once per step
    slowdown: float  # how much longer layers take while `concurrent_processes` processes compute
    concurrent_processes: int
    all_threads: tuple[int, float]  # (n, f): with n threads, all of the machine's, a process is f times as fast
    link_seconds: float
    link_byte_seconds: float
    scatter: tuple[float, float] = (1.0, 1.0)  # quartiles of the seconds by the clock, as parts of these seconds
    source: str = ""
    cost_source: CostSource = "timed_layers"

    def faster(self, threads: int) -> float:
        """How many times as fast a process is with `threads` threads as with the threads that were timed."""
        return self.all_threads[1] if threads == self.all_threads[0] else 1.0

    def of_layers(self, samples: float, faster: float = 1.0) -> tuple[StageCost, ...]:
        """The seconds of each layer for a micro-batch of `samples`, on a process that is `faster` times as fast."""
        return tuple(
            StageCost(*(self._seconds(*sizes, samples) / faster for sizes in zip(small, large, strict=True)))
            for small, large in zip(*self.seconds, strict=True)
        )

    def _seconds(self, small: float, large: float, samples: float) -> float:
        smaller, larger = self.samples
        line = small + (large - small) * (samples - smaller) / (larger - smaller)
        return max(line, small * min(1.0, samples / smaller) if samples < smaller else 0.0)


@dataclass(frozen=True)
class StepCosts:
    """Seconds of every layer and of every transfer between layers, for a micro-batch unless noted."""

    source: str  # a phrase: `hardware=cpu figures`
    cost_source: CostSource
    layers: tuple[StageCost, ...]
    updates: tuple[float, ...]  # seconds per step of the update of each layer's weights
    edges: tuple[EdgeCost, ...]  # transfers at each of the L - 1 places where the model may be cut
    slowdown: tuple[float, ...]  # factor of a device's seconds while 1, 2, ... devices compute; () without slowdown
    set_up: float = 0.0  # seconds once a step, over all layers: batch norm's commit, the norms of gradients
    sums: tuple[float, ...] = ()  # seconds per step to sum each layer's gradients over replicas; () for one replica
    skips: tuple[SkipSends, ...] = ()  # seconds per micro-batch to send each skip
    ties: tuple[TieCost, ...] = ()  # per trained tied weight; `stages` are numbers of layers until the cut is known
    weighted_by: str = ""  # the setting that gives the relative costs of layers, if any: `partition.costs`
    rates: DeviceRates | MeasuredCosts | None = None  # the figures that the costs follow from; None for the data sheet
    together: tuple[float, int] = (1.0, 1)  # (f, n): everything is slower by the factor f while n processes compute


def predicted_costs(
    config: TrainConfig,
    profile: ModelProfile,
    layout: Layout,
    rates: DeviceRates | MeasuredCosts | None = None,
    *,
    samples: float | None = None,
    assume_links: bool = False,
) -> StepCosts:
    """The costs of a micro-batch of `samples` (default: their mean number) by the device's `rates` (default: its data
    sheet's), divided among layers by the user's costs, if given. `assume_links`: as if on several devices.

    Raises InputError if the user gives more or fewer costs than there are layers.
    """
    if rates is None:
        launched = computes_on_gpu(config) and not replays_graphs(config)
        data_sheet = with_data_sheet(config.hardware, layout.devices)
        rates = rates_of_data_sheet(data_sheet, layout.threads, config.precision, launched=launched)
    if samples is None:
        samples = mean_micro_batch(config, profile.lengths)
    assume_links = assume_links or len(set(layout.device_of_stage)) > 1
    latency, per_byte = (rates.link_seconds, rates.link_byte_seconds) if assume_links else (0.0, 0.0)
    slowdown, together = 1.0, 1
    if isinstance(rates, MeasuredCosts):
        faster = rates.faster(layout.threads)
        layers = rates.of_layers(samples, faster)
        updates = tuple(seconds / faster for seconds in rates.updates)
        set_up = rates.set_up / faster
        slowdown, together = rates.slowdown, rates.concurrent_processes
    else:
        layers, updates = _by_rates(profile, rates, samples)
        set_up = 0.0
    costs = StepCosts(
        rates.source,
        rates.cost_source,
        layers,
        updates,
        _edge_costs(profile, samples, latency, per_byte),
        slowdowns(layout.concurrent_devices, len(layers), slowdown, together, config.replicas),
        set_up,
        _sums_over_replicas(profile, config.replicas, rates.link_byte_seconds),
        _skip_costs(profile, samples, latency, per_byte),
        _tie_costs(profile, latency, per_byte),
        rates=rates,
        together=(slowdown, together),
    )
    user_costs = config.partition.costs
    if user_costs is not None and len(user_costs) != len(profile.costs):
        raise InputError(
            f"partition.costs={format_value(user_costs)}: there are {len(user_costs)} for {len(profile.costs)} layers; "
            "give one for each, or null for our own"
        )
    if user_costs is not None:
        return _divide_costs(costs, user_costs, "partition.costs")
    return (
        costs
        if profile.custom_costs is None
        else _divide_costs(costs, profile.custom_costs, "gpipe_cost of the layers")
    )


def _by_rates(
    profile: ModelProfile, rates: DeviceRates, samples: float
) -> tuple[tuple[StageCost, ...], tuple[float, ...]]:
    """The seconds of each layer for a micro-batch of `samples`, and of the update of its weights."""
    layers, updates = [], []
    for cost, weights in zip(profile.costs, profile.weights, strict=True):
        forward = rates.seconds(cost.forward, samples)
        works = (
            (cost.backward,)
            if cost.split_backward is None
            else (cost.backward, cost.split_backward.inputs, cost.split_backward.weights)
        )
        layers.append(StageCost(forward, forward, *(rates.seconds(work, samples) for work in works)))
        # weights, gradients and state are read, weights and state written
        moved_bytes = 2 * weights.weight_bytes + weights.gradient_bytes + 2 * weights.optimizer_bytes
        update = OperationCounts({OperationKind.ELEMENTWISE: Operations(weights.tensors, fixed_bytes=moved_bytes)})
        updates.append(rates.seconds(update, 1) if weights.gradient_bytes else 0.0)
    return tuple(layers), tuple(updates)


def _sums_over_replicas(profile: ModelProfile, replicas: int, per_byte: float) -> tuple[float, ...]:
    """The seconds to sum the gradients of each layer over replicas, each of which sends and receives 2 (R - 1) / R of
    them; () for a single replica."""
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


def _divide_costs(costs: StepCosts, shares: Sequence[float], setting: str) -> StepCosts:
    """A cost model with the same total seconds, divided among layers in proportion to `shares`."""
    totals = [sum(values) for values in zip(*costs.layers, strict=True)]
    layers = tuple(StageCost(*(seconds * share / sum(shares) for seconds in totals)) for share in shares)
    return replace(costs, layers=layers, source=f"{costs.source}, shared out by {setting}", weighted_by=setting)


def slowdowns(
    concurrent_devices: int, stages: int, slowdown: float = 1.0, concurrent_processes: int = 1, replicas: int = 1
) -> tuple[float, ...]:
    """How much slower a device is while 1, 2, ... devices of each of the `replicas` compute; (): no slowdown.
    Only `concurrent_devices` of all devices can compute at the same time, and `concurrent_processes` of them slow each
    other down by `slowdown`, as they share memory; fewer do so in proportion."""
    if concurrent_devices >= stages * replicas and slowdown == 1.0:
        return ()
    others = max(1, concurrent_processes - 1)
    return tuple(
        (1 + (slowdown - 1) * min(n - 1, others) / others) * max(1.0, n / concurrent_devices)
        for n in range(replicas, stages * replicas + 1, replicas)
    )


def _edge_costs(profile: ModelProfile, samples: float, latency: float, per_byte: float) -> tuple[EdgeCost, ...]:
    """The cost of sending over a cut after each layer: activations to the next stage, gradients back."""
    return tuple(
        EdgeCost(
            *_send_seconds((tensor for tensor in cost.outputs if not tensor.skip), profile, samples, latency, per_byte)
        )
        for cost in profile.costs[:-1]
    )


def _skip_costs(profile: ModelProfile, samples: float, latency: float, per_byte: float) -> tuple[SkipSends, ...]:
    """The costs of sending each skip of the model, and its gradient back."""
    sends = []
    for skip in profile.skips:
        tensors = [tensor for tensor in profile.costs[skip.stash].outputs if tensor.skip == skip.name]
        sends.append(SkipSends(skip.stash, skip.pop, *_send_seconds(tensors, profile, samples, latency, per_byte)))
    return tuple(sends)


def _send_seconds(
    tensors: Iterable[BoundaryTensor], profile: ModelProfile, samples: float, latency: float, per_byte: float
) -> tuple[float, float]:
    """The seconds of sending tensors on, and their gradients back, for a micro-batch of `samples`."""
    rounded = max(1, math.ceil(samples))
    sizes = [(t.bytes(rounded, profile.lengths) * samples / rounded, t.has_gradient) for t in tensors]
    forward, back = sum(size for size, _ in sizes), sum(size for size, returns in sizes if returns)
    return latency + forward * per_byte, latency + back * per_byte if back else 0.0
