"""The columns of a comparison: settings in which runs differ, and results (as in the paper's tables 2, 3, 4 and 5).

Settings that are the same in all runs are left out, except K and M. Runs are named by the settings that differ, if
they are few (`partitions=2`), otherwise, or if they are two, by folders. Measured, predicted and ideal are separate.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gpipe_cli.config.pipeline_settings import Affects
from gpipe_cli.config.settings import settings_not_affecting
from gpipe_cli.errors import format_value
from gpipe_cli.reporting.compare.run_record import RunRecord
from gpipe_cli.reporting.compare.scaling import scalings
from gpipe_cli.reporting.tables.table import NONE, SYMBOLS, Column
from gpipe_cli.results.metrics import METRICS, Metric
from gpipe_cli.results.run import RunResult
from gpipe_cli.units import join_ranges

MAX_SETTINGS_IN_NAME = 3  # settings in a name; if more differ, runs are named by their folders
MAX_LISTED_WORDS = 8  # words of a list in a sentence


@dataclass(frozen=True)
class Comparison:
    """Runs and the columns that compare them. Columns have a key, and the value None where a run has no value."""

    runs: Sequence[RunRecord]
    names: Sequence[str]  # unique names of the runs
    by_settings: bool  # whether the runs are named by their settings
    settings: Sequence[Column]  # K, M and the settings that differ, by their dotted keys
    results: Sequence[Column]  # values in the units of result.json, cells in the unit of the heading

    @property
    def columns(self) -> Sequence[Column]:
        return *self.settings, *self.results

    def refer_to(self, positions: Sequence[int]) -> str:
        """The runs at `positions`: `all runs`; by settings, `partitions=2`; of two, the name; or `runs 1 to 4, 7`."""
        if len(positions) == len(self.runs) > 1:
            return "both runs" if len(positions) == 2 else "all runs"
        if self.by_settings or len(self.runs) == 2:
            return join_words([self.names[position] for position in positions])
        run = "run" if len(positions) == 1 else "runs"
        return f"{run} {join_words(join_ranges([position + 1 for position in positions], ' to '))}"


def compare(runs: Sequence[RunRecord]) -> Comparison:
    assert runs, "nothing to compare"
    keys = differing_settings(runs)
    results = [column for column in _results(runs) if any(value is not None for value in column.plain_values)]
    settings = [*SYMBOLS, *(key for key in keys if key not in SYMBOLS)]  # K and M even if they do not differ
    # two runs keep their folders' names, as their settings are rows
    by_settings = len(runs) != 2 and 0 < len(keys) <= MAX_SETTINGS_IN_NAME
    parts = _settings(runs, keys) if by_settings else _folders([run.folder.resolve().parts for run in runs])
    names = [
        name if parts.count(name) == 1 and name else f"{name} #{number}".strip()
        for number, name in enumerate(parts, start=1)
    ]
    return Comparison(runs, names, by_settings, [_setting(key, runs) for key in settings], results)


def differing_settings(runs: Sequence[RunRecord]) -> list[str]:
    """The keys of the settings that differ among the runs that have them.

    `threads` is left out if K and the executor determine it: by default, each process has its share of the cores.
    """
    values: dict[str, set[str]] = {}
    for run in runs:
        for key, value in run.settings.items():
            values.setdefault(key, set()).add(json.dumps(value, sort_keys=True))
    keys = [
        key for key, seen in values.items() if len(seen) > 1 and key not in settings_not_affecting(Affects.COMPARED)
    ]
    if "threads" in keys:
        cuts = [tuple(map(run.settings.get, ("partitions", "executor"))) for run in runs]
        threads = [run.settings.get("threads") for run in runs]
        if len(set(zip(cuts, threads, strict=True))) == len(set(cuts)):
            keys.remove("threads")
    return sorted(keys, key=lambda key: not key.endswith(".name"))  # the model before its settings


def join_words(words: Sequence[str]) -> str:
    """`a, b, and 3 more`; with semicolons if a word has commas."""
    separator = "; " if any("=" in word and "," in word for word in words) else ", "
    more = [f"and {len(words) - MAX_LISTED_WORDS:,} more"] if len(words) > MAX_LISTED_WORDS else []
    return separator.join([*words[:MAX_LISTED_WORDS], *more])


def _settings(runs: Sequence[RunRecord], keys: Sequence[str]) -> list[str]:
    """A name for each run, with settings as they are typed: `filters=16, partitions=2`; `model=resnet`."""
    last = [key.rpartition(".")[2] for key in keys]
    clear = [name if last.count(name) == 1 and name != "name" else key for key, name in zip(keys, last, strict=True)]
    pairs = [(key.removesuffix(".name"), full) for key, full in zip(clear, keys, strict=True)]
    return [
        ", ".join(f"{name}={format_value(run.settings[key])}" for name, key in pairs if key in run.settings)
        for run in runs
    ]


def _folders(folders: Sequence[tuple[str, ...]]) -> list[str]:
    """The shortest distinct endings of the paths, without date and time in a name if they are still distinct."""
    endings = (["/".join(folder[-n:]) for folder in folders] for n in range(1, max(map(len, folders)) + 1))
    ends = next((ends for ends in endings if len(set(ends)) == len(ends)), [folder[-1] for folder in folders])
    for begin in (r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_", r"\d{4}-\d\d-\d\d_"):
        shortened = [re.sub(rf"(^|/){begin}", r"\1", end) for end in ends]
        if len(set(shortened)) == len(shortened) > 1:
            return shortened
    return ends


def _setting(key: str, runs: Sequence[RunRecord]) -> Column:
    """The column of a setting. Cells tell the value `null` from a missing setting, `-`; both have the value None."""
    values = [run.settings.get(key) for run in runs]
    number = all(value is None or (isinstance(value, int | float) and not isinstance(value, bool)) for value in values)
    cells = [format_value(run.settings[key]) if key in run.settings else "-" for run in runs]
    heading = SYMBOLS.get(key) or _break_key(key.removesuffix(".name"), width=9)  # `model`, as it is typed
    return Column(heading, cells=cells, number=number, key=key, values=values)


def _break_key(key: str, width: int) -> str:
    """A key broken between its parts, into lines of at most ``width`` where possible: `micro_` above `batches`."""
    lines = [""]
    for part in re.findall(r"[^._]+[._]?|[._]", key):
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


# Columns of results from left to right.
_COLUMNS = (
    "test_top1", "best_top1", "validation_top1", "test_perplexity", "best_perplexity", "validation_perplexity",
    "test_loss", "samples_per_second", "samples_per_second_q1", "samples_per_second_q3", "tokens_per_second",
    "tokens_per_second_q1", "tokens_per_second_q3", "speed_kind", "speed_up", "efficiency", "step_seconds",
    "bubble_measured", "bubble_ideal",
    "idle_measured", "bubble_predicted", "step_seconds_predicted", "memory_bytes_fullest", "activation_bytes_fullest",
    "model_flops_per_second", "mfu", "epochs_done", "steps", "seconds", "start_seconds", "threads_per_process",
)  # fmt: skip
# A console omits columns that are for files only; for trainings, columns that do not fit next to their accuracies; for
# text, the speed in samples, which are sentences that differ in length.
_FILES_ONLY = {
    "test_loss", "bubble_ideal", "idle_measured", "bubble_predicted", "step_seconds_predicted",
    "activation_bytes_fullest", "epochs_done", "threads_per_process",
}  # fmt: skip
_IMAGE_MEASURES = {"samples_per_second", "samples_per_second_q1", "samples_per_second_q3"}
_BENCH_MEASURES = {
    "samples_per_second_q1", "samples_per_second_q3", "tokens_per_second_q1", "tokens_per_second_q3",
    "model_flops_per_second", "mfu",
}  # fmt: skip


def _results(runs: Sequence[RunRecord]) -> list[Column]:
    """The columns of results, including those in which no run has a value."""
    results = [run.result for run in runs]
    commands = {result.command for result in results}
    left_out = _FILES_ONLY | (set() if "bench" in commands else _BENCH_MEASURES)
    left_out |= _IMAGE_MEASURES if all(result.text for result in results) else set()
    scaled = scalings(runs)
    efficiencies = [scaling and scaling.efficiency for scaling in scaled]
    beyond_bases = [scaling for at, scaling in enumerate(scaled) if scaling is not None and scaling.base != at]
    if all(scaling.efficiency is None for scaling in beyond_bases):
        efficiencies = [None] * len(runs)  # only the bases have an efficiency, which is always 1
    computed: dict[str, list[Any]] = {
        "speed_up": [scaling and scaling.speed_up for scaling in scaled],
        "efficiency": efficiencies,
        "start_seconds": [result.starts[-1].seconds if len(result.starts) > 1 else None for result in results],
    }
    kinds = [result.samples_per_second_kind for result in results]
    shown = [NONE if kind is None else kind.removeprefix("measured_").replace("_", " ") for kind in kinds]

    def fact(key: str, values: Sequence[str | None], *, heading: str = "", printed: bool = False) -> Column:
        words = [value or NONE for value in values]
        return Column(heading or key, cells=words, key=key, values=values, printed=printed)

    columns = []
    for key in _COLUMNS:
        if key == "speed_kind":  # there is no room for `measured_one_device`
            shared = any(run.shares_devices for run in runs)
            columns.append(Column("speed", cells=shown, key=key, values=kinds, printed=shared))
        else:
            metric = METRICS[key]
            values = computed.get(key) or [metric.value(result) for result in results]
            columns.append(
                Column.of_measure(metric, values, _same_unit_values(metric, results), printed=key not in left_out)
            )
    return [
        fact("command", [result.command for result in results], printed=len(commands) > 1),
        fact("status", [result.status for result in results], printed=True),
        fact("started", [result.starts[-1].started if result.starts else None for result in results]),
        *columns,
        fact("machine", [run.machine for run in runs]),
        fact("torch", [result.versions.get("torch") for result in results]),
        *_machine_columns(results),
        fact("model", [result.model for result in results]),
        fact("dataset", [result.dataset for result in results], heading="data set"),
        fact("error", [run.error for run in runs]),
        fact("folder", [str(run.folder) for run in runs]),
    ]


def _machine_columns(results: Sequence[RunResult]) -> Iterator[Column]:
    """Other versions and facts of the machine, and commits of the code, in which runs differ; for files only."""
    ran_on: list[dict[str, Any]] = []
    for result in results:
        named = {f"version of {package}": version for package, version in result.versions.items()}
        for whose, commit in (result.starts[-1].code if result.starts else {}).items():
            changed = {None: ", perhaps changed", True: ", changed", False: ""}
            named[f"commit of {whose}"] = commit and commit["commit"][:12] + changed[commit["changed"]]
        ran_on.append(named | {key: result.hardware.get(key) for key in ("system", "memory_bytes")})
    for key in dict.fromkeys(key for facts in ran_on for key in facts if key != "version of torch"):
        values = [facts.get(key) for facts in ran_on]
        if any(value != values[0] for value in values):
            yield Column(
                key,
                cells=[NONE if value is None else format_value(value) for value in values],
                values=values,
                printed=False,
            )


def _same_unit_values(metric: Metric, results: Sequence[RunResult]) -> list[float | None]:
    """The values of all measures of the same Unit, so that their columns share one size: memory and activations."""
    alike = [other for other in METRICS.values() if other.unit is metric.unit and other.unit.sizes]
    return [other.value(result) for other in alike for result in results]
