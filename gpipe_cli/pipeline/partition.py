"""Where to cut the layers into partitions (section 2.2 of the paper), from an estimated cost of each layer.

The slowest stage sets the pace of a pipeline, so the cut that matters is the one whose most expensive partition is
as cheap as possible; among those cuts, the one of least variance.

Departs from the paper: the paper minimises the variance of the partitions' costs by a heuristic and says that better
partitioners could be used. Here the order is maximum first, variance second, and the result is exactly optimal:
costs are turned into whole numbers without rounding, and no heuristic is involved.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate


def partition(costs: Sequence[float], partitions: int) -> tuple[int, ...]:
    """Number of layers of each partition: contiguous, none empty, least maximum cost, then least variance.

    Among cuts that are equal in both, each cut from the last to the first is as early as possible. That choice leaves
    more layers to the later stages, which have fewer micro-batches in flight under ``1f1b``.

    Args:
        costs: of each layer, in any unit, finite and not negative.
        partitions: K, at most the number of layers.

    Raises:
        ValueError: fewer than one partition, more partitions than layers, a cost that is negative or not finite.
    """
    _require_partitions(len(costs), partitions)
    for layer, cost in enumerate(costs):
        if not (math.isfinite(cost) and cost >= 0):
            raise ValueError(f"cost of layer {layer} is {cost}: must be finite and not negative; measure it again")
    before = [0, *accumulate(_whole_numbers(costs))]  # before[j]: cost of the first j layers
    return _least_squares(before, partitions, _least_maximum(before, partitions))


def check_balance(balance: Sequence[int], layers: int, partitions: int) -> None:
    """Refuse a balance (layers of each partition) given by hand that does not fit the model.

    Raises:
        ValueError: another length than ``partitions``, an empty partition, another sum than ``layers``.
    """
    _require_partitions(layers, partitions)
    even = [layers // partitions + (k < layers % partitions) for k in range(partitions)]
    remedy = f"give {partitions} positive numbers that add up to {layers}, such as {_written(even)}, or leave it out"
    given = f"partition.balance={_written(balance)}"
    if len(balance) != partitions:
        raise ValueError(f"{given}: has {len(balance)} entries, but partitions={partitions}; {remedy}")
    if min(balance) < 1:
        raise ValueError(f"{given}: every partition needs at least one layer; {remedy}")
    if sum(balance) != layers:
        raise ValueError(f"{given}: adds up to {sum(balance)}, but the model has {layers} layers; {remedy}")


def _written(balance: Sequence[int]) -> str:
    """As one types it on the command line: no blanks."""
    return f"[{','.join(map(str, balance))}]"


def _require_partitions(layers: int, partitions: int) -> None:
    if partitions < 1:
        raise ValueError(f"partitions={partitions}: must be at least 1; use partitions=1 to keep the model whole")
    if partitions > layers:
        raise ValueError(
            f"partitions={partitions}: the model has only {layers} layers; use partitions={layers} or fewer"
        )


def _whole_numbers(costs: Sequence[float]) -> list[int]:
    """``costs`` times one common factor: a float is a fraction, so this is exact and sums of it do not round."""
    fractions = [Fraction(cost) for cost in costs]
    factor = math.lcm(*(f.denominator for f in fractions))
    return [int(f * factor) for f in fractions]


def _least_maximum(before: list[int], partitions: int) -> int:
    """The least maximum cost of a partition, by bisection: whether a limit can be met is easy to say.

    A cut into fewer partitions may be cut further without raising its maximum, so "at most" is as good as "exactly".
    """

    def possible(limit: int) -> bool:
        end = 0
        for _ in range(partitions):  # each partition takes as many layers as the limit allows
            end = bisect_right(before, before[end] + limit) - 1
        return end == len(before) - 1

    low, high = 0, before[-1]
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if possible(middle) else (middle + 1, high)
    return low


def _least_squares(before: list[int], partitions: int, limit: int) -> tuple[int, ...]:
    """The cut with the least sum of squared costs (hence variance) whose partitions cost at most ``limit`` each.

    ``least[j]`` is the least sum for the first j layers in k partitions, built up from k - 1. Squares of sums satisfy
    the quadrangle inequality, and leaving out intervals above a limit keeps it; so the best last cut never moves back
    when j grows. Finding it for the middle j first therefore halves the search on both sides: O(K L log L).
    """
    layers = len(before) - 1
    first_cut = [0]  # first_cut[j]: the earliest cut for which the layers up to j cost no more than the limit
    for end in range(1, layers + 1):
        cut = first_cut[-1]
        while before[end] - before[cut] > limit:
            cut += 1
        first_cut.append(cut)
    reach = [0]  # reach[k]: the most layers that k partitions can hold
    for _ in range(partitions):
        reach.append(bisect_right(before, before[reach[-1]] + limit) - 1)
    need = [layers]  # need[k]: the fewest layers that the first k must hold for the rest to fit; built from the end
    for _ in range(partitions):
        need.append(first_cut[need[-1]])
    need.reverse()
    # A partition is never empty: k of them hold at least k layers and leave at least one for each of the others.
    ranges = [range(max(k, need[k]), min(reach[k], layers - partitions + k) + 1) for k in range(partitions + 1)]

    least: list[int] = [0] * (layers + 1)
    cuts: list[list[int]] = []  # cuts[k - 1][j]: where the last of k partitions begins
    for k in range(1, partitions + 1):
        best: list[int] = [0] * (layers + 1)
        cut_at: list[int] = [0] * (layers + 1)
        previous = ranges[k - 1] if k > 1 else range(1)
        pending = [(ranges[k].start, ranges[k].stop, previous.start, previous.stop)]
        while pending:
            low, high, from_, to = pending.pop()
            if low >= high:
                continue
            end = (low + high) // 2
            total, start = before[end], max(from_, first_cut[end])
            stop = min(to, end)
            sums = [s + (total - b) ** 2 for s, b in zip(least[start:stop], before[start:stop], strict=True)]
            best[end] = min(sums)
            cut_at[end] = cut = start + sums.index(best[end])
            pending += [(low, end, from_, cut + 1), (end + 1, high, cut, to)]
        least = best
        cuts.append(cut_at)

    sizes, end = [], layers
    for cut_at in reversed(cuts):
        sizes.append(end - cut_at[end])
        end = cut_at[end]
    return tuple(reversed(sizes))
