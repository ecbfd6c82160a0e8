"""Where Lingvo, the library that the paper's experiments ran in, cuts the layers into partitions: one pass, no search.

The paper (section 2.2) speaks of the least variance of the partitions' costs. The code that was published does
something simpler: `PartitionSequentialLayers` in lingvo/core/gpipe.py for any sequence of layers, and a number of
layers for each partition in lingvo/core/layers_with_gpipe.py for stacks of Transformer layers.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate

from gpipe_cli.config.typed import RefusedError


def cut_by_share(costs: Sequence[float], partitions: int) -> tuple[int, ...]:
    """Layers of each partition: layer i goes to partition floor(K * share), but to the last one where that is K. Its
    share is what the layers up to and including it cost, of the cost of all.

    Raises RefusedError if a partition is left without a layer, as one layer costs more than a partition's share.
    """
    whole = sum(costs)
    return _sizes(partitions, lambda k: [min(int(k * cost / whole), k - 1) for cost in accumulate(costs)])


def cut_stack(blocks: Sequence[bool], partitions: int) -> tuple[int, ...]:
    """Layers of each partition, where `blocks` says which layers are those of a Transformer stack: each partition gets
    L / K of the L blocks, rounded up, and the last one what is left. What lies before the first block is in the first
    partition, what lies behind a block in the partition of that block.

    Raises RefusedError if the rounding leaves nothing for the last partitions.
    """
    last = [max(0, done - 1) for done in accumulate(blocks)]  # of each layer: the block that it is, or lies behind
    return _sizes(partitions, lambda k: [block // -(-sum(blocks) // k) for block in last])


def _sizes(partitions: int, of_layers: Callable[[int], Sequence[int]]) -> tuple[int, ...]:
    """Layers of each of K partitions, where `of_layers(K)` is the partition of each layer."""
    sizes = [of_layers(partitions).count(k) for k in range(partitions)]
    if 0 not in sizes:
        return tuple(sizes)
    fewer = next(k for k in reversed(range(1, partitions)) if len(set(of_layers(k))) == k)
    why = f"Lingvo's rule leaves partition {sizes.index(0)} of {partitions} without a layer"
    raise RefusedError("partition.method", "lingvo", f"{why}; use partition.method=exact or partitions={fewer}")
