"""Notes below a comparison: which of its numbers cannot be compared, and why.

The paper names the hardware of its tables 2 and 3 and the data sets of table 4; runs that are compared here may differ
in any of that.
"""

from collections.abc import Callable, Iterator, Sequence

from gpipe_cli.config.typed import show
from gpipe_cli.reporting.compare.comparison import Comparison
from gpipe_cli.reporting.compare.run_curves import same_curves
from gpipe_cli.reporting.compare.run_names import listed, referred
from gpipe_cli.reporting.compare.run_record import RunRecord

MOST_ERRORS = 5  # failures that get a line of their own
TRAINED = "completed"


def notes(comparison: Comparison) -> list[str]:
    """Sentences about runs that did not end, and about numbers that cannot be compared."""
    return [*_unfinished(comparison.runs), *_different_work(comparison.runs), *_speeds(comparison.runs)]


def same_curve_notes(comparison: Comparison, tag: str) -> list[str]:
    """`train/loss is identical to the last bit: A, B, C`, for each group of runs."""
    groups = same_curves(comparison.runs, tag)
    return [f"{tag} is identical to the last bit: {referred(comparison.runs, group)}" for group in groups]


def _unfinished(runs: Sequence[RunRecord]) -> Iterator[str]:
    failed = [position for position, run in enumerate(runs) if run.status == "failed"]
    for position in failed[:MOST_ERRORS]:
        yield f"{referred(runs, [position])} failed: {runs[position].error}"
    if failed[MOST_ERRORS:]:
        yield f"{len(failed) - MOST_ERRORS:,} more failed; comparison.html and comparison.csv have their errors"
    for status, meaning in (
        ("interrupted", "interrupted, so not trained to the end"),
        ("running", "running: still at work, or killed; numbers are those of its last evaluation"),
        ("dry_run", "a dry run: nothing was trained"),
    ):
        yield from _of_which(runs, meaning, [run.status == status for run in runs])


def _different_work(runs: Sequence[RunRecord]) -> Iterator[str]:
    text = runs[0].text
    if tasks := _different(runs, lambda run: run.result["task"]):
        yield f"different tasks ({tasks}): top-1 and perplexity cannot be compared, nor samples/s with tokens/s"
    elif data := _different(runs, _data):
        score = "perplexity" if text else "top-1"
        yield f"different data sets ({data}): {score} is of different test sets and cannot be compared"
    if models := _different(runs, lambda run: run.result["model"]):
        unit = "tokens/s" if text else "samples/s"
        yield (
            f"different models ({models}): {unit}, step, memory and FLOP/s are of different work; "
            "they compare models, not pipelines"
        )
    if _different(runs, lambda run: run.command):
        yield "runs of gpipe bench are not evaluated: they have a speed and no accuracy"


def _speeds(runs: Sequence[RunRecord]) -> Iterator[str]:
    if machines := _different(runs, lambda run: run.machine):
        yield f"different machines ({machines}): speed, step, bubble and memory cannot be compared across them"
    if threads := _different(runs, lambda run: run.result["hardware"]["threads_per_process"]):
        yield f"different numbers of threads per process ({threads}): speeds differ by that too"
    if versions := _different(runs, lambda run: run.result["versions"]["torch"]):
        yield f"different versions of torch ({versions}): speeds differ by that too"
    for kind, meaning in (
        ("measured_one_device", "one device: measured where stages shared a device or cores"),
        ("measured_contended", "contended: other programs had the stages' cores at times"),
    ):
        sentence = f"{meaning} ({kind}), which is not the speed of a pipeline"
        yield from _of_which(runs, sentence, [run.speed_kind == kind for run in runs])
    warm_up = [bool(run.result.get("speed_includes_warm_up")) for run in runs]
    yield from _of_which(runs, "too short for a speed, so that of warm-up steps is shown", warm_up)
    resumed = [run.result.get("resumed_from") is not None for run in runs]
    yield from _of_which(runs, "resumed, so their time is that since then", resumed)


def _of_which(runs: Sequence[RunRecord], sentence: str, true: Sequence[bool]) -> Iterator[str]:
    """The sentence, and of which runs it is true; nothing if it is of none."""
    if any(true):
        yield f"{sentence}: {referred(runs, [position for position, holds in enumerate(true) if holds])}"


def _different(runs: Sequence[RunRecord], of: Callable[[RunRecord], object]) -> str:
    """`digits: runs 1 to 3; cifar10: run 4`; of many values only what they are; "" where all runs have the same."""
    found: dict[str, list[int]] = {}
    for position, run in enumerate(runs):
        found.setdefault(str(of(run)), []).append(position)
    if len(found) == 1:
        return ""
    if len(found) > 3:
        return listed(list(found))
    return "; ".join(f"{value}: {referred(runs, positions)}" for value, positions in found.items())


def _data(run: RunRecord) -> str:
    """The data set, and its classes if only some are taken."""
    classes = run.settings.get("dataset.classes")
    return f"{run.result['dataset']}{'' if classes is None else f' {show(classes)}'}"
