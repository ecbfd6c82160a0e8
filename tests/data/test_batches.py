"""Mini-batches: complete, within the token budget, little padding, in an order that (seed, epoch) alone decides."""

from itertools import chain
from typing import Any

import pytest
import torch

from gpipe_cli.data.batches import MiniBatches, SplitIndex, derive_seed
from gpipe_cli.data.temperature_sampling import draw_by_temperature, language_quotas


def sentences(dimensions: int = 2) -> SplitIndex:
    """500 of 1 to 30 tokens in five languages; one of these has about as many as all after it together."""
    generator = torch.Generator().manual_seed(500)
    lengths = torch.randint(1, 31, (500, dimensions), generator=generator, dtype=torch.int32)
    groups = (-torch.rand(500, generator=generator).log2()).to(torch.int32).clamp(max=4)
    return SplitIndex(500, lengths=lengths, groups=groups)


def batches_of(data: SplitIndex | int, **settings: Any) -> MiniBatches:
    """A number stands for that many images."""
    split_index = data if isinstance(data, SplitIndex) else SplitIndex(data)
    return MiniBatches(split_index, **{"batch_size": None, "seed": 0, "shuffle": True, **settings})


def epoch_of(batches: MiniBatches, epoch: int) -> list[list[int]]:
    return [batches.indices(epoch, position).tolist() for position in range(batches.steps_per_epoch)]


# --- images


def test_the_batch_size_cuts_the_same_order_elsewhere_and_a_short_last_one_can_be_dropped() -> None:
    kept, dropped = (batches_of(11, batch_size=4, drop_last=drop_last) for drop_last in (False, True))
    whole = epoch_of(kept, 5)
    assert list(map(len, whole)) == [4, 4, 3]
    assert epoch_of(dropped, 5) == whole[:2]
    assert list(chain(*epoch_of(batches_of(11, batch_size=7), 5))) == list(chain(*whole))


def test_orders_are_pinned() -> None:
    """A resumed run of an older version must find the same orders, so a change of the mixing must be noticed."""
    assert batches_of(8, batch_size=8).indices(0, 0).tolist() == [2, 1, 0, 3, 7, 6, 5, 4]
    lengths = torch.tensor([[1], [2], [1], [2], [1], [2], [3]], dtype=torch.int32)
    assert epoch_of(batches_of(SplitIndex(7, lengths=lengths), batch_tokens=4), 1) == [[0, 4, 2], [5, 1], [3], [6]]


# --- all


@pytest.mark.parametrize(
    ("data", "settings"),
    [(SplitIndex(50), {"batch_size": 8}), (sentences(), {"batch_tokens": 90, "temperature": 5.0})],
)
def test_order_depends_on_seed_and_epoch_only(data: SplitIndex, settings: dict[str, Any]) -> None:
    one, other = (batches_of(data, **settings, seed=1) for _ in range(2))
    state = torch.get_rng_state()
    forward = {epoch: epoch_of(one, epoch) for epoch in (0, 1, 2)}
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(6)
    assert forward == {epoch: epoch_of(other, epoch) for epoch in (2, 1, 0)}  # asked for in another order
    assert len({str(order) for order in forward.values()}) == 3
    assert epoch_of(batches_of(data, **settings, seed=2), 0) != forward[0]


def test_stream_from_anywhere_is_the_tail_of_the_whole() -> None:
    batches = batches_of(10, batch_size=4)
    whole = [(epoch, position) for epoch in range(3) for position in range(3)]
    for done, (epoch, position) in enumerate(whole):
        assert list(batches.stream(epoch, position, 3)) == whole[done:]
    assert list(batches.stream(1, 3, 3)) == whole[6:]  # the end of epoch 1 is the start of epoch 2


# --- sentences


@pytest.mark.parametrize(
    ("data", "limit", "shuffle"),
    [
        (SplitIndex(10), {"batch_size": 5}, False),
        (SplitIndex(3), {"batch_size": 8}, True),
        (sentences(), {"batch_size": 7}, True),
        (sentences(dimensions=3), {"batch_tokens": 30}, False),
    ],
)
def test_every_sample_once_and_padded_to_the_longest(data: SplitIndex, limit: dict[str, int], shuffle: bool) -> None:
    batches = batches_of(data, **limit, shuffle=shuffle)
    parts = epoch_of(batches, 1)
    assert sorted(chain.from_iterable(parts)) == list(range(data.samples))
    for position, part in enumerate(parts):
        assert len(part) == batches.size(1, position) > 0
        longest = () if data.lengths is None else tuple(data.lengths[part].amax(dim=0).tolist())
        assert batches.lengths(1, position) == longest


