"""The figures of one accelerator and of the link to the next: what a plan computes seconds and limits from.

The paper's runs were on TPUs and on GPUs without a fast interconnect (sections 3 and 3.2); a plan for those, or for a
machine that one does not have yet, needs nothing but these numbers.
"""

from dataclasses import dataclass, fields
from typing import Literal

from gpipe_cli.typed import above_zero, at_least


@dataclass(frozen=True, slots=True)
class HardwareConfig:
    """One device and one link; None: not known, or of `auto` that the device at hand says it."""

    name: Literal["auto", "cpu", "h200", "p40", "p100_pcie", "tpu_v2", "tpu_v3"]
    tflops: float | None  # that layers reach, in 10^12 a second; of a CPU, one thread's
    peak_tflops: float | None  # by the data sheet, of one device; of a CPU, all its cores'
    memory_gib: float | None  # that a stage must stay below
    memory_gb_per_second: float | None
    operation_microseconds: float | None  # from one operation to the next, however small
    link_gb_per_second: float | None  # one way
    link_microseconds: float | None  # until the first byte has arrived

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("operation_microseconds", "link_microseconds"):
                at_least(f"hardware.{field.name}", value, 0)
            elif field.name != "name" and value is not None:
                above_zero(f"hardware.{field.name}", value)
