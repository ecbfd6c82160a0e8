"""Every experiment at the smallest size that still runs all of its code: what `scale=smoke` runs.

Of a table the first and the last row are left, or the first where rows take long; of repeated runs as few as there
must be.
"""

from dataclasses import replace
from typing import TypeVar

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
Row = TypeVar("Row")


def smallest(experiment: Experiment) -> Experiment:
    match experiment:
        case LargestModel():
            return replace(experiment, sizes=experiment.sizes[:1], measured=())
        case Throughput():
            return replace(
                experiment, models=tuple(replace(model, rows=_ends(model.rows)) for model in experiment.models)
            )
        case PublishedSpeeds():
            return replace(experiment, sources=experiment.sources[:1])
        case Schedules():
            return replace(experiment, devices=experiment.devices[:1])
        case Scaling():
            return replace(experiment, models=experiment.models[-1:])
        case Translation():
            return replace(experiment, desk_sentences=1)
        case FineTuning():
            return replace(experiment, runs=1, from_scratch=False)
        case Consistency():
            return replace(experiment, partitions=_ends(experiment.partitions), seeds=experiment.seeds[:2])
        case Breakdown() | Classification():
            return experiment


def _ends(rows: tuple[Row, ...]) -> tuple[Row, ...]:
    return (rows[0], rows[-1])