def test_the_token_budget_is_kept_and_used() -> None:
    """No mini-batch costs more, and no other way to cut the sorted samples needs fewer (all ways are tried)."""
    data = sentences()
    assert data.lengths is not None
    longest = data.lengths.amax(dim=1)
    for budget in (30, 64, 1000):
        batches = batches_of(data, batch_tokens=budget)
        parts = epoch_of(batches, 1)
        assert all(len(part) * int(longest[part].max()) <= budget for part in parts)
        ordered = longest.sort().values.tolist()
        fewest = [0] + [len(ordered)] * len(ordered)
        for end in range(1, len(ordered) + 1):
            for start in range(end):
                if ordered[end - 1] * (end - start) <= budget:
                    fewest[end] = min(fewest[end], fewest[start] + 1)
        assert len(parts) == fewest[-1]


def test_without_shuffling_sorted_by_length_and_always_the_same() -> None:
    assert epoch_of(batches_of(5, batch_size=3, shuffle=False), 1) == [[0, 1, 2], [3, 4]]  # images have no length
    lengths = torch.tensor([[5, 1], [2, 2], [1, 5], [2, 2], [1, 1]], dtype=torch.int32)
    batches = batches_of(SplitIndex(5, lengths=lengths), batch_size=2, shuffle=False)
    assert epoch_of(batches, 0) == epoch_of(batches, 3) == [[4, 1], [3, 2], [0]]


# --- temperature


def test_quotas_in_closed_form() -> None:
    # Shares 16/17 and 1/17: with T = 2 the weights are as 4 to 1, with T = 4 as 2 to 1.
    assert language_quotas([1600, 100], 2) == [1360, 340]
    assert language_quotas([1600, 101], 1) == [1600, 101]
    assert language_quotas([160, 10], 4) == [113, 57]  # 113.33 and 56.67
    assert language_quotas([160, 10, 0], 1e9) == [85, 85, 0]


def test_no_sample_again_before_all_others() -> None:
    """Over epochs: at every moment the draws of a language differ by at most one between its samples."""
    groups = torch.tensor([0] * 50 + [1] * 7 + [3] * 1 + [4] * 22)[torch.randperm(80)]
    quotas = language_quotas(torch.bincount(groups).tolist(), 3.0)
    times = torch.zeros(80, dtype=torch.int64)
    for epoch in range(12):
        times += torch.bincount(draw_by_temperature(groups, 3.0, 1, epoch), minlength=80)
        for group in (0, 1, 3, 4):
            drawn = times[groups == group]
            assert drawn.sum() == quotas[group] * (epoch + 1)
            assert drawn.max() - drawn.min() <= 1


def test_draws_are_pinned() -> None:
    """A resumed run of an older version must find the same draws, so a change of the mixing must be noticed."""
    groups = torch.tensor([0] * 6 + [1] * 2)
    assert draw_by_temperature(groups, 5.0, derive_seed("languages", 0), 0).tolist() == [1, 3, 2, 4, 7, 6, 6, 7]


def test_temperature_draws_each_language_its_quota() -> None:
    data = sentences()
    assert data.groups is not None
    draws = list(chain.from_iterable(epoch_of(batches_of(data, batch_size=8, temperature=5.0), 3)))
    quotas = language_quotas(torch.bincount(data.groups).tolist(), 5.0)
    assert torch.bincount(data.groups[draws]).tolist() == quotas
    plain, one = (batches_of(data, batch_tokens=64, temperature=temperature) for temperature in (None, 1))
    assert epoch_of(one, 2) == epoch_of(plain, 2)


def test_every_epoch_has_as_many_steps_as_epoch_0() -> None:
    """A small language with long sentences: how many mini-batches the draws fill differs between epochs."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.cat([torch.full((80, 1), 3), torch.randint(1, 60, (9, 1), generator=generator)]).to(torch.int32)
    data = SplitIndex(89, lengths=lengths, groups=torch.tensor([0] * 80 + [1] * 9))
    needed = set()
    for seed in range(5):
        batches = batches_of(data, batch_tokens=60, seed=seed, temperature=5.0)
        needed.add(batches.steps_per_epoch)
        assert all(all(epoch_of(batches, epoch)) for epoch in range(6))
    assert len(needed) > 1  # otherwise this test would prove nothing
