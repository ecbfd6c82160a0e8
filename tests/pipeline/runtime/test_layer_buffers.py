"""Layers that change buffers whenever they run count each micro-batch once, recomputed or not.

Recomputations once changed them a second time, without a word: other running statistics, and other weights.
"""

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.ao import quantization
from training_runs import assert_same_tensors

from gpipe_cli import Pipeline
from gpipe_cli.errors import InputError


class Codebook(nn.Module):
    """Moves its nearest vectors towards its inputs, and replaces the tensor that has them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("vectors", torch.linspace(-1, 1, 30).view(5, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        nearest = torch.cdist(x.detach(), self.vectors).argmin(1)
        quantized = self.vectors[nearest]
        if self.training:
            self.vectors = self.vectors.index_add(0, nearest, 0.1 * (x.detach() - quantized))
        return x + 0.5 * quantized


class Late(nn.Module):
    """Changes its buffer from the second step on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.late = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.late:
            self.calls += 1
        return x * 2


class Unseen(nn.Module):
    """Moves its bounds as an observer of quantization-aware training does: without a count of the write. The lower one
    only moves in some micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("low", torch.zeros(()))
        self.register_buffer("high", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.low.data.sub_(0.1 * (x.detach().max() < 1))
        self.high.data.add_(0.1 * (x.detach().max() - self.high))
        return x * (1 + self.high - self.low)


def quantized() -> nn.Module:
    """A layer of quantization-aware training, whose observers write by a fused operation."""
    layer = nn.Sequential(nn.Linear(6, 6), nn.ReLU()).train()
    layer.qconfig = quantization.get_default_qat_qconfig("x86")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch announces its move to another package
        return quantization.prepare_qat(layer)


def normalized() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2, affine=True, track_running_stats=True), nn.Flatten()
    )


def limited() -> nn.Module:
    """Spectral norm multiplies vectors by the weight in each call."""
    return nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))


def trained(layer: Callable[[], nn.Module], partitions: int, recompute: str, schedule: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(5, 6), layer(), nn.BatchNorm1d(6), layer(), nn.Linear(6, 3))
    pipeline = Pipeline(layers, partitions=partitions, micro_batches=4, recompute=recompute, schedule=schedule)
    optimizer = torch.optim.SGD(pipeline.parameters(), 0.1)
    for _ in range(3):
        pipeline.step(torch.randn(10, 5), torch.randint(3, (10,)), nn.functional.cross_entropy)
        optimizer.step()
        optimizer.zero_grad()
    return pipeline.state_dict() | {"evaluated": pipeline.eval()(torch.ones(4, 5))}


@pytest.mark.parametrize("layer", [Codebook, normalized, limited, Unseen, quantized])
def test_a_micro_batch_counts_once(layer: Callable[[], nn.Module]) -> None:
    for schedule in ("gpipe", "zero_bubble"):  # which add up gradients in other orders
        expected = trained(layer, 1, "never", schedule)
        for partitions, recompute in ((1, "always"), (2, "never"), (2, "except_last"), (3, "always")):
            assert_same_tensors(trained(layer, partitions, recompute, schedule), expected)


def test_a_buffer_that_changes_only_later_is_refused_where_it_cannot_be_recomputed() -> None:
    pipeline = Pipeline(nn.Sequential(nn.Linear(3, 3), Late()), partitions=1, micro_batches=2, recompute="always")
    x, y = torch.randn(4, 3), torch.randint(3, (4,))
    pipeline.step(x, y, nn.functional.cross_entropy)
    pipeline._module[1].late = True
    with pytest.raises(InputError, match=r"layer 1 changes its buffer calls.*use recompute=never"):
        pipeline.step(x, y, nn.functional.cross_entropy)
