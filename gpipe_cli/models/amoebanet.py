"""AmoebaNet-B and AmoebaNet-D (Sections 3 to 5 of the paper; Real et al. 2018) as a sequence of named layers.

The paper trains D for its scaling tables and B for ImageNet, and writes AmoebaNet-D (L, D): L normal cells, D filters
in the first stack. It does not describe the network any further; the layout here is the TPU reference's
(tensorflow/tpu, models/official/amoeba_net: model_builder.py, network_utils.py, and model_specs.py for the wiring of
the cells). With it, B (18, 512) has the 557M parameters that the paper reports.

    stem  stem_reduction_0  stem_reduction_1  cell_00 ... reduction_0 ... reduction_1 ... classifier

The reductions come before the normal cells L // 3 and 2 L // 3; each doubles the filters. Each cell passes on the
tuple (current, previous): its output and the output of the cell before. After the auxiliary head the tuple has a third
element, the head's logits.
"""

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from operator import call
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_cli.errors import InvalidSettingError
from gpipe_cli.models import amoebanet_ops
from gpipe_cli.models.drop_path import ScheduledDropPath

Variant = Literal["b", "d"]
Step = tuple[str, int]  # (operation, number of the state that it reads)


class CellGenotype(NamedTuple):
    """How a cell is wired. State 0 is its input behind a 1x1 convolution, state 1 the output of the cell before that
    input; each pair of steps adds the next state (2, 3, ...) as the sum of two operations."""

    pairs: tuple[tuple[Step, Step], ...]  # for each new state, its two steps
    output: tuple[int, ...]  # the states that are concatenated as the cell's output


# Cells that keep the resolution. The authors' drawing of D's cell concatenates three states, their code four. We follow
# the code: with three, B (18, 512) would have 498M parameters instead of the 557M that the paper reports.
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

# Cells that halve the resolution: the operations that read states 0 and 1 have stride 2.
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
    """One example between two layers: `channels` maps of `size` x `size` pixels."""

    channels: int
    size: int


