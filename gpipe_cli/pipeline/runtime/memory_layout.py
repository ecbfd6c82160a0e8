"""The strides of tensors between layers: the same for every cut, so that kernels, which choose by strides, do the same.

Images travel channels last where the run is in that format; sent as the memory they are, without a copy.
"""

from collections.abc import Sequence

import torch


def in_layout(tensor: torch.Tensor, memory_format: torch.memory_format) -> torch.Tensor:
    """The same values with the strides that tensors between layers have: images (N, C, H, W) in `memory_format`."""
    strides = layout_strides(tensor.shape, memory_format)
    if tensor.stride() == strides:
        return tensor
    if tensor.dim() == 4 and memory_format is torch.channels_last:
        tensor = tensor.contiguous(memory_format=torch.channels_last)
    else:
        tensor = tensor.contiguous()
    # with a dimension of size 1 several strides mean the same memory, and kernels choose by strides
    return tensor if tensor.stride() == strides else tensor.as_strided(tensor.shape, strides)


def layout_strides(shape: Sequence[int], memory_format: torch.memory_format) -> tuple[int, ...]:
    """The strides of a dense tensor of this shape, channels last where that is asked for and there are four
    dimensions."""
    order = list(range(len(shape)))
    if len(shape) == 4 and memory_format is torch.channels_last:
        order = [0, 2, 3, 1]
    strides = [0] * len(shape)
    size = 1
    for dimension in reversed(order):
        strides[dimension] = size
        size *= max(1, shape[dimension])
    return tuple(strides)


def as_sent(tensor: torch.Tensor, memory_format: torch.memory_format) -> torch.Tensor:
    """A contiguous view of the same memory: what is sent has no strides of its own, the receiver knows them."""
    if tensor.dim() == 4 and memory_format is torch.channels_last:
        tensor = tensor.permute(0, 2, 3, 1)
    return tensor if tensor.is_contiguous() else tensor.contiguous()
