"""Which data sheet holds for the device at hand."""

from dataclasses import fields, replace

import torch

from gpipe_cli.config.groups import HardwareConfig
from gpipe_cli.config.settings import TrainConfig, load_hardware
from gpipe_cli.system.gpus import Gpu, usable_gpus

# Words of the name that the driver has for a GPU, the least memory in GB, and its file in conf/hardware.
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


def resolved(hardware: HardwareConfig, device: str) -> HardwareConfig:
    """`auto` becomes the data sheet of the device at hand, if there is one; what is given stays.

    `device` is `cpu` or a CUDA device. Of a GPU that has no file everything that was not given stays None.
    """
    if hardware.name != "auto":
        return hardware
    gpu = None if device == "cpu" else first_gpu()
    name = "cpu" if device == "cpu" else gpu and sheet_of(gpu)
    given = {
        f.name: value for f in fields(hardware) if f.name != "name" and (value := getattr(hardware, f.name)) is not None
    }
    if gpu is not None:
        given = {"memory_gib": gpu.memory_bytes / 2**30} | given
    return replace(load_hardware(name) if name else hardware, **given)


def sheet_of(gpu: Gpu) -> str | None:
    """The file in conf/hardware of a GPU; None if there is none."""
    name = set(gpu.name.replace("-", " ").split())
    fitting = (file for words, least, file in _SHEETS if name >= set(words.split()) and gpu.memory_bytes >= least * 1e9)
    return next(fitting, None)


def first_gpu() -> Gpu | None:
    return next(iter(usable_gpus()), None)


def number_of_gpus(config: TrainConfig) -> int:
    """Those that a run may use."""
    return len(usable_gpus()) if config.device != "cpu" and torch.version.cuda is not None else 0


def computes_on_gpu(config: TrainConfig) -> bool:
    """Whether the run, or the machine that it is planned for, has GPUs."""
    name = config.hardware.name
    return number_of_gpus(config) > 0 if name == "auto" else name in {file for _, _, file in _SHEETS}
