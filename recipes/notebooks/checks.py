"""Hidden checks of the exercises. They compute the truth with gpipe itself, or try everything; read them last."""

import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from commands import gpipe, new
from commands import plan as plan_now

from gpipe_cli.reproduction.recipe import read_recipe
from gpipe_cli.schedule.breakdown import breakdown
from gpipe_cli.schedule.dependencies import ScheduleError, clock, grid
from gpipe_cli.schedule.in_flight_memory import in_flight_counts
from gpipe_cli.schedule.named_schedules import order
from gpipe_cli.schedule.schedule import Action, Kind, Schedule
from gpipe_cli.schedule.schedule_file import read_schedule
from gpipe_cli.schedule.simulator import StageCost, simulate
from gpipe_cli.schedule.timeline import Timeline

plan = lru_cache(plan_now)  # an answer may be checked often; no plan here reads a file that the reader changes

_HERE = "model=custom model.target=models:mlp device=cpu hardware=cpu threads=1"
SIZES = ((1, 1), (1, 4), (2, 1), (2, 3), (3, 2), (4, 4), (4, 8), (5, 3))  # K, M


def check(exercise: str, answer: Any) -> None:
    """Prints whether the answer is right; otherwise a hint, or that the stub is still there."""
    try:
        hint = CHECKS[exercise](answer)
    except _UnansweredError:
        print(f"exercise {exercise}: not answered yet")
        return
    except Exception as error:
        hint = f"it ends with {type(error).__name__}: {error}"
    print(f"exercise {exercise}: right" if hint is None else f"exercise {exercise}: not yet: {hint}")


class _UnansweredError(Exception):
    pass


def _given(answer: Any) -> Any:
    """The answer, or what a function of the reader returned."""
    if answer is ...:
        raise _UnansweredError
    return answer


# --- 1: a pipeline by hand


def _step(partitions: int, micro_batches: int) -> Timeline:
    """A step of gpipe on equal stages whose forwards and backwards, of the whole mini-batch, take 1 and 2 seconds."""
    parts = partitions * micro_batches
    cost = StageCost(1 / parts, 1 / parts, 2 / parts)
    return simulate(order("gpipe", partitions, micro_batches), [cost] * partitions)


def _bubble(partitions: int, micro_batches: int) -> float:
    return breakdown(_step(partitions, micro_batches), micro_batches).bubble


def _running(answer: Callable[[int, int, int], Iterable[tuple[int, int]]]) -> str | None:
    for k, m in SIZES:
        forwards = Schedule(tuple(Action(Kind.F, stage, one) for one in range(m)) for stage in range(k))
        ticks = clock(forwards)
        for tick in range(m + k + 1):
            truth = {(stage, one) for stage, row in enumerate(ticks) for one, at in enumerate(row) if at == tick}
            found = list(_given(_given(answer)(tick, k, m)))
            if len(found) != len(set(found)):
                return f"with K={k}, M={m} a pair is listed twice at tick {tick}"
            if {*found} != truth:
                what = "misses a pair" if truth - {*found} else "lists a pair that does not run"
                return f"with K={k}, M={m} the list of tick {tick} {what}; micro-batch m reaches stage k after k ticks"
    return None


def _bubble_share(answer: Callable[[int, int], float]) -> str | None:
    for k, m in SIZES:
        found, truth = _given(_given(answer)(k, m)), _bubble(k, m)
        if abs(found - truth) > 1e-9:
            much = "much" if found > truth else "little"
            return f"with K={k}, M={m} that is too {much}; how many ticks has a stage, and in how many does it compute?"
    return None


def _enough(answer: int) -> str | None:
    least = next(m for m in range(1, 1000) if _bubble(4, m) < 0.1)
    if _given(answer) == least:
        return None
    return "its bubble is not below 10 %" if answer < least else "fewer are enough"


# --- 2: schedules as files


