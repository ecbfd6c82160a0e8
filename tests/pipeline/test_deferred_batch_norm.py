"""Law 4: running statistics are those of `nn.BatchNorm` over the whole mini-batch, whatever the micro-batches."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from gpipe_cli.pipeline.deferred_batch_norm import BatchStatistics, DeferredBatchNorm, defer_batch_norms
from gpipe_cli.pipeline.micro_batch import micro_batch_sizes, split


def images(samples: int, step: int = 0, mean: float = 0.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return (
        torch.randn(samples, 3, 4, 5, generator=generator) * torch.tensor([1.0, 5.0, 0.1])[:, None, None] + mean
    ).to(dtype)


def step(layers: nn.Module, statistics: BatchStatistics, batch: torch.Tensor, micro_batches: int) -> None:
    for m, piece in enumerate(split(batch, micro_batch_sizes(len(batch), micro_batches))):
        statistics.open(m)
        layers(piece)
        statistics.close()
    statistics.commit()


def pair(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module, BatchStatistics]:
    statistics = BatchStatistics()
    deferred = defer_batch_norms(make(), statistics)
    return make().train(), deferred.train(), statistics


def assert_same_statistics(deferred: nn.Module, whole: nn.Module, tolerance: float = 1e-5) -> None:
    expected = whole.state_dict()
    assert deferred.state_dict().keys() == expected.keys()
    for name, value in deferred.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("momentum", [0.1, 1.0, None])
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4, 7, 8])
def test_statistics_of_the_whole_mini_batch(micro_batches: int, momentum: float | None) -> None:
    """Unbiased variance, uneven micro-batches, a shorter mini-batch in between; the average of all for None."""
    whole, deferred, statistics = pair(lambda: nn.BatchNorm2d(3, momentum=momentum))
    for number, samples in enumerate((8, 7, 3, 8)):
        batch = images(samples, number)
        whole(batch)
        step(deferred, statistics, batch, micro_batches)
        assert_same_statistics(deferred, whole)
    assert statistics.is_empty()


def test_eight_values_tell_biased_from_unbiased() -> None:
    """With 8 values in a channel the two variances differ by a seventh."""
    whole, deferred, statistics = pair(lambda: nn.BatchNorm1d(2, momentum=1.0))
    batch = torch.randn(8, 2, generator=torch.Generator().manual_seed(1))
    whole(batch)
    step(deferred, statistics, batch, 3)
    assert_same_statistics(deferred, whole, 1e-6)
    torch.testing.assert_close(deferred.running_var, batch.var(dim=0, unbiased=True))
    assert (deferred.running_var - batch.var(dim=0, unbiased=False)).abs().min() > 0.03


def test_a_large_mean_does_not_cancel_the_variance() -> None:
    """E[x^2] - E[x]^2 in float32 has no correct digit here; nor would torch have with micro-batches merged that way."""
    _, deferred, statistics = pair(lambda: nn.BatchNorm2d(3, momentum=1.0))
    batch = images(9, mean=3000.0)
    step(deferred, statistics, batch, 4)
    exact = batch.double().transpose(0, 1).flatten(1).var(dim=1)
    torch.testing.assert_close(deferred.running_var.double(), exact, rtol=1e-3, atol=0)


def test_each_micro_batch_is_normalized_by_itself() -> None:
    whole, deferred, statistics = pair(lambda: nn.BatchNorm2d(3))
    pieces = split(images(8), (3, 5))
    for m, piece in enumerate(pieces):
        statistics.open(m)
        torch.testing.assert_close(deferred(piece), whole(piece))
        statistics.close()


def test_a_recomputation_is_not_counted() -> None:
    whole, deferred, statistics = pair(lambda: nn.BatchNorm2d(3))
    batch = images(6)
    whole(batch)
    pieces = split(batch, (3, 3))
    for m, piece in enumerate(pieces):
        statistics.open(m)
        deferred(piece)
        statistics.close()
    again = [deferred(piece) for piece in pieces]
    torch.testing.assert_close(again[0].mean(dim=(0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    statistics.commit()
    statistics.commit()  # nothing is left to be counted twice
    assert_same_statistics(deferred, whole)
    assert int(deferred.num_batches_tracked) == 1


def test_gradients_are_those_of_batch_norm_on_the_micro_batch() -> None:
    whole, deferred, statistics = pair(lambda: nn.BatchNorm2d(3))
    inputs = images(4).requires_grad_(), images(4).requires_grad_()
    weight = images(4, 9)
    statistics.open(0)
    (deferred(inputs[0]) * weight).sum().backward()
    statistics.close()
    (whole(inputs[1]) * weight).sum().backward()
    for one, other in zip((inputs[0], *deferred.parameters()), (inputs[1], *whole.parameters()), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_several_norms_of_several_kinds_keep_their_names() -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Sequential(nn.BatchNorm2d(3, momentum=0.3), nn.Conv2d(3, 5, 3)),
            nn.BatchNorm2d(5, affine=False),
            nn.Flatten(),
            nn.Linear(30, 4),
            nn.BatchNorm1d(4, momentum=None),
            nn.BatchNorm1d(4, track_running_stats=False),
        )

    statistics = BatchStatistics()
    original = make()
    parameters = list(original.parameters())
    deferred = defer_batch_norms(original, statistics)
    assert [type(module) for module in deferred.modules()].count(DeferredBatchNorm) == 3
    assert all(one is other for one, other in zip(deferred.parameters(), parameters, strict=True))
    assert deferred.state_dict().keys() == make().state_dict().keys()
    whole = make()
    step(deferred, statistics, images(6), 1)
    whole(images(6))
    assert_same_statistics(deferred, whole)


def test_evaluation_uses_and_leaves_the_running_statistics() -> None:
    whole, deferred, statistics = pair(lambda: nn.BatchNorm2d(3))
    batch = images(8)
    whole(batch)
    step(deferred, statistics, batch, 1)
    before = {name: value.clone() for name, value in deferred.state_dict().items()}
    statistics.open(0)
    torch.testing.assert_close(deferred.eval()(batch), whole.eval()(batch))
    statistics.close()
    statistics.commit()
    for name, value in before.items():
        assert torch.equal(deferred.state_dict()[name], value)


def test_a_failed_step_is_forgotten() -> None:
    whole, deferred, statistics = pair(lambda: nn.BatchNorm2d(3))
    statistics.open(0)
    deferred(images(5, 1))
    statistics.discard()
    assert statistics.is_empty()
    batch = images(6, 2)
    step(deferred, statistics, batch, 2)
    whole(batch)
    assert_same_statistics(deferred, whole)


def test_one_norm_in_two_places_is_refused() -> None:
    _, deferred, statistics = pair(lambda: nn.BatchNorm2d(3))
    statistics.open(0)
    deferred(images(2))
    with pytest.raises(ValueError, match="applied twice in one forward"):
        deferred(images(2))


def test_a_norm_that_also_activates_still_does() -> None:
    """timm's EfficientNets have batch norms that activate: replaced by plain ones, the network was another."""
    from timm.layers import BatchNormAct2d

    torch.manual_seed(0)
    original = nn.Sequential(BatchNormAct2d(4, act_layer=nn.SiLU))
    deferred = defer_batch_norms(copy.deepcopy(original), BatchStatistics())
    for training in (False, True):
        images = torch.randn(3, 4, 5, 5)
        expected = original.train(training)(images)
        assert torch.equal(deferred.train(training)(images), expected)
        assert expected.min() > -0.3, "SiLU has no smaller values"
