"""Mini-batches: every sample once per epoch, in an order that (seed, epoch) alone decides."""

from __future__ import annotations

from itertools import chain

import pytest
import torch

from gpipe_cli.data.batches import MiniBatches


def epoch_of(batches: MiniBatches, epoch: int) -> list[list[int]]:
    return [batches.indices(epoch, position).tolist() for position in range(batches.steps_per_epoch)]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("samples", "batch_size"), [(10, 5), (11, 4), (3, 8), (1, 1)])
def test_every_sample_once_per_epoch(samples: int, batch_size: int, shuffle: bool) -> None:
    batches = MiniBatches(samples, batch_size, seed=0, shuffle=shuffle)
    for epoch in range(3):
        parts = epoch_of(batches, epoch)
        assert sorted(chain.from_iterable(parts)) == list(range(samples))
        assert [len(part) for part in parts] == [batches.size(epoch, p) for p in range(batches.steps_per_epoch)]
        assert all(len(part) == batch_size for part in parts[:-1])


def test_short_last_batch_is_kept_or_dropped() -> None:
    kept = MiniBatches(11, 4, seed=0, shuffle=True)
    dropped = MiniBatches(11, 4, seed=0, shuffle=True, drop_last=True)
    assert [kept.size(0, p) for p in range(kept.steps_per_epoch)] == [4, 4, 3]
    assert epoch_of(dropped, 5) == epoch_of(kept, 5)[:2]


def test_without_shuffling_the_order_is_the_data_sets() -> None:
    batches = MiniBatches(5, 2, seed=9, shuffle=False)
    assert epoch_of(batches, 0) == epoch_of(batches, 7) == [[0, 1], [2, 3], [4]]


def test_order_depends_on_seed_and_epoch_only() -> None:
    one, other = MiniBatches(50, 8, seed=1, shuffle=True), MiniBatches(50, 8, seed=1, shuffle=True)
    torch.manual_seed(5)
    forward = {epoch: epoch_of(one, epoch) for epoch in (0, 1, 2, 3)}
    torch.manual_seed(6)
    backward = {epoch: epoch_of(other, epoch) for epoch in (3, 2, 1, 0)}  # asked for in another order
    assert forward == backward
    assert len({str(order) for order in forward.values()}) == 4
    assert epoch_of(MiniBatches(50, 8, seed=2, shuffle=True), 0) != forward[0]
    # The batch size cuts the same order elsewhere.
    other_cut = epoch_of(MiniBatches(50, 7, seed=1, shuffle=True), 2)
    assert list(chain.from_iterable(other_cut)) == list(chain.from_iterable(forward[2]))


def test_order_is_pinned() -> None:
    """A resumed run of an older version must find the same order, so a change of the mixing must be noticed."""
    assert MiniBatches(8, 8, seed=0, shuffle=True).indices(0, 0).tolist() == [2, 1, 0, 3, 7, 6, 5, 4]


def test_indices_are_int64_and_the_default_generator_is_untouched() -> None:
    state = torch.get_rng_state()
    indices = MiniBatches(9, 4, seed=0, shuffle=True).indices(0, 2)
    assert indices.dtype == torch.int64
    assert indices.shape == (1,)
    assert torch.equal(torch.get_rng_state(), state)


def test_stream_from_anywhere_is_the_tail_of_the_whole() -> None:
    batches = MiniBatches(10, 4, seed=0, shuffle=True)
    whole = list(batches.stream(0, 0, 3))
    assert whole == [(epoch, position) for epoch in range(3) for position in range(3)]
    for done, (epoch, position) in enumerate(whole):
        assert list(batches.stream(epoch, position, 3)) == whole[done:]
    assert list(batches.stream(1, 3, 3)) == whole[6:]  # the end of epoch 1 is the start of epoch 2
    assert list(batches.stream(3, 0, 3)) == []


def test_nothing_left_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^batch_size=12: there are only 11 samples [^\n]*use batch_size=11 or less$"):
        MiniBatches(11, 12, seed=0, shuffle=True, drop_last=True)
    with pytest.raises(ValueError, match=r"^batch_size=0: "):
        MiniBatches(11, 0, seed=0, shuffle=True)
