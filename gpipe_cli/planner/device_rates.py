"""How fast a device is at each kind of operation, by its data sheet.

The paper's cost estimate c_i of a layer (section 2.1) is its FLOPs. On real devices an operation also takes time to
launch, and an operation that computes little takes as long as moving its bytes. On GPUs and TPUs computing overlaps
with moving bytes, as in the roofline model (Williams et al., CACM 2009); on CPUs the two times add up. Without CUDA
graphs a GPU waits for its host where that takes longer to launch operations than the GPU to run them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from gpipe_cli.config.groups import HardwareConfig, Precision
from gpipe_cli.config.settings import load_hardware
from gpipe_cli.pipeline.profile.layer_cost import OperationCounts, OperationKind

# The share of the tensor cores' peak (TF32, 16 bits) that convolutions reach, as their matrices are gathered from
# overlapping windows and only as wide as the channels. From ResNet-50 on A100 and V100 in the recipe `published`.
_CONVOLUTIONS_REACH = 0.46

# Seconds of a GPU's host per operation that it launches, the Python of layers included: measured for AmoebaNet-D (18,
# 256) and the default job, with an H100 (recipes/gpus.md).
_LAUNCH_SECONDS = 37e-6

# Where seconds come from: the device's data sheet; another device's, if it has none (then only the ratios of layers are
# meaningful); or the layers of the model, timed on this machine.
CostSource = Literal["data_sheet", "other_device", "timed_layers"]


@dataclass(frozen=True)
class DeviceRates:
    """Seconds per operation, FLOP and byte of a device, and of its link to the next device."""

    source: str  # a phrase: `hardware=cpu figures`
    cost_source: CostSource
    operation: float  # from one operation to the next, however small
    flop: Mapping[OperationKind, float]
    byte: float
    overlap: bool  # the device computes and moves bytes at the same time
    link_seconds: float  # latency: until the first byte of a message has arrived
    link_byte_seconds: float
    launch: float = 0.0  # the host's seconds per operation while the device computes; 0: the host is never behind

    def seconds(self, work: OperationCounts, samples: float) -> float:
        """The seconds of ``work`` for a micro-batch of ``samples``."""
        beginning = working = launching = 0.0
        for kind, operations in work.items():
            computing = operations.flops * samples * self.flop[kind]
            moving = operations.bytes * samples * self.byte + operations.fixed_bytes * self.byte
            beginning += operations.count * self.operation
            launching += operations.count * self.launch
            working += max(computing, moving) if self.overlap else computing + moving
        return max(launching, beginning + working)


def rates_of_data_sheet(
    hardware: HardwareConfig, threads: int, precision: Precision = "float32", *, launched: bool = False
) -> DeviceRates:
    """The rates by a data sheet (a CPU's is per thread), or by an H200's if `hardware` has none. At a precision other
    than float32, matrix products are assumed to reach the same share of the peak, convolutions less, and those with few
    channels no more than in float32. `launched`: a host launches each operation by itself, not in CUDA graphs."""
    cost_source: CostSource = "data_sheet"
    if hardware.tflops is None or hardware.memory_gb_per_second is None:
        hardware, cost_source = load_hardware("h200"), "other_device"
    assert hardware.tflops is not None
    assert hardware.memory_gb_per_second is not None
    speed = threads if hardware.name == "cpu" else 1
    products = achieved_tflops(hardware, precision)
    key, peak = load_hardware(hardware.name).peak(precision)
    convolutions = products
    if peak is not None and key != "peak_tflops":  # the peak of tensor cores
        convolutions = min(products, max(hardware.tflops, _CONVOLUTIONS_REACH * peak))
    flop = dict.fromkeys(OperationKind, 1 / (products * 1e12 * speed))
    flop[OperationKind.CONVOLUTION] = 1 / (convolutions * 1e12 * speed)
    few_channels = dict.fromkeys((OperationKind.DEPTHWISE, OperationKind.NARROW), 1 / (hardware.tflops * 1e12 * speed))
    return DeviceRates(
        f"hardware={hardware.name} figures",
        cost_source,
        operation=(hardware.operation_microseconds or 0.0) * 1e-6,
        flop=flop | few_channels,
        byte=1 / (hardware.memory_gb_per_second * 1e9 * speed),
        overlap=hardware.name != "cpu",  # the figures of CPUs were fitted without overlap
        launch=_LAUNCH_SECONDS if launched else 0.0,
        link_seconds=(hardware.link_microseconds or 0.0) * 1e-6,
        link_byte_seconds=0.0 if hardware.link_gb_per_second is None else 1 / (hardware.link_gb_per_second * 1e9),
    )


def achieved_tflops(hardware: HardwareConfig, precision: Precision) -> float:
    """The TFLOP/s that products of large matrices reach; the float32 figure must be known."""
    data_sheet = load_hardware(hardware.name)  # peaks that the user gives affect the MFU alone
    (_, peak), (_, in_float32) = data_sheet.peak(precision), data_sheet.peak("float32")
    assert hardware.tflops is not None
    return hardware.tflops if peak is None or in_float32 is None else hardware.tflops * peak / in_float32


def effective_precision(name: str, precision: Precision) -> str:
    """The precision in which the device of data sheet `name` computes products and convolutions if `precision` is
    requested: `precision` itself; `float32`; or `emulated`, which is `precision` at float32's speed or less. A device
    called `auto` is a GPU without a data sheet, which is assumed to support any precision.

    torch.autocast casts to bfloat16 on every device, also on GPUs before compute capability 8.0, which have no units
    for it (torch.cuda.is_bf16_supported); TF32 is how later ones may multiply float32.
    """
    if precision == "float32" or name == "auto" or load_hardware(name).peak(precision)[0] != "peak_tflops":
        return precision
    if precision == "tf32":
        return "float32"
    return precision if name == "cpu" else "emulated"  # the sheet of CPUs has no peak
