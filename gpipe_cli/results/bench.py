"""The content of bench.json, the result of a sweep of measurements: one row per cell, as in the paper's tables 2, 3."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gpipe_cli.results.dict_conversion import TEXT_FIELD

BENCH_FILE = "bench.json"
BENCH_CSV_FILE = "bench.csv"


@dataclass(frozen=True)
class BenchRow:
    """A cell: medians over the rounds in which it was measured. `metrics.py` explains most of them."""

    settings: dict[str, Any]  # settings that the table varies
    partitions: int | str | None
    micro_batches: int | str | None
    status: str  # measured, impossible, out_of_memory, failed, interrupted
    reason: str | None  # why the cell has no number
    samples_per_second: float | None
    samples_per_second_quartiles: tuple[float, ...] | None
    rounds_measured: int
    range_over_rounds: tuple[float, float] | None  # smallest and largest samples/s or, of text, tokens/s
    relative: float | None  # speed over the baseline's
    step_seconds: float | None
    breakdown: dict[str, float] | None  # shares of the stage-time of a step, which add up to 1
    idle: float | None
    bubble: float | None
    ideal_bubble: float | None
    memory_bytes: tuple[int, ...] | None  # for each stage, the most in any round
    activation_bytes: tuple[int, ...] | None  # for each stage, the most in any round
    model_flops_per_second: float | None
    mfu: float | None
    cpu_starved_share: float | None  # share of computing time without a core, the most in any round
    kind: str | None  # a SpeedKind
    executor: str | None
    threads: int | None  # threads per process
    folders: tuple[str, ...]  # folders of the runs, next to bench.json
    resolved: dict[str, Any]  # values that differ between rows without being asked for, and those that `auto` became
    baseline: bool = False  # whether `relative` of all rows is to this row
    tokens_per_second: float | None = field(default=None, metadata=TEXT_FIELD)
    tokens_per_second_quartiles: tuple[float, ...] | None = field(default=None, metadata=TEXT_FIELD)

    @property
    def text(self) -> bool:
        """Whether the model learns text, so that its speed is counted in tokens."""
        return self.tokens_per_second is not None

    @property
    def quartiles(self) -> tuple[float, ...] | None:
        """The quartiles of the speed: tokens/s of text, samples/s of images."""
        return self.tokens_per_second_quartiles if self.text else self.samples_per_second_quartiles


class BenchTable(NamedTuple):
    varies: tuple[str, ...]  # settings that differ between rows
    rounds: int
    rows: tuple[BenchRow, ...]
