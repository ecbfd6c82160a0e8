"""The partitioner is optimal: it equals brute force, and is exact where floats would round. Lingvo has its own rule."""

import itertools
import random
from collections.abc import Iterator, Sequence
from fractions import Fraction

import pytest

from gpipe_cli.errors import InputError
from gpipe_cli.schedule.lingvo_partitioner import cut_by_share, cut_stack
from gpipe_cli.schedule.partitioner import NoCutFitsError, check_balance, partition


def quality(
    costs: Sequence[float],
    balance: Sequence[int],
    on: Sequence[float] | None = None,
    back: Sequence[float] | None = None,
) -> tuple[Fraction, Fraction]:
    """(maximum, sum of squares) of the partitions' costs, exactly; with what they send on and back."""
    sums = []
    for first, end in itertools.pairwise(itertools.accumulate(balance, initial=0)):
        sent = [on[end - 1]] if on is not None and end < len(costs) else []
        sent += [back[first - 1]] if back is not None and first > 0 else []
        sums.append(sum(map(Fraction, [*costs[first:end], *sent]), Fraction(0)))
    assert end == len(costs)
    assert min(balance) >= 1
    return max(sums), sum((s * s for s in sums), Fraction(0))


def every_balance(layers: int, partitions: int) -> Iterator[tuple[int, ...]]:
    """All cuts; those whose last cut is earliest first, then the one before, and so on."""
    cuts = itertools.combinations(range(1, layers), partitions - 1)
    for cut in sorted(cuts, key=lambda cut: cut[::-1]):
        yield tuple(b - a for a, b in itertools.pairwise((0, *cut, layers)))


@pytest.mark.parametrize("memory", ["none", "same rows", "separate rows", "tight"])
@pytest.mark.parametrize("sends", ["none", "on", "back", "both"])
def test_equals_brute_force_with_sends_and_memory(sends: str, memory: str) -> None:
    """The very cut that trying all of them in the promised order finds first."""
    random_ = random.Random(f"{sends} {memory}")
    refused = 0
    for _ in range(60):
        layers = random_.randint(1, 9)
        partitions = random_.randint(1, layers)
        costs = [random_.choice([0, 1, 2, 3, 9]) for _ in range(layers)]
        on, back = (
            [random_.choice([0, 1, 4, 7]) for _ in range(layers - 1)] if sends in (wanted, "both") else None
            for wanted in ("on", "back")
        )
        furthest: list[list[int]] | None = None
        if memory != "none":  # not monotone: a layer that needs much may stand anywhere
            longest = 3 if memory == "tight" else 6
            rows = [[i + random_.randint(-1 if i % 4 == 0 else 1, longest) for i in range(layers)]
                    for _ in range(partitions)]  # fmt: skip
            furthest = [rows[0]] * partitions if memory == "same rows" else rows
        possible = [
            balance
            for balance in every_balance(layers, partitions)
            if furthest is None or all(
                first + size <= furthest[k][first]
                for k, (first, size) in enumerate(zip(itertools.accumulate(balance, initial=0), balance, strict=False))
            )
        ]  # fmt: skip
        if possible:
            best = min(possible, key=lambda balance: quality(costs, balance, on, back))
            found = partition(costs, partitions, forward_sends=on, backward_sends=back, furthest=furthest)
            assert found == best, (costs, on, back, furthest)
        else:
            refused += 1
            with pytest.raises(NoCutFitsError, match=f"no cut into {partitions} partitions fits"):
                partition(costs, partitions, forward_sends=on, backward_sends=back, furthest=furthest)
    assert (refused > 0) == (memory != "none")


def test_sums_do_not_round() -> None:
    """In floats 0.1 added up ten times is not 1."""
    assert partition([0.1] * 10, 5) == (2, 2, 2, 2, 2)
    assert partition([2.0**40, 2.0**20, 2.0**20, 2.0**40], 2) == (2, 2)  # simple numbers are not rounded
    assert partition([1e16, 1.0, 1e16], 2) in {(1, 2), (2, 1)}


def test_numbers_that_do_not_fit() -> None:
    with pytest.raises(InputError, match="partitions=9: the model has only 8 layers; use partitions=8 or fewer"):
        partition([1.0] * 8, 9)
    with pytest.raises(InputError, match="partitions=0: must be at least 1"):
        partition([1.0] * 8, 0)
    for balance, layers, partitions, message in (
        ([4, 8], 12, 3, r"\[4,8\]: has 2 entries, but partitions=3; .*\[4,4,4\]"),
        ([12, 0], 12, 2, r"\[12,0\]: every partition needs at least one layer; .*\[6,6\]"),
        ([4, 7], 13, 2, r"\[4,7\]: adds up to 11, but the model has 13 layers; .*\[7,6\]"),
    ):
        with pytest.raises(InputError, match=f"partition.balance={message}"):
            check_balance(balance, layers, partitions)


def test_a_layer_goes_where_its_share_of_the_cost_says() -> None:
    """Layer i goes to partition floor(K * share of layers 0 to i), but to K - 1 at most."""
    assert cut_by_share([1, 2, 1, 2, 1, 9], 3) == (3, 2, 1)  # 3 * share: 0.2 0.6 0.8, 1.1 1.3, 3
    assert cut_by_share([2, 3, 3, 2, 2, 4], 3) == (2, 2, 2)  # 3 * share: 0.4 0.9, 1.5 1.9, 2.3 3
    with pytest.raises(InputError, match=r"leaves partition 1 of 3 without a layer; use .*partitions=2$"):
        cut_by_share([1, 1, 1, 9], 3)
    assert cut_by_share([1, 1, 1, 9], 2) == (3, 1)


@pytest.mark.parametrize(
    ("blocks", "partitions", "sizes"),
    [
        ("e" + 12 * "b" + "s", 4, (4, 3, 3, 4)),
        ("e" + 10 * "b" + "s", 4, (4, 3, 3, 2)),  # rounded up: one is left for the last
        ("e" + 3 * "b" + "n" + "e" + 3 * "b" + "s", 2, (6, 4)),  # a norm and an embedding stay behind their encoder
        ("e" + 2 * "b" + "s", 1, (4,)),
    ],
)
def test_a_stack_is_cut_by_the_number_of_its_layers(blocks: str, partitions: int, sizes: tuple[int, ...]) -> None:
    assert cut_stack([kind == "b" for kind in blocks], partitions) == sizes
