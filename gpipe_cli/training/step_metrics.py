"""The numbers of a training step: each process packs what it knows into one vector, and one gather shares them all.

The vector is float64 and has four parts:

    sums       (5,)     over the mini-batch: elements, loss, cross-entropy, top-1, top-5
    stages     (K, 4)   of each stage, the fields of `StageMetrics`
    norms      (P,)     of the gradients of the process's parameters in global order; P is the most that a process has
    recording  (S,)     when the process's stages did what in the step before

What a process does not know is 0 in its vector, so that the first two parts of all processes add up.
"""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields

import torch

from gpipe_cli.assembly.loss import Totals
from gpipe_cli.distributed.control_group import gradient_norm
from gpipe_cli.pipeline.runtime.recording import MARKS, Recording, room
from gpipe_cli.pipeline.schedule.schedules import Schedule
from gpipe_cli.planner.placement import Placement


@dataclass(frozen=True)
class StageMetrics:
    """What the process of a stage knows of it."""

    memory_bytes: float  # the peak so far
    activation_bytes: float  # the most that was saved at once, if it was counted
    library_bytes: float  # of its process, if it was counted
    without_core: float  # the share of its computing time in which it had no core; 0 on a GPU


@dataclass(frozen=True)
class StepMetrics:
    """What all processes know of a step together."""

    totals: Totals  # over the mini-batch
    gradient_norm: float  # global
    stages: tuple[StageMetrics, ...]
    seconds_before: list[list[float]]  # of the step before: of each stage, what `Recording.seconds` gives; [] if none

    @staticmethod
    def pack(
        placement: Placement,
        micro_batches: int,
        *,
        totals: Totals | None = None,
        stages: Mapping[int, StageMetrics] | None = None,
        norms: torch.Tensor | None = None,
        before: Recording | None = None,
        clock_offset_seconds: float = 0.0,
    ) -> torch.Tensor:
        """One process's vector; `before` is read on the clock of process 0, which this one's is ahead of by so much."""
        stages_here = 1 if placement.distributed else placement.partitions
        vector = torch.zeros(sum(_sizes(placement)) + stages_here * room(micro_batches), dtype=torch.float64)
        to_sums, to_stages, to_norms, to_recording = _split(placement, vector)
        if totals is not None:
            to_sums.copy_(torch.tensor(astuple(totals), dtype=torch.float64))
        for k, metrics in (stages or {}).items():
            to_stages[k] = torch.tensor(astuple(metrics), dtype=torch.float64)
        if norms is not None:
            to_norms[: len(norms)] = norms
        if before is not None:
            seconds = [value for _, values in sorted(before.seconds().items()) for value in values]
            to_recording[: len(seconds)] = torch.tensor(seconds, dtype=torch.float64) - clock_offset_seconds
        return vector

    @staticmethod
    def unpack(placement: Placement, vectors: Sequence[torch.Tensor], before: Schedule | None) -> "StepMetrics":
        """From the vectors of all processes, in order; `before` is the schedule of the step before."""
        parts = [_split(placement, vector) for vector in vectors]
        elements, *sums = torch.stack([sums for sums, _, _, _ in parts]).sum(dim=0).tolist()
        stages = torch.stack([stages for _, stages, _, _ in parts]).sum(dim=0).tolist()
        seconds: list[list[float]] = []
        if before is not None:
            for process, (_, _, _, recording) in enumerate(parts):
                values = recording.tolist()
                for stage in placement.stages_of(process):
                    length = MARKS * len(before[stage]) + 2
                    seconds.append(values[:length])
                    values = values[length:]
        return StepMetrics(
            Totals(int(elements), *sums),
            gradient_norm([norms for _, _, norms, _ in parts]),
            tuple(StageMetrics(*numbers) for numbers in stages),
            seconds,
        )


def _sizes(placement: Placement) -> tuple[int, int, int]:
    return len(fields(Totals)), placement.partitions * len(fields(StageMetrics)), placement.most_parameter_tensors


def _split(placement: Placement, vector: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The four parts of a vector, as views."""
    sizes = _sizes(placement)
    sums, stages, norms, recording = vector.split([*sizes, len(vector) - sum(sizes)])
    return sums, stages.view(placement.partitions, -1), norms, recording
