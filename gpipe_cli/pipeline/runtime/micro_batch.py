"""A mini-batch is cut into M micro-batches whose sizes differ by at most one (paper section 2.2, where they are equal).

Departs from the paper: N need not be a multiple of M. `torch.chunk` may return fewer pieces than asked for; counting
them wrongly is what broke deferred batch norm in torchgpipe, so sizes are computed here, once, for every process.
"""

from collections.abc import Sequence

from gpipe_cli.pipeline.runtime.boundary import Tensors


def micro_batch_sizes(samples: int, micro_batches: int) -> tuple[int, ...]:
    """The sizes of the pieces, larger ones first. A mini-batch of fewer than M samples makes one piece a sample.

    >>> micro_batch_sizes(7, 3)
    (3, 2, 2)
    """
    if samples < 1:
        raise ValueError(f"a mini-batch needs at least one sample, not {samples}")
    if micro_batches < 1:
        raise ValueError(f"micro_batches={micro_batches}: at least 1 is needed; use micro_batches=1")
    pieces = min(samples, micro_batches)
    small, larger = divmod(samples, pieces)
    return tuple(small + 1 if piece < larger else small for piece in range(pieces))


def split_all(batch: Tensors, sizes: Sequence[int]) -> tuple[Tensors, ...]:
    """The micro-batches of a mini-batch of several tensors, (N, ...) each."""
    return tuple(zip(*(tensor.split(list(sizes)) for tensor in batch), strict=True))
