"""How fast a device is at each kind of operation: by its data sheet, or fitted to layers that were timed on it.

The paper's cost estimate c_i of a layer (section 2.1) is its FLOPs. On real devices an operation also takes time to
launch, and one that computes little takes as long as moving its bytes. Rates from a data sheet overlap computing with
moving bytes, as in the roofline model (Williams et al., CACM 2009); with fitted rates the two times add up.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from gpipe_cli.config.groups import HardwareConfig, Precision
from gpipe_cli.config.settings import load_hardware
from gpipe_cli.pipeline.profile.layer_cost import OperationKind, Operations, Work

COMPUTING = (OperationKind.PRODUCT, OperationKind.CONVOLUTION, OperationKind.NARROW, OperationKind.DEPTHWISE)
CONVOLUTIONS = COMPUTING[1:]
# Which errors of layers the fit minimises: relative ones at 1, those in seconds at 0. In between, long layers weigh
# more, while short ones, which determine the time of a launch, still count.
_RELATIVE = 0.75
_LEAST_SECONDS = 2e-6  # anything shorter is noise of the clock
_ROUNDS = 10  # iterations of a fit, in which it finds out which layers are bound by launches
# The share of the tensor cores' peak (TF32, 16 bits) that convolutions reach, as their matrices are gathered from
# overlapping windows and only as wide as the channels. From ResNet-50 on A100 and V100 in the recipe `published`.
_CONVOLUTIONS_REACH = 0.46
_TRUST = 0.003  # weight of a device's figures in a fit, relative to the rate that the layers determine best
_LAUNCHES, _WORKS = slice(1, 1 + len(OperationKind)), slice(1 + len(OperationKind), None)  # columns of `_features`


@dataclass(frozen=True)
class Figures:
    """Measured rates of a device that repeats one operation at the precision of a run: a data sheet of its own."""

    product_flops_per_second: float
    convolution_flops_per_second: float
    copied_bytes_per_second: float  # bytes read plus bytes written
    launch_seconds: float  # per operation, in a row of many tiny ones


# Where seconds come from: the device's data sheet; another device's, if it has none (then only the ratios of layers are
# meaningful); a few reference layers timed on this machine; or the layers of the model, timed here.
Basis = Literal["data_sheet", "other_device", "timed_machine", "timed_layers"]


@dataclass(frozen=True)
class Rates:
    """Seconds per layer, operation, FLOP and byte of forwards or of backwards; a missing kind takes none."""

    layer: float = 0.0  # per layer, whatever it does
    operation: Mapping[OperationKind, float] = field(default_factory=dict)
    flop: Mapping[OperationKind, float] = field(default_factory=dict)
    byte: Mapping[OperationKind, float] = field(default_factory=dict)
    weight_byte: Mapping[OperationKind, float] = field(default_factory=dict)  # a missing kind: as in `byte`
    overlap: bool = False  # the device computes and moves bytes at the same time
    launched: bool = False  # the device works while the host launches ahead: the longer of the two counts

    def seconds(self, work: Work, samples: float) -> float:
        """The seconds of ``work`` for a micro-batch of ``samples``."""
        beginning = self.layer if work.by_kind else 0.0
        working = 0.0
        for kind, each in work.by_kind.items():
            byte = self.byte.get(kind, 0.0)
            computing = each.flops * samples * self.flop.get(kind, 0.0)
            moving = each.bytes * samples * byte + each.fixed_bytes * self.weight_byte.get(kind, byte)
            beginning += each.count * self.operation.get(kind, 0.0)
            working += max(computing, moving) if self.overlap else computing + moving
        return max(beginning, working) if self.launched else beginning + working


@dataclass(frozen=True)
class DeviceRates:
    """The rates of a device, and of its link to the next one."""

    source: str  # one phrase: `hardware=cpu figures`
    basis: Basis
    forward: Rates  # forwards that keep nothing
    graph: Rates  # forwards that keep what the backward needs
    backward: Rates  # backwards, and updates of the weights
    link_seconds: float  # latency: until the first byte of a message has arrived
    link_byte_seconds: float
    tensor_seconds: float = 0.0  # per step and trained tensor, in addition to its update
    slowdown: float = 1.0  # factor of all seconds while `together` processes compute on one machine
    together: int = 1
    figures: Figures | None = None  # the device's measured figures, if it was timed
    spread: tuple[float, float] = (1.0, 1.0)  # a short and a long timed pass (10th, 90th percentile) over the mean


def rates_of_sheet(hardware: HardwareConfig, threads: int, precision: Precision = "float32") -> DeviceRates:
    """The rates by a data sheet (a CPU's is per thread), or by an H200's if `hardware` has none. At a precision other
    than float32, matrix products are assumed to reach the same share of the peak, convolutions less, and those with
    few channels no more than in float32."""
    basis: Basis = "data_sheet"
    if hardware.tflops is None or hardware.memory_gb_per_second is None:
        hardware, basis = load_hardware("h200"), "other_device"
    assert hardware.tflops is not None
    assert hardware.memory_gb_per_second is not None
    speed = threads if hardware.name == "cpu" else 1
    each = (hardware.operation_microseconds or 0.0) * 1e-6
    products = reached_tflops(hardware, precision)
    key, peak = load_hardware(hardware.name).peak(precision)
    convolutions = products
    if peak is not None and key != "peak_tflops":  # the peak of tensor cores
        convolutions = min(products, max(hardware.tflops, _CONVOLUTIONS_REACH * peak))
    flop = dict.fromkeys(OperationKind, 1 / (products * 1e12 * speed))
    flop[OperationKind.CONVOLUTION] = 1 / (convolutions * 1e12 * speed)
    few = dict.fromkeys((OperationKind.DEPTHWISE, OperationKind.NARROW), 1 / (hardware.tflops * 1e12 * speed))
    rates = Rates(
        0.0,
        dict.fromkeys(OperationKind, each),
        flop | few,
        dict.fromkeys(OperationKind, 1 / (hardware.memory_gb_per_second * 1e9 * speed)),
        overlap=hardware.name != "cpu",  # the figures of CPUs were fitted without overlap
    )
    return DeviceRates(
        f"hardware={hardware.name} figures",
        basis,
        rates,
        rates,
        rates,
        (hardware.link_microseconds or 0.0) * 1e-6,
        0.0 if hardware.link_gb_per_second is None else 1 / (hardware.link_gb_per_second * 1e9),
    )


def reached_tflops(hardware: HardwareConfig, precision: Precision) -> float:
    """The TFLOP/s that products of large matrices reach; the float32 figure must be known."""
    sheet = load_hardware(hardware.name)  # peaks that the user gives affect the MFU alone
    (_, peak), (_, in_float32) = sheet.peak(precision), sheet.peak("float32")
    assert hardware.tflops is not None
    return hardware.tflops if peak is None or in_float32 is None else hardware.tflops * peak / in_float32


def computes_in(name: str, precision: Precision) -> str:
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


def fit_rates(works: Iterable[Work], seconds: Sequence[float], samples: int, figures: Figures | None = None) -> Rates:
    """Fit rates, none below zero, to the measured `seconds` of layers by least squares.

    `figures`: those of a device that works while its host launches ahead, where layers were timed with a wait after
    each. Then a layer only determines the longer of the two, launching or working; `figures` supply the other rates.
    """
    from scipy.optimize import nnls  # here, as importing it takes a fifth of a second

    kinds = tuple(OperationKind)
    timed = [
        (_features(work, samples), taken) for work, taken in zip(works, seconds, strict=True) if taken > _LEAST_SECONDS
    ]
    matrix, taken = (np.array(values) for values in zip(*timed, strict=True))
    counts = taken**-_RELATIVE
    if figures is None:
        scale = matrix.max(axis=0)
        scale[scale == 0] = 1.0
        rows = matrix / scale
        found, _ = nnls(rows * counts[:, None], taken * counts, maxiter=100 * matrix.shape[1])
    else:
        scale = 1 / np.array(_expected(figures))
        matrix = matrix / scale
        found = np.ones(len(scale))
        for _ in range(_ROUNDS):
            launching = matrix[:, _LAUNCHES] @ found[_LAUNCHES] > matrix[:, _WORKS] @ found[_WORKS]
            rows = matrix.copy()
            rows[launching, _WORKS] = 0.0
            rows[~launching, _LAUNCHES] = 0.0
            weighted = rows * counts[:, None]
            trust = _TRUST * np.linalg.norm(weighted, axis=0).max()
            weighted = np.vstack([weighted, trust * np.eye(len(scale))])
            aims = np.concatenate([taken * counts, np.full(len(scale), trust)])
            found, _ = nnls(weighted, aims, maxiter=100 * len(scale))
    found *= taken.sum() / (rows @ found).sum()  # a fit of relative errors is too low in total
    values = iter((found / scale).tolist())
    layer = next(values)
    operation, flop, byte = (dict(zip(of, values, strict=False)) for of in (kinds, COMPUTING, kinds))
    convolution, product = values
    weights = dict.fromkeys(CONVOLUTIONS, convolution) | {OperationKind.PRODUCT: product}
    return Rates(layer, operation, flop, byte, weights, launched=figures is not None)


def _features(work: Work, samples: int) -> list[float]:
    """The coefficient of each rate in the seconds of a layer, those of launching first."""
    of = {kind: work.by_kind.get(kind, Operations()) for kind in OperationKind}
    moved = [each.bytes * samples + (0.0 if kind in COMPUTING else each.fixed_bytes) for kind, each in of.items()]
    weights = sum(of[kind].fixed_bytes for kind in CONVOLUTIONS), of[OperationKind.PRODUCT].fixed_bytes
    flops = [of[kind].flops * samples for kind in COMPUTING]
    return [1.0 if work.by_kind else 0.0, *(each.count for each in of.values()), *flops, *moved, *weights]


def _expected(figures: Figures) -> list[float]:
    """The rates by `figures`, in the order of `_features`."""
    flops = [figures.product_flops_per_second, *[figures.convolution_flops_per_second] * len(CONVOLUTIONS)]
    bytes_moved = len(OperationKind) + 2
    return [
        *[figures.launch_seconds] * (1 + len(OperationKind)),
        *(1 / rate for rate in flops),
        *[1 / figures.copied_bytes_per_second] * bytes_moved,
    ]
