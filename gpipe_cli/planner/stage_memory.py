"""What a stage holds at its fullest moment, before anything is allocated (paper section 2.3, Table 1).

Weights, gradients and the optimizer's state are there all the time. Activations come and go with the schedule: the
graph of a micro-batch from its forward, or its recomputation, to its backward; the input alone of one that is still to
be recomputed.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import cache
from itertools import accumulate

import numpy as np

from gpipe_cli.config.settings import TrainConfig
from gpipe_cli.data.micro_batches import share_of
from gpipe_cli.pipeline.profile.layer_cost import ActivationMemory
from gpipe_cli.pipeline.schedule.recomputation import fewest_recomputations
from gpipe_cli.pipeline.schedule.schedules import Recompute, Schedule
from gpipe_cli.pipeline.schedule.simulator import Held, live, peak_bytes
from gpipe_cli.planner.model_profile import ModelProfile
from gpipe_cli.planner.step_schedule import checked_schedule

Bounds = Sequence[tuple[int, int]]  # first layer of each stage, and the one behind its last


@dataclass(frozen=True, slots=True)
class StageMemory:
    """At its fullest moment."""

    weights_bytes: int  # parameters and buffers
    gradients_bytes: int
    optimizer_bytes: int  # its state, and the moving average of the weights
    activations_bytes: int  # the most held at once for backwards, a recomputed micro-batch's included
    workspace_bytes: int  # of one layer's backward

    @property
    def total_bytes(self) -> int:
        return sum(astuple(self))


def saved_bytes(
    config: TrainConfig, profile: ModelProfile, bounds: Bounds, order: Schedule, recompute: Recompute, samples: int
) -> tuple[int, ...]:
    """The most activations held at once on each stage, in a mini-batch of `samples` padded to the lengths of
    `profile`."""
    sizes = share_of(samples, config.micro_batches, config.replicas).sizes
    schedule = checked_schedule(order, len(sizes), recompute)
    return MemoryModel(config, profile, sizes).saved(schedule, bounds)


class MemoryModel:
    """What stages hold, for any cut; `sizes` are the samples of the micro-batches, the largest first."""

    def __init__(self, config: TrainConfig, profile: ModelProfile, sizes: Sequence[int]) -> None:
        self._config, self._profile, self._sizes = config, profile, sizes
        self._of_size = {n: ActivationMemory(profile.costs, profile.inputs, n, profile.lengths) for n in set(sizes)}
        self._largest = self._of_size[sizes[0]]
        layers = range(len(profile.costs))
        # while a layer runs backward, the gradients of what it has kept come into being
        self._workspace = np.array([self._largest.graph_bytes(at, at + 1) for at in layers])
        stored = (w.weight_bytes + w.gradient_bytes + w.optimizer_bytes for w in profile.weights)
        self._stored = [0, *accumulate(stored)]

    def stages(self, schedule: Schedule, bounds: Bounds) -> tuple[StageMemory, ...]:
        return tuple(
            StageMemory(
                weights_bytes=sum(w.weight_bytes for w in self._profile.weights[first:end]),
                gradients_bytes=sum(w.gradient_bytes for w in self._profile.weights[first:end]),
                optimizer_bytes=sum(w.optimizer_bytes for w in self._profile.weights[first:end]),
                activations_bytes=saved,
                workspace_bytes=int(self._workspace[first:end].max()),
            )
            for (first, end), saved in zip(bounds, self.saved(schedule, bounds), strict=True)
        )

    def saved(self, schedule: Schedule, bounds: Bounds) -> tuple[int, ...]:
        """The most activations held at once on each stage."""
        of_stages = [{n: _held(of, span) for n, of in self._of_size.items()} for span in bounds]
        return peak_bytes(schedule, [[held[n] for n in self._sizes] for held in of_stages])

    def largest(self, bounds: Bounds) -> list[Held]:
        """Of each stage, the bytes of its largest micro-batch."""
        return [_held(self._largest, span) for span in bounds]

    def room(self, bounds: Bounds, limit_bytes: int) -> list[int]:
        """What the limit leaves each stage for activations."""
        return [
            limit_bytes - (self._stored[end] - self._stored[first]) - int(self._workspace[first:end].max())
            for first, end in bounds
        ]

    def fewest_recomputations(self, order: Schedule, bounds: Bounds, limit_bytes: int | None) -> Recompute:
        """As few recomputations as fit; none without a limit. Raises DoesNotFitError if no number of them fits."""
        if limit_bytes is None:
            return "never"
        return fewest_recomputations(order, self.largest(bounds), self.room(bounds, limit_bytes))

    def furthest(self, order: Schedule, limit_bytes: int | None) -> list[list[int]] | None:
        """For each stage and each layer that it may begin with, how far it can reach within the limit, as if all
        micro-batches were as large as the largest."""
        if limit_bytes is None:
            return None
        # `auto` needs no more than this: what is gained by keeping less, it does
        mode = "except_last" if self._config.recompute == "auto" else self._config.recompute
        schedule = checked_schedule(order, len(self._sizes), mode)

        @cache  # stages that hold as much at the same time reach as far
        def row(moments: tuple[Held, ...]) -> list[int]:
            return [self._reach(first, moments, limit_bytes) for first in range(len(self._workspace))]

        return [row(_fullest(moments)) for moments in live(schedule)]

    def _reach(self, first: int, moments: Sequence[Held], limit_bytes: int) -> int:
        layers = len(self._workspace)
        workspace = np.maximum.accumulate(self._workspace[first:])

        def needed(end: int) -> int:
            size = _held(self._largest, (first, end))
            held = max(sum(number * of for number, of in zip(moment, size, strict=True)) for moment in moments)
            return self._stored[end] - self._stored[first] + held + int(workspace[end - first - 1])

        end = bisect_right(range(first + 1, layers + 1), limit_bytes, key=needed) + first
        # a layer that keeps nothing of what it takes makes a stage that ends behind it smaller: look again
        while end > first and needed(end) > limit_bytes:
            end -= 1
        return end


def _held(memory: ActivationMemory, span: tuple[int, int]) -> Held:
    """The bytes of a micro-batch of layers `span`."""
    gradients, weights = memory.gradients_bytes(*span), memory.weights_bytes(*span)
    return Held(memory.graph_bytes(*span), memory.input_bytes(*span), gradients, weights)


def _fullest(moments: Sequence[Held]) -> tuple[Held, ...]:
    """The moments that can be the fullest: those that no other has as much or more of everything of."""
    most: list[Held] = []
    for moment in sorted(set(moments), reverse=True):
        if not any(all(more >= less for more, less in zip(other, moment, strict=True)) for other in most):
            most.append(moment)
    return tuple(most)
