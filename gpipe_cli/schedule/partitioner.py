"""Where to cut the layers into partitions (section 2.2 of the paper), from an estimated cost of each layer.

The slowest stage sets the pace of a pipeline, so the best cut has the least cost of its most expensive partition and,
among such cuts, the least variance. The cost of a partition is the cost of its layers and of its sends: activations to
the next partition, gradients to the previous. Partitions may have to fit into a memory limit.

Departs from the paper: the paper minimises the variance of the partitions' costs by a heuristic and notes that better
partitioners could be used. Here the maximum comes first, the variance second, and the result is optimal for integer
costs. Costs are scaled to integers; where that takes more than 31 bits they are rounded, by at most 2^-31 of their sum.

A dynamic program over the partitions runs twice: first for the least maximum, then, among partitions that cost no more
than that, for the least sum of squares (hence variance). Most partitions that cost more than any of an even cut are
left out. For 3,000 layers and 128 partitions that takes half a second.
"""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gpipe_cli.errors import InputError

Int64Array = NDArray[np.int64]

_BITS = 31  # integer costs add up to less than 2^31, and their squares to less than 2^62
_NEVER = (1 << 62) - 1  # exceeds any cost or sum of squares; twice this value fits into 63 bits
_BLOCK = 64  # number of partition ends processed together, to stay within a CPU's cache


class NoCutFitsError(InputError):
    """Every cut into this many partitions has a partition that exceeds its memory limit."""


class SkipSends(NamedTuple):
    """The costs of sending a skip on, from layer `stash` to layer `pop`, and its gradient back."""

    stash: int
    pop: int
    forward: float
    backward: float


def partition(
    costs: Sequence[float],
    partitions: int,
    *,
    forward_sends: Sequence[float] | None = None,
    backward_sends: Sequence[float] | None = None,
    skips: Sequence[SkipSends] = (),
    furthest: Sequence[Sequence[int]] | None = None,
) -> tuple[int, ...]:
    """Number of layers of each partition: contiguous, none empty, least maximum cost, then least variance.

    In a tie, each boundary, from the last to the first, is as early as possible. This gives more layers to the later
    stages, which have fewer micro-batches in flight under ``1f1b``.

    `costs` of the L layers are finite and not negative, in any unit. ``forward_sends[i]`` and ``backward_sends[i]``
    (L - 1 each, same unit) are the costs of sending activations from layer i to i + 1, for the partition that ends
    there, and gradients back, for the partition that begins there. A skip costs a partition that sends it on, or its
    gradient back, to any other partition. ``furthest[k][i]`` is the furthest end (exclusive) with which partition k
    fits its memory if it begins with layer i; i or less: not even layer i fits. Rows may be shared.

    Raises NoCutFitsError if `furthest` permits no cut, InputError for no partition or more partitions than layers.
    """
    layers = len(costs)
    check_partitions(layers, partitions)
    on_costs = [0.0] * (layers - 1) if forward_sends is None else list(forward_sends)
    back_costs = [0.0] * (layers - 1) if backward_sends is None else list(backward_sends)
    assert len(on_costs) == len(back_costs) == layers - 1, "a cost for each place between layers"
    assert furthest is None or (len(furthest) == partitions and {len(row) for row in furthest} == {layers})
    all_costs = [*costs, *on_costs, *back_costs, *(cost for skip in skips for cost in (skip.forward, skip.backward))]
    assert all(math.isfinite(cost) and cost >= 0 for cost in all_costs), "finite, not negative"
    integers = np.array(_scale_to_integers(all_costs), dtype=np.int64)
    prefix_sums = np.concatenate(([0], integers[:layers].cumsum()))
    to_end, to_begin = prefix_sums.copy(), prefix_sums.copy()  # of a partition, with its sends
    to_end[1:layers] += integers[layers : 2 * layers - 1]
    to_begin[1:layers] -= integers[2 * layers - 1 : 3 * layers - 2]
    skip_costs = integers[3 * layers - 2 :].reshape(-1, 2)

    def cost(starts: Int64Array, ends: Int64Array) -> Int64Array:
        partition_costs: Int64Array = to_end[ends] - to_begin[starts]
        for skip, (forward, backward) in zip(skips, skip_costs, strict=True):
            partition_costs += forward * ((starts <= skip.stash) & (skip.stash < ends) & (ends <= skip.pop))
            partition_costs += backward * ((skip.stash < starts) & (starts <= skip.pop) & (skip.pop < ends))
        partition_costs[starts >= ends] = _NEVER
        return partition_costs

    def square(starts: Int64Array, ends: Int64Array) -> Int64Array:
        partition_costs = cost(starts, ends)
        return np.where(partition_costs <= smallest_maximum, np.minimum(partition_costs, smallest_maximum) ** 2, _NEVER)

    def earliest(max_cost: int) -> Int64Array:
        """For each end, where a partition that costs no more than `max_cost` begins at the earliest, or before that."""
        return np.minimum(np.maximum.accumulate(to_begin).searchsorted(to_end - max_cost), layers)

    reach = None if furthest is None else [np.asarray(row, dtype=np.int64) for row in furthest]
    # without limits to the memory, a cut exists in which each partition costs no more than its share and this
    even_cost = int(prefix_sums[-1]) // partitions + 1 + int(integers[:layers].max() + skip_costs.sum())
    even_cost += int((to_end - prefix_sums).max() + (prefix_sums - to_begin).max())
    smallest_maximum, _ = _best_cut(cost, earliest(even_cost), partitions, reach, np.maximum)
    if smallest_maximum > even_cost:
        smallest_maximum, _ = _best_cut(cost, np.zeros_like(to_end), partitions, reach, np.maximum)
    if smallest_maximum == _NEVER:
        raise NoCutFitsError(f"no cut into {partitions} partitions fits into the memory")
    return _best_cut(square, earliest(smallest_maximum), partitions, reach, np.add)[1]


