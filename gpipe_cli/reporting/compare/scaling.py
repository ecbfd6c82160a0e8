"""Speed-up and efficiency over K, as in the paper's tables 2 and 3, where runs permit to say them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from gpipe_cli.reporting.compare.run_record import RunRecord

# Settings that say what work a step is: runs that differ in one of them are not compared. All of a model and a data set
# are among them.
_WORK = ("batch_size", "batch_tokens", "precision", "compile", "optimizer.name")


@dataclass(frozen=True)
class Scaling:
    speed_up: float  # how many times as fast as the run with the fewest devices
    efficiency: float | None  # speedup over the ratio of devices; None where stages shared devices or cores
    base: int  # the base's position; of several runs the one with the most settings in common


def devices(run: RunRecord) -> int:
    """How many of them the stages of all replicas were on; K of each where all took turns on one."""
    stages = run.result.partitions
    places = len({(stage.process, stage.device) for stage in stages})
    return int(run.settings["replicas"]) * (len(stages) if run.shared and places == 1 else places)


def scalings(runs: Sequence[RunRecord]) -> list[Scaling | None]:
    """The scaling of each run; None where there is nothing to compare it with."""
    groups: dict[str, list[int]] = {}
    for at, run in enumerate(runs):
        if _speed(run):
            groups.setdefault(work(run), []).append(at)
    found: list[Scaling | None] = [None] * len(runs)
    for group in groups.values():
        fewest = min(devices(runs[at]) for at in group)
        bases = [at for at in group if devices(runs[at]) == fewest]
        if len(bases) < len(group):
            for at in group:
                base = at if at in bases else max(bases, key=partial(_alike, runs, at))
                found[at] = _scaling(runs[at], runs[base], base)
    return found


def _scaling(run: RunRecord, base: RunRecord, position: int) -> Scaling:
    speed_up = _speed(run) / _speed(base)
    shared = run.shared or base.shared
    return Scaling(speed_up, None if shared else speed_up * devices(base) / devices(run), position)


def _speed(run: RunRecord) -> float:
    """0 where there is none, or one that was slowed down by other programs or by warm-up."""
    result = run.result
    slowed = result.samples_per_second_kind == "measured_contended" or result.speed_includes_warm_up
    return 0.0 if slowed or result.status != "completed" else result.speed or 0.0


def work(run: RunRecord) -> str:
    """As `scaling`, for runs that do the same work on the same machine."""
    settings = {k: v for k, v in run.settings.items() if k in _WORK or k.startswith(("model.", "dataset."))}
    return json.dumps([run.machine, run.result.command, settings], sort_keys=True)


def _alike(runs: Sequence[RunRecord], one: int, other: int) -> int:
    """How many settings they have in common."""
    return sum(runs[other].settings.get(key) == value for key, value in runs[one].settings.items())
