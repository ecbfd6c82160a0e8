"""Mini-batches of sequences: complete, within the token budget, little padding, a function of seed and epoch."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import Any

import pytest
import torch

from gpipe_cli.data.batches import Catalogue
from gpipe_cli.data.token_batches import TokenBatches


def catalogue(samples: int = 500, longest: int = 30, dimensions: int = 2, languages: int = 5) -> Catalogue:
    generator = torch.Generator().manual_seed(samples)
    lengths = torch.randint(1, longest + 1, (samples, dimensions), generator=generator, dtype=torch.int32)
    # Language 0 has about as many as all others together, and so on.
    groups = (-torch.rand(samples, generator=generator).log2()).to(torch.int32).clamp(max=languages - 1)
    return Catalogue(samples, lengths=lengths, groups=groups)


def batches_of(data: Catalogue, **settings: Any) -> TokenBatches:
    defaults = {"batch_size": None, "batch_tokens": None, "seed": 0, "shuffle": True, "temperature": None}
    return TokenBatches(data, **{**defaults, **settings})


def epoch_of(batches: TokenBatches, epoch: int) -> list[list[int]]:
    return [batches.indices(epoch, position).tolist() for position in range(batches.steps_per_epoch)]


@pytest.mark.parametrize("dimensions", [1, 2, 3])
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("limit", [{"batch_size": 7}, {"batch_tokens": 64}, {"batch_tokens": 30}, {"batch_size": 9999}])
def test_every_sample_once_and_padded_to_the_longest(limit: dict[str, int], shuffle: bool, dimensions: int) -> None:
    data = catalogue(dimensions=dimensions)
    batches = batches_of(data, **limit, shuffle=shuffle)
    assert batches.samples == 500
    for epoch in (0, 1):
        parts = epoch_of(batches, epoch)
        assert sorted(chain.from_iterable(parts)) == list(range(500))
        for position, part in enumerate(parts):
            assert len(part) == batches.size(epoch, position) > 0
            assert data.lengths is not None
            assert batches.lengths(epoch, position) == tuple(data.lengths[part].amax(dim=0).tolist())
            assert all(isinstance(length, int) for length in batches.lengths(epoch, position))


def test_a_batch_size_is_kept_but_for_one() -> None:
    sizes = Counter(map(len, epoch_of(batches_of(catalogue(), batch_size=64), 2)))
    assert sizes == {64: 7, 500 - 7 * 64: 1}


def test_a_short_last_one_can_be_dropped_without_a_preference_for_short_sentences() -> None:
    data = catalogue()
    batches = batches_of(data, batch_size=64, drop_last=True)
    dropped = []
    for epoch in range(3):
        parts = epoch_of(batches, epoch)
        assert [len(part) for part in parts] == [64] * 7
        dropped.append(set(range(500)) - set(chain.from_iterable(parts)))
        assert len(dropped[-1]) == 500 - 7 * 64
    assert dropped[0] != dropped[1] != dropped[2]
    assert data.lengths is not None
    longest = data.lengths.amax(dim=1)
    assert min(int(longest[list(one)].min()) for one in dropped) < int(longest.double().median())


def test_the_token_budget_is_kept_and_used() -> None:
    """No mini-batch costs more, and no other way to cut the sorted samples needs fewer (all ways are tried)."""
    data = catalogue()
    assert data.lengths is not None
    longest = data.lengths.amax(dim=1)
    for budget in (30, 31, 64, 1000, 10**6):
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


def test_padding_is_small() -> None:
    data = catalogue(samples=5000)
    assert data.lengths is not None
    batches = batches_of(data, batch_size=20)
    padded = sum(
        batches.size(0, position) * sum(batches.lengths(0, position)) for position in range(batches.steps_per_epoch)
    )
    assert int(data.lengths.sum()) / padded > 0.9  # in random order it is 0.53


def test_order_depends_on_seed_and_epoch_only() -> None:
    data = catalogue()
    for temperature in (None, 5.0):
        one, other = (batches_of(data, batch_tokens=90, seed=1, temperature=temperature) for _ in range(2))
        torch.manual_seed(5)
        state = torch.get_rng_state()
        forward = {epoch: epoch_of(one, epoch) for epoch in (0, 1, 2, 3)}
        backward = {epoch: epoch_of(other, epoch) for epoch in (3, 2, 1, 0)}
        assert forward == backward
        assert len({str(order) for order in forward.values()}) == 4
        assert epoch_of(batches_of(data, batch_tokens=90, seed=2, temperature=temperature), 0) != forward[0]
        assert torch.equal(torch.get_rng_state(), state)


def test_ties_are_drawn_and_turns_are_shuffled() -> None:
    data = Catalogue(60, lengths=torch.tensor([[3, 4], [9, 2]], dtype=torch.int32).repeat_interleave(30, dim=0))
    batches = batches_of(data, batch_size=10)
    partners = {frozenset(part) for epoch in range(5) for part in epoch_of(batches, epoch)}
    assert len(partners) == 30  # never the same ten twice
    assert {batches.lengths(epoch, 0) for epoch in range(10)} == {(3, 4), (9, 2)}  # not always the short ones first


def test_without_shuffling_sorted_by_length_and_always_the_same() -> None:
    lengths = torch.tensor([[5, 1], [2, 2], [1, 5], [2, 2], [1, 1]], dtype=torch.int32)
    batches = batches_of(Catalogue(5, lengths=lengths), batch_size=2, shuffle=False)
    assert epoch_of(batches, 0) == epoch_of(batches, 3) == [[4, 1], [3, 2], [0]]


def test_order_is_pinned() -> None:
    """A resumed run of an older version must find the same order, so a change of the mixing must be noticed."""
    lengths = torch.tensor([[1], [2], [1], [2], [1], [2], [3]], dtype=torch.int32)
    assert epoch_of(batches_of(Catalogue(7, lengths=lengths), batch_tokens=4), 1) == [[0, 4, 2], [5, 1], [3], [6]]


# --- all alike


@pytest.mark.parametrize("limit", [{"batch_size": 4}, {"batch_tokens": 4 * 16 + 15}])
def test_samples_that_are_alike(limit: dict[str, int]) -> None:
    data = Catalogue(10, fixed_lengths=(16, 12))
    shuffled, ordered = batches_of(data, **limit), batches_of(data, **limit, shuffle=False)
    assert epoch_of(ordered, 0) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    parts = epoch_of(shuffled, 0)
    assert sorted(chain.from_iterable(parts)) == list(range(10))
    assert parts != epoch_of(shuffled, 1)
    assert [shuffled.lengths(0, position) for position in range(3)] == [(16, 12)] * 3


# --- temperature


def test_temperature_draws_each_language_its_quota() -> None:
    from gpipe_cli.data.temperature import language_quotas

    data = catalogue()
    assert data.groups is not None
    counts = torch.bincount(data.groups)
    batches = batches_of(data, batch_size=8, temperature=5.0)
    assert batches.steps_per_epoch == -(-500 // 8)
    for epoch in (0, 3):
        draws = list(chain.from_iterable(epoch_of(batches, epoch)))
        assert torch.bincount(data.groups[draws]).tolist() == language_quotas(counts.tolist(), 5.0)


def test_temperature_one_is_every_sample_once() -> None:
    data = catalogue()
    assert epoch_of(batches_of(data, batch_tokens=64, temperature=1), 2) == epoch_of(
        batches_of(data, batch_tokens=64), 2
    )


def test_every_epoch_has_as_many_steps_as_epoch_0() -> None:
    """A small language with long sentences: how many mini-batches the draws fill differs between epochs."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.cat([torch.full((80, 1), 3), torch.randint(1, 60, (9, 1), generator=generator)]).to(torch.int32)
    data = Catalogue(89, lengths=lengths, groups=torch.tensor([0] * 80 + [1] * 9))
    needed = set()
    for seed in range(5):
        batches = batches_of(data, batch_tokens=60, seed=seed, temperature=5.0)
        needed.add(batches.steps_per_epoch)
        for epoch in range(6):
            parts = epoch_of(batches, epoch)
            assert len(parts) == batches.steps_per_epoch
            assert all(part for part in parts)
            assert abs(sum(map(len, parts)) - 89) <= 20 * 3  # some mini-batches are left out or repeated
    assert len(needed) > 1  # otherwise this test would prove nothing


