"""The cell that AmoebaNet repeats (Real et al. 2018), one layer of the pipeline; after amoeba_net/network_utils.py.

Between cells travels the tuple (current, previous): the output of the last cell and that of the one before it. Behind
the auxiliary head its logits ride along as a third tensor.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_cli.models.drop_path import ScheduledDropPath
from gpipe_cli.models.genotype import CellGenotype
from gpipe_cli.models.operations import AfterRelu, FactorizedReduction, Norm, convolution, operation


class FeatureMap(NamedTuple):
    """Shape of one example between two layers: `channels` maps of `size` x `size` pixels."""

    channels: int
    size: int


def halved(size: int) -> int:
    """Side of a map after stride 2 with SAME padding."""
    return -(-size // 2)


class Cell(nn.Module):
    """Takes (current, previous[, auxiliary logits]), returns (output, current[, auxiliary logits]).

    The first cell of a network takes one tensor (N, C, H, W) alone, which is then both current and previous.

    Args:
        genotype: the wiring.
        filters: F, the channels of every state; the output has F times the number of states that it joins.
        stride: 1, or 2 for a reduction cell, whose operations on states 0 and 1 halve the resolution.
        current: shape of the input.
        previous: shape of the input's predecessor; None for the first cell.
        norm: builds a batch normalisation.
        drop_path: probability to drop an operation's result at the end of the training.

    Attributes:
        output: shape of the output.
    """

    def __init__(
        self,
        genotype: CellGenotype,
        *,
        filters: int,
        stride: int,
        current: FeatureMap,
        previous: FeatureMap | None,
        norm: Norm,
        drop_path: float,
    ) -> None:
        super().__init__()
        self.genotype = genotype
        size = current.size if stride == 1 else halved(current.size)
        self.output = FeatureMap(filters * len(genotype.output), size)
        self.current = convolution(current.channels, filters, norm)
        self.previous = _match(previous, filters, current.size, norm)
        channels = [filters, current.channels if previous is None else filters] + [filters] * len(genotype.pairs)
        self.operations = nn.ModuleList(
            operation(name, channels[state], filters, stride if state < 2 else 1, norm)
            for pair in genotype.pairs
            for name, state in pair
        )
        self.drop_path = ScheduledDropPath(drop_path)

    def forward(self, inputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        current, previous, *auxiliary = inputs if isinstance(inputs, tuple) else (inputs, inputs)
        states = [self.current(F.relu(current)), self.previous(previous)]
        rectified: dict[int, Tensor] = {}
        operations = iter(self.operations)
        for pair in self.genotype.pairs:
            results = []
            for name, state in pair:
                apply = next(operations)
                x = states[state]
                if isinstance(apply, AfterRelu):
                    x = rectified[state] if state in rectified else rectified.setdefault(state, F.relu(x))
                x = apply(x)
                results.append(x if name == "identity" else self.drop_path(x))
            states.append(results[0] + results[1])
        output = torch.cat([states[state] for state in self.genotype.output], dim=1)
        return (output, current, *auxiliary)


def _match(previous: FeatureMap | None, filters: int, size: int, norm: Norm) -> nn.Module:
    """What brings the predecessor to `filters` channels and `size` pixels; where it does anything, ReLU comes first."""
    if previous is None:  # The very first cell reads the stem as it is, whatever its channels.
        return nn.Identity()
    if previous.size != size:
        return FactorizedReduction(previous.channels, filters, norm)
    if previous.channels != filters:
        return nn.Sequential(nn.ReLU(), convolution(previous.channels, filters, norm))
    return nn.Identity()
