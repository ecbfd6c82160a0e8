"""Lingvo's cuts: against its rule, written down layer by layer, and against the paper's Table 2 as it was made."""

import random

import pytest

from gpipe_cli.errors import InputError
from gpipe_cli.pipeline.schedule.lingvo_partitioner import cut_by_share, cut_stack


def test_a_layer_goes_where_its_share_of_the_cost_says() -> None:
    draw = random.Random(0)
    cut = refused = 0
    for _ in range(300):
        costs = [draw.randint(1, 50) for _ in range(draw.randint(1, 30))]
        partitions = draw.randint(1, len(costs))
        places, done = [], 0
        for cost in costs:
            done += cost
            places.append(min(partitions * done // sum(costs), partitions - 1))
        if set(places) == set(range(partitions)):
            assert cut_by_share(costs, partitions) == tuple(places.count(k) for k in range(partitions))
            cut += 1
            continue
        with pytest.raises(InputError) as error:
            cut_by_share(costs, partitions)
        remedy = int(str(error.value).rpartition("partitions=")[2])
        assert remedy < partitions
        assert sum(cut_by_share(costs, remedy)) == len(costs)
        refused += 1
    assert min(cut, refused) > 30


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


def test_a_stack_too_short_for_its_rounding_names_a_number_that_works() -> None:
    with pytest.raises(InputError, match=r"leaves partition 5 of 8 without a layer; use .*partitions=5$"):
        cut_stack([True] * 10, 8)
    assert cut_stack([True] * 10, 5) == (2,) * 5
