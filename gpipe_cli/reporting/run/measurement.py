"""Speed, memory and environment of a run: a speed without its warm-up rule, hardware and versions is not comparable."""

import os
import platform
import sys
import time
from array import array
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING, Literal

from gpipe_cli.config.groups import CustomConfig, ModelConfig
from gpipe_cli.results.run import CONTENDED_SHARE, StageMemory
from gpipe_cli.schedule.placement import stages_of_devices
from gpipe_cli.system.machine import cpu_model, usable_cores, usable_memory_bytes
from gpipe_cli.system.source_code import Commit, commit_of
from gpipe_cli.units import join_ranges

if TYPE_CHECKING:  # these modules import torch
    from gpipe_cli.planner.pipeline_spec import PipelineSpec
    from gpipe_cli.planner.stage_memory import StageMemory as PlannedMemory

# contended: other programs used the cores of the stages; one_device: stages shared a device or cores with each other
SpeedKind = Literal["measured", "measured_contended", "measured_one_device"]

PACKAGES = ("torch", "torchvision", "timm", "transformers", "gpipe-cli")
TEXT_PACKAGES = ("sentencepiece", "Babel", "sacrebleu")  # tokens, sentences and scores depend on them


class StepMedians:
    """Medians over the steps of a run, because single steps wait for data, disks and other programs. The first
    ``warm_up_steps`` count only while there are no others: they allocate memory and choose algorithms."""

    def __init__(self, warm_up_steps: int) -> None:
        self.warm_up_steps = warm_up_steps
        self._values: dict[str, array[float]] = {}

    def add(self, values: Mapping[str, float]) -> None:
        """Adds quantities of the next step; a quantity is added in every step, or in none."""
        for quantity, value in values.items():
            self._values.setdefault(quantity, array("d")).append(value)

    def values_counted(self, quantity: str, last: int = 0) -> Sequence[float]:
        """The values of the ``last`` steps that count, 0: of all; empty for a quantity that was never added, such as
        images' tokens/s."""
        values = self._values.get(quantity, array("d"))
        first = self.warm_up_steps if len(values) > self.warm_up_steps else 0
        return values[max(first, len(values) - last) if last else first :]

    def median(self, quantity: str, last: int = 0) -> float | None:
        """The median over the ``last`` steps that count, 0: over all; None if there are none. It takes time in
        proportion to ``last``, so that a step costs the same however long the run is."""
        values = self.values_counted(quantity, last)
        return median(values) if values else None

    def quartiles(self, quantity: str) -> tuple[float, float] | None:
        values = self.values_counted(quantity)
        if len(values) < 2:
            return (values[0], values[0]) if values else None
        first, _, third = quantiles(values, n=4, method="inclusive")
        return first, third


def classify_speed(one_device: bool, cpu_starved_share: float | None) -> SpeedKind | None:
    """The kind of a speed; ``cpu_starved_share``: of computing time, 0 to 1; None before the first step."""
    if cpu_starved_share is None:
        return None
    if one_device:
        return "measured_one_device"
    return "measured_contended" if cpu_starved_share > CONTENDED_SHARE else "measured"


def stage_memory(
    spec: "PipelineSpec",
    planned: "Sequence[PlannedMemory]",
    peaks: Sequence[int],
    activation_bytes: Sequence[int] | None,
    libraries: Sequence[int] | None,
) -> tuple[StageMemory, ...]:
    """The parts of each measured peak, in bytes, which add up to it. Stages that share a device, or a process on a CPU,
    share a peak. If activations were not counted, they are the planned ones."""
    memories = []
    for stages in stages_of_devices(spec.layout.device_of_stage) if peaks else ():
        parts = {
            "libraries": libraries[stages[0]] if libraries else 0,
            "weights": sum(planned[k].weights_bytes for k in stages),
            "gradients": sum(planned[k].gradients_bytes for k in stages),
            "optimizer": sum(planned[k].optimizer_bytes for k in stages),
            "activations": sum(
                activation_bytes[k] if activation_bytes else planned[k].activations_bytes for k in stages
            ),
        }
        peak = peaks[stages[0]]
        stage = stages[0] if len(stages) == 1 else None if len(stages) == len(peaks) else format_stages(stages)
        memories.append(StageMemory(stage, **parts, other=peak - sum(parts.values()), peak=peak))
    return tuple(memories)


def format_stages(stages: Sequence[int]) -> str:
    """`2`, `0,1`; three neighbours or more are a range, `2-4`."""
    return ",".join(join_ranges(stages, "-"))


def process_seconds() -> float:
    """Seconds since this process began, interpreter and imports included; Linux only, to 0.01 s; 0 elsewhere."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


def describe_hardware(gpu_names: Sequence[str], threads: int) -> dict[str, object]:
    """The machine. GPU names are passed in, as asking torch would create a CUDA context in the parent process."""
    return {
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "threads_per_process": threads,
        "memory_bytes": usable_memory_bytes(),
        "gpus": list(gpu_names),
        "system": f"{platform.system()} {platform.machine()}",
    }


def find_commits(model: ModelConfig) -> dict[str, Commit | None]:
    """The commits of gpipe and of a user's model, which has been imported; None if it is not in a git repository."""
    commits = {"gpipe": commit_of(Path(__file__))}
    if isinstance(model, CustomConfig):
        file = getattr(sys.modules.get(model.target.partition(":")[0]), "__file__", None)
        commits["model"] = None if file is None else commit_of(Path(file))
    return commits


def read_versions(text: bool = False) -> dict[str, str | None]:
    """Versions of Python and of the packages that the numbers depend on, read without importing them."""
    version_of: dict[str, str | None] = {"python": platform.python_version()}
    for package in (*PACKAGES, *TEXT_PACKAGES) if text else PACKAGES:
        try:
            version_of[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            version_of[package] = None
    return version_of
