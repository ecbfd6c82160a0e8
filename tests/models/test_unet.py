"""U-Net: torchgpipe's sizes, and what an ordinary U-Net computes, to the bit."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_cli.errors import InvalidSettingError
from gpipe_cli.models.skips import SkipSequential
from gpipe_cli.models.unet import unet
from gpipe_cli.units import count


def small(**settings: int) -> SkipSequential:
    sizes = {"depth": 2, "num_convs": 2, "base_channels": 4, "image_size": 16, "num_classes": 3}
    return unet(**{**sizes, "dropout": 0.1, **settings})


@pytest.mark.parametrize(
    ("num_convs", "base_channels", "published"),
    [
        (6, 72, "362.2M"), (11, 128, "2.21B"), (24, 128, "4.99B"), (24, 160, "7.80B"), (48, 160, "15.82B"),
    ],
)  # fmt: skip
def test_it_has_as_many_parameters_as_torchgpipe_s(num_convs: int, base_channels: int, published: str) -> None:
    """torchgpipe's docs/benchmarks.rst, U-Net (B, C) Memory Benchmark; its last layer has one output, ours two, which
    the printed digits do not show."""
    with torch.device("meta"):
        model = small(depth=5, num_convs=num_convs, base_channels=base_channels, image_size=192, num_classes=2)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    digits = len(published.partition(".")[2]) - 1
    print(f"U-Net ({num_convs}, {base_channels}): published {published}, here {count(parameters)}")
    assert f"{parameters / (1e6 if published.endswith('M') else 1e9):.{digits}f}{published[-1]}" == published


def ordinary(model: nn.Module, image: Tensor, depth: int, num_convs: int) -> Tensor:
    """A U-Net as it is usually written, with a variable for each skip, and the weights of `model`."""

    def cell(name: str, x: Tensor) -> Tensor:
        for number in range(num_convs):
            weight = model.get_parameter(f"{name}_conv_{number}.convolution.weight")
            x = F.leaky_relu(F.instance_norm(F.conv2d(x, weight, padding=1)), 0.01)
        return x

    x, kept = image, []
    for level in range(depth):
        x = cell(f"down_{level}", x)
        kept.append(x)
        x = F.max_pool2d(x, 2)
    x = cell("bottom", x)
    for level in reversed(range(depth)):
        x = cell(f"up_{level}", torch.cat([F.interpolate(x, scale_factor=2), kept[level]], dim=1))
    return F.conv2d(x, model.get_parameter("logits.weight"))


@pytest.mark.parametrize("num_convs", [1, 3])
def test_it_computes_what_an_ordinary_unet_does(num_convs: int) -> None:
    """Outputs and gradients, bit for bit."""
    torch.manual_seed(0)
    model = small(depth=3, num_convs=num_convs).eval()
    gradients = []
    images = torch.randn(2, 3, 16, 16)
    for logits in (model(images), ordinary(model, images, 3, num_convs)):
        gradients.append((logits, *torch.autograd.grad(logits.square().sum(), list(model.parameters()))))
    assert gradients[0][0].shape == (2, 3, 16, 16)
    for ours, theirs in zip(*gradients, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(("image_size", "use"), [(18, "16 or 20"), (4, "8"), (5, "8")])
def test_a_size_that_cannot_be_halved_is_refused(image_size: int, use: str) -> None:
    """4 pixels halved twice are one, which instance norm cannot normalize."""
    with pytest.raises(
        InvalidSettingError, match=rf"^dataset\.image_size={image_size}: .*use {use}, or a smaller model\.depth$"
    ):
        small(image_size=image_size)
    nearest = re.findall(r"\d+", use)
    for size in map(int, nearest):
        assert small(image_size=size)(torch.randn(1, 3, size, size)).shape == (1, 3, size, size)