def _read(answer: str, partitions: int, micro_batches: int) -> Schedule:
    """The schedule of a text. Raises ScheduleError with the remedy and, if it shows where, the grid."""
    with TemporaryDirectory() as folder:
        file = Path(folder, "answer.csv")
        file.write_text(_given(answer))
        return read_schedule(str(file), partitions, micro_batches)


def _max_kept(schedule: Schedule) -> list[int]:
    """For each stage, the most micro-batches of which it holds the activations at once."""
    return [max(held.graph + held.input for held in in_flight_counts(actions)) for actions in schedule.stages]


def _ticks(schedule: Schedule) -> int:
    return 1 + max(at for row in clock(schedule) for at in row)


def _graded(schedule: Schedule) -> None:
    print(grid(schedule))


def _one_f_one_b(answer: str) -> str | None:
    try:
        schedule = _read(answer, 2, 4)
    except ScheduleError as error:
        return str(error)
    _graded(schedule)
    known = order("1f1b", 2, 4)
    kept, allowed = _max_kept(schedule), _max_kept(known)
    for stage, (found, most) in enumerate(zip(kept, allowed, strict=True)):
        if found > most:
            return f"stage {stage} keeps {found} micro-batches at once; 1F1B returns one before it takes more"
    if _ticks(schedule) > _ticks(known):
        return f"it takes {_ticks(schedule)} ticks and could take fewer: a stage waits although it has work"
    file = Path("outputs", "exercise_2a.csv")
    file.parent.mkdir(exist_ok=True)
    file.write_text(answer)
    different = gpipe(f"check schedule={file} {_HERE} executor=in_process run_folder={new('2a_check')}")
    return "gpipe check finds other gradients" if different else None


def _min_memory(answer: str) -> str | None:
    try:
        schedule = _read(answer, 2, 4)
    except ScheduleError as error:
        return str(error)
    _graded(schedule)
    most = max(_max_kept(schedule))
    if most > 1:
        return f"a stage keeps {most} micro-batches at once; begin one only after both stages have returned the last"
    return None


def _mended(answer: str, broken: str) -> str | None:
    try:
        schedule = _read(answer, 3, 2)
    except ScheduleError as error:
        return str(error)
    _graded(schedule)

    def rows(text: str) -> list[list[str]]:
        return [
            [cell.strip() for cell in line.split(",") if cell.strip()] for line in text.splitlines() if line.strip()
        ]

    changed = [k for k, (ours, theirs) in enumerate(zip(rows(answer), rows(broken), strict=True)) if ours != theirs]
    return f"rows {changed} were changed; one is enough" if len(changed) != 1 else None


# --- 3: memory

_MIDDLE = f"{_HERE} partitions=3 partition.balance=[4,4,2]"


def _kept_bytes(answer: Callable[[int, int, int], int], recompute: str) -> str | None:
    for samples, m, width in ((64, 4, 256), (96, 2, 128), (40, 8, 64)):
        settings = f"batch_size={samples} micro_batches={m} recompute={recompute} model.arguments={{width:{width}}}"
        found = _given(_given(answer)(samples, m, width))
        truth = plan(f"{_MIDDLE} {settings}")["stages"][1]["memory"]["activations_bytes"]
        if found != truth:
            which = f"with N={samples}, M={m}, width={width} stage 1 keeps {'more' if truth > found else 'fewer'} bytes"
            return f"{which}; count the tensors of a micro-batch, then the micro-batches that are kept at once"
    return None


def _fastest(answer: str, settings: str, limit: int) -> str | None:
    _given(answer)
    plans = {mode: plan(f"{settings} recompute={mode}") for mode in ("never", "always", "except_last")}
    fits = {mode: max(stage["memory"]["total_bytes"] for stage in it["stages"]) <= limit for mode, it in plans.items()}
    if answer not in plans:
        return f"choose one of {', '.join(plans)}"
    if not fits[answer]:
        return "its fullest stage does not fit"
    faster = [mode for mode in plans if fits[mode] and plans[mode]["step_seconds"] < plans[answer]["step_seconds"]]
    return "it fits, but another that fits is faster" if faster else None


# --- 4: slow steps

