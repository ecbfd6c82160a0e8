"""Law 4: running statistics equal `nn.BatchNorm`'s over the whole mini-batch, whatever the micro-batches."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from training_runs import assert_same_tensors

from gpipe_cli.data.micro_batches import micro_batch_sizes
from gpipe_cli.errors import InputError
from gpipe_cli.pipeline.runtime.deferred_batch_norm import (
    AllGather,
    BatchStatistics,
    batch_norm_deferred,
    defer_batch_norms,
    single_replica,
)


def images(samples: int, step: int = 0, mean: float = 0.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(samples, 3, 4, 5, generator=generator) * torch.tensor([1.0, 5.0, 0.1])[:, None, None] + mean


def step(
    layers: nn.Module,
    statistics: BatchStatistics,
    batch: torch.Tensor,
    micro_batches: int,
    replicas: AllGather = single_replica,
) -> None:
    for m, piece in enumerate(batch.split(micro_batch_sizes(len(batch), micro_batches)) if len(batch) else ()):
        with statistics.writing_to(statistics.moments_of(m)):
            layers(piece)
    statistics.commit(replicas)


def pair(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module, BatchStatistics]:
    statistics = BatchStatistics()
    deferred = make().train()
    defer_batch_norms(deferred, statistics)
    return make().train(), deferred, statistics


def assert_same_statistics(deferred: nn.Module, whole: nn.Module) -> None:
    torch.testing.assert_close(dict(deferred.state_dict()), dict(whole.state_dict()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("momentum", "micro_batches"), [(0.1, 1), (1.0, 3), (None, 8)])
def test_statistics_of_the_whole_mini_batch(momentum: float | None, micro_batches: int) -> None:
    """Unbiased variance, uneven micro-batches, a shorter mini-batch in between; the average of all for None."""
    whole, deferred, statistics = pair(lambda: nn.BatchNorm2d(3, momentum=momentum))
    for number, samples in enumerate((8, 7, 3, 8)):
        batch = images(samples, number)
        whole(batch)
        step(deferred, statistics, batch, micro_batches)
        with statistics.writing_to(
            statistics.moments_of(0)
        ):  # an evaluation uses the running statistics and leaves them
            torch.testing.assert_close(deferred.eval()(batch), whole.eval()(batch))
        statistics.commit()
        assert_same_statistics(deferred.train(), whole.train())


def test_every_norm_writes_to_an_aligned_address() -> None:
    """cuDNN's persistent batch norm stores 16 bytes at a time and checks no address: norms whose numbers of channels
    are no multiples of four would end the first forward on a GPU."""
    statistics = BatchStatistics()
    norms = defer_batch_norms(nn.Sequential(*map(nn.BatchNorm2d, (3, 16, 5, 32, 33, 1))), statistics)
    with statistics.writing_to(statistics.moments_of(0)):
        for number, norm in enumerate(norms):
            for written in statistics.target_of(number, 2):
                assert written is not None
                assert written.shape == (norm.num_features,)
                assert written.storage_offset() * written.itemsize % 128 == 0


def test_a_large_mean_does_not_cancel_the_variance() -> None:
    """E[x^2] - E[x]^2 in float32 has no correct digit here; nor would torch have with micro-batches merged that way."""
    _, deferred, statistics = pair(lambda: nn.BatchNorm2d(3, momentum=1.0))
    batch = images(9, mean=3000.0)
    step(deferred, statistics, batch, 4)
    exact = batch.double().transpose(0, 1).flatten(1).var(dim=1)
    torch.testing.assert_close(deferred.running_var.double(), exact, rtol=1e-3, atol=0)


def test_a_norm_that_is_applied_twice_is_refused() -> None:
    norm = nn.BatchNorm2d(3)
    _, deferred, statistics = pair(lambda: nn.Sequential(norm, nn.Sequential(norm)))
    with pytest.raises(InputError, match=r"layer 0: a batch norm is applied twice .*; make a norm for each"):
        step(deferred, statistics, images(8), 1)
    norm.eval()  # it tracks nothing
    step(deferred, statistics, images(8), 1)


def test_a_replica_that_has_never_had_a_sample_tracks_what_others_have() -> None:
    whole, *_ = pair(lambda: nn.BatchNorm2d(3))
    meeting, given = Barrier(2, timeout=20), dict[int, torch.Tensor]()

    def replica(rank: int) -> nn.Module:
        def gather(tensor: torch.Tensor) -> list[torch.Tensor]:
            given[rank] = tensor
            meeting.wait()
            tensors = [given[0], given[1]]
            meeting.wait()
            return tensors

        _, deferred, statistics = pair(lambda: nn.BatchNorm2d(3))
        for number, samples in enumerate(((8, 0), (8, 0), (5, 4))):
            batch = images(sum(samples), number)
            step(deferred, statistics, batch.split(samples)[rank], 1, gather)
        return deferred

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(replica, (0, 1))
    for number, samples in enumerate((8, 8, 9)):
        whole(images(samples, number))
    assert_same_statistics(first, whole)
    assert_same_tensors(dict(first.state_dict()), dict(second.state_dict()))


class Inherits(nn.BatchNorm2d):
    """Inherits its forward."""


class Scaled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


def test_a_norm_stays_the_object_that_it_is() -> None:
    """Replaced by another one, it lost hooks, attributes, parametrizations and what timm's norms do besides: drop and
    activate."""
    from timm.layers import BatchNormAct2d

    def make() -> nn.Module:
        torch.manual_seed(0)
        hooked, scaled = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
        hooked.register_forward_hook(lambda module, inputs, output: output * 3)
        parametrize.register_parametrization(scaled, "weight", Scaled())
        weight = nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 3, 1))
        activates = BatchNormAct2d(3, act_layer=nn.SiLU, drop_layer=nn.Softplus)
        plain = nn.Sequential(nn.BatchNorm2d(3, affine=False), nn.BatchNorm2d(3, track_running_stats=False))
        return nn.Sequential(hooked, scaled, weight, Inherits(3, momentum=0.4), activates, plain)

    whole, deferred, statistics = pair(make)
    before = [type(module) for module in deferred.modules()]
    for training in (False, True):
        assert torch.equal(deferred.train(training)(images(6)), whole.train(training)(images(6)))
    step(deferred.train(), statistics, images(6), 1)
    assert_same_statistics(deferred, whole)
    assert [type(module) for module in deferred.modules()] == before


class Gain(nn.BatchNorm2d):
    """Overrides forward, which uses a parameter."""

    def __init__(self, channels: int, **settings: Any) -> None:
        super().__init__(channels, **settings)
        self.gain = nn.Parameter(torch.ones(channels, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.gain


def patched() -> nn.Module:
    norm = nn.BatchNorm2d(3)
    norm.forward = lambda x: x  # type: ignore[method-assign]
    return norm


@pytest.mark.parametrize(("make", "name"), [(lambda: Gain(3), "Gain"), (lambda: nn.SyncBatchNorm(3), "SyncBatchNorm"),
                                            (patched, "BatchNorm2d")])  # fmt: skip
def test_a_norm_whose_forward_is_not_known_is_refused(make: Callable[[], nn.Module], name: str) -> None:
    """It used to be replaced by a plain one, without a word: its own parameters were neither trained nor saved."""
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Sequential(nn.ReLU(), make()))
    with pytest.raises(InputError, match=rf"layer 1\.1 \({name}\).*use nn\.BatchNorm1d, 2d or 3d") as refused:
        defer_batch_norms(model, BatchStatistics())
    assert "\n" not in str(refused.value)
    # what tracks nothing may do as it likes
    assert not defer_batch_norms(nn.Sequential(Gain(3, track_running_stats=False)), BatchStatistics())


def test_two_norms_do_not_track_one_tensor() -> None:
    norms = nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm2d(3))
    norms[1].running_mean = norms[0].running_mean
    with pytest.raises(InputError, match="layers 0 and 1: two batch norms track one running_mean"):
        defer_batch_norms(norms, BatchStatistics())


def test_deferring_ends() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3))
    for deferred in (True, False):
        with batch_norm_deferred(model) if deferred else nullcontext():
            model(images(4))
        assert int(model[0].num_batches_tracked) == (not deferred)
