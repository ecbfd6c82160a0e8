"""Asynchronous copies of samples, targets and a step's metrics between the host and a device.

With a GPU they need page-locked memory on the host; with a CPU nothing is copied.
"""

from collections.abc import Callable

import torch


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Start copying a host tensor to `device`; kernels launched later on its current stream see the copy."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def to_host(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Start copying a tensor to the host. The returned function waits for the copy and returns it."""
    copy = tensor.to("cpu", non_blocking=True)  # torch allocates page-locked memory for a copy from a GPU
    copied = torch.cuda.current_stream(tensor.device).record_event() if tensor.device.type == "cuda" else None

    def read() -> torch.Tensor:
        if copied is not None:
            copied.synchronize()
        return copy

    return read
