"""A finished run as a comparison reads it: settings, numbers and curves, from the run's own folder.

The paper's tables set runs beside each other that took hours each. What is compared is read from what every run leaves,
result.json and its events, so that runs of last year and of another machine can stand in one table.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from gpipe_cli.reporting.compare.curves import Curve, read_curves
from gpipe_cli.reporting.run.result import RESULT, flattened, read_result

CONFIG = "config.yaml"  # a folder that holds it is a run
# Groups and settings that mean nothing to a measurement: gpipe bench sets them by itself, and refuses them.
NOT_OF_A_BENCH = frozenset({"epochs", "max_steps", "evaluate_every_epochs", "check_layers", "checkpoint"})


@dataclass(frozen=True)
class RunRecord:
    """What became of one run of `gpipe train` or `gpipe bench`."""

    folder: Path
    settings: Mapping[str, Any]  # dotted key, `model.filters`, and value; of a bench those that mean something to it
    result: Mapping[str, Any]  # result.json

    @property
    def status(self) -> str:
        return str(self.result.get("status", "unknown"))

    @property
    def text(self) -> bool:
        """Whether it is judged by tokens; runs from before there was text do not say so."""
        return self.result.get("task", "classification") != "classification"

    @property
    def bench(self) -> bool:
        """Whether it was a measurement; runs from before there was gpipe bench do not say so."""
        return self.result.get("command") == "bench"

    @property
    def speed_kind(self) -> str | None:
        """measured | measured_contended | measured_one_device; None of a run without a speed, such as a dry run."""
        kind = self.result.get("samples_per_second_kind")
        return None if kind is None or self.number("samples_per_second") is None else str(kind)

    @property
    def shared(self) -> bool:
        """Whether its stages shared a device or cores with each other or others: not the speed of a pipeline then."""
        return self.speed_kind in ("measured_one_device", "measured_contended")

    @cached_property
    def curves(self) -> Mapping[str, Curve]:
        """Every scalar of its events by tag; read when first asked for, which takes a moment."""
        return read_curves(self.folder)

    def number(self, *keys: str) -> float | None:
        """A number of result.json, `number("test", "top1")`; None where there is none."""
        value: Any = self.result
        for key in keys:
            value = value.get(key) if isinstance(value, Mapping) else None
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

    def numbers(self, key: str) -> list[float]:
        """The numbers of a list in result.json; none where there is none."""
        values = self.result.get(key)
        listed = values if isinstance(values, list) else []
        return [float(value) for value in listed if isinstance(value, int | float) and not isinstance(value, bool)]


def read_run(folder: Path) -> RunRecord:
    """The run in ``folder``.

    Raises:
        ValueError: there is no result.json, or it cannot be read; one line.
    """
    try:
        result = read_result(folder)
    except FileNotFoundError:
        raise ValueError(f"{folder}: has no {RESULT}, so nothing is known of this run; run it again") from None
    except OSError as error:
        raise ValueError(f"{folder / RESULT}: cannot be read ({error.strerror}); mend that or leave it out") from error
    if not isinstance(result.get("config"), dict):
        raise ValueError(f"{folder / RESULT}: holds no settings, so it is not the result of a run; leave it out")
    for file in folder.glob("*tfevents*"):
        if not file.is_file():
            raise ValueError(f"{file}: must be a regular file, as it has the name of curves; remove it")
    settings = dict(flattened(result["config"]))
    if result.get("command") == "bench":
        settings = {key: value for key, value in settings.items() if key.partition(".")[0] not in NOT_OF_A_BENCH}
    return RunRecord(folder, settings, result)


def find_runs(folder: Path) -> list[Path]:
    """The run that ``folder`` is, or those one or two levels below it, in the order in which people count.

    Raises:
        ValueError: there is no such folder, or no run in it; the line does not say where else there are some.
    """
    if folder.is_file():
        raise ValueError(f"{folder}: is a file; give the folder of a run")
    if not folder.is_dir():
        raise ValueError(f"{folder}: there is no such folder")
    if (folder / CONFIG).is_file():
        return [folder]
    found = [file.parent for depth in ("*", "*/*") for file in folder.glob(f"{depth}/{CONFIG}")]
    if not found:
        raise ValueError(f"{folder}: no run there (looked for {CONFIG} in it and up to two levels below)")
    return sorted(found, key=_counted)


def newest_runs(output: Path, most: int = 3) -> list[Path]:
    """The runs in ``output`` and its sweeps that were begun last."""
    files = [file for depth in ("*", "*/*") for file in output.glob(f"{depth}/{CONFIG}")]
    return [file.parent for file in sorted(files, key=lambda file: file.stat().st_mtime, reverse=True)[:most]]


def _counted(folder: Path) -> list[tuple[bool, int, str]]:
    """Sorts `partitions=4` before `partitions=16`."""
    return [
        (not part.isdigit(), int(part) if part.isdigit() else 0, part)
        for part in re.split(r"([0-9]+)", str(folder))
        if part
    ]
