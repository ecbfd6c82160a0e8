"""What runs are compared by: the settings in which they differ, and their results (the paper's tables 2, 3, 4 and 5).

Settings that are the same in all runs are left out, and rows are named by the few
that differ. What was measured, predicted and ideal are columns apart.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gpipe_cli.config.typed import show
from gpipe_cli.reporting.compare.run_names import by_settings, differing, folded, listed, names, spans
from gpipe_cli.reporting.compare.run_record import RunRecord
from gpipe_cli.reporting.tables.table import Column
from gpipe_cli.units import operations

GIB, MIB = 2**30, 2**20


@dataclass(frozen=True)
class Comparison:
    """Runs beside each other. Columns have a key, and None as value where a run has none."""

    runs: Sequence[RunRecord]
    names: Sequence[str]  # of the runs, no two of them alike
    by_settings: bool  # that is what they are named by
    settings: Sequence[Column]  # those that differ, by their dotted keys; values as they are typed
    results: Sequence[Column]  # values in the units of result.json, cells in those of the heading

    @property
    def columns(self) -> Sequence[Column]:
        """All of them."""
        return *self.settings, *self.results

    @property
    def labels(self) -> Sequence[str]:
        """As names; those of folders stand behind the run's number, `3: 12-00-00_K2`, by which texts refer to it."""
        return self.names if self.by_settings else [f"{at}: {name}" for at, name in enumerate(self.names, start=1)]

    def referred(self, positions: Sequence[int]) -> str:
        """Some of the runs in a sentence: `partitions=2, partitions=4`, or `runs 1 to 4, 7` where names are long."""
        if self.by_settings:
            return listed([self.names[position] for position in positions])
        run = "run" if len(positions) == 1 else "runs"
        return f"{run} {listed(spans([position + 1 for position in positions]))}"


def compare(runs: Sequence[RunRecord]) -> Comparison:
    """Puts runs beside each other."""
    assert runs, "nothing to compare"
    keys = differing(runs)
    results = [column for column in _results(runs) if any(value is not None for value in column.plain_values)]
    return Comparison(runs, names(runs), by_settings(keys), [_setting(key, runs) for key in keys], results)


def _setting(key: str, runs: Sequence[RunRecord]) -> Column:
    """`null` is a value; `-` is what a run has no such setting for."""
    values = [show(run.settings[key]) if key in run.settings else None for run in runs]
    known = [run.settings[key] for run in runs if key in run.settings]
    number = all(value is None or (isinstance(value, int | float) and not isinstance(value, bool)) for value in known)
    cells = ["-" if value is None else value for value in values]
    heading = folded(key.removesuffix(".name"))  # `model`, as one types it
    return Column(heading, cells=cells, number=number, key=key, values=values)


