"""Which data sheet holds for the device at hand."""

from dataclasses import fields, replace
from functools import cache
from pathlib import Path

from gpipe_cli.config.groups import HardwareConfig
from gpipe_cli.config.settings import load_hardware

_BY_NAME = {
    "H200": "h200",
    "P100-PCIE": "p100_pcie",
    "P40": "p40",
}  # as drivers call a GPU -> its file in conf/hardware


def resolved(hardware: HardwareConfig, device: str) -> HardwareConfig:
    """`auto` becomes the data sheet of the device at hand, if there is one; what is given stays.

    `device` is `cpu` or a CUDA device. Of a GPU that has no file everything that was not given stays None.
    """
    if hardware.name != "auto":
        return hardware
    model = gpu_model()
    name = "cpu" if device == "cpu" else next((file for part, file in _BY_NAME.items() if part in model), None)
    if name is None:
        return hardware
    found = load_hardware(name)
    given = {
        f.name: value for f in fields(hardware) if f.name != "name" and (value := getattr(hardware, f.name)) is not None
    }
    return replace(found, **given)


@cache
def gpu_model() -> str:
    """Of the first GPU, by the driver's own list: asking CUDA would open a context in a process that needs none."""
    for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        return file.read_text(encoding="utf-8", errors="replace").partition("Model:")[2].partition("\n")[0].strip()
    return ""
