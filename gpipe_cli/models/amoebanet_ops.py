"""The operations whose results an AmoebaNet cell adds up, with their weight initialisation, after the TPU reference
(amoeba_net/network_utils.py).

Padding is TensorFlow's SAME: the output is ceil(input / stride) long, and an odd padding has its extra pixel on the
right and at the bottom. A model is built on the meta device, and each process initialises only its own layers, by the
`reset_parameters` of every module, from torch's default generator.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Norm = Callable[[int], nn.Module]  # number of channels -> batch normalisation

_ONEDNN = torch.backends.mkldnn.is_available()  # evaluated here, as torch.compile cannot trace the call in a layer


def variance_scaling_(weight: Tensor, fan_out: int) -> None:
    """Fill `weight` from a normal distribution truncated at two standard deviations, with variance about 2 / `fan_out`,
    as tf.contrib.layers' `variance_scaling_initializer`; truncation leaves 0.774 of the variance, hence its 1.3."""
    deviation = math.sqrt(1.3 * 2.0 / fan_out)
    nn.init.trunc_normal_(weight, std=deviation, a=-2 * deviation, b=2 * deviation)


def convolve(x: Tensor, weight: Tensor, stride: tuple[int, ...], padding: tuple[int, int], groups: int) -> Tensor:
    """A convolution with zero padding and without bias, (N, C, H, W) -> (N, C', H', W')."""
    # On one CPU thread, torch runs a 1x1 convolution of fewer than 16 samples (a micro-batch, in short) by a general
    # routine that takes up to twice as long as oneDNN, which it uses for strided or dilated ones. Dilation does
    # not change a 1x1 kernel, so we ask for it: D (6, 128) at 224 pixels, 8 samples, takes 0.67 s instead of 0.92 s.
    # Not in an exported graph, where onnxruntime would take a tenth longer for it.
    pointwise = weight.shape[2:] == (1, 1) and not torch.compiler.is_exporting()
    dilation = 2 if pointwise and x.device.type == "cpu" and _ONEDNN else 1
    return F.conv2d(x, weight, None, stride, padding, dilation, groups)


