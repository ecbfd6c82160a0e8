"""The cells that AmoebaNet repeats (Real et al. 2018), each one layer of the pipeline; after the TPU reference
(tensorflow/tpu, models/official/amoeba_net: model_specs.py for the wiring, network_utils.py for the rest).

The paper trains AmoebaNet-D for its scaling tables and B for ImageNet. Between cells passes the tuple
(current, previous): the output of the last cell and that of the one before it. Behind the auxiliary head its logits are
a third tensor.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_cli.models.drop_path import ScheduledDropPath
from gpipe_cli.models.operations import AfterRelu, FactorizedReduction, Norm, convolution, operation

Variant = Literal["b", "d"]
Step = tuple[str, int]  # (operation, the state that it reads)


@dataclass(frozen=True, slots=True)
class CellGenotype:
    """How a cell is wired.

    State 0 is the cell's input behind a 1x1 convolution and state 1 the output of the cell before that input; each pair
    of steps adds the next state (2, 3, ...) as the sum of two operations.
    """

    pairs: tuple[tuple[Step, Step], ...]  # for each new state, its two steps
    output: tuple[int, ...]  # the states that are concatenated as the cell's output


# The cells that keep the resolution. The drawing of D's that its authors published joins three states, their code four.
# Four it is: with three, B (18, 512) would have 498M parameters instead of the 557M that the paper reports.
NORMAL: dict[Variant, CellGenotype] = {
    "b": CellGenotype(
        pairs=(
            (("1x1", 1), ("max_pool_3x3", 1)),
            (("identity", 1), ("separable_3x3_2", 0)),
            (("1x1", 1), ("separable_3x3_2", 0)),
            (("1x1", 2), ("identity", 2)),
            (("avg_pool_3x3", 1), ("1x1", 5)),
        ),
        output=(0, 3, 4, 6),
    ),
    "d": CellGenotype(
        pairs=(
            (("1x1", 1), ("max_pool_3x3", 1)),
            (("identity", 1), ("1x7_7x1", 0)),
            (("1x1", 0), ("1x7_7x1", 0)),
            (("max_pool_3x3", 2), ("identity", 2)),
            (("avg_pool_3x3", 1), ("1x1", 5)),
        ),
        output=(0, 3, 4, 6),
    ),
}

# Those that halve it: there the operations that read states 0 and 1 have stride 2.
REDUCTION: dict[Variant, CellGenotype] = {
    # The reference calls the 5x5 "dilated", but builds it without dilation; so do we.
    "b": CellGenotype(
        pairs=(
            (("max_pool_2x2", 0), ("max_pool_3x3", 0)),
            (("identity", 2), ("3x3", 1)),
            (("separable_5x5_2", 2), ("max_pool_3x3", 2)),
            (("identity", 3), ("separable_3x3_2", 1)),
            (("avg_pool_3x3", 4), ("1x1", 3)),
        ),
        output=(5, 6),
    ),
    "d": CellGenotype(
        pairs=(
            (("max_pool_2x2", 0), ("max_pool_3x3", 0)),
            (("identity", 2), ("3x3", 1)),
            (("1x7_7x1", 2), ("max_pool_3x3", 2)),
            (("identity", 3), ("max_pool_2x2", 1)),
            (("avg_pool_3x3", 2), ("1x1", 3)),
        ),
        output=(4, 5, 6),
    ),
}


class FeatureMap(NamedTuple):
    """Shape of one example between two layers: `channels` maps of `size` x `size` pixels."""

    channels: int
    size: int


class Cell(nn.Module):
    """Takes (current, previous[, auxiliary logits]), returns (output, current[, auxiliary logits]).

    The first cell of a network takes one tensor (N, C, H, W) alone, which is then both current and previous.

    Args:
        filters: F, the channels of every state; `output`, the result's shape, has F for each of the states it joins.
        stride: 1, or 2 for a reduction cell.
        current: shape of the input.
        previous: shape of the input's predecessor; None for the first cell.
        drop_path: probability to drop an operation's result at the end of the training.
    """

    def __init__(
        self,
        genotype: CellGenotype,
        filters: int,
        stride: int,
        current: FeatureMap,
        previous: FeatureMap | None,
        norm: Norm,
        drop_path: float,
    ) -> None:
        super().__init__()
        self.genotype = genotype
        size = -(-current.size // stride)  # SAME padding
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
                    if state not in rectified:
                        rectified[state] = F.relu(x)
                    x = rectified[state]
                x = apply(x)
                results.append(x if name == "identity" else self.drop_path(x))
            states.append(results[0] + results[1])
        output = torch.cat([states[state] for state in self.genotype.output], dim=1)
        return (output, current, *auxiliary)


def _match(previous: FeatureMap | None, filters: int, size: int, norm: Norm) -> nn.Module:
    """Changes the predecessor to `filters` channels and `size` pixels; where it does anything, ReLU comes first."""
    if previous is None:  # the very first cell reads the stem as it is, whatever its channels
        return nn.Identity()
    if previous.size != size:
        return FactorizedReduction(previous.channels, filters, norm)
    if previous.channels != filters:
        return nn.Sequential(nn.ReLU(), convolution(previous.channels, filters, norm))
    return nn.Identity()
