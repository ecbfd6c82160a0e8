"""What runs are compared by: the settings in which they differ, and their results (the paper's tables 2, 3, 4 and 5).

Settings that are the same in all runs are left out, and rows are named by the few
that differ. What was measured, predicted and ideal are columns apart.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpipe_cli.config.typed import show
from gpipe_cli.reporting.compare.run_names import differing, few, folded, names
from gpipe_cli.reporting.compare.run_record import RunRecord
from gpipe_cli.reporting.tables.table import Column
from gpipe_cli.units import operations

GIB, MIB = 2**30, 2**20


@dataclass(frozen=True)
class Comparison:
    """Runs beside each other. Columns have a key, and None as value where a run has none."""

    runs: tuple[RunRecord, ...]
    names: tuple[str, ...]  # of the runs, no two of them alike
    by_settings: bool  # that is what they are named by
    settings: tuple[Column, ...]  # those that differ, by their dotted keys; values as they are typed
    results: tuple[Column, ...]  # values in the units of result.json, cells in those of the heading

    @property
    def columns(self) -> tuple[Column, ...]:
        """All of them."""
        return *self.settings, *self.results


def compare(runs: Sequence[RunRecord]) -> Comparison:
    """Puts runs beside each other."""
    assert runs, "nothing to compare"
    keys = differing(runs)
    results = (column for column in _results(runs) if any(value is not None for value in column.plain_values))
    settings = (_setting(key, runs) for key in keys)
    return Comparison(tuple(runs), tuple(names(runs)), few(keys), tuple(settings), tuple(results))


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

    def text(key: str, heading: str, of: Callable[[RunRecord], str | None], printed: bool = True) -> Column:
        values = [of(run) for run in runs]
        return Column(heading, cells=[value or "-" for value in values], key=key, values=values, printed=printed)

    def number(
        key: str, heading: str, of: Callable[[RunRecord], float | None], form: Callable[[float], str] = _whole,
        printed: bool = True,
    ) -> Column:  # fmt: skip
        values = [of(run) for run in runs]
        cells = ["-" if value is None else form(value) for value in values]
        return Column(heading, cells=cells, number=True, key=key, values=values, printed=printed)

    def of(*keys: str) -> Callable[[RunRecord], float | None]:
        return lambda run: run.number(*keys)

    def fullest(key: str) -> Callable[[RunRecord], float | None]:
        return lambda run: max(run.numbers(key), default=None)

    def quartile(key: str, which: int) -> Callable[[RunRecord], float | None]:
        return lambda run: found[which] if (found := run.numbers(key)) else None

    # Trainings have quartiles and FLOP/s too, but no room for them beside their accuracies.
    commands = {run.command for run in runs}
    bench = "bench" in commands
    # Sentences differ in length: the speed of text in samples stands on the page and in CSV only.
    images = not all(run.text for run in runs)
    time, seconds = _unit([run.number("seconds") for run in runs], (("s", 1), ("min", 60), ("h", 3600)), 120)
    step, step_seconds = _unit([run.number("step_seconds") for run in runs], (("ms", 1e-3), ("s", 1)), 10_000)
    memory, size = _unit([fullest("memory_bytes")(run) for run in runs], (("MiB", MIB), ("GiB", GIB)), 10 * 1024)
    return [
        text("command", "command", lambda run: run.command, len(commands) > 1),
        text("status", "status", lambda run: run.status),
        number("test_top1", "top-1\n%", of("test", "top1"), _percent),
        number("best_top1", "best\n%", of("best", "top1"), _percent),
        number("test_perplexity", "perpl.\nfinal", of("test", "perplexity"), _short_number),
        number("best_perplexity", "perpl.\nbest", of("best", "perplexity"), _short_number),
        number("test_loss", "test loss", of("test", "loss"), _short_number, False),
        number("samples_per_second", "samples\n/s", of("samples_per_second"), _rate, images),
        number("samples_per_second_q1", "q1\n/s", quartile("samples_per_second_quartiles", 0), _rate, images and bench),
        number("samples_per_second_q3", "q3\n/s", quartile("samples_per_second_quartiles", 1), _rate, images and bench),
        number("tokens_per_second", "tokens\n/s", of("tokens_per_second"), _rate),
        number("tokens_per_second_q1", "q1\n/s", quartile("tokens_per_second_quartiles", 0), _rate, bench),
        number("tokens_per_second_q3", "q3\n/s", quartile("tokens_per_second_quartiles", 1), _rate, bench),
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
        number("epochs_done", "epochs\ndone", of("epochs"), printed=False),
        number("steps", "steps", of("steps")),
        number("seconds", f"time\n{time}", of("seconds"), _scaled(seconds)),
        number("threads_per_process", "threads", of("hardware", "threads_per_process"), printed=False),
        text("machine", "machine", lambda run: run.machine, False),
        text("torch", "torch", lambda run: run.result["versions"]["torch"], False),
        text("model", "model", lambda run: run.result["model"], False),
        text("dataset", "data set", lambda run: run.result["dataset"], False),
        text("error", "error", lambda run: run.error, False),
        text("folder", "folder", lambda run: str(run.folder), False),
    ]  # fmt: skip


def _speed_kind(runs: Sequence[RunRecord]) -> Column:
    """In the table only where a run is not `measured`; there is no room for `measured_one_device`."""
    kinds = [run.speed_kind for run in runs]
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
