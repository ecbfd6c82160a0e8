"""All uses of an accelerator, by torch's names for any kind: streams, events, copies, seeds, memory, names.

These are NVIDIA's GPUs, and AMD's with torch's build for ROCm, which gives them the same type. Another kind needs its
type in DEVICE_TYPE, and settings for its libraries in `configure_libraries`.
"""

import os
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

DEVICE_TYPE = "cuda"  # the type of the devices that gpipe computes on, besides "cpu"
_NO_CONTEXT = nullcontext()


def is_accelerator(device: torch.device) -> bool:
    """Whether work on `device` runs on after the call that launches it has returned."""
    return device.type == DEVICE_TYPE


def torch_supports_accelerator() -> bool:
    """Whether this torch has code for the accelerator, which need not be here. Opens no context."""
    built = torch.accelerator.current_accelerator()
    return built is not None and built.type == DEVICE_TYPE


def configure_libraries(precision: str, *, deterministic: bool) -> None:
    """Set how CUDA's libraries compute in this process: in which precision, and whether bitwise reproducibly."""
    # autograd's threads open the device's context in the first product of a backward
    warnings.filterwarnings("ignore", "Attempting to run cuBLAS, but there was no current CUDA context")
    # micro-batches of two sizes fragment memory; torch reads this variable at the first allocation on a GPU
    if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:  # its older name, which has lower priority
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    # torch's older settings: once the newer ones are set, reading the older raises, and Inductor reads them
    torch.set_float32_matmul_precision("highest" if precision == "float32" else "high")
    torch.backends.cudnn.allow_tf32 = precision != "float32"
    # bitwise reproducible: no algorithm that is chosen by timing, or that sums in the order in which threads finish
    torch.backends.cudnn.benchmark = not deterministic
    torch.backends.cudnn.deterministic = deterministic
    torch.use_deterministic_algorithms(deterministic, warn_only=True)
    # no code here reads uninitialized memory
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # defined at run time
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # fused attention kernels sum their backward in the order in which threads finish (flash too, while torch only
    # warns); without them the attention weights of all pairs of positions are in memory together
    torch.backends.cuda.enable_flash_sdp(not deterministic)
    torch.backends.cuda.enable_mem_efficient_sdp(not deterministic)
    torch.backends.cuda.enable_cudnn_sdp(not deterministic)


def number_of_devices() -> int:
    """How many accelerators this process sees. CUDA itself is asked, without opening a context, and remembers its
    answer: what `hidden_gpus` hides afterwards stays visible to this process, which can no longer fork workers."""
    module = torch.get_device_module(DEVICE_TYPE)
    number: int = module.device_count() if module.is_available() else 0
    return number


def device_list() -> list[tuple[str, int]]:
    """The name and the bytes of memory of each accelerator. Opens a context on it."""
    module = torch.get_device_module(DEVICE_TYPE)
    devices = map(module.get_device_properties, range(module.device_count()))
    return [(device.name, device.total_memory) for device in devices]


def new_stream(device: torch.device) -> torch.Stream:
    return torch.Stream(device)


def current_stream(device: torch.device) -> torch.Stream:
    return torch.accelerator.current_stream(device)


def on_stream(stream: torch.Stream | None) -> AbstractContextManager[object]:
    """A context in which work on the stream's device is launched on `stream`; None stands for the current stream."""
    return nullcontext() if stream is None else stream


def new_timer(device: torch.device) -> torch.Event:
    """An event that measures time, and can be recorded repeatedly."""
    return torch.Event(device, enable_timing=True)


def record_use(tensor: torch.Tensor, stream: torch.Stream) -> None:
    """Do not give the tensor's memory to another tensor before what was launched on `stream` by then is done."""
    tensor.record_stream(stream)


def wait_for_device(device: torch.device) -> None:
    """Wait until all launched work is done; on a CPU it always is."""
    if is_accelerator(device):
        torch.accelerator.synchronize(device)


def use_device(device: torch.device) -> None:
    """Make `device` the device on which this thread, and threads of libraries that ask it, allocate and launch."""
    if is_accelerator(device):
        torch.accelerator.set_device_index(device)


def using_device(device: torch.device) -> AbstractContextManager[object]:
    """A context in which `device` is this thread's: a new thread has device 0, and would open a context on it."""
    return torch.accelerator.device_index(device.index) if is_accelerator(device) else _NO_CONTEXT


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Start copying a host tensor to `device`; kernels launched later on its current stream see the copy."""
    return (tensor.pin_memory() if is_accelerator(device) else tensor).to(device, non_blocking=True)


def copy_to_host_async(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Start copying a tensor to the host. The returned function waits for the copy and returns it."""
    copy = tensor.to("cpu", non_blocking=True)  # torch allocates page-locked memory for a copy from a GPU
    copied = current_stream(tensor.device).record_event() if is_accelerator(tensor.device) else None

    def read() -> torch.Tensor:
        if copied is not None:
            copied.synchronize()
        return copy

    return read


def new_pinned_memory(bytes: int) -> torch.Tensor:
    """Memory of the host, uint8 (bytes,), to which an accelerator copies without the host waiting; torch rounds it up
    to a power of two."""
    return torch.empty(bytes, dtype=torch.uint8, pin_memory=True)


def generators(device: torch.device) -> list[torch.Generator]:
    """The default generators that a layer on `device` may draw from: the CPU's and, on an accelerator, the device's."""
    defaults = [torch.default_generator]
    if is_accelerator(device):
        module = torch.get_device_module(device)
        module.init()  # there are no generators before
        index = torch.accelerator.current_device_index() if device.index is None else device.index
        defaults.append(module.default_generators[index])
    return defaults


def peak_bytes(device: torch.device) -> int:
    """The maximum that torch's allocator has allocated on an accelerator."""
    return torch.accelerator.max_memory_allocated(device)


def device_name(device: torch.device) -> str:
    name: str = torch.get_device_module(device).get_device_name(device)
    return name
