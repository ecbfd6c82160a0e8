"""Reference layers for timing a device: blocks of the models that come with gpipe, and each kind of operation alone, on
large and on small tensors.

Timing all of them takes a few seconds, and on a GPU they are large enough to keep it busy. `device_rates.py` fits the
device's seconds per operation, per FLOP and per byte to their times.
"""

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gpipe_cli.models.amoebanet import amoebanet
from gpipe_cli.models.transformer import SelfAttentionLayer

IMAGE_SIZE, CLASSES = 32, 10


def samples_for(gpu_bytes: int | None) -> int:
    """The samples of a micro-batch: 8 on a CPU, 64 to 256 on a GPU, as more memory usually means more speed."""
    return 8 if gpu_bytes is None else min(256, max(64, 2 ** round(math.log2(gpu_bytes / 2**28))))


def layers_for_gpu() -> nn.Sequential:
    """`layers` with enough channels to fill a GPU."""
    return layers(wide=192, width=1024)


class _Apply(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[[Any], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> torch.Tensor:
        return self.function(x)


def layers(wide: int = 48, width: int = 128) -> nn.Sequential:
    """The reference layers, from images (N, 3, 32, 32) to logits (N, 10): 0.1 GFLOP per sample by default, more with
    more channels (`wide`) or larger tokens (`width`)."""
    narrow, few = 16, 4

    def several(make: Callable[[], nn.Module], count: int = 4) -> nn.Sequential:
        return nn.Sequential(*(make() for _ in range(count)))

    def block(channels: int, out: int, stride: int) -> nn.Sequential:
        """A block like that of a small ResNet, without the shortcut."""
        return nn.Sequential(
            nn.Conv2d(channels, out, 3, stride, 1, bias=False),
            nn.BatchNorm2d(out),
            nn.ReLU(inplace=True),
            nn.Conv2d(out, out, 3, 1, 1, bias=False),
            nn.BatchNorm2d(out),
        )

    def attention() -> SelfAttentionLayer:
        return SelfAttentionLayer(width, 4 * width, 4, width // 4, 0.1, 0.1, causal=True)

    cells = amoebanet(
        variant="d", normal_cells=3, filters=2 * few, image_size=IMAGE_SIZE, num_classes=CLASSES, auxiliary_head=False,
        batch_norm_momentum=0.1,
    )  # fmt: skip
    *blocks, _ = cells.named_children()
    return nn.Sequential(
        OrderedDict(
            blocks,
            current=_Apply(lambda cell: cell[0]),
            upsample=nn.Upsample(scale_factor=4),
            entry=nn.Conv2d(32 * few, wide, 3, padding=1, bias=False),
            convolution=nn.Conv2d(wide, wide, 3, padding=1, bias=False),
            norm=nn.BatchNorm2d(wide),
            relu=nn.ReLU(),
            pointwise=nn.Conv2d(wide, wide, 1, bias=False),
            max_pool=nn.MaxPool2d(3, 1, 1),
            average_pool=nn.AvgPool2d(3, 1, 1),
            depthwise=nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False),
            wide_depthwise=nn.Conv2d(wide, wide, 5, padding=2, groups=wide, bias=False),
            dropout=nn.Dropout(0.1),
            thin=nn.Conv2d(wide, 2 * few, 1, bias=False),
            thin_square=nn.Conv2d(2 * few, 2 * few, 3, padding=1, bias=False),
            thick=nn.Conv2d(2 * few, wide, 1, bias=False),
            pool=nn.MaxPool2d(4),
            block_0=block(wide, 2 * wide, 2),
            block_1=block(2 * wide, 2 * wide, 1),
            block_2=block(2 * wide, 256, 2),
            block_3=block(256, 256, 1),
            expand=nn.Upsample(scale_factor=4),
            reduction=nn.Conv2d(256, narrow, 1, bias=False),
            convolutions=several(lambda: nn.Conv2d(narrow, narrow, 3, padding=1, bias=False)),
            narrowing=nn.Conv2d(narrow, few, 1, bias=False),
            narrow=nn.Conv2d(few, few, 3, padding=1, bias=False),
            narrows=several(lambda: nn.Conv2d(few, few, (1, 3), padding=(0, 1), bias=False)),
            widening=nn.Conv2d(few, narrow, 1, bias=False),
            norms=several(lambda: nn.BatchNorm2d(narrow)),
            relus=several(nn.ReLU),
            pointwises=several(lambda: nn.Conv2d(narrow, narrow, 1, bias=False)),
            max_pools=several(lambda: nn.MaxPool2d(3, 1, 1)),
            average_pools=several(lambda: nn.AvgPool2d(3, 1, 1)),
            depthwises=several(lambda: nn.Conv2d(narrow, narrow, 3, padding=1, groups=narrow, bias=False)),
            dropouts=several(lambda: nn.Dropout(0.1)),
            tokens=_Apply(lambda images: images.flatten(2).mT.contiguous()),
            expansion=nn.Linear(narrow, width),
            attention_0=attention(),
            attention_1=attention(),
            products=several(lambda: nn.Linear(width, width)),
            longer=nn.Linear(width, 4 * width),
            gelu=nn.GELU(),
            shorter=nn.Linear(4 * width, width),
            layer_norm=nn.LayerNorm(width),
            scores=_Apply(lambda x: (x @ x.mT).softmax(dim=-1) @ x),
            mean=_Apply(lambda x: x.mean(dim=1)),
            products_of_vectors=several(lambda: nn.Linear(width, width)),
            relus_of_vectors=several(nn.ReLU),
            heavy=nn.Linear(width, 4096),
            classifier=nn.Linear(4096, CLASSES),
        )
    )  # fmt: skip
