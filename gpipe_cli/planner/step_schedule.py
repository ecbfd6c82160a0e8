"""The mini-batch and the schedule of a step by the settings: N samples, M micro-batches, the order of actions."""

from collections.abc import Sequence
from functools import lru_cache

from gpipe_cli.config.pipeline_settings import PipelineSettings
from gpipe_cli.config.settings import TrainConfig
from gpipe_cli.errors import InvalidSettingError
from gpipe_cli.schedule.dependencies import ScheduleError, check
from gpipe_cli.schedule.schedule import RecomputePlan, Schedule, with_recomputation
from gpipe_cli.schedule.schedule_file import read_schedule


def mini_batch_samples(config: TrainConfig, lengths: Sequence[int]) -> int:
    """N, the samples of a mini-batch; with `batch_tokens`, the number of sentences of the maximum length."""
    if config.batch_size is not None:
        return config.batch_size
    assert config.batch_tokens is not None
    return max(1, config.batch_tokens // max(lengths))


def mean_micro_batch(config: TrainConfig, lengths: Sequence[int]) -> float:
    """The mean number of samples of a micro-batch. With `batch_tokens` it may be below 1, as mini-batches of shorter
    sentences have more samples than N, and so all M micro-batches."""
    samples = mini_batch_samples(config, lengths)
    pieces = config.replicas * config.micro_batches
    return samples / (pieces if config.batch_size is None else min(pieces, samples))


def schedule_of_file(settings: PipelineSettings) -> Schedule:
    """The schedule in the file that `schedule` names. Raises InvalidSettingError if it does not fit the settings."""
    try:
        schedule = read_schedule(settings.schedule, settings.partitions, settings.micro_batches)
    except ScheduleError as error:
        raise InvalidSettingError("schedule", settings.schedule, error.what, error.drawn) from None
    if settings.compile and schedule.split:
        why = f"schedule={settings.schedule} cuts backwards in two, and compiled code cannot be cut"
        raise InvalidSettingError("compile", True, f"{why}; use compile=false")
    return schedule


@lru_cache(maxsize=16)  # they can be large
def schedule_for(order: Schedule, micro_batches: int, recompute: RecomputePlan) -> Schedule:
    """The schedule of a step of `micro_batches`, of which a short last mini-batch may have fewer than M. It need not be
    checked to know what a stage holds, which follows from the stage's own actions."""
    return with_recomputation(order.first(micro_batches), recompute)


@lru_cache(maxsize=16)
def validated_schedule_for(order: Schedule, micro_batches: int, recompute: RecomputePlan) -> Schedule:
    """`schedule_for`, checked. Raises ScheduleError if it cannot be performed."""
    schedule = schedule_for(order, micro_batches, recompute)
    check(schedule)
    return schedule
