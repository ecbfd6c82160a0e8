"""A run as a comparison reads it: settings and numbers from result.json, curves from the events in its folder.

If updates do not depend on the number of partitions (the paper's sections 1 and 7), the loss curves of K = 1, 2, 4 and
8 coincide: this is checked here by their bits, not by eye.
"""

import re
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from gpipe_cli.config.pipeline_settings import Affects
from gpipe_cli.config.settings import CONFIG_FILE, flatten, run_folders_in, settings_not_affecting
from gpipe_cli.errors import InputError, format_value
from gpipe_cli.results.files import RESULT_FILE
from gpipe_cli.results.metrics import METRICS
from gpipe_cli.results.run import RunResult, read_run_result
from gpipe_cli.units import plural

MAX_POINTS = 100_000  # points of a curve; TensorBoard's reader samples longer ones, deterministically

Plain = str | int | float | None


class Curve(NamedTuple):
    """One scalar over the steps of a run, with at least one point."""

    steps: tuple[int, ...]
    values: tuple[float, ...]  # rounded to 32-bit floats, as event files have them
    complete: bool = True  # False: a sample of MAX_POINTS points


@dataclass(frozen=True)
class RunRecord:
    folder: Path
    settings: Mapping[str, Any]  # by dotted key, `model.filters`; of a measurement, the settings that affect a step
    result: RunResult

    @property
    def error(self) -> str | None:
        """Why the run failed, in one line; None if it did not."""
        return None if self.result.error is None else format_value(self.result.error)

    @property
    def shares_devices(self) -> bool:
        """Whether stages shared a device or cores, perhaps with other programs: the speed is then not a pipeline's."""
        return self.result.samples_per_second_kind in ("measured_one_device", "measured_contended")

    @property
    def machine(self) -> str:
        """The hardware of the run: `2 cores of AMD EPYC`, `2 x NVIDIA H200, 16 cores of ...`."""
        hardware = self.result.hardware
        if not hardware:
            return "unknown"
        gpus = Counter(hardware["gpus"])
        counted = [f"{number} x {name}" if number > 1 else name for name, number in gpus.items()]
        return ", ".join([*counted, f"{hardware['cores']} cores of {hardware['cpu']}"])

    @cached_property
    def curves(self) -> Mapping[str, Curve]:
        return read_curves(self.folder)


def read_run(folder: Path) -> RunRecord:
    """The run in ``folder``. Raises InputError if result.json is missing or unreadable, or a *tfevents* not a file."""
    try:
        result = read_run_result(folder)
    except FileNotFoundError:
        raise InputError(f"{folder}: has no {RESULT_FILE}, so nothing is known about this run; run it again") from None
    except OSError as error:
        raise InputError(f"{folder / RESULT_FILE}: cannot be read ({error.strerror}); fix that or remove it") from error
    for file in folder.glob("*tfevents*"):
        if not file.is_file():
            raise InputError(f"{file}: must be a regular file, as it has the name of curves; remove it")
    settings = dict(flatten(result.config))
    if result.command == "bench":
        without_effect = settings_not_affecting(Affects.STEP)
        settings = {key: value for key, value in settings.items() if key.partition(".")[0] not in without_effect}
    return RunRecord(folder, settings, result)


def read_curves(folder: Path) -> dict[str, Curve]:
    """Every scalar in the events of ``folder`` by tag; empty if there are no events.

    Steps that a resumed run repeated count once, as in TensorBoard: the newer points replace the older ones.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util import tb_logging

    tb_logging.get_logger().setLevel("ERROR")  # it warns of the steps that a resumed run repeated
    # 1 is the reader's minimum, as 0 means all.
    few = {"images": 1, "audio": 1, "histograms": 1, "compressedHistograms": 1, "tensors": 1}
    accumulator = EventAccumulator(str(folder), size_guidance={**few, "scalars": MAX_POINTS})
    accumulator.Reload()
    curves = {}
    for tag in accumulator.Tags()["scalars"]:
        events = accumulator.Scalars(tag)
        steps, values = (tuple(getattr(event, name) for event in events) for name in ("step", "value"))
        curves[tag] = Curve(steps, values, len(events) < MAX_POINTS)
    return curves


def same_curves(curves: Sequence[Curve | None]) -> list[list[int]]:
    """Groups of positions of curves with bitwise equal values at the same steps: NaN equals NaN, 0 differs from -0.
    Incomplete curves are in no group."""
    groups: dict[bytes, list[int]] = {}
    for position, curve in enumerate(curves):
        if curve is not None and curve.complete:
            points = len(curve.steps)
            bits = struct.pack(f"{points}q{points}f", *curve.steps, *curve.values)
            groups.setdefault(bits, []).append(position)
    return [group for group in groups.values() if len(group) > 1]


def first_difference(one: Curve | None, other: Curve | None) -> int | None:
    """The first step of both curves at which they differ; None if there is none."""
    if one is None or other is None:
        return None
    theirs = dict(zip(other.steps, map(repr, other.values), strict=True))
    mine = zip(one.steps, map(repr, one.values), strict=True)
    return next((step for step, value in mine if theirs.get(step, value) != value), None)


def flat_result(folder: Path) -> dict[str, Plain]:
    """The implementation of `gpipe_cli.result`, which documents the content and errors."""
    runs = find_runs(folder)
    if runs != [folder]:
        raise InputError(f"{folder}: contains {plural(len(runs), 'run')}; give the folder of one, such as {runs[0]}")
    record = read_run(folder)
    result, settings = record.result, {key: _plain(value) for key, value in record.settings.items()}
    facts = {"speed_kind": result.samples_per_second_kind, "machine": record.machine}
    numbers = {key: metric.value(result) for key, metric in METRICS.items() if metric.path}
    for kind, shares in (("measured", result.breakdown.measured), ("predicted", result.breakdown.predicted)):
        numbers |= {f"{name}_{kind}": share for name, share in (shares or {}).items()}
    return {
        "run": folder.name,
        "command": result.command,
        "status": result.status,
        **{key: settings.get(key) for key in ("partitions", "micro_batches")},  # the first columns of a DataFrame
        **{key: value for key, value in (numbers | facts).items() if value is not None},
        **settings,
    }


def _plain(value: Any) -> Plain:
    return value if value is None or isinstance(value, str | int | float) else format_value(value)


def find_runs(folder: Path) -> list[Path]:
    """The run folder ``folder`` itself, or those up to two levels below it, sorted with numbers in names by value.

    Raises InputError if there is no such folder, or no run in it.
    """
    if not folder.is_dir():
        why = "is a file; give the folder of a run" if folder.is_file() else "there is no such folder"
        raise InputError(f"{folder}: {why}")
    folders = [folder] if (folder / CONFIG_FILE).is_file() else run_folders_in(folder)
    if not folders:
        raise InputError(f"{folder}: no run there (looked for {CONFIG_FILE} in it and up to two levels below)")
    return sorted(folders, key=_numeric_key)


def _numeric_key(folder: Path) -> list[tuple[bool, int, str]]:
    """A sort key: `partitions=4` comes before `partitions=16`."""
    parts = re.split(r"([0-9]+)", str(folder))  # every other one is a number
    return [(at % 2 == 0, int(part) if at % 2 else 0, part) for at, part in enumerate(parts) if part]
