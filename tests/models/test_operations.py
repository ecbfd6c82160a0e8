"""The operations of a cell behave and start as TensorFlow's: checked against loops and sums written out here."""

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


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def missing(length: int, kernel: int, stride: int) -> int:
    """Pixels that the last window lacks, from the definition of TensorFlow's SAME rule."""
    return max((math.ceil(length / stride) - 1) * stride + kernel - length, 0)


def windows(length: int, kernel: int, stride: int) -> list[range]:
    """The real pixels under each window; half of the missing ones (rounded down) lie before the first."""
    starts = [window * stride - missing(length, kernel, stride) // 2 for window in range(math.ceil(length / stride))]
    return [range(max(start, 0), min(start + kernel, length)) for start in starts]


def pooled(x: Tensor, kernel: int, stride: int, how: str) -> Tensor:
    rows, columns = windows(x.shape[2], kernel, stride), windows(x.shape[3], kernel, stride)
    result = x.new_empty(*x.shape[:2], len(rows), len(columns))
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            window = x[:, :, row.start : row.stop, column.start : column.stop].flatten(2)
            result[:, :, i, j] = window.amax(2) if how == "max" else window.mean(2)
    return result


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
        expected = pooled(x, kernel, stride, name.split("_", maxsplit=1)[0])
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
    y = apply(x)
    # The rule, written out: a frame of zeros wide enough for every window, then one dot product per window.
    frame = F.pad(x, (8, 8, 8, 8))
    first_row = 8 - missing(size[0], kernel[0], stride[0]) // 2
    first_column = 8 - missing(size[1], kernel[1], stride[1]) // 2
    assert y.shape == (2, 3, math.ceil(size[0] / stride[0]), math.ceil(size[1] / stride[1]))
    for i in range(y.shape[2]):
        for j in range(y.shape[3]):
            top, left = first_row + i * stride[0], first_column + j * stride[1]
            patch = frame[:, :, top : top + kernel[0], left : left + kernel[1]]
            torch.testing.assert_close(y[:, :, i, j], torch.einsum("nchw,ochw->no", patch, apply.weight))


@pytest.mark.parametrize(("name", "channels"), [("identity", 4), ("1x1", 8)])
def test_pointwise_convolution(name: str, channels: int) -> None:
    apply = operation(name, channels, 8, 1, no_norm)
    assert isinstance(apply, AfterRelu)
    (weight,) = apply.parameters()
    x = torch.randn(2, channels, 5, 5)
    expected = torch.einsum("oc,nchw->nohw", weight[:, :, 0, 0], x)
    torch.testing.assert_close(apply(x), expected)


def test_a_bottleneck_has_a_quarter_of_the_channels() -> None:
    shapes = [tuple(parameter.shape) for parameter in operation("1x7_7x1", 12, 16, 1, no_norm).parameters()]
    assert shapes == [(4, 12, 1, 1), (4, 4, 1, 7), (4, 4, 7, 1), (16, 4, 1, 1)]


def test_separable_is_depthwise_then_pointwise() -> None:
    apply = operation("separable_3x3_2", 6, 8, 2, no_norm)
    depthwise, pointwise, depthwise_2, pointwise_2 = apply.parameters()
    assert next(operation("separable_5x5_2", 6, 8, 2, no_norm).parameters()).shape == (6, 1, 5, 5)
    assert [tuple(p.shape) for p in apply.parameters()] == [(6, 1, 3, 3), (8, 6, 1, 1), (8, 1, 3, 3), (8, 8, 1, 1)]
    x = torch.rand(2, 6, 8, 8)
    y = torch.cat([F.conv2d(F.pad(x[:, c : c + 1], (0, 1, 0, 1)), depthwise[c : c + 1], stride=2) for c in range(6)], 1)
    y = F.relu(torch.einsum("oc,nchw->nohw", pointwise[:, :, 0, 0], y))
    y = torch.cat([F.conv2d(y[:, c : c + 1], depthwise_2[c : c + 1], padding=1) for c in range(8)], 1)
    y = torch.einsum("oc,nchw->nohw", pointwise_2[:, :, 0, 0], y)
    torch.testing.assert_close(apply(x), y)


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
