"""Languages by temperature: quotas in closed form, and rows of permutations that no epoch breaks."""

from collections import Counter

import pytest
import torch

from gpipe_cli.data.temperature import language_quotas, temperature_draws


def test_quotas_in_closed_form() -> None:
    # Shares 16/17 and 1/17: with T = 2 the weights are as 4 to 1, with T = 4 as 2 to 1.
    assert language_quotas([1600, 100], 2) == [1360, 340]
    assert language_quotas([1600, 101], 1) == [1600, 101]
    assert language_quotas([160, 10], 4) == [113, 57]  # 113.33 and 56.67
    assert language_quotas([160, 10], 1e9) == [85, 85]
    assert language_quotas([7, 0, 7], 5) == [7, 0, 7]


@pytest.mark.parametrize("temperature", [1.0, 1.5, 5.0, 100.0])
def test_quotas_add_up_and_are_within_one(temperature: float) -> None:
    counts = [10**position + 3 for position in range(6)]
    quotas = language_quotas(counts, temperature)
    weights = [count ** (1 / temperature) for count in counts]
    assert sum(quotas) == sum(counts)
    for quota, weight in zip(quotas, weights, strict=True):
        assert abs(quota - sum(counts) * weight / sum(weights)) < 1


def test_no_sample_again_before_all_others() -> None:
    """Over epochs: at every moment the draws of a language differ by at most one between its samples."""
    groups = torch.tensor([0] * 50 + [1] * 7 + [3] * 1 + [4] * 22)[torch.randperm(80)]
    quotas = language_quotas(torch.bincount(groups).tolist(), 3.0)
    seen: dict[int, Counter[int]] = {group: Counter() for group in (0, 1, 3, 4)}
    for epoch in range(12):
        draws = temperature_draws(groups, 3.0, 1, epoch)
        assert len(draws) == 80
        assert torch.bincount(groups[draws], minlength=5).tolist() == quotas
        for sample in draws.tolist():
            seen[int(groups[sample])][sample] += 1
        for group, counts in seen.items():
            members = (groups == group).nonzero().flatten().tolist()
            times = [counts[sample] for sample in members]
            assert sum(times) == quotas[group] * (epoch + 1)
            assert max(times) - min(times) <= 1


def test_draws_are_pinned() -> None:
    """A resumed run of an older version must find the same draws, so a change of the mixing must be noticed."""
    groups = torch.tensor([0] * 6 + [1] * 2)
    assert temperature_draws(groups, 5.0, 0, 0).tolist() == [1, 3, 2, 4, 7, 6, 6, 7]
