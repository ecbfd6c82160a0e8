from itertools import product

import pytest

from gpipe_cli.data.micro_batches import micro_batch_sizes


def test_sizes_add_up_and_differ_by_at_most_one() -> None:
    for samples, micro_batches in product(range(1, 20), range(1, 9)):
        sizes = micro_batch_sizes(samples, micro_batches)
        assert sum(sizes) == samples
        assert len(sizes) == min(samples, micro_batches)
        assert max(sizes) - min(sizes) <= 1
        assert list(sizes) == sorted(sizes, reverse=True)


def test_nothing_to_cut_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        micro_batch_sizes(0, 3)
    with pytest.raises(ValueError, match="micro_batches=0"):
        micro_batch_sizes(3, 0)
