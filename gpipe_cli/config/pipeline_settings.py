"""What a training step does and in which processes, whatever is trained: settings that `gpipe train` shares with a
`Pipeline` in a user's own program; and what depends on each setting.
"""

from dataclasses import dataclass, field
from enum import Flag, auto
from typing import Annotated, Literal

from gpipe_cli.config import groups
from gpipe_cli.config.schema import Range
from gpipe_cli.errors import InvalidSettingError
from gpipe_cli.schedule import named_schedules
from gpipe_cli.schedule.named_schedules import AUTO_SCHEDULE, ORDERS, SCHEDULES_THAT_SPLIT
from gpipe_cli.schedule.placement import PlacementName
from gpipe_cli.schedule.schedule import RecomputeMode

Executor = Literal["auto", "in_process", "distributed"]
CudaGraphs = Literal["auto", True, False]
Partitions = Annotated[int, Range(1, 10_000, why="as no model has more layers")]
MicroBatches = Annotated[int, Range(1, 100_000)]
Replicas = Annotated[int, Range(1, 10_000, why="as no cluster has more machines")]
SCHEDULES = (*named_schedules.SCHEDULES, AUTO_SCHEDULE)
SCHEDULE_FILE = ".csv"  # suffix of a file with a schedule


class Affects(Flag):
    """What depends on a setting. Each field of `TrainConfig` has it as metadata; see `settings_affecting`."""

    LAYERS = auto()  # the layers that are traced: their shapes, operations and bytes
    SECONDS = auto()  # how long layers of given shapes take
    SCALE = auto()  # data, sizes or training: with another value, the paper's numbers are not comparable
    STEP = auto()  # what a step does, not how many there are or what happens between them
    RUN = auto()  # what a run does, also when it is resumed, not only this invocation of the command
    COMPARED = auto()  # what two runs may differ in, not where a run is written or how it is resumed


def _affects(*answers: int) -> dict[str, Affects]:
    return {"affects": Affects(sum(what.value for what, yes in zip(Affects, answers, strict=True) if yes))}


# fmt: off
#                     LAYERS SECONDS SCALE STEP RUN COMPARED
FOLDERS    = _affects(     0,      0,    0,   0,  0,       0)
INVOCATION = _affects(     0,      0,    1,   0,  0,       1)
WRITING    = _affects(     0,      0,    0,   0,  1,       1)
COURSE     = _affects(     0,      0,    1,   0,  1,       1)
MACHINE    = _affects(     0,      0,    0,   1,  1,       1)
KERNELS    = _affects(     1,      0,    0,   1,  1,       1)
STEP       = _affects(     0,      0,    1,   1,  1,       1)
LAYERS     = _affects(     1,      0,    1,   1,  1,       1)
SECONDS    = _affects(     1,      1,    1,   1,  1,       1)
# fmt: on


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSettings:
    """What a training step does and in which processes, whatever is trained: the settings that `gpipe train` and a
    `Pipeline` in a user's own program share. Raises InputError if two contradict each other."""

    ON_CPU = "device=cpu"  # the setting, in messages, with which layers compute on the CPU

    partitions: Partitions = field(metadata=STEP)  # K
    micro_batches: MicroBatches = field(metadata=STEP)  # M
    replicas: Replicas = field(default=1, metadata=STEP)  # R
    schedule: str = field(metadata=STEP)  # a name, `auto`, or a file
    recompute: Literal[RecomputeMode, "auto"] = field(metadata=STEP)
    executor: Executor = field(metadata=MACHINE)
    stages_per_process: Partitions | None = field(default=None, metadata=STEP)
    placement: PlacementName | None = field(default=None, metadata=STEP)  # None: what suits the schedule
    seed: Annotated[int, Range(0, 2**32 - 1)] = field(metadata=MACHINE)
    precision: groups.Precision = field(default="float32", metadata=SECONDS)
    compile: bool = field(default=False, metadata=LAYERS)
    graphs: CudaGraphs = field(default="auto", metadata=MACHINE)

    def __post_init__(self) -> None:
        self._check_schedule()

    @property
    def splits_backward(self) -> bool:
        """Whether the schedule may split backwards into the inputs' and the weights' (zero bubble)."""
        return not self.compile and (self.schedule in SCHEDULES_THAT_SPLIT or self.schedule_is_file)

    @property
    def schedule_is_file(self) -> bool:
        return self.schedule.endswith(SCHEDULE_FILE)

    def _check_schedule(self) -> None:
        """Raises InputError for a schedule that is neither a name nor a file, for a placement that does not go with it,
        and for a schedule that compiled layers cannot follow."""
        if self.schedule not in SCHEDULES and not self.schedule_is_file:
            allowed = f"must be one of {', '.join(SCHEDULES)}, or a file NAME{SCHEDULE_FILE}"
            raise InvalidSettingError("schedule", self.schedule, f"{allowed}; for example schedule={SCHEDULES[0]}")
        if self.compile and self.schedule in SCHEDULES_THAT_SPLIT and self.schedule != AUTO_SCHEDULE:
            why = f"schedule={self.schedule} cuts backwards in two, and compiled code cannot be cut"
            raise InvalidSettingError("compile", True, f"{why}; use compile=false or schedule=1f1b")
        if (placement := self.placement) is None:
            return
        if self.schedule_is_file:
            why = f"schedule={self.schedule} assigns the stages to devices; remove either"
            raise InvalidSettingError("placement", placement, why)
        placed = ORDERS[self.schedule].placement if self.schedule in ORDERS else None
        if placed not in (None, placement):
            why = f"schedule={self.schedule} is made for placement={placed}; remove either"
            raise InvalidSettingError("placement", placement, why)
