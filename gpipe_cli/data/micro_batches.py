"""How a mini-batch is cut: the sizes of its micro-batches, and which of them each pipeline gets."""

from typing import NamedTuple


def micro_batch_sizes(samples: int, micro_batches: int) -> tuple[int, ...]:
    """Samples of each of M micro-batches: they differ by at most 1, larger first. With N < M there are N of 1 sample.

    Departs from the paper (section 2.2): N need not be a multiple of M. `torch.chunk`, which is not used here, may
    return fewer chunks than asked for; miscounting them broke deferred batch norm in torchgpipe.

    >>> micro_batch_sizes(7, 3)
    (3, 2, 2)
    """
    assert samples > 0, samples
    assert micro_batches > 0, micro_batches
    pieces = min(samples, micro_batches)
    small, larger = divmod(samples, pieces)
    return tuple(small + 1 if piece < larger else small for piece in range(pieces))


class Shard(NamedTuple):
    """One pipeline's part of a mini-batch: consecutive micro-batches of the R x M of all R pipelines."""

    first_sample: int
    first_micro_batch: int
    sizes: tuple[int, ...]  # samples of each micro-batch; () if there are too few samples for this pipeline

    @property
    def samples(self) -> slice:
        return slice(self.first_sample, self.first_sample + sum(self.sizes))


def shard_of(samples: int, micro_batches: int, replicas: int = 1, replica: int = 0) -> Shard:
    """The shard of pipeline `replica`: at most `micro_batches`, M, micro-batches. All R shards together are the
    micro-batches of a single pipeline with R x M (law 7 of recipes/contributing.md).

    >>> shard_of(7, 2, replicas=2, replica=1)
    Shard(first_sample=4, first_micro_batch=2, sizes=(2, 1))
    """
    sizes = micro_batch_sizes(samples, replicas * micro_batches)
    counts = [len(sizes) // replicas + (number < len(sizes) % replicas) for number in range(replicas)]
    first = sum(counts[:replica])
    return Shard(sum(sizes[:first]), first, sizes[first : first + counts[replica]])
