"""The partitioner is optimal: it equals brute force, and it is exact where floats would round."""

import itertools
import random
from collections.abc import Sequence
from fractions import Fraction

import pytest

from gpipe_cli.pipeline.partition import check_balance, partition


def quality(costs: Sequence[float], balance: Sequence[int]) -> tuple[Fraction, Fraction]:
    """(maximum, sum of squares) of the partitions' costs, exactly."""
    assert sum(balance) == len(costs)
    assert min(balance) >= 1
    rest = iter([Fraction(c) for c in costs])
    sums = [sum(itertools.islice(rest, size), Fraction(0)) for size in balance]
    return max(sums), sum((s * s for s in sums), Fraction(0))


def best_quality(costs: Sequence[float], partitions: int) -> tuple[Fraction, Fraction]:
    """By trying every cut."""
    layers = len(costs)
    cuts = itertools.combinations(range(1, layers), partitions - 1)
    ends = ((0, *cut, layers) for cut in cuts)
    return min(quality(costs, [b - a for a, b in itertools.pairwise(end)]) for end in ends)


@pytest.mark.parametrize("kind", ["small", "zeros", "equal", "spike", "float"])
def test_equals_brute_force(kind: str) -> None:
    random_ = random.Random(kind)
    for _ in range(150):
        layers = random_.randint(1, 9)
        partitions = random_.randint(1, layers)
        costs: list[float] = {
            "small": [random_.randint(0, 9) for _ in range(layers)],
            "zeros": [random_.choice([0, 0, 0, 1, 5]) for _ in range(layers)],
            "equal": [random_.randint(0, 3)] * layers,
            "spike": [random_.choice([1, 1, 1, 2, 50]) for _ in range(layers)],
            "float": [random_.random() * 10 ** random_.randint(-8, 8) for _ in range(layers)],
        }[kind]
        balance = partition(costs, partitions)
        assert len(balance) == partitions
        assert quality(costs, balance) == best_quality(costs, partitions), (costs, balance)


def test_where_block_partition_fails() -> None:
    """torchgpipe's local search stops early: [1, 1, 1, 4], and loads [20, 50, 30] where 40 is possible."""
    assert sorted(partition([5] * 7, 4)) == [1, 2, 2, 2]
    assert partition([10, 10, 10, 40, 10, 10, 10], 3) == (3, 1, 3)


def test_where_the_cumulative_histogram_fails() -> None:
    """Lingvo cuts at fixed shares of the total cost: [1, 2, 2, 3], and [3, 0, 0, 5] with two empty partitions."""
    assert partition([5] * 8, 4) == (2, 2, 2, 2)
    balance = partition([1, 1, 1, 9, 1, 1, 1, 1], 4)
    assert min(balance) >= 1
    assert quality([1, 1, 1, 9, 1, 1, 1, 1], balance) == (9, 81 + 9 + 4 + 4)


def test_the_maximum_comes_before_the_variance() -> None:
    """Loads 5, 10, 20, 21, 8, 4 vary less than 5, 10, 20, 1, 20, 12, but the pace would be set by 21."""
    assert partition([5, 10, 20, 1, 20, 1, 7, 2, 2], 6) == (1, 1, 1, 1, 1, 4)


def test_a_tie_leaves_more_layers_to_later_partitions() -> None:
    assert partition([5] * 7, 4) == (1, 2, 2, 2)
    assert partition([1, 0, 0, 1], 2) == (1, 3)


def test_sums_do_not_round() -> None:
    """In floats 1e16 + 1 + 1 is 1e16, so the two would be taken for equal and the cut for free."""
    assert partition([1e16, 1.0, 1.0, 1e16], 2) == (2, 2)
    assert partition([1e16, 1.0, 1e16], 2) in {(1, 2), (2, 1)}
    assert partition([0.1] * 10, 5) == (2, 2, 2, 2, 2)


def test_the_largest_model_of_the_paper() -> None:
    """1663 Transformer layers on 128 partitions (Table 1), with one layer that dominates: the slowest case."""
    costs = [1.0] * 800 + [1000.0] + [1.0] * 862
    balance = partition(costs, 128)
    assert len(balance) == 128
    assert quality(costs, balance)[0] == 1000
    assert balance.count(1) == 1  # the dominating layer stands alone
    assert set(partition([1.0] * 1664, 128)) == {13}


def test_equal_layers_differ_by_at_most_one() -> None:
    for layers in range(1, 30):
        for partitions in range(1, layers + 1):
            balance = partition([3.5] * layers, partitions)
            assert max(balance) - min(balance) <= 1


@pytest.mark.parametrize(
    ("costs", "partitions", "message"),
    [
        ([1.0] * 8, 9, "partitions=9: the model has only 8 layers; use partitions=8 or fewer"),
        ([1.0] * 8, 0, "partitions=0: must be at least 1"),
        ([1.0, -2.0], 1, "cost of layer 1 is -2.0: must be finite and not negative"),
        ([float("nan")], 1, "cost of layer 0 is nan"),
        ([float("inf")], 1, "cost of layer 0 is inf"),
    ],
)
def test_refuses(costs: list[float], partitions: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        partition(costs, partitions)


def test_a_balance_that_fits() -> None:
    check_balance([4, 8], 12, 2)
    check_balance((1,), 1, 1)


@pytest.mark.parametrize(
    ("balance", "layers", "partitions", "message"),
    [
        ([4, 8], 12, 3, r"partition.balance=\[4,8\]: has 2 entries, but partitions=3; .*\[4,4,4\]"),
        ([], 2, 1, r"partition.balance=\[\]: has 0 entries"),
        ([12, 0], 12, 2, r"partition.balance=\[12,0\]: every partition needs at least one layer; .*\[6,6\]"),
        ([-1, 13], 12, 2, "every partition needs at least one layer"),
        ([4, 7], 13, 2, r"partition.balance=\[4,7\]: adds up to 11, but the model has 13 layers; .*\[7,6\]"),
        ([1] * 9, 8, 9, "partitions=9: the model has only 8 layers"),
    ],
)
def test_a_balance_that_does_not_fit(balance: list[int], layers: int, partitions: int, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        check_balance(balance, layers, partitions)
    assert "\n" not in str(error.value)