def _results(runs: Sequence[RunRecord]) -> list[Column]:
    """The results of the runs, also columns in which no run has a value."""
    # Trainings have quartiles and FLOP/s too, but no room for them beside their accuracies.
    commands = {run.result["command"] for run in runs}
    bench = "bench" in commands
    # Sentences differ in length: the speed of text in samples stands on the page and in CSV only.
    images = not all(run.text for run in runs)
    time, seconds = _unit([run.value("seconds") for run in runs], (("s", 1), ("min", 60), ("h", 3600)), 120)
    step, step_seconds = _unit([run.value("step_seconds") for run in runs], (("ms", 1e-3), ("s", 1)), 10_000)
    peaks = [peak for run in runs for peak in run.value("memory_bytes") or []]
    memory, size = _unit(peaks, (("MiB", MIB), ("GiB", GIB)), 10 * 1024)

    def column(key: str, heading: str, values: Sequence[Any], form: Callable[[Any], str], printed: bool) -> Column:
        cells = ["-" if value is None else form(value) for value in values]
        return Column(heading, cells=cells, number=form is not str, key=key, values=values, printed=printed)

    def text(key: str, heading: str, of: Callable[[RunRecord], str | None], printed: bool = True) -> Column:
        return column(key, heading, [of(run) for run in runs], str, printed)

    def number(key: str, heading: str, *at: str, form: Callable[[float], str] = _whole, printed: bool = True) -> Column:
        found = [run.value(*(at or [key])) for run in runs]
        return column(key, heading, [None if value is None else float(value) for value in found], form, printed)

    def quartiles(key: str, printed: bool) -> list[Column]:
        found = [run.value(f"{key}_quartiles") or (None, None) for run in runs]
        return [
            column(f"{key}_{name}", f"{name}\n/s", [values[which] for values in found], _rate, printed)
            for which, name in enumerate(("q1", "q3"))
        ]

    def fullest(key: str, heading: str, printed: bool) -> Column:
        found = [max(run.value(key) or [], default=None) for run in runs]
        values = [None if value is None else float(value) for value in found]
        return column(f"{key}_fullest", f"{heading}\n{memory}", values, _scaled(size), printed)

    return [
        text("command", "command", lambda run: run.value("command"), len(commands) > 1),
        text("status", "status", lambda run: run.value("status")),
        number("test_top1", "top-1\n%", "test", "top1", form=_percent),
        number("best_top1", "best\n%", "best", "top1", form=_percent),
        number("test_perplexity", "perpl.\nfinal", "test", "perplexity", form=_short_number),
        number("best_perplexity", "perpl.\nbest", "best", "perplexity", form=_short_number),
        number("test_loss", "test loss", "test", "loss", form=_short_number, printed=False),
        number("samples_per_second", "samples\n/s", form=_rate, printed=images),
        *quartiles("samples_per_second", images and bench),
        number("tokens_per_second", "tokens\n/s", form=_rate),
        *quartiles("tokens_per_second", bench),
        _speed_kind(runs),
        number("step_seconds", f"step\n{step}", form=_scaled(step_seconds)),
        number("bubble_measured", "bubble\n%", "bubble", "measured", form=_percent),
        number("bubble_ideal", "bubble ideal\n%", "ideal_bubble", form=_percent, printed=False),
        number("idle_measured", "idle\n%", "idle", "measured", form=_percent, printed=False),
        number("bubble_predicted", "bubble predicted\n%", "bubble", "predicted", form=_percent, printed=False),
        number(
            "step_seconds_predicted", f"step predicted\n{step}", "prediction", "step_seconds",
            form=_scaled(step_seconds), printed=False,
        ),
        fullest("memory_bytes", "memory", printed=True),
        fullest("activation_bytes", "activations", printed=False),
        number("model_flops_per_second", "FLOP/s", form=operations, printed=bench),
        number("mfu", "MFU\n%", form=_percent, printed=bench),
        number("epochs_done", "epochs\ndone", "epochs", printed=False),
        number("steps", "steps"),
        number("seconds", f"time\n{time}", form=_scaled(seconds)),
        number("threads_per_process", "threads", "hardware", "threads_per_process", printed=False),
        text("machine", "machine", lambda run: run.machine, False),
        text("torch", "torch", lambda run: run.value("versions", "torch"), False),
        text("model", "model", lambda run: run.value("model"), False),
        text("dataset", "data set", lambda run: run.value("dataset"), False),
        text("error", "error", lambda run: run.error, False),
        text("folder", "folder", lambda run: str(run.folder), False),
    ]  # fmt: skip


def _speed_kind(runs: Sequence[RunRecord]) -> Column:
    """In the table only where a run is not `measured`; there is no room for `measured_one_device`."""
    kinds = [run.value("samples_per_second_kind") for run in runs]
    cells = ["-" if kind is None else kind.removeprefix("measured_").replace("_", " ") for kind in kinds]
    return Column("speed", cells=cells, key="speed_kind", values=kinds, printed=any(run.shared for run in runs))


def _unit(values: Sequence[float | None], units: Sequence[tuple[str, float]], most: float) -> tuple[str, float]:
    """The smallest unit in which the largest value is below ``most``, for a whole column; and its size."""
    largest = max((abs(value) for value in values if value is not None), default=0.0)
    return next(((name, size) for name, size in units if largest < most * size), units[-1])


def _scaled(size: float) -> Callable[[float], str]:
    return lambda value: f"{value / size:,.1f}"


def _whole(value: float) -> str:
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
