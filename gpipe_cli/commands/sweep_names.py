"""What tells the runs of a sweep apart: their settings, and from these the names of their folders."""

import re
from collections.abc import Sequence
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser


def differences(jobs: Sequence[Sequence[str]], task: Sequence[str]) -> list[str]:
    """What tells each job of a sweep from the others, `micro_batches=4,partitions=2`; `task` is what was typed."""
    return [",".join(sorted(o.lstrip("+") for o in job)) or "run" for job in _varied(jobs, task)]


def varied_settings(jobs: Sequence[Sequence[str]], task: Sequence[str]) -> list[dict[str, object]]:
    """The same as settings and their values, in the order in which they were typed."""
    return [values_of(job) for job in _varied(jobs, task)]


def values_of(job: Sequence[str]) -> dict[str, object]:
    """The settings of one job and their values."""
    return {o.key_or_group: o.value() for o in OverridesParser.create().parse_overrides(list(job)) if not o.is_delete()}


def free_folder(parent: Path, name: str) -> Path:
    """A folder for the run `name` that does not exist yet; its name is one that every file system takes."""
    safe = re.sub(r"[^\w.,=+\[\]-]", "_", name.replace("'", "").replace('"', ""))[:150].strip(".") or "run"
    folder, count = parent / safe, 1
    while folder.exists():
        count += 1
        folder = parent / f"{safe}-{count}"
    return folder


def _varied(jobs: Sequence[Sequence[str]], task: Sequence[str]) -> list[list[str]]:
    """Of each job the overrides that not all have."""
    typed = OverridesParser.create().parse_overrides(list(task))
    swept = {o.key_or_group for o in typed if o.is_sweep_override()}
    same = {o.key_or_group for o in typed} - swept  # by key: Hydra writes a true as True

    def varies(override: str) -> bool:
        key = override.lstrip("+~").partition("=")[0]
        return key not in same and (len(jobs) == 1 or any(override not in job for job in jobs))

    return [[override for override in job if varies(override)] for job in jobs]
