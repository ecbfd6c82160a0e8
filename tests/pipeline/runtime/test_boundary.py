"""What crosses a boundary has the same strides and alignment for every cut."""

from collections import OrderedDict
from math import prod
from typing import Any

import pytest
import torch
from engine_runs import CPU, SumOfSquares, local_transport
from torch import nn

from gpipe_cli.pipeline.runtime.boundary import BoundaryTensor, in_layout, layout_strides, split_all
from gpipe_cli.pipeline.runtime.executor import Executor
from gpipe_cli.pipeline.runtime.stage import Stage
from gpipe_cli.schedule.named_schedules import build


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (1, 3, 1, 1), (4, 1, 5, 5), (6, 7), ()])
def test_the_layout_between_layers(shape: tuple[int, ...], memory_format: torch.memory_format) -> None:
    """One set of strides for a shape, wherever the tensor comes from; the values stay."""
    strides = layout_strides(shape, memory_format)
    dense = torch.arange(float(prod(shape))).reshape(shape)
    parts = [torch.cat([torch.zeros(before), dense.flatten()])[before:].view(shape) for before in (3, 4, 32, 64)]
    variants = [dense, dense.clone(), *parts]
    if len(shape) == 4:
        turned = dense.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
        variants += [dense.to(memory_format=torch.channels_last), turned]
    for tensor in variants:
        laid = in_layout(tensor, memory_format)
        assert laid.stride() == strides
        assert torch.equal(laid, dense)
        assert laid.storage_offset() % 64 == 0, "as in a receive buffer, to 256 bytes"
    if memory_format is torch.contiguous_format and 1 not in shape:
        assert strides == dense.stride()
    if memory_format is torch.channels_last and len(shape) == 4 and 1 not in shape:
        assert strides == dense.to(memory_format=torch.channels_last).stride()


class Takes(nn.Module):
    """Hands on a part of a tensor, which begins anywhere in its memory."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x, 2 * x])[1]


def test_a_layer_gets_equally_aligned_tensors_for_every_cut() -> None:
    """Handed over in a stage, or in a process, they lay where the layer had put them; received ones at the beginning of
    a buffer. A GPU's kernels are chosen by that, and so were its bits."""
    seen: dict[int, list[int]] = {1: [], 2: []}
    for partitions, found in seen.items():

        def note(layer: nn.Module, given: Any, found: list[int] = found) -> None:
            found.append(given[0].data_ptr() % 64)  # the alignment of torch's memory

        layers = OrderedDict(first=nn.Linear(3, 3), takes=Takes(), last=nn.Linear(3, 2))
        layers["last"].register_forward_pre_hook(note)
        layers["takes"].register_full_backward_pre_hook(note)
        described = (BoundaryTensor((0, 3), (1, 0), torch.float32, True),)
        parts = [layers] if partitions == 1 else [dict([one]) for one in layers.items()]
        stages, first = {}, 0
        for index, part in enumerate(parts):
            stages[index] = Stage(index, nn.Sequential(OrderedDict(part)), first_layer=first, run_seed=0, device=CPU,
                                  inputs=described if index else ())  # fmt: skip
            first += len(part)
        executor = Executor(stages, [0] * len(parts), local_transport(stages))
        executor.run(build("gpipe", len(parts), 2, "never"), 0, [3, 3], (torch.ones(6, 3),), SumOfSquares())
    assert seen[1] == [0] * 4
    assert sorted(seen[2]) == sorted(seen[1])


def test_every_micro_batch_is_aligned() -> None:
    """A layer returns its input, as a translation model's does with the targets: from an odd address it was copied,
    which no plan knew of."""
    images = torch.randn(5, 3, 5, 5).contiguous(memory_format=torch.channels_last)
    tokens = torch.arange(55).view(5, 11)
    pieces = split_all((images, tokens), [2, 2, 1])
    for cut, whole in zip(zip(*pieces, strict=True), (images, tokens), strict=True):
        assert torch.equal(torch.cat(cut), whole)
        assert [one.storage_offset() for one in cut] == [0, 0, 0]
        assert [one.stride() for one in cut] == [whole.stride()] * 3
        assert cut[0].data_ptr() == whole.data_ptr(), "the first one is no copy"