# --- the rest of the interface


def test_stream_from_anywhere_is_the_tail_of_the_whole() -> None:
    batches = batches_of(catalogue(samples=10), batch_size=4)
    whole = list(batches.stream(0, 0, 3))
    assert whole == [(epoch, position) for epoch in range(3) for position in range(3)]
    for done, (epoch, position) in enumerate(whole):
        assert list(batches.stream(epoch, position, 3)) == whole[done:]
    assert list(batches.stream(1, 3, 3)) == whole[6:]
    assert list(batches.stream(3, 0, 3)) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, r"batch_size=null, batch_tokens=null: exactly one .*"),
        ({"batch_size": 3, "batch_tokens": 50}, r"batch_size=3, batch_tokens=50: exactly one .*"),
        ({"batch_size": 0}, r"batch_size=0: must be 1 or more"),
        ({"batch_tokens": -4}, r"batch_tokens=-4: must be 1 or more"),
        ({"batch_tokens": 29}, r"batch_tokens=29: the longest sentence has 30 tokens; use 30 or more"),
        ({"batch_size": 4, "temperature": 0.5}, r"temperature=0\.5: must be 1 or more; .*"),
        ({"batch_size": 4, "temperature": float("nan")}, r"temperature=nan: must be 1 or more; .*"),
    ],
)
def test_settings_that_mean_nothing(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=rf"\A{message}\Z"):
        batches_of(catalogue(), **settings)


def test_nothing_to_draw_languages_from() -> None:
    with pytest.raises(ValueError, match=r"^temperature=5\.0: this data set has no languages[^\n]*$"):
        batches_of(Catalogue(10, fixed_lengths=(8,)), batch_size=2, temperature=5.0)
    with pytest.raises(ValueError, match=r"^batch_tokens=7: the longest sentence has 8 tokens; use 8 or more$"):
        batches_of(Catalogue(10, fixed_lengths=(8,)), batch_tokens=7)
