"""The mini-batch of a step and its schedule, from the settings: N samples, M micro-batches, who does what when."""

from collections.abc import Sequence
from functools import lru_cache

from gpipe_cli.config.settings import TrainConfig
from gpipe_cli.config.typed import RefusedError
from gpipe_cli.pipeline.schedule.dependencies import ScheduleError, check
from gpipe_cli.pipeline.schedule.schedule import Recompute, Schedule, with_recomputation
from gpipe_cli.pipeline.schedule.schedule_file import read_schedule


def mini_batch_samples(config: TrainConfig, lengths: Sequence[int]) -> int:
    """N; where mini-batches are cut by tokens, of the longest sentences."""
    if config.batch_size is not None:
        return config.batch_size
    assert config.batch_tokens is not None
    return max(1, config.batch_tokens // max(lengths))


def mean_micro_batch(config: TrainConfig, lengths: Sequence[int]) -> float:
    """The mean samples of a micro-batch. Cut by tokens, a mini-batch of short sentences has more samples than are
    planned for, and so all M micro-batches."""
    whole, pieces = mini_batch_samples(config, lengths), config.replicas * config.micro_batches
    return whole / (pieces if config.batch_size is None else min(pieces, whole))


def schedule_of_file(config: TrainConfig) -> Schedule:
    """What the file has that `schedule` names. Raises RefusedError if it is no schedule of this training."""
    try:
        found = read_schedule(config.schedule, config.partitions, config.micro_batches)
    except ScheduleError as error:
        raise RefusedError("schedule", config.schedule, error.what, error.drawn) from None
    if config.compile and found.split:
        why = f"schedule={config.schedule} cuts backwards in two, and compiled code cannot be cut"
        raise RefusedError("compile", True, f"{why}; use compile=false")
    return found


@lru_cache(maxsize=16)  # they can be large
def unchecked_schedule(order: Schedule, micro_batches: int, recompute: Recompute) -> Schedule:
    """The schedule of a step; a short last mini-batch may have fewer micro-batches than the others. It is enough to
    know what its stages hold, which follows from the actions of each alone."""
    return with_recomputation(order.first(micro_batches), recompute)


@lru_cache(maxsize=16)
def checked_schedule(order: Schedule, micro_batches: int, recompute: Recompute) -> Schedule:
    """The same, once it is known that it can be performed. Raises ScheduleError if it cannot."""
    schedule = unchecked_schedule(order, micro_batches, recompute)
    check(schedule)
    return schedule
