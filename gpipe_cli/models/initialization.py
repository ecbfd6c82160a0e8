"""How AmoebaNet's weights start (after the TPU reference): convolutions and linear layers that initialise themselves.

A model is built on the meta device and each process materialises only its own layers, so every module that owns
parameters must be able to fill them in alone: that is what `reset_parameters` does here.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# From `variance_scaling_initializer` of tf.contrib.layers: its default factor is 2, and 1.3 makes up for the variance
# that a normal distribution loses when it is cut at two standard deviations (0.774 of it is left; 1 / 0.774 = 1.29).
FACTOR = 2.0
TRUNCATION_CORRECTION = 1.3


def variance_scaling_(weight: Tensor, fan_out: int) -> None:
    """Fill `weight` from a normal distribution cut at two standard deviations, of variance about 2 / `fan_out`."""
    deviation = math.sqrt(TRUNCATION_CORRECTION * FACTOR / fan_out)
    nn.init.trunc_normal_(weight, std=deviation, a=-2 * deviation, b=2 * deviation)


def convolve(x: Tensor, weight: Tensor, stride: tuple[int, ...], padding: tuple[int, int], groups: int) -> Tensor:
    """A convolution with zeros as padding, (N, C, H, W) -> (N, C', H', W')."""
    # On one CPU thread, torch runs a 1x1 convolution of fewer than 16 samples (a micro-batch, in short) by a general
    # routine that takes up to twice as long as oneDNN, which it uses for strided or dilated ones. To a 1x1 kernel
    # dilation means nothing, so we say "dilated": D (6, 128) at 224 pixels, 8 samples, takes 0.67 s instead of 0.92 s.
    pointwise = weight.shape[2:] == (1, 1)
    dilation = 2 if pointwise and x.device.type == "cpu" and torch.backends.mkldnn.is_available() else 1
    return F.conv2d(x, weight, None, stride, padding, dilation, groups)


class Convolution(nn.Conv2d):
    """A convolution without bias and without padding (TensorFlow's VALID), from (N, C, H, W).

    Its fan-out counts the outputs that one input value reaches: kernel area times output channels *per group*. For a
    depth-wise kernel that is the area alone, as in TensorFlow, where such weights are (height, width, channels, 1).
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
        """Draw new weights from torch's default generator."""
        variance_scaling_(self.weight, math.prod(self.kernel_size) * self.out_channels // self.groups)


class Linear(nn.Linear):
    """A fully connected layer with bias, (N, in) -> (N, out)."""

    def reset_parameters(self) -> None:
        """Draw new weights from torch's default generator; the bias starts at zero."""
        variance_scaling_(self.weight, self.out_features)
        nn.init.zeros_(self.bias)
