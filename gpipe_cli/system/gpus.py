"""The GPUs that this process may use, by the driver's management library: asking CUDA would open a context on one."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class Gpu:
    name: str  # as the driver calls it
    memory_bytes: int


@cache
def usable_gpus() -> tuple[Gpu, ...]:
    """In CUDA's order; () without a driver."""
    import pynvml

    # CUDA counts the fastest first otherwise, and the library always by the bus
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
        uuids = [pynvml.nvmlDeviceGetUUID(handle) for handle in handles]
        shown = [
            handles[entry] if isinstance(entry, int) else pynvml.nvmlDeviceGetHandleByUUID(entry)
            for entry in visible(os.environ.get("CUDA_VISIBLE_DEVICES"), uuids)
        ]
        return tuple(
            Gpu(pynvml.nvmlDeviceGetName(handle), int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)) for handle in shown
        )
    except pynvml.NVMLError:
        return ()


def visible(setting: str | None, uuids: Sequence[str]) -> list[int | str]:
    """Which GPUs CUDA_VISIBLE_DEVICES leaves, by number or, for a part of one (MIG), by name.

    As CUDA does: numbers and beginnings of names, up to the first that there is not.
    """
    if setting is None:
        return list(range(len(uuids)))
    found: list[int | str] = []
    for entry in map(str.strip, setting.split(",")):
        if entry.startswith("MIG-"):
            found.append(entry)
            continue
        if entry.isdecimal():
            matching = [int(entry)] if int(entry) < len(uuids) else []
        else:
            matching = [number for number, uuid in enumerate(uuids) if entry and uuid.startswith(entry)]
        if len(matching) != 1 or matching[0] in found:
            break
        found += matching
    return found
