"""What a process of a run is doing, as numbers in memory that its parent reads: how a process that hangs is found."""

from dataclasses import dataclass, fields
from enum import IntEnum


class Awaited(IntEnum):
    NOTHING = 0
    PROCESS = 1  # another one of the run
    DATA = 2


@dataclass(frozen=True)
class Activity:
    changes: int  # how often it has begun something
    awaited: int  # Awaited
    # its last action; then its samples, and what they are padded to along up to two dimensions
    kind: int  # 1 F, 2 R, 3 B, 0 none yet
    stage: int
    micro_batch: int
    samples: int
    length_0: int
    length_1: int


ACTIVITY_NUMBERS = len(fields(Activity))
