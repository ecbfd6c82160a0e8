"""`gpipe list`: tables of the models, datasets, hardware and recipes to choose among, and of past runs."""

import re
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path

from rich.console import Console

from gpipe_cli.commands.split_arguments import split_arguments
from gpipe_cli.config.comments import all_settings, choice_descriptions
from gpipe_cli.config.did_you_mean import suggest_nearest
from gpipe_cli.config.groups import IMAGE_DATASETS
from gpipe_cli.config.settings import CONFIG_FILE, load_hardware
from gpipe_cli.errors import InputError, format_value
from gpipe_cli.models.timm_list import list_sequential_models
from gpipe_cli.reporting.compare.run_record import find_runs
from gpipe_cli.reporting.run.lines import show_text
from gpipe_cli.reporting.tables.table import NONE, SYMBOLS, TABLE, Column, Table, show_table, to_text
from gpipe_cli.results.metrics import Metric, select_metrics
from gpipe_cli.results.run import RunResult, read_run_result
from gpipe_cli.units import count, plural

PEAKS = {"float32": "peak_tflops", "tf32": "tf32_tflops", "bfloat16": "bfloat16_tflops"}
SPEEDS = ("samples_per_second", "tokens_per_second", "step_seconds")
Listing = tuple[Table, str]  # the table, and a line below it ("": none)
HELP = """\
Lists what there is to choose among, and what has been run.

Usage: gpipe list                         shows what can be listed
       gpipe list models                  model=...
       gpipe list models 'resnet*'        timm's of such names that are plain sequences, for model=timm model.name=...
       gpipe list datasets                dataset=...
       gpipe list hardware                hardware=..., with the figures that plans are made of
       gpipe list recipes                 of gpipe reproduce
       gpipe list runs [FOLDER]           in outputs or another folder, the newest first

format=json or format=csv, behind any of them, writes what is listed for programs: every column, numbers with all their
digits, and nothing else. A narrow terminal gets the columns that it has room for, a pipe all of them.

Examples
  gpipe list runs format=json | jq -r '.[] | select(.status == "completed") | .run'
  gpipe list hardware format=csv > hardware.csv
"""


def main(arguments: Sequence[str]) -> int:
    words, settings = split_arguments(arguments, "format")
    match words:
        case []:
            commands = [f"gpipe list {name}" for name in TOPICS]
            descriptions = [description for description, _ in TOPICS.values()]
            table = Table("", [Column("list", cells=commands, key="command"), Column("of", cells=descriptions)])
            line = ""
        case [("models" | "datasets" | "hardware" | "recipes" | "runs") as what]:
            table, line = TOPICS[what][1]()
        case ["models", pattern]:
            table, line = _timm(pattern)
        case ["runs", folder]:
            table, line = _runs(Path(folder))
        case [what, *more]:
            if what in TOPICS:
                taken = {"models": "one pattern", "runs": "one folder"}.get(what)
                extra, allowed = (more[1], f"{taken} and nothing more") if taken else (more[0], "nothing more")
                raise InputError(f"{extra}: gpipe list {what} takes {allowed}; remove it")
            hint = suggest_nearest(what, list(TOPICS)) or f"; choose one of {', '.join(TOPICS)}"
            raise InputError(f"{what}: no such list{hint}")
    if settings["format"] != TABLE:
        sys.stdout.write(to_text(table, settings["format"]))
        return 0
    console = Console()
    show_table(console, table, elsewhere="format=csv")
    if line:
        console.print()
        show_text(console, line)
    return 0


def _models() -> Listing:
    return _choices(
        "model", []
    ), "gpipe list models 'resnet*' lists timm's that are plain sequences of blocks (model=timm)"


def _datasets() -> Listing:
    settings = [setting for setting in all_settings() if setting.key == "dataset.root"]
    roots = {setting.place.partition("=")[2]: setting.value for setting in settings}
    names = list(choice_descriptions("dataset"))
    files = [{"???": "yours: dataset.root", None: "none"}.get(roots.get(name), roots.get(name, "")) for name in names]
    kinds = ["images" if name in IMAGE_DATASETS else "text" for name in names]
    return _choices("dataset", [Column("kind", cells=kinds), Column("files", cells=files)]), ""


