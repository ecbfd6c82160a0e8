"""The moving average against TensorFlow's formula."""

from contextlib import suppress

import pytest
import torch
from torch import nn
from training_runs import assert_same_tensors

from gpipe_cli.assembly.weight_average import WeightAverage
from gpipe_cli.pipeline.runtime.deferred_batch_norm import BatchStatistics, defer_batch_norms


def module() -> nn.Sequential:
    layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2), nn.Linear(3, 4))
    layers[3].weight = layers[0].weight  # applied and taken back twice, the average stayed in the place of the weights
    return layers.double()


def change(layers: nn.Module) -> None:
    with torch.no_grad():
        for tensor in layers.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(torch.randn_like(tensor))
            else:
                tensor += 1


@pytest.mark.parametrize("decay", [0.9999, 0.3])
def test_the_decay_starts_small(decay: float) -> None:
    """After n updates it is min(decay, (1 + n) / (10 + n)), for parameters and for running statistics."""
    layers = module()
    average = WeightAverage(layers, decay)
    expected = {name: tensor.clone() for name, tensor in layers.state_dict().items()}
    for n in range(1, 12):
        change(layers)
        average.update()
        kept = min(decay, (1 + n) / (10 + n))
        for name, tensor in layers.state_dict().items():
            expected[name] = expected[name] * kept + tensor * (1 - kept)
    assert set(average.average) == set(layers.state_dict()) - {"1.num_batches_tracked"}
    for name, value in average.average.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-12)


def test_statistics_are_averaged_once() -> None:
    """Of mini-batches whose mean is the step's number: the average lags behind as if it were a weight, and not by the
    ten steps more that the running statistics lag."""
    statistics, layers = BatchStatistics(), nn.Sequential(nn.BatchNorm1d(1)).double()
    defer_batch_norms(layers, statistics)
    average = WeightAverage(layers, 0.9)
    expected = 0.0
    for n in range(1, 60):
        with torch.no_grad():
            layers[0].weight.fill_(n)
        for micro_batch in range(2):
            with statistics.writing_to(statistics.moments_of(micro_batch)):
                layers(torch.tensor([[n - 1.0], [n + 1.0]], dtype=torch.float64))
        statistics.commit()
        average.update(statistics.last_batch_stats)
        kept = min(0.9, (1 + n) / (10 + n))
        expected = kept * expected + (1 - kept) * n
    running, weight = average.average["0.running_mean"].item(), average.average["0.weight"].item()
    assert [running, weight] == pytest.approx([expected, expected])
    assert average.average["0.running_var"].item() == pytest.approx(4 / 3)
    assert layers[0].running_mean.item() < running + 1


def test_applied_and_back_again_bit_for_bit() -> None:
    layers = module()
    average = WeightAverage(layers, 0.5)
    for _ in range(3):
        change(layers)
        average.update()
    live = {name: tensor.clone() for name, tensor in layers.state_dict().items()}
    kept = {name: tensor.clone() for name, tensor in average.average.items()}

    with suppress(KeyError), average.use_averages():
        assert_same_tensors(layers.state_dict(), live | kept)
        raise KeyError("something goes wrong inside")
    assert_same_tensors(layers.state_dict(), live)
    assert_same_tensors(average.average, kept)
    change(layers)
    average.update()  # still follows the same module
    assert not torch.equal(average.average["0.weight"], kept["0.weight"])


def test_a_stage_without_weights_has_nothing_to_average() -> None:
    """A cut may leave a stage nothing but activations and pools; torch refuses to average an empty list."""
    WeightAverage(nn.Sequential(nn.ReLU(), nn.Flatten()), 0.9).update()
