"""Notes below a comparison: which of its numbers cannot be compared, and why.

The paper names the hardware of its tables 2 and 3 and the data sets of table 4; runs that are compared here may differ
in any of that.
"""

from collections.abc import Iterator, Sequence

from gpipe_cli.config.typed import show
from gpipe_cli.reporting.compare.comparison import Comparison, listed
from gpipe_cli.reporting.compare.run_record import RunRecord, same_curves

MOST_ERRORS = 5  # failures that get a line of their own


def notes(comparison: Comparison) -> list[str]:
    """Sentences about runs that did not end, and about numbers that cannot be compared."""
    return [*_unfinished(comparison), *_different_work(comparison), *_speeds(comparison)]


def same_curve_notes(comparison: Comparison, tag: str) -> list[str]:
    """`train/loss is identical to the last bit: A, B, C`, for each group of runs."""
    groups = same_curves([run.curves.get(tag) for run in comparison.runs])
    return [f"{tag} is identical to the last bit: {comparison.referred(group)}" for group in groups]


def _unfinished(comparison: Comparison) -> Iterator[str]:
    runs = comparison.runs
    failed = [position for position, run in enumerate(runs) if run.result["status"] == "failed"]
    for position in failed[:MOST_ERRORS]:
        yield f"{comparison.referred([position])} failed: {runs[position].error}"
    if failed[MOST_ERRORS:]:
        yield f"{len(failed) - MOST_ERRORS:,} more failed; comparison.html and comparison.csv have their errors"
    for status, meaning in (
        ("interrupted", "interrupted, so not trained to the end"),
        ("running", "running: still at work, or killed; numbers are those of its last evaluation"),
        ("dry_run", "a dry run: nothing was trained"),
    ):
        yield from _of_which(comparison, meaning, [run.result["status"] == status for run in runs])


def _different_work(comparison: Comparison) -> Iterator[str]:
    runs = comparison.runs
    text = runs[0].text
    if tasks := _different(comparison, [run.result["task"] for run in runs]):
        yield f"different tasks ({tasks}): top-1 and perplexity cannot be compared, nor samples/s with tokens/s"
    elif data := _different(comparison, [_data(run) for run in runs]):
        score = "perplexity" if text else "top-1"
        yield f"different data sets ({data}): {score} is of different test sets and cannot be compared"
    if models := _different(comparison, [run.result["model"] for run in runs]):
        unit = "tokens/s" if text else "samples/s"
        yield (
            f"different models ({models}): {unit}, step, memory and FLOP/s are of different work; "
            "they compare models, not pipelines"
        )
    if _different(comparison, [run.result["command"] for run in runs]):
        yield "runs of gpipe bench are not evaluated: they have a speed and no accuracy"


def _speeds(comparison: Comparison) -> Iterator[str]:
    runs = comparison.runs
    if machines := _different(comparison, [run.machine for run in runs]):
        yield f"different machines ({machines}): speed, step, bubble and memory cannot be compared across them"
    for what, keys in (
        ("numbers of threads per process", ("hardware", "threads_per_process")),
        ("versions of torch", ("versions", "torch")),
    ):
        if found := _different(comparison, [run.value(*keys) for run in runs]):
            yield f"different {what} ({found}): speeds differ by that too"
    for kind, meaning in (
        ("measured_one_device", "one device: measured where stages shared a device or cores"),
        ("measured_contended", "contended: other programs had the stages' cores at times"),
    ):
        of_kind = [run.value("samples_per_second_kind") == kind for run in runs]
        yield from _of_which(comparison, f"{meaning} ({kind}), which is not the speed of a pipeline", of_kind)
    warm_up = "too short for a speed, so that of warm-up steps is shown"
    yield from _of_which(comparison, warm_up, [run.value("speed_includes_warm_up") for run in runs])
    resumed = "resumed, so their time is that since then"
    yield from _of_which(comparison, resumed, [run.value("resumed_from") is not None for run in runs])


def _of_which(comparison: Comparison, sentence: str, true: Sequence[bool]) -> Iterator[str]:
    """The sentence, and of which runs it is true; nothing if it is of none."""
    if any(true):
        yield f"{sentence}: {comparison.referred([position for position, holds in enumerate(true) if holds])}"


def _different(comparison: Comparison, values: Sequence[object]) -> str:
    """`digits: runs 1 to 3; cifar10: run 4`; of many values only what they are; "" where all runs have the same."""
    found: dict[str, list[int]] = {}
    for position, value in enumerate(values):
        found.setdefault(str(value), []).append(position)
    if len(found) == 1:
        return ""
    if len(found) > 3:
        return listed(list(found))
    return "; ".join(f"{value}: {comparison.referred(positions)}" for value, positions in found.items())


def _data(run: RunRecord) -> str:
    """The data set, and its classes if only some are taken."""
    classes = run.settings.get("dataset.classes")
    return f"{run.result['dataset']}{'' if classes is None else f' {show(classes)}'}"
