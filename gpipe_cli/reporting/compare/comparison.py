"""What runs are compared by: the settings in which they differ, and what came of it (the paper's tables 2, 3, 4 and 5).

A table of runs says something where its rows differ in little, so settings that are the same everywhere are left out,
and rows are named by the few that are not. What was measured, predicted and ideal are columns apart.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gpipe_cli.config.typed import show
from gpipe_cli.reporting.compare.run_names import differing, few, folded, names
from gpipe_cli.reporting.compare.run_record import RunRecord
from gpipe_cli.units import operations

GIB, MIB = 2**30, 2**20


@dataclass(frozen=True)
class Column:
    """One column of a comparison, with a value for each run; None where a run has none."""

    key: str  # its heading in CSV, with the unit; of a setting its dotted key
    heading: str  # as people read it, `step\nms`
    values: tuple[Any, ...]  # in the units of result.json
    texts: tuple[str, ...]  # in those of the heading; `-` where there is none
    printed: bool = True  # in the table of 80 columns too
    setting: bool = False

    @property
    def numeric(self) -> bool:
        """Whether it holds nothing but numbers."""
        return all(v is None or (isinstance(v, int | float) and not isinstance(v, bool)) for v in self.values)


@dataclass(frozen=True)
class Comparison:
    """Runs beside each other, all they need to be shown."""

    runs: tuple[RunRecord, ...]
    names: tuple[str, ...]  # of the runs, no two of them alike
    by_settings: bool  # that is what they are named by
    columns: tuple[Column, ...]  # settings that differ, then results


def compare(runs: Sequence[RunRecord]) -> Comparison:
    """Puts runs beside each other."""
    assert runs, "nothing to compare"
    keys = differing(runs)
    settings = (_setting(key, runs) for key in keys)
    columns = (*settings, *(column for column in _results(runs) if any(v is not None for v in column.values)))
    return Comparison(tuple(runs), tuple(names(runs)), few(keys), columns)


def _setting(key: str, runs: Sequence[RunRecord]) -> Column:
    """`null` is a value; `-` is what a run has no such setting for."""
    texts = tuple(show(run.settings[key]) if key in run.settings else "-" for run in runs)
    heading = folded(key.removesuffix(".name"))  # `model`, as one types it
    return Column(key, heading, tuple(run.settings.get(key) for run in runs), texts, setting=True)


def _results(runs: Sequence[RunRecord]) -> list[Column]:
    """What came of the runs, each column whether or not a run has a value there."""

    def told(key: str, heading: str, of: Callable[[RunRecord], object], printed: bool = True) -> Column:
        values = tuple(of(run) for run in runs)
        return Column(key, heading, values, tuple("-" if v is None else str(v) for v in values), printed)

    def number(
        key: str, heading: str, of: Callable[[RunRecord], float | None], form: Callable[[float], str] = _plain,
        printed: bool = True,
    ) -> Column:  # fmt: skip
        values = tuple(of(run) for run in runs)
        return Column(key, heading, values, tuple("-" if value is None else form(value) for value in values), printed)

    def of(*keys: str) -> Callable[[RunRecord], float | None]:
        return lambda run: run.number(*keys)

    def quartile(key: str, which: int) -> Callable[[RunRecord], float | None]:
        return lambda run: found[which] if len(found := run.numbers(f"{key}_quartiles")) == 2 else None

    def fullest(key: str) -> Callable[[RunRecord], float | None]:
        return lambda run: max(run.numbers(key), default=None)

    # Trainings have quartiles and FLOP/s too, but no room for them beside their accuracies.
    commands = {str(run.result.get("command", "train")) for run in runs}
    bench = "bench" in commands
    time, seconds = _unit([run.number("seconds") for run in runs], (("s", 1), ("min", 60), ("h", 3600)), 120)
    step, step_seconds = _unit([run.number("step_seconds") for run in runs], (("ms", 1e-3), ("s", 1)), 10_000)
    peaks = [fullest("memory_bytes")(run) for run in runs]
    memory, size = _unit(peaks, (("MiB", MIB), ("GiB", GIB)), 10 * 1024)
    columns = [
        told("command", "command", lambda run: str(run.result.get("command", "train")), len(commands) > 1),
        told("status", "status", lambda run: run.status),
        number("test_top1", "top-1\n%", of("test", "top1"), _percent),
        number("best_top1", "best\n%", of("best", "top1"), _percent),
        number("test_perplexity", "perpl.\nfinal", of("test", "perplexity"), _short_number),
        number("best_perplexity", "perpl.\nbest", of("best", "perplexity"), _short_number),
        number("test_loss", "test loss", of("test", "loss"), _short_number, False),
    ]
    # A speed in samples says little of text, whose sentences differ in length: it is left to the page and to CSV.
    for unit, printed in (("samples", not all(run.text for run in runs)), ("tokens", True)):
        key = f"{unit}_per_second"
        columns += [
            number(key, f"{unit}\n/s", _speed(unit), _rate, printed),
            number(f"{key}_q1", "q1\n/s", quartile(key, 0), _rate, printed and bench),
            number(f"{key}_q3", "q3\n/s", quartile(key, 1), _rate, printed and bench),
        ]
    return [
        *columns,
        _speed_kind(runs),
        number("step_seconds", f"step\n{step}", of("step_seconds"), _scaled(step_seconds)),
        number("bubble_measured", "bubble\n%", of("bubble", "measured"), _percent),
        number("bubble_ideal", "bubble ideal\n%", of("ideal_bubble"), _percent, False),
        number("idle_measured", "idle\n%", of("idle", "measured"), _percent, False),
        number("bubble_predicted", "bubble predicted\n%", of("bubble", "predicted"), _percent, False),
        number(
            "step_seconds_predicted", f"step predicted\n{step}", of("prediction", "step_seconds"),
            _scaled(step_seconds), False,
        ),
        number("memory_bytes_fullest", f"memory\n{memory}", fullest("memory_bytes"), _scaled(size)),
        number(
            "activation_bytes_fullest", f"activations\n{memory}", fullest("activation_bytes"), _scaled(size), False
        ),
        number("model_flops_per_second", "FLOP/s", of("model_flops_per_second"), operations, bench),
        number("mfu", "MFU\n%", of("mfu"), _percent, bench),
        number("epochs_done", "epochs\ndone", of("epochs"), _plain, False),
        number("steps", "steps", of("steps")),
        number("seconds", f"time\n{time}", of("seconds"), _scaled(seconds)),
        number("threads_per_process", "threads", of("hardware", "threads_per_process"), _plain, False),
        told("machine", "machine", machine, False),
        told("torch", "torch", lambda run: _inner(run, "versions").get("torch"), False),
        told("model", "model", lambda run: run.result.get("model"), False),
        told("dataset", "data set", lambda run: run.result.get("dataset"), False),
        told("error", "error", lambda run: one_line(run.result.get("error")), False),
        told("folder", "folder", lambda run: str(run.folder), False),
    ]  # fmt: skip


def _speed_kind(runs: Sequence[RunRecord]) -> Column:
    """In the table only where a run is not `measured`; there is no room for `measured_one_device`."""
    kinds = tuple(run.speed_kind for run in runs)
    texts = tuple("-" if kind is None else kind.removeprefix("measured_").replace("_", " ") for kind in kinds)
    return Column("speed_kind", "speed", kinds, texts, any(run.shared for run in runs))


def machine(run: RunRecord) -> str | None:
    """What a run ran on: `2 cores of AMD EPYC`, `NVIDIA H200, 16 cores of ...`; None if it does not say."""
    hardware = _inner(run, "hardware")
    if not hardware:
        return None
    gpus = [str(name) for name in hardware.get("gpus") or []]
    counted = [f"{gpus.count(name)} x {name}" if gpus.count(name) > 1 else name for name in dict.fromkeys(gpus)]
    return ", ".join([*counted, f"{hardware.get('cores', '?')} cores of {hardware.get('cpu', 'unknown')}"])


def one_line(text: object) -> str | None:
    """An error without line breaks and control characters; None if there is none."""
    return " ".join(re.sub(r"[\x00-\x1f\x7f-\x9f]", " ", str(text)).split()) if text else None


def _inner(run: RunRecord, key: str) -> dict[str, Any]:
    value = run.result.get(key)
    return value if isinstance(value, dict) else {}


def _speed(unit: str) -> Callable[[RunRecord], float | None]:
    return lambda run: run.number(f"{unit}_per_second")


def _unit(values: Sequence[float | None], units: Sequence[tuple[str, float]], most: float) -> tuple[str, float]:
    """The smallest unit in which the largest value is below ``most``, for a whole column; and its size."""
    largest = max((abs(value) for value in values if value is not None), default=0.0)
    return next(((name, size) for name, size in units if largest < most * size), units[-1])


def _scaled(size: float) -> Callable[[float], str]:
    return lambda value: f"{value / size:,.1f}"


def _plain(value: float) -> str:
    return f"{value:,.0f}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _rate(per_second: float) -> str:
    return f"{per_second:,.0f}" if per_second >= 999.95 else f"{per_second:.1f}"


def _short_number(value: float) -> str:
    """Losses and perplexities, four digits of them: `1.234`, `103.3`, `12,345`, `1.2e+08`."""
    if value >= 999_999.5:
        return f"{value:.1e}"
    return f"{value:,.0f}" if value >= 999.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.3f}"
