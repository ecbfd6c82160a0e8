"""The pieces of a mini-batch: sizes of micro-batches, and which of them a pipeline gets."""

from dataclasses import dataclass


def micro_batch_sizes(samples: int, micro_batches: int) -> tuple[int, ...]:
    """The sizes of M pieces that differ by at most one, larger ones first; of fewer samples than M one piece a sample.

    Departs from the paper (section 2.2): N need not be a multiple of M. `torch.chunk` may return fewer pieces than
    asked for; counting them wrongly is what broke deferred batch norm in torchgpipe.

    >>> micro_batch_sizes(7, 3)
    (3, 2, 2)
    """
    assert samples > 0, samples
    assert micro_batches > 0, micro_batches
    pieces = min(samples, micro_batches)
    small, larger = divmod(samples, pieces)
    return tuple(small + 1 if piece < larger else small for piece in range(pieces))


@dataclass(frozen=True)
class Share:
    """What one of R pipelines gets of a mini-batch: consecutive micro-batches of the R x M of all of them."""

    first_sample: int
    first_micro_batch: int
    sizes: tuple[int, ...]  # samples of each micro-batch; () if there are fewer samples than pipelines

    @property
    def samples(self) -> slice:
        return slice(self.first_sample, self.first_sample + sum(self.sizes))


def share_of(samples: int, micro_batches: int, replicas: int = 1, replica: int = 0) -> Share:
    """The share of pipeline `replica`, of `micro_batches` at most: the micro-batches of all are those of one pipeline
    with R x M of them (law 7).

    >>> share_of(7, 2, replicas=2, replica=1)
    Share(first_sample=4, first_micro_batch=2, sizes=(2, 1))
    """
    sizes = micro_batch_sizes(samples, replicas * micro_batches)
    counts = [len(sizes) // replicas + (one < len(sizes) % replicas) for one in range(replicas)]
    first = sum(counts[:replica])
    return Share(sum(sizes[:first]), first, sizes[first : first + counts[replica]])