class Convolution(nn.Conv2d):
    """A convolution without bias and without padding (TensorFlow's VALID), from (N, C, H, W).

    Its fan-out is kernel area times output channels *per group*: for a depth-wise kernel the area alone, as in
    TensorFlow, where such weights are (height, width, channels, 1).
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: tuple[int, int] = (1, 1),
        stride: tuple[int, int] = (1, 1),
        groups: int = 1,
    ) -> None:
        super().__init__(in_channels, out_channels, kernel_size, stride, groups=groups, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return convolve(x, self.weight, self.stride, (0, 0), self.groups)

    def reset_parameters(self) -> None:
        variance_scaling_(self.weight, math.prod(self.kernel_size) * self.out_channels // self.groups)


class Linear(nn.Linear):
    """A fully connected layer with bias, (N, in) -> (N, out)."""

    def reset_parameters(self) -> None:
        variance_scaling_(self.weight, self.out_features)
        nn.init.zeros_(self.bias)


def same_padding(length: int, kernel: int, stride: int) -> tuple[int, int]:
    """Pixels that TensorFlow's SAME rule adds before and after a line of `length` pixels."""
    windows = -(-length // stride)
    total = max((windows - 1) * stride + kernel - length, 0)
    return total // 2, total - total // 2


class SameConvolution(Convolution):
    """A convolution with SAME padding by zeros, (N, C, H, W) -> (N, C', ceil(H / stride), ceil(W / stride))."""

    def forward(self, x: Tensor) -> Tensor:
        top, bottom = same_padding(x.shape[2], self.kernel_size[0], self.stride[0])
        left, right = same_padding(x.shape[3], self.kernel_size[1], self.stride[1])
        if (top, left) != (bottom, right):  # the convolution itself can only pad both sides alike
            x = F.pad(x, (left, right, top, bottom))
            top = left = 0
        return convolve(x, self.weight, self.stride, (top, left), self.groups)


class Pool(nn.Module):
    """Maximum or average over the real pixels of a window, (N, C, H, W) -> (N, C, ceil(H / stride), ceil(W / stride)).

    The last window extends over the edge where an odd padding has its extra pixel; no padded copy is made.
    """

    def __init__(self, name: str, stride: int) -> None:
        super().__init__()
        self.average = name.startswith("avg")
        self.kernel = int(name[-1])
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        padding = [same_padding(length, self.kernel, self.stride)[0] for length in x.shape[2:]]
        if self.average:
            return F.avg_pool2d(x, self.kernel, self.stride, padding, ceil_mode=True, count_include_pad=False)
        return F.max_pool2d(x, self.kernel, self.stride, padding, ceil_mode=True)


class FactorizedReduction(nn.Module):
    """ReLU, then half the resolution without losing every second pixel, (N, C, H, W) -> (N, C', ceil(H/2), ceil(W/2)).

    A 1x1 convolution reads the pixels (0, 0), (0, 2), ..., another the pixels (1, 1), (1, 3), ..., and zeros where an
    odd size leaves none. Pixels are picked before the convolutions: the backward of a 1x1 convolution with a
    stride writes past its memory on CPUs for some sizes (torch 2.15: 12 channels of 56 x 56, channels last).
    """

    def __init__(self, in_channels: int, out_channels: int, norm: Norm) -> None:
        super().__init__()
        self.even = Convolution(in_channels, out_channels // 2)
        self.odd = Convolution(in_channels, out_channels - out_channels // 2)
        self.norm = norm(out_channels)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(x)
        odd = F.pad(x[:, :, 1::2, 1::2], (0, x.shape[3] % 2, 0, x.shape[2] % 2))
        return self.norm(torch.cat([self.even(x[:, :, ::2, ::2]), self.odd(odd)], dim=1))


class PreActivated(nn.Sequential):
    """An operation that begins with ReLU, without that ReLU: a cell rectifies each state once for all operations that
    read it, and keeps a single tensor for the backward."""


# In place after a batch norm: nothing else reads the norm's output, and its backward needs only its input.
relu_after_norm = partial(nn.ReLU, inplace=True)


def convolution(in_channels: int, out_channels: int, norm: Norm) -> PreActivated:
    """(ReLU,) 1x1 convolution, batch norm."""
    return PreActivated(Convolution(in_channels, out_channels), norm(out_channels))


def _bottleneck(
    in_channels: int, out_channels: int, stride: int, norm: Norm, *kernels: tuple[int, int]
) -> PreActivated:
    """(ReLU,) 1x1 to a quarter of the channels, the `kernels` there, 1x1 back; batch norm and ReLU between."""
    inner = out_channels // 4
    layers: list[nn.Module] = [Convolution(in_channels, inner)]
    for kernel in kernels:
        layers += [norm(inner), relu_after_norm(), SameConvolution(inner, inner, kernel, (stride, stride))]
    return PreActivated(*layers, norm(inner), relu_after_norm(), Convolution(inner, out_channels), norm(out_channels))


def _separable(in_channels: int, out_channels: int, stride: int, norm: Norm, *, kernel: int) -> PreActivated:
    """Twice: (ReLU,) a kernel x kernel filter for each channel, 1x1 convolution, batch norm; the first with stride."""
    return PreActivated(
        SameConvolution(in_channels, in_channels, (kernel, kernel), (stride, stride), groups=in_channels),
        Convolution(in_channels, out_channels),
        norm(out_channels),
        relu_after_norm(),
        SameConvolution(out_channels, out_channels, (kernel, kernel), groups=out_channels),
        Convolution(out_channels, out_channels),
        norm(out_channels),
    )


def make_operation(name: str, in_channels: int, out_channels: int, stride: int, norm: Norm) -> nn.Module:
    """An operation of a genotype, (N, in, H, W) -> (N, out, ceil(H / stride), ceil(W / stride)).

    A `PreActivated` expects its input rectified; every other module takes the state as it is.
    """
    match name:
        case "identity" if in_channels == out_channels:
            return nn.Identity()
        case "identity" | "1x1":  # no genotype uses these, or 1x7_7x1, with stride 2
            return convolution(in_channels, out_channels, norm)
        case "3x3":
            return _bottleneck(in_channels, out_channels, stride, norm, (3, 3))
        case "1x7_7x1":
            return _bottleneck(in_channels, out_channels, stride, norm, (1, 7), (7, 1))
        case "separable_3x3_2" | "separable_5x5_2":
            return _separable(in_channels, out_channels, stride, norm, kernel=3 if "3x3" in name else 5)
    pool = Pool(name, stride)
    if in_channels == out_channels:
        return pool
    return nn.Sequential(pool, Convolution(in_channels, out_channels), norm(out_channels))  # no ReLU
