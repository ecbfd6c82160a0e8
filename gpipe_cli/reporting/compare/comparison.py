"""What runs are compared by: the settings in which they differ, and their results (the paper's tables 2, 3, 4 and 5).

Settings that are the same in all runs are left out, and rows are named by the few that differ, `partitions=2`, or by
their folders. What was measured, predicted and ideal are columns apart.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gpipe_cli.config.typed import show
from gpipe_cli.reporting.compare.run_record import RunRecord
from gpipe_cli.reporting.compare.scaling import scalings
from gpipe_cli.reporting.tables.table import SYMBOLS, Column
from gpipe_cli.units import GIB, MIB, operations, rate, spans

WHOLE = "{:,.0f}".format
NOT_COMPARED = frozenset({"run_folder", "output", "resume", "max_restarts"})  # where it lies, not what it is
MOST_NAMING = 3  # settings that a name is made of; more make no name
MOST_LISTED = 8  # words of a list in a sentence


@dataclass(frozen=True)
class Comparison:
    """Runs beside each other. Columns have a key, and None as value where a run has none."""

    runs: Sequence[RunRecord]
    names: Sequence[str]  # of the runs, no two of them alike
    by_settings: bool  # that is what they are named by
    settings: Sequence[Column]  # K, M and those that differ, by their dotted keys
    results: Sequence[Column]  # values in the units of result.json, cells in those of the heading

    @property
    def columns(self) -> Sequence[Column]:
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
        return f"{run} {listed(spans([position + 1 for position in positions], ' to '))}"


def compare(runs: Sequence[RunRecord]) -> Comparison:
    assert runs, "nothing to compare"
    keys = differing(runs)
    results = [column for column in _results(runs) if any(value is not None for value in column.plain_values)]
    settings = [*SYMBOLS, *(key for key in keys if key not in SYMBOLS)]  # K and M also if they do not differ
    return Comparison(runs, names(runs), _by_settings(keys), [_setting(key, runs) for key in settings], results)


def differing(runs: Sequence[RunRecord]) -> list[str]:
    """The settings of which runs have different values; one that a run does not have at all is none of them.

    `threads` only where K does not decide them: by default each process has its share of the cores.
    """
    values: dict[str, set[str]] = {}
    for run in runs:
        for key, value in run.settings.items():
            values.setdefault(key, set()).add(json.dumps(value, sort_keys=True))
    keys = [key for key, found in values.items() if len(found) > 1 and key not in NOT_COMPARED]
    if "threads" in keys:
        cuts = [tuple(map(run.settings.get, ("partitions", "executor"))) for run in runs]
        threads = [run.settings.get("threads") for run in runs]
        if len(set(zip(cuts, threads, strict=True))) == len(set(cuts)):
            keys.remove("threads")
    return sorted(keys, key=lambda key: not key.endswith(".name"))  # the model before its own settings


def names(runs: Sequence[RunRecord]) -> list[str]:
    """A different name for each run: `partitions=2`, or a piece of its folder's name."""
    keys = differing(runs)
    by_folders = not _by_settings(keys)
    found = _folders([run.folder.resolve().parts for run in runs]) if by_folders else _settings(runs, keys)
    return [
        name if found.count(name) == 1 and name else f"{name} #{number}".strip()
        for number, name in enumerate(found, start=1)
    ]


def listed(words: Sequence[str]) -> str:
    """`a, b, and 3 more`; with semicolons where a word has commas of its own."""
    separator = "; " if any("=" in word and "," in word for word in words) else ", "
    more = [f"and {len(words) - MOST_LISTED:,} more"] if len(words) > MOST_LISTED else []
    return separator.join([*words[:MOST_LISTED], *more])


def _by_settings(keys: Sequence[str]) -> bool:
    """Whether so few settings differ that they make a name."""
    return 0 < len(keys) <= MOST_NAMING


def _settings(runs: Sequence[RunRecord], keys: Sequence[str]) -> list[str]:
    """`filters=16, partitions=2`; `model=resnet`, as one types it."""
    last = [key.rpartition(".")[2] for key in keys]
    clear = [name if last.count(name) == 1 and name != "name" else key for key, name in zip(keys, last, strict=True)]
    pairs = [(key.removesuffix(".name"), full) for key, full in zip(clear, keys, strict=True)]
    return [
        ", ".join(f"{name}={show(run.settings[key])}" for name, key in pairs if key in run.settings) for run in runs
    ]


