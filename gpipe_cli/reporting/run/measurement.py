"""How fast a run is, and on what: the numbers beside every throughput of the paper (tables 2, 3 and 5).

A speed without its warm-up rule, hardware and versions cannot be compared with another; they are kept together here.
"""

import os
import platform
import time
from array import array
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any, Literal, get_args

from gpipe_cli.reporting.run.description import PartitionDescription, SpeedKind
from gpipe_cli.system.machine import cpu_model, usable_cores, usable_memory_bytes

if TYPE_CHECKING:  # it imports torch
    from gpipe_cli.planner.model_flops import StepFlops

PACKAGES = ("torch", "torchvision", "timm", "gpipe-cli")
CONTENDED = 0.05  # share of a stage's computing time without a core from which on its speed is not its own
# Of each step; without_core: the share of its computing time in which the stage that was worst off had no core, as
# others had them all.
Quantity = Literal["step_seconds", "samples_per_second", "tokens_per_second", "without_core"]
TEXT_PACKAGES = ("sentencepiece", "Babel", "sacrebleu")  # the tokens, the sentences and the scores come from them


class StepSpeeds:
    """The speed of a run: medians over its steps, because single steps wait for data, disks and other programs.

    The first ``warm_up_steps`` do not count: they allocate memory and choose algorithms. While there are no others,
    they are what there is, and ``includes_warm_up`` says so.
    """

    def __init__(self, warm_up_steps: int = 3) -> None:
        self.warm_up_steps = warm_up_steps
        self._values: dict[Quantity, array[float]] = {name: array("d") for name in get_args(Quantity)}

    def add(
        self, samples: int, seconds: float, tokens: int | None = None, without_core: Sequence[float] = (0.0,)
    ) -> None:
        """One step of ``samples`` samples that took ``seconds``; ``tokens`` in every step of a run or in none;
        ``without_core`` is the share of its computing time in which each stage had no core."""
        assert samples > 0, samples
        assert seconds > 0, seconds
        assert tokens is None or len(self._values["tokens_per_second"]) == self.steps, "some steps had no tokens"
        self._values["step_seconds"].append(seconds)
        self._values["samples_per_second"].append(samples / seconds)
        self._values["without_core"].append(max(without_core))
        if tokens is not None:
            self._values["tokens_per_second"].append(tokens / seconds)

    @property
    def steps(self) -> int:
        return len(self._values["step_seconds"])

    @property
    def includes_warm_up(self) -> bool:
        """Whether the numbers are those of warm-up steps, for want of others."""
        return 0 < self.steps <= self.warm_up_steps

    @property
    def counted_steps(self) -> int:
        """Steps that the medians are over."""
        return len(self._counted("step_seconds"))

    def median(self, quantity: Quantity) -> float | None:
        """Over steps; None without any, as for the tokens of images."""
        return _median(self._counted(quantity))

    def quartiles(self, quantity: Quantity) -> list[float] | None:
        """The first and the third over steps; None without any."""
        values = self._counted(quantity)
        if len(values) < 2:
            return [values[0], values[0]] if values else None
        first, _, third = quantiles(values, n=4, method="inclusive")
        return [first, third]

    def recent(self, quantity: Quantity, steps: int = 20) -> float | None:
        """Median over the last few steps that count, for a display; None without any."""
        return _median(self._counted(quantity, steps + self.warm_up_steps)[-steps:])

    def kind(self, expected: SpeedKind) -> SpeedKind | None:
        """What kind of a number the speed is; ``expected`` if no other program had the cores. None without steps."""
        share = self.median("without_core")
        contended = expected == "measured" and share is not None and share > CONTENDED
        return None if share is None else "measured_contended" if contended else expected

    def _counted(self, quantity: Quantity, last: int = 0) -> Sequence[float]:
        values = self._values[quantity][-last:]
        return values if self.includes_warm_up else values[min(self.warm_up_steps, len(values)) :]


def flops_result(flops: "StepFlops | None", speed: StepSpeeds) -> dict[str, Any]:
    """The entries of result.json that say how much of a device's peak the model's own operations reach.

    The share is that of PaLM's authors (model FLOPs utilization, MFU): recomputation does not count as work.
    """
    per_second = (
        None
        if flops is None
        else flops.per_second(speed.median("samples_per_second"), speed.median("tokens_per_second"))
    )
    peak = None if flops is None else flops.peak_per_second
    return {
        "model_flops": None if flops is None else flops.step,
        "model_flops_per_second": per_second,
        "peak_flops_per_second": peak,
        "mfu": None if per_second is None or peak is None else per_second / peak,
    }


def memory_result(
    partitions: Sequence[PartitionDescription],
    distributed: bool,
    peaks: Sequence[int],
    counted: Sequence[int] | None,
    libraries: Sequence[int] | None,
) -> list[dict[str, int | None]]:
    """The entry ``memory`` of result.json: the bytes of each stage, or of all (``stage`` is None) where they are in one
    process on a CPU. The parts add up to the peak.

    ``other`` is the rest: workspace, data, what the allocator keeps; below 0 where not all parts were there at once.

    Args:
        distributed: every stage is in a process of its own.
        peaks: what was measured of each stage.
        counted: activations of each stage; those that were predicted if they were not counted.
        libraries: of each stage's process.
    """
    memory = [partition.memory for partition in partitions]
    if not peaks or None in memory:
        return []
    known = [part for part in memory if part is not None]
    together = not distributed and {partition.device for partition in partitions} == {"cpu"}
    result: list[dict[str, int | None]] = []
    for stages in [range(len(known))] if together else [range(k, k + 1) for k in range(len(known))]:
        parts = {
            "libraries": libraries[stages[0]] if libraries else 0,
            "weights": sum(known[k].weights_bytes for k in stages),
            "gradients": sum(known[k].gradients_bytes for k in stages),
            "optimizer": sum(known[k].optimizer_bytes for k in stages),
            "activations": sum(counted[k] if counted else known[k].activations_bytes for k in stages),
        }
        peak = peaks[stages[0]]
        alone = stages[0] if len(stages) == 1 else None
        result.append({"stage": alone, **parts, "other": peak - sum(parts.values()), "peak": peak})
    return result


def process_seconds() -> float:
    """Since this process began (Linux, to a hundredth of a second), interpreter and imports included; 0 elsewhere."""
    try:
        fields = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


def hardware(gpu_names: Sequence[str], threads: int) -> dict[str, object]:
    """The machine, without opening a device.

    The names of GPUs are given by whoever uses them: to ask torch here would create a CUDA context in the parent.
    """
    return {
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "threads_per_process": threads,
        "memory_bytes": usable_memory_bytes(),
        "gpus": list(gpu_names),
        "system": f"{platform.system()} {platform.machine()}",
    }


def versions(text: bool = False) -> dict[str, str | None]:
    """Versions of Python and of the packages that the numbers depend on, read without importing them."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in (*PACKAGES, *TEXT_PACKAGES) if text else PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None
