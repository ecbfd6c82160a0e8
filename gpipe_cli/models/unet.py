"""U-Net (B, C), a network with long skips for the segmentation of images, as a sequence of named layers.

The GPipe paper has none; torchgpipe's benchmarks do (github.com/kakaobrain/torchgpipe, benchmarks/models/unet): the
U-Net of Ronneberger et al. (2015) made simpler, with B convolutions in each cell and C channels in the first cell. Ours
has its shapes, so that its parameters, memory and speed can be compared with the published ones.

    down_0_conv_0 ... down_0_skip  down_0_pool  down_1_conv_0 ...                      (C, 2C, 4C, ... channels)
    bottom_conv_0 ...
    up_4_upsample  up_4_skip  up_4_conv_0 ... up_3_upsample  up_3_skip ...             (... 4C, 2C, C, C / 2 channels)
    logits

Departs from torchgpipe: the logits have a channel for each class instead of a single channel for "yes"; and sizes that
pooling would have to round are refused instead of padded.
"""

from collections import OrderedDict

from torch import nn

from gpipe_cli.errors import InvalidSettingError
from gpipe_cli.models.skips import Pop, SkipSequential, Stash

LEAKY_RELU_SLOPE = 0.01  # torchgpipe's


def unet(
    *, depth: int, num_convs: int, base_channels: int, dropout: float, image_size: int, num_classes: int
) -> SkipSequential:
    """The network: images (N, 3, S, S) -> logits (N, classes, S, S).

    Args:
        depth: times the resolution is halved; as many skips. torchgpipe's have 5.
        num_convs: B, convolutions in each of the 2 * depth + 1 cells.
        base_channels: C, channels of the first cell; doubled at each halving.
        dropout: fraction of whole channels that is dropped after each convolution.

    Raises InputError if an odd number of pixels would be halved, or the smallest map would have a single pixel, which
    instance norm cannot normalize.
    """
    step = 2**depth
    if image_size % step or image_size == step:
        below = image_size // step * step
        sizes = f"{below} or {below + step}" if below > step else str(2 * step)
        why = (
            f"model.depth={depth} needs a multiple of {step} from {2 * step} on; use {sizes}, or a smaller model.depth"
        )
        raise InvalidSettingError("dataset.image_size", image_size, why)
    layers: OrderedDict[str, nn.Module] = OrderedDict()

    def cell(name: str, inputs: int, hidden: int, outputs: int) -> None:
        channels = [inputs, *[hidden] * (num_convs - 1), outputs]
        for number in range(num_convs):
            layers[f"{name}_conv_{number}"] = convolution(channels[number], channels[number + 1], dropout)

    inputs = 3
    for level in range(depth):
        width = base_channels * 2**level
        cell(f"down_{level}", inputs, width, width)
        layers[f"down_{level}_skip"] = Stash(f"level_{level}")
        layers[f"down_{level}_pool"] = nn.MaxPool2d(2)
        inputs = width
    cell("bottom", inputs, 2 * inputs, inputs)
    for level in reversed(range(depth)):
        width = base_channels * 2**level
        layers[f"up_{level}_upsample"] = nn.Upsample(scale_factor=2)  # nearest neighbour
        layers[f"up_{level}_skip"] = Pop(f"level_{level}")
        inputs = max(1, width // 2)
        cell(f"up_{level}", 2 * width, inputs, inputs)
    layers["logits"] = nn.Conv2d(inputs, num_classes, kernel_size=1, bias=False)
    return SkipSequential(layers)


def convolution(inputs: int, outputs: int, dropout: float) -> nn.Sequential:
    """3x3 convolution, dropout of whole channels, instance norm, leaky ReLU: (N, inputs, H, W) -> (N, outputs, H, W)"""
    parts = OrderedDict[str, nn.Module](
        convolution=nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=False),
        dropout=nn.Dropout2d(dropout),
        norm=nn.InstanceNorm2d(outputs),
        activation=nn.LeakyReLU(LEAKY_RELU_SLOPE),
    )
    return nn.Sequential(parts)
