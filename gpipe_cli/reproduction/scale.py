"""The scale of a recipe: the paper's, a small one for two CPU cores, or a smoke test; which a machine allows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gpipe_cli.system.gpus import Gpu
from gpipe_cli.units import plural, size

Scale = Literal["smoke", "small", "paper"]


@dataclass(frozen=True, slots=True)
class Needs:
    """The hardware and the data that the paper's scale needs."""

    gpus: int
    memory_gib: float  # memory of each GPU
    data: str | None = None  # the value of `dataset`; None if the data come with the program
    how: str | None = None  # how to get the data, and where to put them

    def __str__(self) -> str:
        machine = f"{plural(self.gpus, 'GPU')} of {self.memory_gib:g} GiB" if self.gpus else "no GPU"
        return f"{machine}, {self.data}" if self.data else machine

    def fitting_scale(self, gpus: Sequence[Gpu]) -> tuple[Scale, str]:
        """The scale that a machine with these GPUs allows, and the reason."""
        if not self.gpus:
            return "paper", "the recipe needs no GPU"
        wanted = f"the paper's scale needs {plural(self.gpus, 'GPU')} of {self.memory_gib:g} GiB"
        enough = [gpu for gpu in gpus if gpu.memory_bytes >= self.memory_gib * 2**30]
        if len(enough) >= self.gpus:
            return "paper", f"{wanted}, which this machine has"
        present = f"{plural(len(gpus), 'GPU')} of {size(min(gpu.memory_bytes for gpu in gpus))}" if gpus else "no GPU"
        return "small", f"{wanted}, but this machine has {present}"


@dataclass(frozen=True, slots=True)
class SmallScale:
    """The settings of the same experiment on two CPU cores."""

    settings: tuple[str, ...]  # replace the recipe's own: `batch_size=32`
    scaled: str  # a line: what is smaller, and which data stand in for the paper's
    minutes: float  # measured on 2 CPU cores

    @property
    def duration(self) -> str:
        return f"{self.minutes:g} min"
