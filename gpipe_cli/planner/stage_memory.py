"""The peak memory of each stage, predicted before anything is allocated (paper section 2.3, Table 1).

Weights, gradients and the optimizer's state are stored all the time. Activations come and go with the schedule: a stage
saves the graph of a micro-batch from its forward or recomputation to its backward, before a recomputation the input.

Where stages are replayed as CUDA graphs, memory is allocated once, for the largest micro-batch. Each micro-batch in
flight has a pool for its graph and for what its backward needs in addition, until the gradients of weights are
computed. All micro-batches of a stage share memory for what the stage receives and sends.
"""

from collections.abc import Sequence
from itertools import accumulate
from operator import add
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpipe_cli.config.settings import TrainConfig
from gpipe_cli.pipeline.profile.layer_cost import ActivationMemory, Layers
from gpipe_cli.pipeline.runtime.boundary import BoundaryTensor
from gpipe_cli.pipeline.runtime.routes import routes
from gpipe_cli.planner.data_sheet import computes_on_gpu, replays_graphs
from gpipe_cli.planner.model_profile import LayerWeights, ModelProfile, TiedWeight
from gpipe_cli.planner.step_schedule import schedule_for
from gpipe_cli.schedule.in_flight_memory import (
    SavedAmounts,
    SkipBytes,
    in_flight_counts,
    peak_bytes,
    peak_skip_bytes,
    peaks_of_devices,
)
from gpipe_cli.schedule.placement import stages_of_devices
from gpipe_cli.schedule.schedule import Action, Schedule

Int64Array = NDArray[np.int64]
Bounds = Sequence[tuple[int, int]]  # first layer of each stage and its end (exclusive)


class StageMemory(NamedTuple):
    """The bytes that a stage holds at its peak."""

    weights_bytes: int  # parameters and buffers
    gradients_bytes: int
    optimizer_bytes: int  # the optimizer's state, and the moving average of the weights
    # the peak, a recomputed micro-batch's included; of a stage that is replayed, its pools
    activations_bytes: int
    workspace_bytes: int  # the most that a layer's backward needs in addition
    # for sums over replicas, gradients of tied weights in other stages, skips that wait to be popped, what a stage that
    # is replayed receives and sends and, on a CPU, for the checkpoint that is being written
    buffers_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return sum(self)


def buffers_bytes(config: TrainConfig, weights: LayerWeights) -> int:
    """The bytes of a layer's gradients in addition to `.grad` while they are summed over replicas: what is sent
    replaces the gradients, unless CUDA graphs add to them, and what is received is added. On this machine's CPUs, also
    the copies that are written as a checkpoint while training continues; a GPU's state is copied to its host's memory.
    """
    freed_bytes = 0 if replays_graphs(config) else weights.gradient_bytes
    sums = 2 * weights.summed_bytes - freed_bytes if config.replicas > 1 else 0
    on_cpu = config.hardware.is_this_machine and not computes_on_gpu(config)
    return sums + (weights.saved_bytes if on_cpu else 0)


def _tied_bytes(tied: Sequence[TiedWeight], first: Layers, end: Layers) -> tuple[Int64Array, Int64Array, Int64Array]:
    """By how many bytes a stage with tied weights differs from the sum of its layers: of weights, of the optimizer, and
    of gradients received from other stages; arrays for n stages."""
    none = np.zeros_like(np.asarray(first))
    weights = optimizer = received = none
    for weight in tied:
        uses = sum((np.asarray((first <= at) & (at < end), dtype=np.int64) for at in weight.layers), none)
        copies = np.maximum(uses - 1, 0)
        weights = weights - copies * weight.weight_bytes
        optimizer = optimizer - copies * weight.optimizer_bytes
        received = received + np.where(uses > 0, len(weight.layers) - uses, 0) * weight.gradient_bytes
    return weights, optimizer, received


