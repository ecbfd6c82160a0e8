"""Speed-up and efficiency over K, as in the paper's tables 2 and 3, for runs that can be compared."""

import json
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from gpipe_cli.reporting.compare.run_record import RunRecord

# Settings that define the work of a step, in addition to all settings of the model and the data set: speeds are not
# compared if any of them differs.
_WORK_SETTINGS = ("batch_size", "batch_tokens", "precision", "compile", "optimizer.name")


class Scaling(NamedTuple):
    speed_up: float  # how many times as fast as the run with the fewest devices
    efficiency: float | None  # speed-up divided by the ratio of devices; None where stages shared devices or cores
    base: int  # position of the run with the fewest devices; of several, with the most settings in common


def count_devices(run: RunRecord) -> int:
    """The number of devices of all replicas; K per replica if all of its stages shared one device."""
    stages = run.result.partitions
    places = len({(stage.process, stage.device) for stage in stages})
    return int(run.settings["replicas"]) * (len(stages) if run.shares_devices and places == 1 else places)


def scalings(runs: Sequence[RunRecord]) -> list[Scaling | None]:
    """The scaling of each run; None where there is nothing to compare it with."""
    groups: dict[str, list[int]] = {}
    for position, run in enumerate(runs):
        if _speed(run):
            groups.setdefault(work_key(run), []).append(position)
    results: list[Scaling | None] = [None] * len(runs)
    for group in groups.values():
        fewest = min(count_devices(runs[position]) for position in group)
        bases = [position for position in group if count_devices(runs[position]) == fewest]
        if len(bases) < len(group):
            for position in group:
                base = position if position in bases else max(bases, key=partial(_count_equal_settings, runs, position))
                results[position] = _scaling(runs[position], runs[base], base)
    return results


def _scaling(run: RunRecord, base: RunRecord, base_position: int) -> Scaling:
    speed_up = _speed(run) / _speed(base)
    shared = run.shares_devices or base.shares_devices
    return Scaling(speed_up, None if shared else speed_up * count_devices(base) / count_devices(run), base_position)


def _speed(run: RunRecord) -> float:
    """The speed of a completed run; 0 if it has none, or was slowed down by other programs or by warm-up."""
    result = run.result
    slowed = result.samples_per_second_kind == "measured_contended" or result.speed_includes_warm_up
    return 0.0 if slowed or result.status != "completed" else result.speed or 0.0


def work_key(run: RunRecord) -> str:
    """A key that is the same for runs that do the same work on the same machine."""
    settings = {k: v for k, v in run.settings.items() if k in _WORK_SETTINGS or k.startswith(("model.", "dataset."))}
    return json.dumps([run.machine, run.result.command, settings], sort_keys=True)


def _count_equal_settings(runs: Sequence[RunRecord], first: int, second: int) -> int:
    return sum(runs[second].settings.get(key) == value for key, value in runs[first].settings.items())
