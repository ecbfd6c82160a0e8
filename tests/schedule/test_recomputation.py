"""The fewest recomputations that fit: as by trying all subsets, by the simulator's count of bytes."""

import itertools
from collections.abc import Iterator, Sequence

import pytest
from schedule_runs import build

from gpipe_cli.schedule import in_flight_memory
from gpipe_cli.schedule.in_flight_memory import SavedAmounts
from gpipe_cli.schedule.named_schedules import SCHEDULES
from gpipe_cli.schedule.recomputation import DoesNotFitError, find_fewest_recomputations
from gpipe_cli.schedule.schedule import Schedule, backward_follows_forward

SHAPES = [*itertools.product((1, 3), (1, 2, 4)), (4, 4)]
SIZES = [
    SavedAmounts(10, 1, 2, 4),
    SavedAmounts(7, 3, 0, 1),
    SavedAmounts(5, 5, 3, 6),
]  # the last one: more between I and W than before


def peak_bytes(schedule: Schedule, sizes: Sequence[SavedAmounts]) -> tuple[int, ...]:
    """For each stage, where all micro-batches are alike."""
    return in_flight_memory.peak_bytes(schedule, [[size] * schedule.micro_batches for size in sizes])


def subsets(micro_batches: int) -> Iterator[frozenset[int]]:
    """The smaller ones first."""
    for size in range(micro_batches + 1):
        yield from map(frozenset, itertools.combinations(range(micro_batches), size))


def peaks(name: str, partitions: int, micro_batches: int, size: SavedAmounts) -> list[dict[frozenset[int], int]]:
    """For each stage, what recomputing each set of micro-batches leaves as its peak."""
    found: list[dict[frozenset[int], int]] = [{} for _ in range(partitions)]
    for again in subsets(micro_batches):
        schedule = build(name, partitions, micro_batches, (again,) * partitions)
        for of_stage, peak in zip(found, peak_bytes(schedule, [size] * partitions), strict=True):
            of_stage[again] = peak
    return found


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("size", SIZES)
def test_equals_trying_all_subsets(name: str, size: SavedAmounts) -> None:
    """Every limit at which anything changes, on every stage."""
    for partitions, micro_batches in SHAPES:
        tried = peaks(name, partitions, micro_batches, size)
        order = build(name, partitions, micro_batches, "never")
        for limit in sorted({peak + more for of_stage in tried for peak in of_stage.values() for more in (-1, 0)}):
            fewest, missing = [], []
            for of_stage in tried:
                fewest.append(min((len(again) for again, peak in of_stage.items() if peak <= limit), default=None))
                missing.append(min(of_stage.values()) - limit)
            if None in fewest:
                with pytest.raises(DoesNotFitError) as error:
                    find_fewest_recomputations(order, [size] * partitions, [limit] * partitions)
                assert error.value.missing_bytes == max(missing)
                assert error.value.stage == missing.index(max(missing))
                continue
            found = find_fewest_recomputations(order, [size] * partitions, [limit] * partitions)
            assert [len(again) for again in found] == fewest
            for of_stage, again, actions in zip(tried, found, order.stages, strict=True):
                assert of_stage[again] <= limit
                assert not again & backward_follows_forward(actions)
