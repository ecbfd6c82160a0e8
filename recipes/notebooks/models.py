"""The models of the notebooks, small enough to compute their memory by hand."""

from itertools import pairwise

from torch import nn


def mlp(width: int = 256, hidden: int = 8) -> nn.Sequential:
    """Digits (N, 3, 24, 24) to logits (N, 10): `hidden` layers of `width` units, each with its ReLU."""
    widths = [3 * 24 * 24, *[width] * hidden]
    layers = [nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in pairwise(widths)]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(width, 10))


def hourglass(wide: int = 1024, narrow: int = 16) -> nn.Sequential:
    """Digits to logits through a bottleneck: a cut there sends 64 times fewer bytes than one layer before or after."""
    widths = [3 * 24 * 24, wide, wide, narrow, wide, wide]
    layers = [nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in pairwise(widths)]
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(wide, 10))
