"""The schedules that have a name, for the tests of what holds for all of them."""

from gpipe_cli.schedule import named_schedules
from gpipe_cli.schedule.schedule import Action, Kind, RecomputePlan, Schedule


def build(name: str, partitions: int, micro_batches: int, recompute: RecomputePlan) -> Schedule:
    """`interleaved` with two stages on each device where the number is even, and one where it is odd."""
    devices = partitions if name == "interleaved" and partitions % 2 else None
    return named_schedules.build(name, partitions, micro_batches, recompute, devices)


def parse(text: str) -> Schedule:
    """A line for each row: `0F0 0B0`, with stages of one digit."""
    return Schedule(
        tuple(Action(Kind(word[1]), int(word[0]), int(word[2:])) for word in line.split())
        for line in text.strip().splitlines()
    )
