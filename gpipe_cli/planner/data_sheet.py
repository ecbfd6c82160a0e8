"""Finds the data sheet, a file in conf/hardware, of the devices of this machine."""

from collections.abc import Sequence
from dataclasses import fields, replace

from gpipe_cli.config.groups import HardwareConfig
from gpipe_cli.config.settings import TrainConfig, load_hardware
from gpipe_cli.errors import InvalidSettingError
from gpipe_cli.system.accelerator import torch_supports_accelerator
from gpipe_cli.system.gpus import Gpu, usable_gpus

# Words in a GPU's name as the driver gives it, its least memory in GB, and its file in conf/hardware. Several products
# share most of these names; a name with a word of _OTHERS that the row does not list is another product.
_OTHERS = {"PCIE", "NVL", "MIG", "LAPTOP", "D", "144G"}
_SHEETS = (
    ("A100", 60, "a100_80"),
    ("A100", 0, "a100_40"),
    ("GH200", 0, "gh200"),
    ("H100", 0, "h100"),
    ("H200", 0, "h200"),
    ("L4", 0, "l4"),
    ("L40S", 0, "l40s"),
    ("P40", 0, "p40"),
    ("P100 PCIE", 0, "p100_pcie"),
    ("4090", 0, "rtx_4090"),
    ("T4", 0, "t4"),
    ("V100", 0, "v100"),
)
# GPU memory reserved for CUDA's context and for the code and workspaces of its libraries (a heuristic).
_LIBRARIES_GIB = 1.0


def with_data_sheet(hardware: HardwareConfig, devices: Sequence[str]) -> HardwareConfig:
    """`hardware` with `auto` replaced by the data sheet of `devices`, if they have any; values given by the user stay.

    `devices` are `cpu` or CUDA devices. Of different GPUs, the sheet of the slowest and the smallest memory count, as a
    step waits for all of them. For a GPU without a file, only the memory is filled in.
    """
    if not hardware.is_this_machine:
        return hardware
    gpus = [gpu for device in dict.fromkeys(devices) if (gpu := gpu_of(device)) is not None]
    names = [data_sheet_of(gpu) for gpu in gpus] or ["cpu" if devices[0] == "cpu" else None]
    sheets = [load_hardware(name) if name else hardware for name in names]
    slowest = min(sheets, key=lambda sheet: sheet.tflops or 0.0)
    values = {field.name: getattr(hardware, field.name) for field in fields(hardware) if field.name != "name"}
    given = {name: value for name, value in values.items() if value is not None}
    if gpus:
        given = {"memory_gib": min(gpu.memory_bytes for gpu in gpus) / 2**30 - _LIBRARIES_GIB} | given
    return replace(slowest, **given)


def sheet_of_devices(devices: Sequence[str]) -> HardwareConfig:
    """The data sheet of `devices` that are here, whatever hardware a plan is for."""
    return with_data_sheet(load_hardware("auto"), devices)


def data_sheet_of(gpu: Gpu) -> str | None:
    """The file in conf/hardware of a GPU; None if there is none."""
    name = set(gpu.name.upper().replace("-", " ").split())
    for words, min_memory_gb, file in _SHEETS:
        product_words = set(words.split())
        if name >= product_words and not (name & _OTHERS) - product_words and gpu.memory_bytes >= min_memory_gb * 1e9:
            return file
    return None


def gpu_of(device: str) -> Gpu | None:
    """The GPU that a device name stands for; None for `cpu`, and without a driver. Devices of other machines count as
    devices of this machine, as all machines of a run have equally many GPUs."""
    gpus = usable_gpus() if device != "cpu" else ()
    return gpus[int(device.partition(":")[2]) % len(gpus)] if gpus else None


def number_of_gpus(config: TrainConfig) -> int:
    """The number of GPUs that a run may use. Raises InvalidSettingError for device=cuda if there is none."""
    gpus = len(usable_gpus()) if config.device != "cpu" and torch_supports_accelerator() else 0
    if config.device == "cuda" and gpus == 0:
        why = "this machine has no CUDA device" if torch_supports_accelerator() else "this torch is built without CUDA"
        raise InvalidSettingError("device", config.device, f"{why}; use device=cpu or device=auto")
    return gpus


def computes_on_gpu(config: TrainConfig) -> bool:
    """Whether the run, or the machine that it is planned for, has GPUs."""
    hardware = config.hardware
    return number_of_gpus(config) > 0 if hardware.is_this_machine else hardware.name in {file for _, _, file in _SHEETS}


def replays_graphs(config: TrainConfig) -> bool:
    """Whether the stages of the run, or of the machine that it is planned for, are replayed as CUDA graphs."""
    return config.graphs is not False and computes_on_gpu(config)
