from itertools import product

from gpipe_cli.data.micro_batches import micro_batch_sizes


def test_sizes_add_up_and_differ_by_at_most_one() -> None:
    for samples, micro_batches in product(range(1, 20), range(1, 9)):
        sizes = micro_batch_sizes(samples, micro_batches)
        assert sum(sizes) == samples
        assert len(sizes) == min(samples, micro_batches)
        assert max(sizes) - min(sizes) <= 1
        assert list(sizes) == sorted(sizes, reverse=True)
