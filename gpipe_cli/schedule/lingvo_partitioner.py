"""Lingvo's rules for cutting layers into partitions, in a single pass without a search, as in the paper's experiments.

The paper (section 2.2) minimises the variance of the partitions' costs. The published code of Lingvo does something
simpler: `PartitionSequentialLayers` in lingvo/core/gpipe.py for any sequence of layers, and a fixed number of layers
for each partition in lingvo/core/layers_with_gpipe.py for stacks of Transformer layers.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate

from gpipe_cli.errors import InputError


def cut_by_share(costs: Sequence[float], partitions: int) -> tuple[int, ...]:
    """The number of layers of each partition: layer i goes to partition min(floor(K * share), K - 1), where share is
    the cost of layers 0 to i, relative to the cost of all layers.

    Raises InputError if a partition gets no layer, because a layer costs more than a partition's share.
    """
    total = sum(costs)
    return _sizes(partitions, lambda k: [min(int(k * cost_so_far / total), k - 1) for cost_so_far in accumulate(costs)])


def cut_stack(blocks: Sequence[bool], partitions: int) -> tuple[int, ...]:
    """The number of layers of each partition, where `blocks` are the layers that belong to a Transformer stack: each
    partition gets L / K of the L blocks, rounded up, and the last partition the rest. Layers before the first block are
    in the first partition, layers after a block in the partition of that block.

    Raises InputError if rounding up leaves no block for the last partitions.
    """
    # per layer: its block, or the last block before it
    last_blocks = [max(0, count - 1) for count in accumulate(blocks)]
    return _sizes(partitions, lambda k: [block // -(-sum(blocks) // k) for block in last_blocks])


def _sizes(partitions: int, partition_of_layers: Callable[[int], Sequence[int]]) -> tuple[int, ...]:
    """The number of layers of each of K partitions, where `partition_of_layers(K)` is the partition of each layer."""
    sizes = [partition_of_layers(partitions).count(k) for k in range(partitions)]
    if 0 not in sizes:
        return tuple(sizes)
    fewer = next(k for k in reversed(range(1, partitions)) if len(set(partition_of_layers(k))) == k)
    why = f"Lingvo's rule leaves partition {sizes.index(0)} of {partitions} without a layer"
    raise InputError(f"partition.method=lingvo: {why}; use partition.method=exact or partitions={fewer}")
