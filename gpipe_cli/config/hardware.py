"""The figures of one accelerator and of the link to the next: what a plan computes seconds and limits from.

The paper's runs were on TPUs and on GPUs without a fast interconnect (sections 3 and 3.2); a plan for those, or for any
other machine, needs only these numbers.
"""

from dataclasses import dataclass
from typing import Literal

from gpipe_cli.config.typed import NotNegative, Positive


@dataclass(frozen=True, slots=True)
class HardwareConfig:
    """One device and one link; None: not known, or with `auto` read from the device at hand."""

    name: Literal["auto", "cpu", "h200", "p40", "p100_pcie", "tpu_v2", "tpu_v3"]
    tflops: Positive | None  # that layers reach, in 10^12 a second; of a CPU, one thread's
    peak_tflops: Positive | None  # by the data sheet, of one device; of a CPU, all its cores'
    memory_gib: Positive | None  # that a stage must stay below
    memory_gb_per_second: Positive | None
    operation_microseconds: NotNegative | None  # from one operation to the next, however small
    link_gb_per_second: Positive | None  # one way
    link_microseconds: NotNegative | None  # until the first byte has arrived
