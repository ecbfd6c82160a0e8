"""The operations of a cell behave and start as TensorFlow's."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_cli.models.operations import (
    AfterRelu,
    Convolution,
    FactorizedReduction,
    Linear,
    SameConvolution,
    operation,
)


def same(x: Tensor, kernel: tuple[int, int], stride: tuple[int, int], value: float = 0.0) -> Tensor:
    """`x` in a frame, from the definition of TensorFlow's SAME rule: of the pixels that the last window lacks, half
    (rounded down) lie before the first."""
    lacks = [
        max((math.ceil(length / step) - 1) * step + size - length, 0)
        for length, size, step in zip(x.shape[2:], kernel, stride, strict=True)
    ]
    (top, bottom), (left, right) = ((lack // 2, lack - lack // 2) for lack in lacks)
    return F.pad(x, (left, right, top, bottom), value=value)


def norm(channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels)


def no_norm(channels: int) -> nn.Module:
    return nn.Identity()


def fill(module: nn.Module, value: float = 1.0) -> None:
    for parameter in module.parameters():
        nn.init.constant_(parameter, value)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("name", ["max_pool_2x2", "max_pool_3x3", "avg_pool_3x3"])
def test_pool(name: str, stride: int) -> None:
    """An even kernel is used with stride 2 only."""
    kernel = int(name[-1])
    for size in ((1, 2), (4, 4), (6, 7)) if kernel == 3 or stride == 2 else ():
        # Negative almost everywhere: a zero taken from the padding would be the maximum.
        x = torch.randn(2, 8, *size) - 3
        frame = (kernel, kernel), (stride, stride)
        if name.startswith("max"):
            expected = F.max_pool2d(same(x, *frame, value=-math.inf), kernel, stride)
        else:  # of the real pixels
            sums, counts = (F.avg_pool2d(same(each, *frame), kernel, stride) for each in (x, torch.ones_like(x)))
            expected = sums / counts
        torch.testing.assert_close(operation(name, 8, 8, stride, norm)(x), expected)


def test_pool_that_changes_channels_projects_without_relu() -> None:
    apply = operation("max_pool_3x3", 1, 4, 1, no_norm)
    fill(apply)
    x = torch.full((1, 1, 3, 3), -2.0)
    assert not isinstance(apply, AfterRelu)
    assert torch.equal(apply(x), torch.full((1, 4, 3, 3), -2.0))


@pytest.mark.parametrize(
    ("size", "kernel", "stride"),
    [
        ((6, 7), (3, 3), (2, 2)),
        ((7, 6), (1, 7), (1, 2)),
        ((6, 7), (7, 1), (2, 1)),
        ((7, 6), (3, 3), (1, 1)),
    ],
)
def test_same_convolution(size: tuple[int, int], kernel: tuple[int, int], stride: tuple[int, int]) -> None:
    apply = SameConvolution(2, 3, kernel, stride)
    x = torch.randn(2, 2, *size)
    torch.testing.assert_close(apply(x), F.conv2d(same(x, kernel, stride), apply.weight, stride=stride))


@pytest.mark.parametrize(("name", "channels"), [("identity", 4), ("1x1", 8)])
def test_pointwise_convolution(name: str, channels: int) -> None:
    apply = operation(name, channels, 8, 1, no_norm)
    assert isinstance(apply, AfterRelu)
    (weight,) = apply.parameters()
    x = torch.randn(2, channels, 5, 5)
    expected = torch.einsum("oc,nchw->nohw", weight[:, :, 0, 0], x)
    torch.testing.assert_close(apply(x), expected)


def test_separable_is_depthwise_then_pointwise() -> None:
    apply = operation("separable_3x3_2", 6, 8, 2, no_norm)
    depthwise, pointwise, depthwise_2, pointwise_2 = apply.parameters()
    assert next(operation("separable_5x5_2", 6, 8, 2, no_norm).parameters()).shape == (6, 1, 5, 5)
    assert [tuple(p.shape) for p in apply.parameters()] == [(6, 1, 3, 3), (8, 6, 1, 1), (8, 1, 3, 3), (8, 8, 1, 1)]
    x = torch.rand(2, 6, 8, 8)
    y = F.conv2d(same(x, (3, 3), (2, 2)), depthwise, stride=2, groups=6)
    y = F.relu(torch.einsum("oc,nchw->nohw", pointwise[:, :, 0, 0], y))
    y = F.conv2d(y, depthwise_2, padding=1, groups=8)
    torch.testing.assert_close(apply(x), torch.einsum("oc,nchw->nohw", pointwise_2[:, :, 0, 0], y))


@pytest.mark.parametrize("size", [6, 7])
def test_factorized_reduction_reads_both_lattices(size: int) -> None:
    apply = FactorizedReduction(1, 2, no_norm)
    fill(apply)
    x = torch.arange(1.0, size * size + 1).reshape(1, 1, size, size)
    even, odd = apply(x)[0]
    assert torch.equal(even, x[0, 0, ::2, ::2])
    expected = torch.zeros_like(even)
    lattice = x[0, 0, 1::2, 1::2]
    expected[: lattice.shape[0], : lattice.shape[1]] = lattice  # zeros where an odd size leaves no pixel
    assert torch.equal(odd, expected)
    assert torch.equal(apply(-x), torch.zeros_like(apply(x))), "ReLU comes first"


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
def test_initial_weights(module: Convolution | Linear, fan_out: int) -> None:
    """As TensorFlow's variance scaling draws them: variance 2 / fan-out, cut at two standard deviations."""
    module.reset_parameters()
    assert module.weight.std().item() == pytest.approx(math.sqrt(2 / fan_out), rel=0.02)
    assert module.weight.mean().item() == pytest.approx(0, abs=0.02 * math.sqrt(2 / fan_out))
    # The largest of so many normal values would be beyond 3.5 deviations if nothing cut them off.
    assert module.weight.abs().max().item() <= 2 * math.sqrt(2.6 / fan_out)
    assert module.bias is None or not module.bias.any()


def test_pointwise_convolution_is_an_ordinary_one() -> None:
    """The faster routine on CPU changes neither result nor gradients beyond rounding."""
    module = Convolution(8, 16, stride=(2, 2))
    x = torch.randn(2, 8, 5, 5, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    weight = module.weight.detach().clone().requires_grad_()
    ours, expected = module(x), F.conv2d(y, weight, stride=2)
    torch.testing.assert_close(ours, expected)
    ours.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    torch.testing.assert_close(module.weight.grad, weight.grad, rtol=1e-4, atol=1e-4)
