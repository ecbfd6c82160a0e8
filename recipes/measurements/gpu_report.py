"""The table that gpu_acceptance.py writes: the rows of its calls, on one machine or several, and beside each row the
figures of README.md, of recipes/README.md and of the predictions for GPUs that it replaces or confirms. The predictions
were read off the source code before there was a GPU.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from gpipe_cli.system.files import write_whole

SHOWN = 400  # characters of a cell; the JSON file has all


@dataclass(frozen=True)
class Row:
    part: str
    what: str
    held: bool | None  # None: the row only reports figures
    figures: str
    published: str = ""  # torchgpipe's published speed


@dataclass
class Call:
    machine: str  # with versions
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)


# What follows is a text of that file.
README, RECIPES, PREDICTION = "README.md: ", "recipes/README.md: ", "prediction: "
GPUS, LAWS = "recipes/gpus.md: ", "recipes/contributing.md: "
NEW = ()

# For each part, regular expressions of what its rows show; the first that is found counts.
FIGURES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "versions": {
        "^data sheet of": (f"{PREDICTION}the data sheet is found by the name that the driver gives the GPU",),
        "^hardware=auto": (f"{GPUS}`hardware=h100` predicts a machine that you do not have",),
        "^hardware=|^Python|^torch|^gpipe|^dependencies|^NCCL|^driver|^GPUs by NVML": NEW,
    },
    "tests": {
        "^pytest -m gpu": (f"{GPUS}makes every run bit-identical, also on a GPU",
                           f"{PREDICTION}misaligned statistics of batch norms would end in a CUDA error"),
        "^failed": NEW,
    },
    "check": {"^gpipe check": (f"{LAWS}**K does not matter**",)},
    "resumption": {"^K=2, then 4": (f"{LAWS}**Resuming does not matter**",)},
    "links": {
        "processes on one device": (f"{RECIPES}| in the order of all actions (on GPUs) | at once, or when the GPU is",
                                    f"{PREDICTION}no order of messages deadlocks, however large"),
    },
    "nodes": {"^the other one names": (f"{LAWS}so is a machine that is lost",)},
    "synchronisations": {
        "calls that wait": (f"{GPUS}Logging and checkpoints never stall a GPU",),
        "the run$": NEW,
    },
    "memory": {
        "^activations": (f"{LAWS}saved activations to the byte", f"{PREDICTION}1 GiB is enough for the libraries"),
        "^out of memory": (f"{LAWS}a stage that fails or is killed ends the run, and is named",),
    },
    "prediction": {
        "cost=figures": (f"{RECIPES}median |error| of 178 speeds 7.5 %",),
        "cost=measured_anew": (f"{README}predicted    210.1 ms a step, measured 233.0 ms (11 % more)",),
    },
    "peers": {
        "^amoebanet, .*(gpipe, K|PyTorch)": (f"{RECIPES}gpipe, K = 1, M = 1 / plain PyTorch, one thread",),
        "^amoebanet, .*torchgpipe": (f"{RECIPES}most of the difference is not explained",),
        "^resnet, .*gpipe, K": (f"{RECIPES}Recomputation costs us more at K = 1 (0.66, the paper 0.80)",),
        "^resnet, .*PyTorch": (f"{RECIPES}| baseline | 95.9 | 97.6 | +1.8 |",),
        "^resnet, .*torchgpipe": (f"{RECIPES}| pipeline-1 | 81.8 | 82.7 | +1.0 |",),
        "^transformer_lm": NEW,
    },
    "speeds": {
        "deterministic=": (f"{GPUS}`false` chooses the fastest kernels",),
        "memory_format=": (f"{RECIPES}recompute / compute is 0.34 measured",
                           f"{PREDICTION}channels last may be slower in float32, by its depthwise convolutions"),
        "partitions=1$": NEW,
        "partitions=2$": (f"{RECIPES}| n = 2; m = 4 | 41.1 | 53.8 | +30.9 |",),
        "partitions=4$": (f"{RECIPES}| n = 4; m = 4 | 44.5 | 74.7 | +67.8 |",),
        "partitions=8$": (f"{RECIPES}| n = 8; m = 4 | 70.1 | 93.7 | +33.8 |",),
        "compile=": (f"{PREDICTION}compiled, a step spends less time on the launch of kernels",),
    },
}  # fmt: skip


def attempt(what: str, cell: Callable[[], tuple[str, bool | None, str]]) -> tuple[str, bool | None, str]:
    """The row that ``cell`` returns, or one with its error: a failure does not take the later rows with it."""
    try:
        return cell()
    except Exception as error:  # whatever it is, it is a finding
        return what, False, first_line(error)


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def replaced(part: str, what: str) -> str:
    """The figures that a row stands beside; '' if the table above lacks the row."""
    if what == "the part":
        return "new"
    return next(("; ".join(of) or "new" for name, of in FIGURES[part].items() if re.search(name, what)), "")


def joined(calls: Sequence[Call]) -> list[Call]:
    """The calls without the rows of parts that a later one has run again."""
    last = {row.part: number for number, call in enumerate(calls) for row in call.rows}
    kept = [
        Call(call.machine, call.seconds, [row for row in call.rows if last[row.part] == number])
        for number, call in enumerate(calls)
    ]
    return [call for call in kept if call.rows]


def report(calls: Sequence[Call]) -> str:
    """The machine and versions of each call, and the table of all rows in the order of the parts, in Markdown."""
    lines, order = [], list(FIGURES)
    for call in calls:
        parts = sorted({row.part for row in call.rows}, key=order.index)
        lines.append(f"* {', '.join(parts)}: {call.machine}; {call.seconds:.0f} s")
    rows = sorted((row for call in calls for row in call.rows), key=lambda row: order.index(row.part))
    judged = [row.held for row in rows if row.held is not None]
    lines += [
        "",
        f"{sum(judged)} of {len(judged)} held.",
        "",
        "| part | what | held | figures | replaces, or stands beside | published: torchgpipe, P40 |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        held = {True: "yes", False: "NO", None: ""}[row.held]
        cells = row.part, row.what, held, row.figures[:SHOWN], replaced(row.part, row.what), row.published
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def write(folder: Path, calls: Sequence[Call]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / "gpu_acceptance.json", json.dumps([asdict(call) for call in calls], indent=1))
    write_whole(folder / "gpu_acceptance.md", report(calls))


def read(file: Path) -> list[Call]:
    """The calls in a gpu_acceptance.json; raises OSError, or ValueError if it is none."""
    try:
        return [Call(**call | {"rows": [Row(**row) for row in call["rows"]]}) for call in json.loads(file.read_text())]
    except (TypeError, LookupError) as error:
        raise ValueError(f"{file}: is no table of gpu_acceptance.py") from error