def _best_cut(
    cost: Callable[[Int64Array, Int64Array], Int64Array],
    earliest: Int64Array,
    partitions: int,
    reach: Sequence[Int64Array] | None,
    join: np.ufunc,
) -> tuple[int, tuple[int, ...]]:
    """The least total that a cut can have, where ``join`` (maximum or sum) totals its costs, and the sizes of that cut.

    ``cost(i, j)`` is the cost of a partition of layers i to j - 1, _NEVER if it is not allowed, for rows i and columns
    j; partitions that begin before ``earliest[j]`` are left out. ``least[j]`` is the least total of the first j layers
    in k partitions, computed from the total for k - 1; ``begins[k][j]`` is where partition k then begins, as early as
    possible. No partition is empty.
    """
    layers = len(earliest) - 1
    least = np.full(layers + 1, _NEVER)
    least[0] = 0
    begins = []
    for k in range(partitions):
        least_of_more = np.full(layers + 1, _NEVER)
        begin = np.zeros(layers + 1, dtype=np.int64)
        last = layers - partitions + k + 1
        for first in range(k + 1 if k < partitions - 1 else layers, last + 1, _BLOCK):
            ends = np.arange(first, min(first + _BLOCK, last + 1))
            begins_at = max(k, int(earliest[ends].min()))
            begins_before = int(ends[-1]) if k else 1
            if begins_at >= begins_before:
                continue
            if reach is not None:
                begins_at += int((reach[k][begins_at:begins_before] >= first).argmax())
            starts = np.arange(begins_at, begins_before)
            total = join(cost(starts, ends[:, None]), least[starts])
            if reach is not None:
                total[reach[k][starts] < ends[:, None]] = _NEVER
            begin[ends] = total.argmin(axis=1) + begins_at
            least_of_more[ends] = np.minimum(total.min(axis=1), _NEVER)
        least = least_of_more
        begins.append(begin)
    sizes = []
    end = layers
    for begin in reversed(begins):
        sizes.append(int(end - begin[end]))
        end = int(begin[end])
    return int(least[layers]), tuple(reversed(sizes))


def imbalance(
    costs: Sequence[float],
    balance: Sequence[int],
    *,
    forward_sends: Sequence[float] | None = None,
    backward_sends: Sequence[float] | None = None,
    skips: Sequence[SkipSends] = (),
) -> float:
    """The cost of the slowest stage over the mean of all stages, minus 1: 0 is perfect. Arguments as in `partition`."""
    ends = [0, *accumulate(balance)]
    assert ends[-1] == len(costs), "the cut is of these layers"
    on_costs = [*(forward_sends or [0.0] * ends[-1]), 0.0]
    back_costs = [0.0, *(backward_sends or [0.0] * ends[-1])]
    stages = [
        math.fsum(costs[first:end])
        + on_costs[end - 1]
        + back_costs[first]
        + sum(skip.forward for skip in skips if first <= skip.stash < end <= skip.pop)
        + sum(skip.backward for skip in skips if skip.stash < first <= skip.pop < end)
        for first, end in pairwise(ends)
    ]
    mean = math.fsum(stages) / len(stages)
    return max(stages) / mean - 1 if mean > 0 else 0.0


def check_balance(balance: Sequence[int], layers: int, partitions: int, setting: str = "partition.balance") -> None:
    """Raises InputError if a balance given by hand (layers of each partition), as `setting`, does not fit the model."""
    check_partitions(layers, partitions)
    even = [layers // partitions + (k < layers % partitions) for k in range(partitions)]
    remedy = f"give {partitions} positive numbers with the sum {layers}, such as {_format_balance(even)}, or remove it"
    given = f"{setting}={_format_balance(balance)}"
    if len(balance) != partitions:
        raise InputError(f"{given}: has {len(balance)} entries, but partitions={partitions}; {remedy}")
    if min(balance) < 1:
        raise InputError(f"{given}: every partition needs at least one layer; {remedy}")
    if sum(balance) != layers:
        raise InputError(f"{given}: adds up to {sum(balance)}, but the model has {layers} layers; {remedy}")


def _format_balance(balance: Sequence[int]) -> str:
    """The balance as typed on the command line, without blanks."""
    return f"[{','.join(map(str, balance))}]"


def check_partitions(layers: int, partitions: int) -> None:
    """Raises InputError unless there is at least 1 partition, and a layer for each."""
    if partitions < 1:
        raise InputError(f"partitions={partitions}: must be at least 1; use partitions=1 to keep the model whole")
    if partitions > layers:
        raise InputError(
            f"partitions={partitions}: the model has only {layers} layers; use partitions={layers} or fewer"
        )


def _scale_to_integers(costs: Sequence[float]) -> list[int]:
    """``costs`` scaled by a common factor to integers with a sum below 2^31, rounded only if no factor is exact."""
    fractions = [Fraction(cost) for cost in costs]
    factor = math.lcm(*(f.denominator for f in fractions))
    exact = [int(f * factor) for f in fractions]
    common = math.gcd(*exact) or 1
    total = sum(exact) // common
    if total < 1 << _BITS:
        return [number // common for number in exact]
    max_sum = (1 << _BITS) - 1 - len(costs)  # rounding may add 1/2 to each
    return [(2 * (number // common) * max_sum + total) // (2 * total) for number in exact]
