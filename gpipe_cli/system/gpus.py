"""Looks up the GPUs that this process may use with NVML, the driver's library: CUDA would open a context on a GPU."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

_DRIVERS = "/dev/nvidiactl", "/dev/kfd"  # NVIDIA's and AMD's; without either, no GPU


class Gpu(NamedTuple):
    name: str  # name given by the driver
    memory_bytes: int


@cache
def usable_gpus() -> tuple[Gpu, ...]:
    """The usable GPUs in CUDA's order; () without a driver. CUDA itself is asked where NVML may not see them all."""
    import pynvml

    try:
        handles = _handles()
        if "CUDA_VISIBLE_DEVICES" not in os.environ and any(map(_has_mig_instances, handles)):
            return _gpus_of_torch()  # CUDA counts MIG instances, not whole GPUs
        return tuple(
            Gpu(pynvml.nvmlDeviceGetName(handle), int(pynvml.nvmlDeviceGetMemoryInfo(handle).total))
            for handle in handles
        )
    except pynvml.NVMLError as error:
        no_driver = (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
        # no NVML in a container, a device of other users, memory shared with the CPU, AMD's GPUs: torch may see them
        return () if error.value in no_driver and not any(map(os.path.exists, _DRIVERS)) else _gpus_of_torch()


def describe_devices() -> str:
    """The devices of this machine, as `device` and an error name them: `cpu, cuda (2 x NVIDIA H200)`."""
    names = Counter(gpu.name for gpu in usable_gpus())
    return f"cpu, cuda ({', '.join(f'{number} x {name}' for name, number in names.items())})" if names else "cpu"


def refresh_gpus() -> None:
    """Clear the cache of `usable_gpus`: a GPU may have failed since."""
    import pynvml

    usable_gpus.cache_clear()
    _handles.cache_clear()
    with suppress(pynvml.NVMLError):
        pynvml.nvmlShutdown()


def _has_mig_instances(handle: Any) -> bool:
    """Whether the GPU is divided into MIG instances."""
    import pynvml

    try:
        return bool(pynvml.nvmlDeviceGetMigMode(handle)[0] == pynvml.NVML_DEVICE_MIG_ENABLE)
    except pynvml.NVMLError:  # most GPUs have no MIG
        return False


def _gpus_of_torch() -> tuple[Gpu, ...]:
    """The GPUs as torch lists them, asked in a subprocess: a process that has initialized CUDA can fork no workers."""
    program = "import json; from gpipe_cli.system.accelerator import device_list; print(json.dumps(device_list()))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    return () if done.returncode else tuple(Gpu(*properties) for properties in json.loads(done.stdout))


def driver_version() -> str:
    """The version of the GPUs' driver; "" if NVML does not report it."""
    import pynvml

    try:
        return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return ""


@cache
def _handles() -> tuple[Any, ...]:
    """NVML's handles of the GPUs that CUDA shows, in CUDA's order."""
    import pynvml

    # by default CUDA puts the fastest first; NVML always orders by PCI bus
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    pynvml.nvmlInit()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
    uuids = [pynvml.nvmlDeviceGetUUID(handle) for handle in handles]
    return tuple(
        handles[entry] if isinstance(entry, int) else pynvml.nvmlDeviceGetHandleByUUID(entry)
        for entry in visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"), uuids)
    )


def visible_gpus(setting: str | None, uuids: Sequence[str]) -> list[int | str]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, by number or, for MIG instances, by UUID.

    As in CUDA, entries are numbers or prefixes of UUIDs, and end at the first that is unknown, ambiguous or repeated.
    """
    if setting is None:
        return list(range(len(uuids)))
    listed: list[int | str] = []
    for entry in map(str.strip, setting.split(",")):
        if entry.startswith("MIG-"):
            listed.append(entry)
            continue
        if re.fullmatch("[0-9]{1,9}", entry):
            matching = [int(entry)] if int(entry) < len(uuids) else []
        else:
            matching = [number for number, uuid in enumerate(uuids) if entry and uuid.startswith(entry)]
        if len(matching) != 1 or matching[0] in listed:
            break
        listed += matching
    return listed
