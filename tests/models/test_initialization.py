"""Weights start as TensorFlow's variance scaling draws them: variance 2 / fan-out, cut at two standard deviations."""

import math

import pytest
import torch
from torch import nn

from gpipe_cli.models.initialization import Convolution, Linear
from gpipe_cli.models.operations import SameConvolution


@pytest.mark.parametrize(
    ("module", "fan_out"),
    [
        (Convolution(64, 256), 256),
        (SameConvolution(64, 64, (3, 3)), 9 * 64),
        (SameConvolution(64, 64, (1, 7)), 7 * 64),
        (SameConvolution(4096, 4096, (3, 3), groups=4096), 9),  # depth-wise: TensorFlow's kernel is (3, 3, channels, 1)
        (Linear(300, 100), 100),
    ],
)
def test_weights(module: Convolution | Linear, fan_out: int) -> None:
    torch.manual_seed(0)
    module.reset_parameters()
    assert module.weight.std().item() == pytest.approx(math.sqrt(2 / fan_out), rel=0.02)
    assert module.weight.mean().item() == pytest.approx(0, abs=0.02 * math.sqrt(2 / fan_out))
    # The largest of so many normal values would be beyond 3.5 deviations if nothing cut them off.
    assert module.weight.abs().max().item() <= 2 * math.sqrt(2.6 / fan_out)
    assert module.bias is None or not module.bias.any()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("samples", [2, 16])
@pytest.mark.parametrize("stride", [1, 2])
def test_pointwise_convolution_is_an_ordinary_one(samples: int, threads: int, stride: int) -> None:
    """The detour to the faster routine on CPU changes neither result nor gradients beyond rounding."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        torch.manual_seed(0)
        module = Convolution(8, 16, stride=(stride, stride))
        x = torch.randn(samples, 8, 5, 5, requires_grad=True)
        y = x.detach().clone().requires_grad_()
        weight = module.weight.detach().clone().requires_grad_()
        ours, expected = module(x), nn.functional.conv2d(y, weight, stride=stride)
        torch.testing.assert_close(ours, expected)
        ours.square().sum().backward()
        expected.square().sum().backward()
        torch.testing.assert_close(x.grad, y.grad)
        torch.testing.assert_close(module.weight.grad, weight.grad, rtol=1e-4, atol=1e-4)
    finally:
        torch.set_num_threads(before)
