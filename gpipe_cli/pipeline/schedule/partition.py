"""Where to cut the layers into partitions (section 2.2 of the paper), from an estimated cost of each layer.

The slowest stage sets the pace of a pipeline, so the cut that matters is the one whose most expensive partition is
as cheap as possible; among those cuts, the one of least variance. A partition costs its layers and what it sends: the
activations over its end, the gradients back over its beginning. It may have to fit into a memory.

Departs from the paper: the paper minimises the variance of the partitions' costs by a heuristic and says that better
partitioners could be used. Here the order is maximum first, variance second, and the result is exactly optimal for
costs in whole numbers. Costs are made whole; where that takes more than 31 bits they are rounded, at most by the
2^31th part of their sum.

With ``on[j]`` = the cost of the first j layers and of sending behind them, and ``back[i]`` = the cost of the first i
layers without that of sending back before them, a partition [i, j) costs ``on[j] - back[i]``. So whether a limit can
be met takes one running minimum per partition, and the least limit follows by bisection: O(K L log). It leaves each
cut few places, and only among those the variance is compared.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Whole = NDArray[np.int64]
Marks = NDArray[np.bool_]

_BITS = 31  # whole costs add up to less than 2^31, so that a sum of squares has room in 63 bits
_NEVER = 1 << 62  # more than any cost or sum of squares
_BLOCK = 64  # ends looked at together: bounds the memory, and keeps the beginnings that can matter few


class NoCutFitsError(ValueError):
    """No cut into this many partitions has only partitions that fit into their memory."""


def partition(
    costs: Sequence[float],
    partitions: int,
    *,
    forward_sends: Sequence[float] | None = None,
    backward_sends: Sequence[float] | None = None,
    furthest: Sequence[Sequence[int]] | None = None,
) -> tuple[int, ...]:
    """Number of layers of each partition: contiguous, none empty, least maximum cost, then least variance.

    Among cuts that are equal in both, each cut from the last to the first is as early as possible. That choice leaves
    more layers to the later stages, which have fewer micro-batches in flight under ``1f1b``.

    Args:
        costs: of each layer, in any unit, finite and not negative.
        partitions: K, at most the number of layers.
        forward_sends: of each of the L - 1 places between layers, the cost of sending activations over it, in the
            unit of ``costs``. The partition that ends there pays. Free if left out.
        backward_sends: likewise of sending gradients back. The partition that begins there pays.
        furthest: ``furthest[k][i]`` is the furthest end (exclusive) that partition k can have in its memory if it
            begins with layer i; i or less: not even one layer fits. Rows may be one object. No limit if left out.

    Raises:
        NoCutFitsError: ``furthest`` leaves no cut.
        ValueError: fewer than one partition, more partitions than layers, a cost that is negative or not finite.
    """
    layers = len(costs)
    _require_partitions(layers, partitions)
    on_costs = [0.0] * (layers - 1) if forward_sends is None else list(forward_sends)
    back_costs = [0.0] * (layers - 1) if backward_sends is None else list(backward_sends)
    assert len(on_costs) == len(back_costs) == layers - 1, "one cost for each place between layers"
    assert furthest is None or (len(furthest) == partitions and {len(row) for row in furthest} == {layers})
    for what, values in (
        ("cost of", costs),
        ("cost of sending after", on_costs),
        ("cost of sending back after", back_costs),
    ):
        for layer, cost in enumerate(values):
            if not (math.isfinite(cost) and cost >= 0):
                raise ValueError(f"{what} layer {layer} is {cost}: must be finite and not negative; measure it again")
    whole = np.array(_whole_numbers([*costs, *on_costs, *back_costs]), dtype=np.int64)
    before = np.concatenate(([0], whole[:layers].cumsum()))
    on, back = before.copy(), before.copy()
    on[1:layers] += whole[layers : 2 * layers - 1]
    back[1:layers] -= whole[2 * layers - 1 :]
    memory = None if furthest is None else _as_arrays(furthest)
    problem = _Problem(partitions, on, back, memory)
    return _least_squares(problem, *_least_maximum(problem, int(whole[:layers].max()), int(whole.sum())))


def stage_costs(
    costs: Sequence[float],
    balance: Sequence[int],
    *,
    forward_sends: Sequence[float] | None = None,
    backward_sends: Sequence[float] | None = None,
) -> tuple[float, ...]:
    """What each partition of a cut costs, layers and sends, in the unit of ``costs``; arguments as of partition()."""
    ends = [0, *accumulate(balance)]
    assert ends[-1] == len(costs), "the cut is of these layers"
    result = []
    for first, end in pairwise(ends):
        cost = math.fsum(costs[first:end])
        if forward_sends is not None and end < len(costs):
            cost += forward_sends[end - 1]
        if backward_sends is not None and first > 0:
            cost += backward_sends[first - 1]
        result.append(cost)
    return tuple(result)


def imbalance(
    costs: Sequence[float],
    balance: Sequence[int],
    *,
    forward_sends: Sequence[float] | None = None,
    backward_sends: Sequence[float] | None = None,
) -> float:
    """How far a cut is from perfect balance: its slowest stage over the mean of its stages, minus 1. 0 is perfect."""
    stages = stage_costs(costs, balance, forward_sends=forward_sends, backward_sends=backward_sends)
    mean = math.fsum(stages) / len(stages)
    return max(stages) / mean - 1 if mean > 0 else 0.0


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
    """``costs`` times one common factor, below 2^31 in sum; exact if the numbers are simple enough for that."""
    fractions = [Fraction(cost) for cost in costs]
    factor = math.lcm(*(f.denominator for f in fractions))
    exact = [int(f * factor) for f in fractions]
    common = math.gcd(*exact) or 1
    total = sum(exact) // common
    if total < 1 << _BITS:
        return [number // common for number in exact]
    room = (1 << _BITS) - 1 - len(costs)  # rounding may add a half for each
    return [(2 * (number // common) * room + total) // (2 * total) for number in exact]


def _as_arrays(furthest: Sequence[Sequence[int]]) -> list[Whole]:
    """One array for rows that are one object."""
    known: dict[int, Whole] = {}
    return [known.setdefault(id(row), np.asarray(row, dtype=np.int64)) for row in furthest]


@dataclass(frozen=True)
class _Problem:
    """Partition k costs ``on[j] - back[i]`` if it is [i, j); ``furthest[k][i]`` as for partition()."""

    partitions: int
    on: Whole  # (L + 1,)
    back: Whole  # (L + 1,)
    furthest: list[Whole] | None  # K of (L,)

    @property
    def layers(self) -> int:
        return len(self.on) - 1


def _beginnings(problem: _Problem, limit: int) -> list[Marks] | None:
    """``result[k][i]``: the layers from i on can be cut into partitions k, k + 1, ... that keep to limit and memory.

    None if all layers cannot. For one partition, i is such a beginning if the cheapest end that it may have, among
    those that are beginnings for the next one, is cheap enough.
    """
    layers = problem.layers
    possible = np.zeros(layers + 1, dtype=bool)
    possible[layers] = True
    result = [possible]
    for k in reversed(range(problem.partitions)):
        ends = np.where(result[-1], problem.on, _NEVER)[1:]  # by i: the end i + 1
        if problem.furthest is None:
            cheapest = np.minimum.accumulate(ends[::-1])[::-1]
        else:
            cheapest = _cheapest_up_to(ends, problem.furthest[k])
        possible = np.zeros(layers + 1, dtype=bool)
        possible[:layers] = cheapest <= problem.back[:layers] + limit
        if not possible.any():
            return None
        result.append(possible)
    result.reverse()
    return result if result[0][0] else None


def _cheapest_up_to(ends: Whole, furthest: Whole) -> Whole:
    """For each i the least of ``ends[i : furthest[i]]``; _NEVER if that is empty.

    ``table[p][i]`` is the least of 2^p from i on; two overlapping ones make any range.
    """
    layers = len(ends)
    first = np.arange(layers)
    lengths = np.minimum(furthest, layers) - first
    some = lengths > 0
    power = np.zeros(layers, dtype=np.int64)
    power[some] = np.frexp(lengths[some].astype(np.float64))[1] - 1  # floor of the logarithm, exact
    table = np.full((int(power.max()) + 1, layers), _NEVER, dtype=np.int64)
    table[0] = ends
    for p in range(1, len(table)):
        half = 1 << (p - 1)
        table[p, : layers - half] = np.minimum(table[p - 1, : layers - half], table[p - 1, half:])
    second = np.where(some, first + lengths - (1 << power), 0)
    return np.where(some, np.minimum(table[power, first], table[power, second]), _NEVER)


def _least_maximum(problem: _Problem, costliest: int, total: int) -> tuple[int, list[Marks]]:
    """The least limit that every partition of some cut keeps to, and where partitions may begin under it."""
    found = _beginnings(problem, total)
    if found is None:
        raise NoCutFitsError(f"no cut into {problem.partitions} partitions fits into the memory")
    low, high = max(costliest, -(-int(problem.on[-1]) // problem.partitions)), total
    while low < high:
        middle = (low + high) // 2
        beginnings = _beginnings(problem, middle)
        if beginnings is None:
            low = middle + 1
        else:
            high, found = middle, beginnings
    return low, found


def _least_squares(problem: _Problem, limit: int, beginnings: list[Marks]) -> tuple[int, ...]:
    """The cut with the least sum of squared costs (hence variance) whose partitions keep to limit and memory.

    ``least[i]`` is the least sum for the first i layers in k partitions, built up from k - 1, only for those i from
    which the end can be reached.
    """
    starts, least = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
    steps: list[tuple[Whole, Whole]] = []  # by partition: its possible ends and for each the best beginning
    for k in range(problem.partitions):
        ends = np.flatnonzero(beginnings[k + 1])
        furthest = None if problem.furthest is None else problem.furthest[k][starts]
        found = [_best_beginnings(problem, limit, ends[at : at + _BLOCK], starts, least, furthest)
                 for at in range(0, len(ends), _BLOCK)]  # fmt: skip
        best, cuts = (np.concatenate(part) for part in zip(*found, strict=True))
        reached = best < _NEVER
        starts, least = ends[reached], best[reached]
        steps.append((starts, cuts[reached]))

    sizes, end = [], problem.layers
    for ends, cuts in reversed(steps):
        cut = int(cuts[np.searchsorted(ends, end)])
        sizes.append(end - cut)
        end = cut
    return tuple(reversed(sizes))


def _best_beginnings(
    problem: _Problem, limit: int, ends: Whole, starts: Whole, least: Whole, furthest: Whole | None
) -> tuple[Whole, Whole]:
    """For each of some ends the least sum of squares up to it, and the earliest beginning that gives it."""
    able = np.flatnonzero((starts < ends[-1]) & (problem.back[starts] + limit >= problem.on[ends].min()))
    if len(able) == 0:
        return np.full(len(ends), _NEVER, dtype=np.int64), np.zeros(len(ends), dtype=np.int64)
    starts, least = starts[able], least[able]
    cost: NDArray[Any] = problem.on[ends] - problem.back[starts][:, None]
    barred = (cost > limit) | (starts[:, None] >= ends)
    if furthest is not None:
        barred |= furthest[able][:, None] < ends
    sums = cost * cost
    sums += least[:, None]
    sums[barred] = _NEVER
    best = sums.argmin(axis=0)
    return sums[best, np.arange(len(ends))], starts[best]
