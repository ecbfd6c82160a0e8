"""Every experiment at the smallest size that still runs all of its code: what `scale=smoke` runs.

A table keeps its first and its last row, or only the first if rows take long; repeated runs are as few as possible.
"""

from dataclasses import replace

from gpipe_cli.reproduction.breakdown import Breakdown
from gpipe_cli.reproduction.consistency import Consistency
from gpipe_cli.reproduction.largest_model import LargestModel
from gpipe_cli.reproduction.published import PublishedSpeeds
from gpipe_cli.reproduction.scaling import Scaling
from gpipe_cli.reproduction.schedules import Schedules
from gpipe_cli.reproduction.throughput import Throughput
from gpipe_cli.reproduction.training import Classification, FineTuning, Translation

Experiment = (
    LargestModel
    | Throughput
    | Breakdown
    | Schedules
    | Scaling
    | PublishedSpeeds
    | Classification
    | Translation
    | FineTuning
    | Consistency
)


def smallest(experiment: Experiment) -> Experiment:
    match experiment:
        case LargestModel():
            return replace(experiment, sizes=experiment.sizes[:1], measured=(), precisions=("float32",))
        case Throughput():
            ends = [replace(model, rows=(model.rows[0], model.rows[-1])) for model in experiment.models]
            return replace(experiment, models=tuple(ends))
        case PublishedSpeeds():
            return replace(experiment, sources=experiment.sources[:1])
        case Schedules():
            return replace(experiment, devices=experiment.devices[:1])
        case Scaling():
            return replace(experiment, models=experiment.models[-1:])
        case Translation():
            return replace(experiment, desk_sentences=1)
        case FineTuning():
            return replace(experiment, desk_runs=1, from_scratch=False)
        case Consistency():
            return replace(experiment, partitions=experiment.partitions[:2], seeds=experiment.seeds[:2])
        case Breakdown() | Classification():
            return experiment
