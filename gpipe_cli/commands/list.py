"""`gpipe list`: what there is to choose among, and what has been run; a table each."""

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, get_args, get_type_hints

from rich.console import Console

from gpipe_cli.commands.reproduce import show_recipes
from gpipe_cli.config.comments import all_settings, of_choices
from gpipe_cli.config.groups import ImagesConfig
from gpipe_cli.config.settings import CONFIG, load_hardware
from gpipe_cli.config.typed import nearest
from gpipe_cli.errors import InputError
from gpipe_cli.reporting.compare.run_record import find_runs
from gpipe_cli.reporting.run.lines import show_line
from gpipe_cli.reporting.run.result import RESULT, read_result, value_of
from gpipe_cli.reporting.tables.table import Column, Table, show_table
from gpipe_cli.system.interrupts import interruptible_import
from gpipe_cli.units import count, percent, perplexity, plural, rate

NONE = "-"
HELP = """\
Lists what there is to choose among, and what has been run.

Usage: gpipe list                         says what can be listed
       gpipe list models                  model=...
       gpipe list models 'resnet*'        those of timm with such names that are chains, for model=timm model.name=...
       gpipe list datasets                dataset=...
       gpipe list hardware                hardware=..., with the figures that plans are made of
       gpipe list recipes                 of gpipe reproduce
       gpipe list runs [FOLDER]           in outputs or another folder, the newest first
"""


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code. Raises InputError, one line, for what the user can mend."""
    if any(argument in ("-h", "--help") for argument in arguments):
        sys.stdout.write(HELP)
        return 0
    console = Console()
    match list(arguments):
        case []:
            _topics(console)
        case [("models" | "datasets" | "hardware" | "recipes" | "runs") as what]:
            TOPICS[what][1](console)
        case ["models", pattern]:
            _timm(console, pattern)
        case ["runs", folder]:
            _runs(console, Path(folder))
        case [what, *more]:
            if what in TOPICS:
                taken = {"models": "one pattern", "runs": "one folder"}.get(what)
                extra, allowed = (more[1], f"{taken} and nothing more") if taken else (more[0], "nothing more")
                raise InputError(f"{extra}: gpipe list {what} takes {allowed}; leave it out")
            hint = nearest(what, list(TOPICS)) or f"; choose one of {', '.join(TOPICS)}"
            raise InputError(f"{what}: there is no such list{hint}")
    return 0


def _topics(console: Console) -> None:
    rows = [(f"gpipe list {name}", line) for name, (line, _) in TOPICS.items()]
    show_table(console, Table.of_rows("", [Column("list"), Column("of")], rows))


def _models(console: Console) -> None:
    _show_choices(console, "model", [])
    console.print()
    show_line(console, "gpipe list models 'resnet*' lists those of timm with such names that are chains (model=timm)")


def _datasets(console: Console) -> None:
    images = get_args(get_type_hints(ImagesConfig)["name"])
    roots = {one.place.partition("=")[2]: one.value for one in all_settings() if one.key == "dataset.root"}
    names = list(of_choices("dataset"))
    files = [{"???": "yours: dataset.root", None: "none"}.get(roots.get(name), roots.get(name, "")) for name in names]
    kinds = ["images" if name in images else "text" for name in names]
    _show_choices(console, "dataset", [Column("kind", cells=kinds), Column("files", cells=files)])


def _hardware(console: Console) -> None:
    figures = [load_hardware(name) for name in of_choices("hardware")]

    def column(heading: str, values: Iterable[float | None]) -> Column:
        return Column(heading, cells=[NONE if value is None else f"{value:,g}" for value in values], number=True)

    columns = [
        column("TFLOP/s\nfloat32", (one.peak_tflops for one in figures)),
        column("TFLOP/s\nbfloat16", (one.bfloat16_tflops for one in figures)),
        column("memory\nGiB", (one.memory_gib for one in figures)),
        column("link\nGB/s", (one.link_gb_per_second for one in figures)),
    ]
    _show_choices(console, "hardware", columns)


def _show_choices(console: Console, group: str, columns: Sequence[Column]) -> None:
    """A row for each choice of a group, with the first sentence of what its file says of it."""
    choices = of_choices(group)
    sentences = [re.split(r"(?<=\.) (?=[A-Z])|(?<=[^.]): data sheet", text)[0] for text in choices.values()]
    table = Table("", [Column(group, cells=list(choices)), *columns, Column("what it is", cells=sentences)])
    show_table(console, table)


def _timm(console: Console, pattern: str) -> None:
    with interruptible_import():
        from gpipe_cli.models.timm_models import chains  # torch comes with it

    found, others = chains(pattern)
    rows = [(name, family, str(layers), count(parameters)) for name, family, layers, parameters in found]
    columns = [Column("model.name"), Column("family"), Column("layers", number=True), Column("parameters", number=True)]
    if rows:
        show_table(console, Table.of_rows("", columns, rows))
        console.print()
    show_line(console, f"{plural(len(rows), 'chain')}; {others} more of timm's names fit {pattern} and are none")


def _runs(console: Console, folder: Path = Path("outputs")) -> None:
    try:
        found = sorted(find_runs(folder), key=lambda run: (run / CONFIG).stat().st_mtime, reverse=True)
    except InputError as error:
        raise InputError(f"{error}; gpipe train begins one, gpipe list runs FOLDER looks elsewhere") from error
    columns = [
        Column("run"), Column("started", number=True), Column("status"), Column("model"), Column("dataset"),
        Column("K", number=True), Column("M", number=True), Column("test", number=True),
        Column("samples/s", number=True),
    ]  # fmt: skip
    show_table(console, Table.of_rows("", columns, map(_row, found)))


def _row(run: Path) -> Sequence[str]:
    """One with a result.json that cannot be read is listed too, and so are those after it."""
    begun = datetime.fromtimestamp((run / CONFIG).stat().st_mtime)
    try:
        result: dict[str, Any] = read_result(run) if (run / RESULT).exists() else {"status": "no result"}
        if starts := result.get("starts"):
            begun = datetime.fromisoformat(starts[-1]["started"])
        described = [
            str(result["status"]),
            str(result.get("model", NONE)),
            str(result.get("dataset", NONE)),
            str(value_of(result, "config", "partitions") or NONE),
            str(value_of(result, "config", "micro_batches") or NONE),
            *_scores(result),
        ]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # as it stands in a file that was edited
        described = ["damaged", *[NONE] * 6]
    return str(run), f"{begun:%Y-%m-%d %H:%M}", *described


def _scores(result: dict[str, Any]) -> tuple[str, str]:
    """Of the test set, and the speed."""
    top1, text = value_of(result, "test", "top1"), value_of(result, "test", "perplexity")
    score = percent(top1) if top1 is not None else f"perplexity {perplexity(text)}" if text is not None else NONE
    speed = value_of(result, "samples_per_second")
    return score, NONE if speed is None else rate(speed)


TOPICS: dict[str, tuple[str, Callable[[Console], None]]] = {
    "models": ("models, model=...; with a pattern timm's names", _models),
    "datasets": ("data sets, dataset=...", _datasets),
    "hardware": ("devices with their figures, hardware=...", _hardware),
    "recipes": ("tables, figures and results of the paper, gpipe reproduce NAME", show_recipes),
    "runs": ("what has been run, in outputs or another folder", _runs),
}
