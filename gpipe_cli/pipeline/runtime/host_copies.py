"""Copies between the host and a device for which the host does not wait: of samples and targets, of a step's numbers.

On a GPU that takes page-locked memory on the host's side; on a CPU there is nothing to copy.
"""

from collections.abc import Callable

import torch


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Begin to copy a tensor of the host to `device`; what is launched there next has it."""
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def to_host(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Begin to copy a tensor to the host. What is returned waits until the device has come so far, and gives the
    copy."""
    copy = tensor.to("cpu", non_blocking=True)  # from a GPU torch puts it into page-locked memory
    copied = torch.cuda.current_stream(tensor.device).record_event() if tensor.device.type == "cuda" else None

    def read() -> torch.Tensor:
        if copied is not None:
            copied.synchronize()
        return copy

    return read