class Cell(nn.Module):
    """Takes (current, previous[, auxiliary logits]), returns (output, current[, auxiliary logits]).

    The first cell takes a single tensor (N, C, H, W) as current and previous, and is built with previous=None.
    filters: channels of every state. stride: 2 for a reduction cell. output: the shape of the result.
    """

    def __init__(
        self,
        genotype: CellGenotype,
        filters: int,
        stride: int,
        current: FeatureMap,
        previous: FeatureMap | None,
        norm: amoebanet_ops.Norm,
        drop_path: float,
    ) -> None:
        super().__init__()
        self.genotype = genotype
        size = -(-current.size // stride)  # SAME padding
        self.output = FeatureMap(filters * len(genotype.output), size)
        self.current = amoebanet_ops.convolution(current.channels, filters, norm)
        self.previous = _match_previous(previous, filters, current.size, norm)
        channels = [filters, current.channels if previous is None else filters] + [filters] * len(genotype.pairs)
        self.operations = nn.ModuleList(
            amoebanet_ops.make_operation(name, channels[state], filters, stride if state < 2 else 1, norm)
            for pair in genotype.pairs
            for name, state in pair
        )
        self.drop_path = ScheduledDropPath(drop_path)

    def forward(self, inputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        current, previous, *auxiliary = inputs if isinstance(inputs, tuple) else (inputs, inputs)
        states = [self.current(F.relu(current)), self.previous(previous)]
        rectified: dict[int, Tensor] = {}
        remaining = iter(self.operations)
        for pair in self.genotype.pairs:
            results = []
            for name, state in pair:
                operation = next(remaining)
                x = states[state]
                if isinstance(operation, amoebanet_ops.PreActivated):
                    if state not in rectified:
                        rectified[state] = F.relu(x)
                    x = rectified[state]
                results.append(operation(x) if name == "identity" else self.drop_path(operation(x)))
            states.append(results[0] + results[1])
        output = torch.cat([states[state] for state in self.genotype.output], dim=1)
        return (output, current, *auxiliary)


def _match_previous(previous: FeatureMap | None, filters: int, size: int, norm: amoebanet_ops.Norm) -> nn.Module:
    """Maps `previous` to `filters` channels of `size` x `size` pixels; starts with ReLU unless it is the identity."""
    if previous is None or previous == (filters, size):  # the first cell reads the stem, whatever its channels
        return nn.Identity()
    if previous.size != size:
        return amoebanet_ops.FactorizedReduction(previous.channels, filters, norm)
    return nn.Sequential(nn.ReLU(), amoebanet_ops.convolution(previous.channels, filters, norm))


STEM_CHANNELS = 32
SMALL_IMAGE = 64  # up to this many pixels, "auto" takes the small stem
AUXILIARY_POOL, AUXILIARY_STRIDE = 5, 3
AUXILIARY_CHANNELS = 51, 307  # int(128 s) and int(768 s) for the reference's default s = 0.4


class AuxiliaryHead(nn.Module):
    """A second classifier in the middle of the network: in training, appends its logits (N, classes) to (x, skip).

    ReLU, 5x5 average pool of stride 3, 1x1 convolution, then a convolution as large as the whole remaining map: the
    head fits only the image size it was built for. Its second batch norm sees one value per example and channel, so
    torch refuses to train it on a micro-batch of a single example.
    """

    def __init__(self, x: FeatureMap, num_classes: int, norm: amoebanet_ops.Norm) -> None:
        super().__init__()
        inner, outer = AUXILIARY_CHANNELS
        size = (x.size - AUXILIARY_POOL) // AUXILIARY_STRIDE + 1
        self.features = nn.Sequential(
            nn.AvgPool2d(AUXILIARY_POOL, AUXILIARY_STRIDE),
            amoebanet_ops.Convolution(x.channels, inner),
            norm(inner),
            amoebanet_ops.relu_after_norm(),
            amoebanet_ops.Convolution(inner, outer, (size, size)),
            norm(outer),
            amoebanet_ops.relu_after_norm(),
            nn.Flatten(),
        )
        self.logits = amoebanet_ops.Linear(outer, num_classes)

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if not self.training:
            return inputs
        return (*inputs, self.logits(self.features(F.relu(inputs[0]))))


class Classifier(nn.Module):
    """ReLU, average over all pixels, dropout, fully connected: (x, skip) -> logits (N, classes), and
    (x, skip, auxiliary logits) -> (logits, auxiliary logits)."""

    def __init__(self, channels: int, num_classes: int, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.logits = amoebanet_ops.Linear(channels, num_classes)

    def forward(self, inputs: tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        x, _, *auxiliary = inputs
        logits = self.logits(self.dropout(F.relu(x).mean(dim=(2, 3))))
        return (logits, *auxiliary) if auxiliary else logits


def amoebanet(
    *,
    variant: Variant,
    normal_cells: int,
    filters: int,
    image_size: int,
    num_classes: int,
    auxiliary_head: bool,
    batch_norm_momentum: float,
    batch_norm_epsilon: float = 1e-3,
    dropout: float = 0.5,
    drop_path: float = 0.0,
    stem: Literal["auto", "imagenet", "small"] = "auto",
    make: Callable[..., Any] = call,
) -> nn.Sequential:
    """The network: images (N, 3, S, S) -> logits (N, classes); in training with `auxiliary_head`, both logits.

    Args:
        normal_cells: L, without the reduction cells; at least 3.
        filters: D, the filters of the first stack.
        num_classes: the reference has 1001 for ImageNet: 0 is "background".
        auxiliary_head: behind the normal cell before the second reduction; its loss has weight 0.4 in the reference.
        batch_norm_momentum: weight of the *new* statistics (torch's meaning: 1 - TensorFlow's decay).
        batch_norm_epsilon: 1e-3 is the default of the reference's network.
        drop_path: probability of dropping an operation's result for an example, at the end of training.
        stem: "imagenet" divides the resolution by 8 before the first normal cell, "small" keeps it.
        make: makes a cell of a class and its arguments; `build_model` gives one that makes equal cells once.

    Raises InputError if `filters` is not a multiple of 16 (small stem: 4) or a map is too small for the auxiliary head.
    """
    small = image_size <= SMALL_IMAGE if stem == "auto" else stem == "small"
    # The narrowest cell has F = D / 4 filters (ImageNet stem), else D; its bottlenecks have F / 4 channels.
    divisor = 4 if small else 16
    if filters % divisor:
        below = max(filters // divisor, 1) * divisor
        why = f"the bottlenecks need a multiple of {divisor}; use {below} or {below + divisor}"
        raise InvalidSettingError("model.filters", filters, why)
    norm = partial(nn.BatchNorm2d, eps=batch_norm_epsilon, momentum=batch_norm_momentum)
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    layers["stem"], current = _stem(image_size, norm, small=small)
    previous: FeatureMap | None = None

    def add(name: str, width: int, stride: int) -> None:
        nonlocal current, previous
        genotype = NORMAL[variant] if stride == 1 else REDUCTION[variant]
        layers[name] = cell = make(Cell, genotype, width, stride, current, previous, norm, drop_path)
        # the second cell reads the output of the stem as its `previous`
        current, previous = cell.output, current

    if not small:
        add("stem_reduction_0", filters // 4, stride=2)
        add("stem_reduction_1", filters // 2, stride=2)
    width = filters
    reductions = (normal_cells // 3, 2 * normal_cells // 3)
    for index in range(normal_cells):
        if index in reductions:
            width *= 2
            add(f"reduction_{reductions.index(index)}", width, stride=2)
        add(f"cell_{index:02d}", width, stride=1)
        if auxiliary_head and index == reductions[1] - 1:
            if current.size < AUXILIARY_POOL:
                why = f"the auxiliary head would see {current.size}x{current.size} pixels and needs 5x5"
                raise InvalidSettingError("dataset.image_size", image_size, f"{why}; use model.auxiliary_head=false")
            layers["auxiliary_head"] = AuxiliaryHead(current, num_classes, norm)
    layers["classifier"] = Classifier(current.channels, num_classes, dropout)
    return nn.Sequential(layers)


def _stem(image_size: int, norm: amoebanet_ops.Norm, *, small: bool) -> tuple[nn.Module, FeatureMap]:
    """3x3 convolution (stride 2; small: 1) to 32 channels and batch norm, without ReLU.

    Departs from the reference: its stem for small images, which the paper never trains on, does not pad (32 pixels
    become 30); ours does, so that 32 and 64 pixels halve evenly.
    """
    convolution = amoebanet_ops.Convolution(3, STEM_CHANNELS, (3, 3), (2, 2))
    if small:
        convolution = amoebanet_ops.SameConvolution(3, STEM_CHANNELS, (3, 3))
    size = image_size if small else (image_size - 3) // 2 + 1
    return nn.Sequential(convolution, norm(STEM_CHANNELS)), FeatureMap(STEM_CHANNELS, size)
