"""Copies of samples, targets and a step's numbers between the host and a device, for which the host does not wait.

With a GPU this needs page-locked memory on the host; with a CPU there is nothing to copy.
"""

from collections.abc import Callable

import torch


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Begin to copy a tensor from the host to `device`; kernels launched there from now on see the copy."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def to_host(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Begin to copy a tensor to the host. The function returned waits until the copy is there, and returns it."""
    copy = tensor.to("cpu", non_blocking=True)  # page-locked memory if it comes from a GPU
    copied = torch.cuda.current_stream(tensor.device).record_event() if tensor.device.type == "cuda" else None

    def read() -> torch.Tensor:
        if copied is not None:
            copied.synchronize()
        return copy

    return read