def _hardware() -> Listing:
    figures = [load_hardware(name) for name in choice_descriptions("hardware")]

    def column(heading: str, key: str, *, printed: bool = True) -> Column:
        return Column.of(key, heading, [getattr(device, key) for device in figures], "{:,g}".format, printed=printed)

    columns = [
        *(column(f"TFLOP/s\n{name}", key) for name, key in PEAKS.items()),
        column("assumed\nfloat32", "tflops"),
        column("memory\nGiB", "memory_gib"),
        column("memory\nGB/s", "memory_gb_per_second", printed=False),
        column("link\nGB/s", "link_gb_per_second"),
    ]
    line = "TFLOP/s: peaks by data sheet; assumed: what a plan expects in float32, and that share of the other peaks"
    return _choices("hardware", columns, until=": "), line


def _choices(group: str, columns: Sequence[Column], until: str = r"(?<=\.) (?=[A-Z])") -> Table:
    """A row per choice of a group, with its file's description up to the pattern `until`, by default a sentence."""
    choices = choice_descriptions(group)
    sentences = [re.split(until, text)[0] for text in choices.values()]
    what = Column("what it is", cells=sentences, key="what", values=list(choices.values()))
    return Table("", [Column(group, cells=list(choices)), *columns, what])


def _timm(pattern: str) -> Listing:
    models, others = list_sequential_models(pattern)
    names, families, layers, parameters = zip(*models, strict=True) if models else ((),) * 4
    columns = [
        Column("model.name", cells=names),
        Column("family", cells=families),
        Column.of("layers", "layers", layers, str),
        Column.of("parameters", "parameters", parameters, count),
    ]
    line = f"{plural(len(models), 'plain sequence')}; {others} more of timm's names fit {pattern} and are none"
    return Table("", columns), line


def _recipes() -> Listing:
    from gpipe_cli.commands.reproduce import USAGE_HINT, recipes  # it imports all kinds of experiments

    return recipes(), USAGE_HINT


def _runs(folder: Path = Path("outputs")) -> Listing:
    try:
        runs = sorted(find_runs(folder), key=lambda run: (run / CONFIG_FILE).stat().st_mtime, reverse=True)
    except InputError as error:
        raise InputError(f"{error}; gpipe train begins one, gpipe list runs FOLDER looks elsewhere") from error
    begin_times, results = zip(*map(_start_and_result, runs), strict=True)

    def text(heading: str, values: Sequence[str | None]) -> Column:
        return Column(heading, cells=[value or NONE for value in values], values=values)

    def cut(key: str, symbol: str) -> Column:
        return Column.of(key, symbol, [result.config.get(key) for result in results], format_value)

    def number(metric: Metric) -> Column:
        values = [metric.value(result) for result in results]
        return Column.of_measure(metric, values, printed=any(value is not None for value in values))

    above = "" if folder in (Path(), *runs) else f"{folder}/"  # the folder that all runs share is the heading
    paths = list(map(str, runs))
    columns = [
        Column(above or "run", cells=[path.removeprefix(above) for path in paths], key="run", values=paths),
        *(cut(key, symbol) for key, symbol in SYMBOLS.items()),
        text("status", [result.status for result in results]),
        Column.of("started", "started", [started.isoformat() for started in begin_times], _format_minute),
        *map(number, select_metrics("test_top1", "test_perplexity", *SPEEDS)),
        text("dataset", [result.dataset for result in results]),
        text("model", [result.model for result in results]),
    ]
    return Table("", columns, names=4), ""


def _format_minute(time: str) -> str:
    return time[:16].replace("T", " ")


def _start_and_result(run: Path) -> tuple[datetime, RunResult]:
    """When a run began, and its result. If result.json is missing or damaged, the run is listed with that as status."""
    started = datetime.fromtimestamp((run / CONFIG_FILE).stat().st_mtime)
    try:
        result = read_run_result(run)
        return (datetime.fromisoformat(result.starts[-1].started) if result.starts else started), result
    except FileNotFoundError:
        return started, RunResult("no result")
    except (OSError, ValueError):  # somebody may have edited the file
        return started, RunResult("damaged")


TOPICS: dict[str, tuple[str, Callable[[], Listing]]] = {
    "models": ("models, model=...; with a pattern timm's names", _models),
    "datasets": ("data sets, dataset=...", _datasets),
    "hardware": ("devices with their figures, hardware=...", _hardware),
    "recipes": ("tables, figures and results of the paper, gpipe reproduce NAME", _recipes),
    "runs": ("what has been run, in outputs or another folder", _runs),
}
