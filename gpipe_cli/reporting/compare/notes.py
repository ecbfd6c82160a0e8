"""What must be said beside a comparison, so that no two numbers are compared which do not mean the same.

The paper sets its models and machines beside each other with care (tables 2 and 3 name the hardware, table 4 the data
set); a table made of any runs has to say itself where that care is due.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from gpipe_cli.config.typed import show
from gpipe_cli.reporting.compare.comparison import Comparison, machine, one_line
from gpipe_cli.reporting.compare.curves import same_curves
from gpipe_cli.reporting.compare.run_names import differing, listed, referred
from gpipe_cli.reporting.compare.run_record import NOT_OF_A_BENCH, RunRecord

MOST_ERRORS = 5  # failures that get a line of their own
TRAINED = "completed"


def notes(comparison: Comparison) -> list[str]:
    """Sentences about what the columns cannot say."""
    runs = comparison.runs
    return [*_unfinished(comparison), *_different_work(comparison), *_speeds(comparison), *_unknown_settings(runs)]


def same_curve_notes(comparison: Comparison, tag: str) -> list[str]:
    """`train/loss is identical to the last bit: A, B, C`, for each group of runs."""
    groups = same_curves(comparison.runs, tag)
    return [f"{tag} is identical to the last bit: {referred(comparison.runs, group)}" for group in groups]


def _unfinished(comparison: Comparison) -> Iterator[str]:
    by_status: dict[str, list[int]] = {}
    for position, run in enumerate(comparison.runs):
        if run.status != TRAINED:
            by_status.setdefault(run.status, []).append(position)
    failed = by_status.pop("failed", [])
    for position in failed[:MOST_ERRORS]:
        error = one_line(comparison.runs[position].result.get("error")) or "the run does not say why"
        yield f"{referred(comparison.runs, [position])} failed: {error}"
    if failed[MOST_ERRORS:]:
        yield f"{len(failed) - MOST_ERRORS:,} more failed; comparison.html and comparison.csv have their errors"
    meanings = {
        "interrupted": "interrupted, so not trained to the end",
        "running": "running: still at work, or killed; numbers are those of its last evaluation",
        "dry_run": "a dry run: nothing was trained",
    }
    for status, positions in by_status.items():
        yield f"{meanings.get(status, status)}: {referred(comparison.runs, positions)}"


def _different_work(comparison: Comparison) -> Iterator[str]:
    runs = comparison.runs
    if len(tasks := _groups(comparison, lambda run: run.result.get("task", "classification"))) > 1:
        yield f"different tasks ({_told(tasks)}): top-1 and perplexity cannot be compared, nor samples/s with tokens/s"
    elif len(data := _groups(comparison, _data)) > 1:
        score = "perplexity" if runs[0].text else "top-1"
        yield f"different data sets ({_told(data)}): {score} is of different test sets and cannot be compared"
    if len(models := _groups(comparison, lambda run: run.result.get("model"))) > 1:
        unit = "tokens/s" if runs[0].text else "samples/s"
        yield (
            f"different models ({_told(models)}): {unit}, step, memory and FLOP/s are of different work; "
            "they compare models, not pipelines"
        )
    if len(_groups(comparison, lambda run: run.result.get("command", "train"))) > 1:
        yield "runs of gpipe bench are not evaluated: they have a speed and no accuracy"


def _speeds(comparison: Comparison) -> Iterator[str]:
    if len(machines := _groups(comparison, machine)) > 1:
        yield f"different machines ({_told(machines)}): speed, step, bubble and memory cannot be compared across them"
    for name, key, what in (
        ("numbers of threads per process", "hardware", "threads_per_process"),
        ("versions of torch", "versions", "torch"),
    ):
        found = _groups(comparison, _of_inner(key, what))
        if len(found) > 1:
            yield f"different {name} ({_told(found)}): speeds differ by that too"
    for kind, meaning in (
        ("one_device", "measured where stages shared a device or cores"),
        ("contended", "other programs had the stages' cores at times"),
    ):
        if shared := [n for n, run in enumerate(comparison.runs) if run.speed_kind == f"measured_{kind}"]:
            yield (
                f"{kind.replace('_', ' ')}: {meaning} (measured_{kind}), which is not the speed of a pipeline: "
                f"{referred(comparison.runs, shared)}"
            )
    if warm := [n for n, run in enumerate(comparison.runs) if run.result.get("speed_includes_warm_up")]:
        yield f"too short for a speed, so that of warm-up steps is shown: {referred(comparison.runs, warm)}"
    if resumed := [n for n, run in enumerate(comparison.runs) if run.result.get("resumed_from")]:
        yield f"resumed, so their time is that since then: {referred(comparison.runs, resumed)}"


def _unknown_settings(runs: Sequence[RunRecord]) -> Iterator[str]:
    """Settings that only some runs have although all made the same choices: other versions of gpipe wrote them."""
    known = set(differing(runs))  # these have a column
    keys = dict.fromkeys(key for run in runs for key in run.settings if key not in known)
    unknown = []
    for key in keys:
        group = key.partition(".")[0]
        have = [run for run in runs if key in run.settings]
        lack = [run for run in runs if key not in run.settings and not (run.bench and group in NOT_OF_A_BENCH)]
        choice = f"{group}.name"
        same = {run.settings.get(choice) for run in have} & {run.settings.get(choice) for run in lack}
        whole = group == key or any(choice in run.settings for run in lack)
        nothing = all(have_run.settings[key] in (None, False) for have_run in have)
        if lack and same and whole and not nothing:
            unknown.append(f"{key}={show(have[0].settings[key])}")
    if unknown:
        yield f"settings that some of the runs do not say, as another version of gpipe wrote them: {listed(unknown)}"


def _groups(comparison: Comparison, of: Callable[[RunRecord], Any]) -> dict[str, str]:
    """What ``of`` says of the runs, and of which; without those of which it says nothing."""
    found: dict[str, list[int]] = {}
    for position, run in enumerate(comparison.runs):
        if (value := of(run)) is not None:
            found.setdefault(str(value), []).append(position)
    return {value: referred(comparison.runs, positions) for value, positions in found.items()}


def _told(groups: dict[str, str]) -> str:
    """`digits: runs 1 to 3; cifar10: run 4`; of many groups only what they are."""
    if len(groups) > 3:
        return listed(list(groups))
    return "; ".join(f"{value}: {runs}" for value, runs in groups.items())


def _data(run: RunRecord) -> str | None:
    """The data set, and its classes if only some are taken."""
    classes = run.settings.get("dataset.classes")
    name = run.result.get("dataset")
    return None if name is None else str(name) if classes is None else f"{name} {show(classes)}"


def _of_inner(key: str, what: str) -> Callable[[RunRecord], Any]:
    def of(run: RunRecord) -> Any:
        value = run.result.get(key)
        return value.get(what) if isinstance(value, dict) else None

    return of
