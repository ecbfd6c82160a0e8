"""Drop-path removes whole results, one example at a time, and keeps the expectation."""

import pytest
import torch

from gpipe_cli.models.drop_path import ScheduledDropPath


def test_drops_whole_examples_and_scales_the_rest() -> None:
    torch.manual_seed(0)
    drop_path = ScheduledDropPath(0.4)
    drop_path.progress = 0.5  # keep = 1 - 0.5 * 0.4 = 0.8
    x = torch.ones(4000, 3, 2, 2, requires_grad=True)
    whole = drop_path(x)
    whole.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, whole.detach())  # the gradient has the same mask
    y = whole.detach().flatten(1)
    assert torch.equal(y, y[:, :1].expand(-1, 12)), "all channels and pixels of an example share one fate"
    dropped = y[:, 0] == 0
    torch.testing.assert_close(y[~dropped], torch.full_like(y[~dropped], 1 / 0.8))
    # Standard deviation of the mean: sqrt(0.8 * 0.2 / 4000) = 0.0063.
    assert dropped.float().mean().item() == pytest.approx(0.2, abs=0.03)
    assert y.mean().item() == pytest.approx(1, abs=0.04)
