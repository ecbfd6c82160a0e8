"""The fewest recomputations that fit: as trying all subsets says, by the simulator's own count of bytes."""

import itertools
import pickle
import random
from collections.abc import Iterator, Sequence

import pytest

from gpipe_cli.pipeline.schedule import simulator
from gpipe_cli.pipeline.schedule.orders import SCHEDULES, build
from gpipe_cli.pipeline.schedule.recomputation import DoesNotFitError, fewest_recomputations
from gpipe_cli.pipeline.schedule.schedules import Schedule, backward_follows_forward

SHAPES = list(itertools.product((1, 3), (1, 2, 3, 5)))


def peak_bytes(schedule: Schedule, graph_bytes: Sequence[int], input_bytes: Sequence[int]) -> tuple[int, ...]:
    """For each stage, where all micro-batches are alike."""
    graphs, inputs = ([[size] * len(schedule[0]) for size in sizes] for sizes in (graph_bytes, input_bytes))
    return simulator.peak_bytes(schedule, graphs, inputs)


def subsets(micro_batches: int) -> Iterator[frozenset[int]]:
    """The smaller ones first."""
    for size in range(micro_batches + 1):
        yield from map(frozenset, itertools.combinations(range(micro_batches), size))


def peaks(name: str, partitions: int, micro_batches: int, graph: int, kept: int) -> list[dict[frozenset[int], int]]:
    """For each stage, what recomputing each set of micro-batches leaves as its peak."""
    found: list[dict[frozenset[int], int]] = [{} for _ in range(partitions)]
    for again in subsets(micro_batches):
        schedule = build(name, partitions, micro_batches, (again,) * partitions)
        for of_stage, peak in zip(found, peak_bytes(schedule, [graph] * partitions, [kept] * partitions), strict=True):
            of_stage[again] = peak
    return found


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("graph", "kept"), [(10, 1), (7, 3), (5, 5)])
def test_equals_trying_all_subsets(name: str, graph: int, kept: int) -> None:
    """Every limit at which anything changes, on every stage."""
    for partitions, micro_batches in SHAPES:
        tried = peaks(name, partitions, micro_batches, graph, kept)
        order = build(name, partitions, micro_batches, "never")
        for limit in sorted({peak + more for of_stage in tried for peak in of_stage.values() for more in (-1, 0)}):
            sizes = [graph] * partitions, [kept] * partitions, [limit] * partitions
            fewest, missing = [], []
            for of_stage in tried:
                fewest.append(min((len(again) for again, peak in of_stage.items() if peak <= limit), default=None))
                missing.append(min(of_stage.values()) - limit)
            if None in fewest:
                with pytest.raises(DoesNotFitError) as error:
                    fewest_recomputations(name, partitions, micro_batches, *sizes)
                assert error.value.missing_bytes == max(missing)
                assert error.value.stage == missing.index(max(missing))
                continue
            found = fewest_recomputations(name, partitions, micro_batches, *sizes)
            assert [len(again) for again in found] == fewest
            for of_stage, again, actions in zip(tried, found, order, strict=True):
                assert of_stage[again] <= limit
                assert not again & backward_follows_forward(actions)


@pytest.mark.parametrize("name", SCHEDULES)
def test_stages_are_decided_one_by_one(name: str) -> None:
    random_ = random.Random(name)
    for _ in range(40):
        partitions, micro_batches = random_.choice(SHAPES)
        kept = [random_.randint(0, 5) for _ in range(partitions)]
        graph = [size + random_.randint(0, 9) for size in kept]
        least = peak_bytes(build(name, partitions, micro_batches, "except_last"), graph, kept)
        most = peak_bytes(build(name, partitions, micro_batches, "never"), graph, kept)
        limit = [random_.randint(a, b) for a, b in zip(least, most, strict=True)]
        found = fewest_recomputations(name, partitions, micro_batches, graph, kept, limit)
        peak = peak_bytes(build(name, partitions, micro_batches, found), graph, kept)
        assert all(a <= b for a, b in zip(peak, limit, strict=True))


def test_a_stage_that_lacks_memory_is_named() -> None:
    with pytest.raises(DoesNotFitError, match="stage 1 lacks 4 bytes for activations") as error:
        fewest_recomputations("gpipe", 3, 4, [10, 10, 10], [1, 1, 1], [12, 9, 13])
    again = pickle.loads(pickle.dumps(error.value))
    assert (again.stage, again.missing_bytes) == (1, 4)
    assert str(again) == str(error.value)