def _folders(folders: Sequence[tuple[str, ...]]) -> list[str]:
    """The last parts of paths, as many as tell them apart.

    The time that begins a run folder's name is kept where nothing else differs, and the date where runs are of several.
    """
    most = max(map(len, folders))
    endings = (["/".join(folder[-n:]) for folder in folders] for n in range(1, most + 1))
    ends = next((found for found in endings if len(set(found)) == len(found)), [folder[-1] for folder in folders])
    for begin in (r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_", r"\d{4}-\d\d-\d\d_"):
        found = [re.sub(rf"(^|/){begin}", r"\1", end) for end in ends]
        if len(set(found)) == len(found) > 1:
            return found
    return ends


def _setting(key: str, runs: Sequence[RunRecord]) -> Column:
    """In a cell `null` is a value, and `-` stands where a run has no such setting; values have None for both."""
    values = [run.settings.get(key) for run in runs]
    number = all(value is None or (isinstance(value, int | float) and not isinstance(value, bool)) for value in values)
    cells = [show(run.settings[key]) if key in run.settings else "-" for run in runs]
    heading = SYMBOLS.get(key) or _folded(key.removesuffix(".name"))  # `model`, as one types it
    return Column(heading, cells=cells, number=number, key=key, values=values)


def _folded(key: str, width: int = 9) -> str:
    """A key over several lines, each as near to ``width`` as its parts allow: `micro_` above `batches`."""
    lines = [""]
    for part in re.findall(r"[^._]+[._]?|[._]", key):
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def _results(runs: Sequence[RunRecord]) -> list[Column]:
    """The results of the runs, also columns in which no run has a value."""
    # Trainings have quartiles and FLOP/s too, but no room for them beside their accuracies.
    commands = {run.result["command"] for run in runs}
    bench = "bench" in commands
    # Sentences differ in length: the speed of text in samples stands on the page and in CSV only.
    images = not all(run.text for run in runs)
    time, seconds = _unit([run.value("seconds") for run in runs], (("s", 1), ("min", 60), ("h", 3600)), 120)
    step, step_seconds = _unit([run.value("step_seconds") for run in runs], (("ms", 1e-3), ("s", 1)), 10_000)
    scaled = scalings(runs)
    speed_ups = [one and one.speed_up for one in scaled]
    efficiencies = [one and one.efficiency for one in scaled]
    if not any(one is not None and one.base != at and one.efficiency is not None for at, one in enumerate(scaled)):
        efficiencies = [None] * len(runs)  # that of what is compared with says nothing
    peaks = [peak for run in runs for peak in run.value("memory_bytes") or []]
    memory, size = _unit(peaks, (("MiB", MIB), ("GiB", GIB)), 10 * 1024)

    def column(
        key: str, heading: str, of: Callable[[RunRecord], Any], form: Callable[[Any], str] = str, printed: bool = False
    ) -> Column:
        return listed_column(key, heading, [of(run) for run in runs], form, printed)

    def listed_column(
        key: str, heading: str, values: Sequence[Any], form: Callable[[Any], str], printed: bool
    ) -> Column:
        cells = ["-" if value is None else form(value) for value in values]
        number = any(isinstance(value, int | float) for value in values)
        return Column(heading, cells=cells, number=number, key=key, values=values, printed=printed)

    def number(key: str, heading: str, *at: str, form: Callable[[float], str] = WHOLE, printed: bool = True) -> Column:
        return column(key, heading, lambda run: run.value(*(at or [key])), form, printed)

    def quartile(which: int, key: str, printed: bool) -> Column:
        name = ("q1", "q3")[which]
        return column(
            f"{key}_{name}", f"{name}\n/s", lambda run: (run.value(f"{key}_quartiles") or (None, None))[which], rate,
            printed,
        )  # fmt: skip

    def fullest(key: str, heading: str, printed: bool) -> Column:
        heading = f"{heading}\n{memory}"
        return column(
            f"{key}_fullest", heading, lambda run: max(run.value(key) or [], default=None), _scaled(size), printed
        )  # fmt: skip

    return [
        column("command", "command", lambda run: run.value("command"), printed=len(commands) > 1),
        column("status", "status", lambda run: run.value("status"), printed=True),
        column("started", "started", lambda run: (run.value("starts") or [{}])[-1].get("started")),
        number("test_top1", "top-1\n%", "test", "top1", form=_percent),
        number("best_top1", "best\n%", "best", "top1", form=_percent),
        number("test_perplexity", "perpl.\nfinal", "test", "perplexity", form=_short_number),
        number("best_perplexity", "perpl.\nbest", "best", "perplexity", form=_short_number),
        number("test_loss", "test loss", "test", "loss", form=_short_number, printed=False),
        number("samples_per_second", "samples\n/s", form=rate, printed=images),
        quartile(0, "samples_per_second", images and bench),
        quartile(1, "samples_per_second", images and bench),
        number("tokens_per_second", "tokens\n/s", form=rate),
        quartile(0, "tokens_per_second", bench),
        quartile(1, "tokens_per_second", bench),
        column(  # there is no room for `measured_one_device`
            "speed_kind", "speed", lambda run: run.value("samples_per_second_kind"),
            lambda kind: kind.removeprefix("measured_").replace("_", " "), any(run.shared for run in runs),
        ),
        listed_column("speed_up", "speed-\nup", speed_ups, "{:.2f}".format, True),
        listed_column("efficiency", "effi-\nciency %", efficiencies, _percent, True),
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
        column("machine", "machine", lambda run: run.machine),
        column("torch", "torch", lambda run: run.value("versions", "torch")),
        column("model", "model", lambda run: run.value("model")),
        column("dataset", "data set", lambda run: run.value("dataset")),
        column("error", "error", lambda run: run.error),
        column("folder", "folder", lambda run: str(run.folder)),
    ]  # fmt: skip


def _unit(values: Sequence[float | None], units: Sequence[tuple[str, float]], most: float) -> tuple[str, float]:
    """The smallest unit in which the largest value is below ``most``, for a whole column; and its size."""
    largest = max((abs(value) for value in values if value is not None), default=0.0)
    return next(((name, size) for name, size in units if largest < most * size), units[-1])


def _scaled(size: float) -> Callable[[float], str]:
    return lambda value: f"{value / size:,.1f}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _short_number(value: float) -> str:
    """Losses and perplexities, four digits of them: `1.234`, `103.3`, `12,345`, `1.2e+08`."""
    if value >= 999_999.5:
        return f"{value:.1e}"
    return f"{value:,.0f}" if value >= 999.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.3f}"