CAUSES = ("bubble", "imbalance", "transfer")
_MAY_CHANGE = ("micro_batches", "partition.balance", "partition.method", "schedule", "recompute")


def _cause(planned: Mapping[str, Any]) -> str:
    return max(CAUSES, key=planned["breakdown"].__getitem__)


def _causes(answer: Mapping[str, str], patients: Mapping[str, str]) -> str | None:
    for name, settings in patients.items():
        if _given(answer[name]) not in CAUSES:
            return f"{name}: name one of {', '.join(CAUSES)}"
        if answer[name] != _cause(plan(settings)):
            return f"{name}: another cause takes a larger share of its step"
    return None


def _cure(answer: str, patient: str) -> str | None:
    keys = [one.partition("=")[0] for one in shlex.split(_given(answer))]
    if other := [key for key in keys if key not in _MAY_CHANGE]:
        return f"{other[0]} may not change: the same work on the same machine; change {', '.join(_MAY_CHANGE)}"
    kept = " ".join(one for one in shlex.split(patient) if one.partition("=")[0] not in keys)
    sick, cured = plan(patient), plan(f"{kept} {answer}")
    cause = _cause(sick)
    if cured["step_seconds"] >= sick["step_seconds"]:
        return "the step is not faster"
    before, after = sick["breakdown"][cause], cured["breakdown"][cause]
    return f"{cause} still takes {after:.1%} of the step, {before:.1%} before" if 2 * after > before else None


# --- 5: a row of Table 2


def paper() -> dict[tuple[int, int], float]:
    """Table 2 of the paper (arXiv 1811.06965v5), Transformer-48: (K, M) -> speed relative to K = 2, M = 1."""
    (table,) = read_recipe("table2_transformer").values["tables"]
    return {(cell["partitions"], cell["micro_batches"]): cell["paper"] for cell in table["cells"]}


def _bound(answer: Callable[[int, int], float]) -> str | None:
    base = _step(2, 1).step_seconds
    for k, m in [*SIZES, *paper()]:
        found, truth = _given(_given(answer)(k, m)), base / _step(k, m).step_seconds
        if abs(found - truth) > 1e-9:
            return f"with K={k}, M={m} an ideal pipeline is {'faster' if truth > found else 'slower'} than that"
    return None


def _above(answer: Collection[tuple[int, int]]) -> str | None:
    base = _step(2, 1).step_seconds
    truth = {(k, m) for (k, m), speed in paper().items() if speed > base / _step(k, m).step_seconds + 1e-9}
    if {*_given(answer)} == truth:
        return None
    return "a cell is missing" if truth - {*answer} else "a cell is listed that does not exceed its bound"


def _nearest(answer: Mapping[int, int], plans: Sequence[Mapping[str, Any]], base: float) -> str | None:
    for k in (2, 4, 8):
        of_k = [one for one in plans if one["settings"]["partitions"] == k and one["error"] is None]
        off = {one["step_samples"]: abs(one["samples_per_second"] / base - paper()[k, 4]) for one in of_k}
        if _given(answer[k]) not in off:
            return f"K={k}: choose one of {', '.join(map(str, off))}, which fit the memory"
        if off[answer[k]] > min(off.values()):
            return f"K={k}: another N comes closer to the paper's {paper()[k, 4]}"
    return None


CHECKS: Mapping[str, Callable[[Any], str | None]] = {
    "1a": _running,
    "1b": _bubble_share,
    "1c": _enough,
    "2a": _one_f_one_b,
    "2b": _min_memory,
    "2c": lambda answer: _mended(*answer),
    "3a": lambda answer: _kept_bytes(answer, "never"),
    "3b": lambda answer: _kept_bytes(answer, "always"),
    "3c": lambda answer: _fastest(*answer),
    "4a": lambda answer: _causes(*answer),
    "4b": lambda answer: _cure(*answer),
    "4c": lambda answer: _cure(*answer),
    "4d": lambda answer: _cure(*answer),
    "5a": _bound,
    "5b": _above,
    "5c": lambda answer: _nearest(*answer),
}