class MemoryModel:
    """How much memory stages need, for any cut. `sizes`: samples of each micro-batch, the largest first."""

    def __init__(self, config: TrainConfig, profile: ModelProfile, sizes: Sequence[int]) -> None:
        self._config, self._profile, self._sizes = config, profile, sizes
        self._of_size = {n: ActivationMemory(profile.costs, profile.inputs, n, profile.lengths) for n in set(sizes)}
        self.replays = replays_graphs(config)
        layers, largest = np.arange(len(profile.costs)), self._of_size[sizes[0]]
        # the backward of a layer allocates gradients of all that the layer has saved
        self.workspace = largest.of_stages(layers, layers + 1)[0]
        self.graphs = largest.of_stages(np.zeros_like(layers), layers + 1)[0]  # of the model up to each layer
        # the most held during each layer's backward, when the layers after it have freed what they saved
        self._in_backward = _Maxima(self.graphs + self.workspace)
        boundaries = [profile.inputs, *(cost.outputs for cost in profile.costs)]
        self._boundaries = np.array([self._sent_bytes(tensors, sizes[0]) for tensors in boundaries]).T
        self.buffers = [buffers_bytes(config, of_layer) for of_layer in profile.weights]
        stored = (w.weight_bytes + w.gradient_bytes + w.optimizer_bytes for w in profile.weights)
        self._stored = np.array([0, *accumulate(map(add, stored, self.buffers))])

    def stages(
        self, schedule: Schedule, bounds: Bounds, device_of_stage: Sequence[int] = ()
    ) -> tuple[StageMemory, ...]:
        """The memory of each stage at its fullest moment."""
        waiting = peak_skip_bytes(schedule, self._skips(bounds), device_of_stage)
        return self.at_peaks(bounds, peak_bytes(schedule, self._all_saved_amounts(bounds)), waiting)

    def at_peaks(self, bounds: Bounds, saved: Sequence[int], waiting: Sequence[int]) -> tuple[StageMemory, ...]:
        """The memory of stages that hold these bytes of activations, and of skips that wait, at their fullest."""

        def stage(first: int, end: int, saved: int, waiting: int) -> StageMemory:
            weights = self._profile.weights[first:end]
            tied_weights, tied_optimizer, received = map(int, _tied_bytes(self._profile.tied, first, end))
            return StageMemory(
                weights_bytes=sum(w.weight_bytes for w in weights) + tied_weights,
                gradients_bytes=sum(w.gradient_bytes for w in weights),
                optimizer_bytes=sum(w.optimizer_bytes for w in weights) + tied_optimizer,
                activations_bytes=saved,
                buffers_bytes=sum(self.buffers[first:end]) + received + int(self._static(first, end)) + waiting,
                workspace_bytes=int(self.workspace[first:end].max()),
            )

        return tuple(stage(*span, *of_stage) for span, *of_stage in zip(bounds, saved, waiting, strict=True))

    def devices(
        self, held: Sequence[StageMemory], schedule: Schedule, bounds: Bounds, device_of_stage: Sequence[int]
    ) -> tuple[int, ...]:
        """The peak bytes of each device: what its stages, which hold `held`, store all the time, the most that their
        activations take together, and the largest workspace of any of them, as one action runs at a time. Stages that
        are replayed keep their pools."""
        of_devices = stages_of_devices(device_of_stage)
        if self.replays or len(of_devices) == len(held):
            peaks = tuple(sum(held[k].activations_bytes for k in stages) for stages in of_devices)
        else:
            peaks = peaks_of_devices(schedule, self._all_saved_amounts(bounds), device_of_stage)
        return tuple(
            peak
            + sum(held[k].total_bytes - held[k].activations_bytes - held[k].workspace_bytes for k in stages)
            + max(held[k].workspace_bytes for k in stages)
            for peak, stages in zip(peaks, of_devices, strict=True)
        )

    def _skips(self, bounds: Bounds) -> SkipBytes:
        """The bytes of skips between stages that are not neighbours."""
        profile = self._profile
        crossing = [profile.costs[end - 1].outputs for _, end in bounds[:-1]]
        return {
            (route.sender, route.receiver): [self._sent_bytes(route.tensors, n) for n in self._sizes]
            for route in (routes(crossing) if profile.skips else ())
            if route.receiver > route.sender + 1
        }

    def peak_saved_bytes(self, schedule: Schedule, bounds: Bounds) -> tuple[int, ...]:
        """The peak bytes of activations that autograd saves on each stage."""
        return peak_bytes(schedule, self._autograd_amounts(bounds))

    def _all_saved_amounts(self, bounds: Bounds) -> list[list[SavedAmounts]]:
        """For each stage, the bytes of each micro-batch in each way to save it."""
        if self.replays:
            return [[held] * len(self._sizes) for held in self.largest(bounds)]
        return self._autograd_amounts(bounds)

    def _autograd_amounts(self, bounds: Bounds) -> list[list[SavedAmounts]]:
        """The same, of what autograd saves."""
        of_stages = [
            {n: activations.saved_amounts(*span) for n, activations in self._of_size.items()} for span in bounds
        ]
        return [[held[n] for n in self._sizes] for held in of_stages]

    def largest(self, bounds: Bounds) -> list[SavedAmounts]:
        """For each stage, the bytes of the largest micro-batch in each way to save it."""
        return [SavedAmounts(*self._largest(*span).tolist()) for span in bounds]

    def largest_amounts(self, bounds: Bounds) -> list[SavedAmounts]:
        """For each stage, the bytes that autograd saves of the largest micro-batch in each way to save it."""
        return [self._of_size[self._sizes[0]].saved_amounts(*span) for span in bounds]

    def _largest(self, first: Layers, end: Layers) -> Int64Array:
        """The bytes of the largest micro-batch in each of the ways of `SavedAmounts`, (4,); (4, n) for n stages."""
        held = self._of_size[self._sizes[0]].of_stages(first, end)
        if not self.replays:
            return held
        graph, inputs, gradients, _ = held
        backward = self._in_backward.between(first, end) - self.graphs[np.asarray(end) - 1]
        pool = np.where(graph > 0, graph + backward, 0)
        return np.array([pool, inputs, gradients, pool + gradients])

    def _static(self, first: Layers, end: Layers) -> Int64Array:
        """The bytes of what a replayed stage of layers `first` to `end - 1` receives and sends: inputs, outputs and the
        gradients of both. Inputs count twice, as they are copied into the memory that graphs read."""
        if not self.replays:
            return np.zeros_like(np.asarray(first))
        (inputs, input_gradients), (outputs, output_gradients) = self._boundaries[:, first], self._boundaries[:, end]
        static = 2 * inputs + input_gradients + outputs + output_gradients
        for skip in self._profile.skips:  # a skip past a stage goes from its sender to its receiver
            passes = (skip.stash < np.asarray(first)) & (np.asarray(end) <= skip.pop)
            tensors = [tensor for tensor in self._profile.costs[skip.stash].outputs if tensor.skip == skip.name]
            values, gradients = self._sent_bytes(tensors, self._sizes[0])
            static = static - passes * (3 * values + 2 * gradients)
        return np.asarray(static)

    def _sent_bytes(self, tensors: Sequence[BoundaryTensor], samples: int) -> tuple[int, int]:
        """The bytes of tensors of a micro-batch of `samples`, and of their gradients."""
        sizes = [(tensor.bytes(samples, self._profile.lengths), tensor.has_gradient) for tensor in tensors]
        return sum(size for size, _ in sizes), sum(size for size, has_gradient in sizes if has_gradient)

    def activation_budget(self, bounds: Bounds, limit_bytes: int, device_of_stage: Sequence[int] = ()) -> list[int]:
        """The bytes that the limit, which is per stage, leaves for activations: of each stage or, with a device for
        each stage, of all stages of each device together."""
        stored = [int(self._stored_by(first, end)) for first, end in bounds]
        workspace = [int(self.workspace[first:end].max()) for first, end in bounds]
        return [
            sum(limit_bytes - stored[k] for k in stages) - max(workspace[k] for k in stages)
            for stages in stages_of_devices(device_of_stage or range(len(bounds)))
        ]

    def _stored_by(self, first: Layers, end: Layers) -> Int64Array:
        """The bytes that a stage of layers `first` to `end - 1` stores all the time."""
        stored = self._stored[end] - self._stored[first] + sum(_tied_bytes(self._profile.tied, first, end))
        return np.asarray(stored + self._static(first, end))

    def furthest(self, order: Schedule, limit_bytes: int | None) -> list[list[int]] | None:
        """For each stage and each first layer, the furthest end (exclusive) within the limit, if all micro-batches were
        as large as the largest; None without a limit."""
        if limit_bytes is None:
            return None
        # recompute=auto never saves more than this mode needs
        mode = "except_last" if self._config.recompute == "auto" else self._config.recompute
        schedule = schedule_for(order, len(self._sizes), mode)
        workspace = _Maxima(self.workspace)

        def row(actions: Sequence[Action]) -> list[int]:
            fullest = np.array(_dominant(list(in_flight_counts(actions))))
            firsts = np.arange(len(self.workspace))  # one binary search for all of them
            fits, limits = firsts, np.full_like(firsts, len(firsts))  # ends that fit, and the furthest that may fit
            while (fits < limits).any():
                ends = np.maximum((fits + limits + 1) // 2, firsts + 1)
                held = (fullest @ self._largest(firsts, ends)).max(axis=0)
                needed = self._stored_by(firsts, ends) + held + workspace.between(firsts, ends)
                below = needed <= limit_bytes
                fits, limits = np.where(below, ends, fits), np.where(below, limits, ends - 1)
            return fits.tolist()

        # stages with the same actions reach equally far
        keys = [tuple((a.kind, a.micro_batch) for a in actions) for actions in schedule.stages]
        rows = {key: row(actions) for key, actions in dict(zip(keys, schedule.stages, strict=True)).items()}
        return [rows[key] for key in keys]


class _Maxima:
    """The maximum of any range of numbers, from the maxima of 1, 2, 4, ... numbers at each place: two of them cover
    any range (a sparse table)."""

    def __init__(self, numbers: NDArray[np.int64]) -> None:
        self._from = [numbers]
        while (size := 1 << len(self._from)) <= len(numbers):
            half = self._from[-1]
            self._from.append(np.maximum(half, np.roll(half, -size // 2)))
        self._table = np.array(self._from)

    def between(self, first: Layers, end: Layers) -> Int64Array:
        """The maximum of numbers `first` to `end - 1`, where `first` is below `end`."""
        power = np.frexp(np.asarray(end - first))[1] - 1
        return np.asarray(np.maximum(self._table[power, first], self._table[power, end - (1 << power)]))


def _dominant(moments: Sequence[SavedAmounts]) -> tuple[SavedAmounts, ...]:
    """The moments that can be the peak: those for which no other moment holds as much of everything."""
    dominant: list[SavedAmounts] = []
    for moment in sorted(set(moments), reverse=True):
        if not any(all(more >= less for more, less in zip(other, moment, strict=True)) for other in dominant):
            dominant.append(moment)
    return tuple(dominant)
