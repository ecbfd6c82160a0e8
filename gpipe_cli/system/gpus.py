"""The GPUs that this process may use, by the driver's management library: asking CUDA would open a context on one."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any


@dataclass(frozen=True)
class Gpu:
    name: str  # name given by the driver
    memory_bytes: int


@cache
def usable_gpus() -> tuple[Gpu, ...]:
    """The usable GPUs in CUDA's order; () without a driver. CUDA itself is asked where the library misses some."""
    import pynvml

    try:
        handles = _handles()
        if "CUDA_VISIBLE_DEVICES" not in os.environ and any(map(_is_divided, handles)):
            return _gpus_of_cuda()  # CUDA counts the parts, not the whole
        return tuple(
            Gpu(pynvml.nvmlDeviceGetName(handle), int(pynvml.nvmlDeviceGetMemoryInfo(handle).total))
            for handle in handles
        )
    except pynvml.NVMLError as error:
        no_driver = (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
        # a container without the library, a device that others have, memory that is shared with the CPU
        return () if error.value in no_driver and not os.path.exists("/dev/nvidiactl") else _gpus_of_cuda()


def look_again() -> None:
    """`usable_gpus` was to find the same for ever; one of them may have failed since."""
    import pynvml

    usable_gpus.cache_clear()
    _handles.cache_clear()
    with suppress(pynvml.NVMLError):
        pynvml.nvmlShutdown()


def _is_divided(handle: Any) -> bool:
    """Whether a GPU is cut into parts (MIG)."""
    import pynvml

    try:
        return bool(pynvml.nvmlDeviceGetMigMode(handle)[0] == pynvml.NVML_DEVICE_MIG_ENABLE)
    except pynvml.NVMLError:  # most cannot be
        return False


def _gpus_of_cuda() -> tuple[Gpu, ...]:
    """Asked in a process of its own: one that has opened CUDA can fork no workers."""
    program = (
        "import json, torch\n"
        "each = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))\n"
        "print(json.dumps([(one.name, one.total_memory) for one in each]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    return () if done.returncode else tuple(Gpu(*one) for one in json.loads(done.stdout))


def driver_version() -> str:
    """Where there are GPUs; "" if the driver's library does not say."""
    import pynvml

    try:
        return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return ""


def busy_share(number: int) -> float:
    """For how much of the last second, or less, this one of `usable_gpus` had work, 0 to 1; 0 where its driver does not
    say, as of a part of a GPU (MIG)."""
    import pynvml

    try:
        return float(pynvml.nvmlDeviceGetUtilizationRates(_handles()[number]).gpu / 100)
    except (pynvml.NVMLError, IndexError):
        return 0.0


@cache
def _handles() -> tuple[Any, ...]:
    """The library's, of the GPUs that CUDA shows, in its order."""
    import pynvml

    # CUDA counts the fastest first otherwise, and the library always by the bus
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    pynvml.nvmlInit()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())]
    uuids = [pynvml.nvmlDeviceGetUUID(handle) for handle in handles]
    return tuple(
        handles[entry] if isinstance(entry, int) else pynvml.nvmlDeviceGetHandleByUUID(entry)
        for entry in visible(os.environ.get("CUDA_VISIBLE_DEVICES"), uuids)
    )


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
        if re.fullmatch("[0-9]{1,9}", entry):
            matching = [int(entry)] if int(entry) < len(uuids) else []
        else:
            matching = [number for number, uuid in enumerate(uuids) if entry and uuid.startswith(entry)]
        if len(matching) != 1 or matching[0] in found:
            break
        found += matching
    return found
