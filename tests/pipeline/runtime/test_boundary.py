"""What crosses a boundary has the same strides for every cut."""

from math import prod

import pytest
import torch

from gpipe_cli.pipeline.runtime.boundary import in_layout, layout_strides


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (1, 3, 1, 1), (4, 1, 5, 5), (6, 7), ()])
def test_the_layout_between_layers(shape: tuple[int, ...], memory_format: torch.memory_format) -> None:
    """One set of strides for a shape, wherever the tensor comes from; the values stay."""
    strides = layout_strides(shape, memory_format)
    dense = torch.arange(float(prod(shape))).reshape(shape)
    variants = [dense, dense.clone()]
    if len(shape) == 4:
        turned = dense.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
        variants += [dense.to(memory_format=torch.channels_last), turned]
    for tensor in variants:
        laid = in_layout(tensor, memory_format)
        assert laid.stride() == strides
        assert torch.equal(laid, dense)
    if memory_format is torch.contiguous_format and 1 not in shape:
        assert strides == dense.stride()
    if memory_format is torch.channels_last and len(shape) == 4 and 1 not in shape:
        assert strides == dense.to(memory_format=torch.channels_last).stride()
