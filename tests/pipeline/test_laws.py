"""Laws 1, 2 and 4 of the engine, over executor, schedule, recomputation and number of partitions."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
import torch
from engine_runs import Case, Pool, assert_same_bits, run_in_process, tricky_model
from frozen_runs import run_frozen

from gpipe_cli.pipeline.runtime.frozen import Frozen
from gpipe_cli.pipeline.runtime.materialize import materialize
from gpipe_cli.pipeline.schedule.schedules import RECOMPUTE, SCHEDULES


@pytest.fixture(scope="module")
def pools() -> Iterator[dict[int, Pool]]:
    pools = {partitions: Pool(partitions) for partitions in (1, 2, 3, 4)}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture(scope="module")
def reference() -> dict[tuple[str, bool], dict[str, torch.Tensor]]:
    """One partition, nothing recomputed: what every other way of running must equal, bit for bit."""
    return {
        (schedule, channels_last): run_in_process(Case(schedule=schedule, channels_last=channels_last))
        for schedule in SCHEDULES
        for channels_last in (False, True)
    }


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("partitions", [1, 2, 3, 4])
@pytest.mark.parametrize("executor", ["in_process", "distributed"])
def test_partitions_do_not_matter(executor, partitions, schedule, recompute, channels_last, pools, reference) -> None:
    """Losses, gradients, weights, running statistics and evaluation are the same bits, with dropout and uneven
    micro-batches."""
    case = Case(partitions=partitions, schedule=schedule, recompute=recompute, channels_last=channels_last)
    result = run_in_process(case) if executor == "in_process" else pools[partitions].run(case)
    assert_same_bits(result, reference[schedule, channels_last])


def test_no_cut_matters() -> None:
    """Every cut of the six layers in two and in three."""
    for schedule in SCHEDULES:
        whole = run_in_process(Case(schedule=schedule))
        for cuts in [*combinations(range(1, 6), 1), *combinations(range(1, 6), 2)]:
            ends = (0, *cuts, 6)
            balance = tuple(b - a for a, b in pairwise(ends))
            case = Case(schedule=schedule, partitions=len(balance), balance=balance, recompute="except_last")
            assert_same_bits(run_in_process(case), whole)


def test_dropout_is_on_and_steps_differ() -> None:
    """The laws would hold trivially without randomness: the same images at another step give another loss."""
    same_images = run_in_process(Case(samples=(10,)))
    other_step = run_in_process(Case(samples=(10, 10)))
    assert torch.equal(same_images["loss 0 0"], other_step["loss 0 0"])
    assert not torch.equal(other_step["gradient 0 a.left.weight"], other_step["gradient 1 a.left.weight"])


@pytest.mark.parametrize("micro_batches", [2, 3, 5, 8])
def test_micro_batches_hardly_matter(micro_batches: int) -> None:
    """Law 2: without batch norm and dropout only the order of sums changes, also for uneven pieces."""
    one = run_in_process(Case(model="plain", micro_batches=1))
    many = run_in_process(Case(model="plain", micro_batches=micro_batches, partitions=2, recompute="always"))
    for name in one:
        if name.startswith(("gradient", "final")):
            torch.testing.assert_close(many[name], one[name], rtol=1e-5, atol=1e-6)


def test_fewer_samples_than_micro_batches(pools: dict[int, Pool]) -> None:
    """A short last mini-batch of 3 samples with M = 4 makes three micro-batches, everywhere."""
    case = Case(samples=(9, 3), partitions=3, recompute="except_last")
    whole = run_in_process(replace(case, partitions=1))
    assert_same_bits(pools[3].run(case), whole)
    assert_same_bits(run_in_process(case), whole)


# of the six layers: the first two; one in the middle; batch norms inside layers and weights, but no whole layer
FROZEN = {
    "prefix": Frozen(modules=("spread", "a")),
    "middle": Frozen(modules=("b",)),
    "inside": Frozen(modules=("a.norm", "c.norm"), parameters=("b.left.weight", "head.logits.bias")),
    "both": Frozen(modules=("spread", "a", "c"), parameters=("b.right.weight",)),
}


@pytest.mark.parametrize("frozen", FROZEN)
def test_no_cut_matters_where_layers_are_frozen(frozen: str) -> None:
    """Also where a whole stage has nothing to train; and what is frozen ends as it began, buffers too."""
    for schedule in SCHEDULES:
        whole = run_frozen(Case(schedule=schedule, balance=(6,)), FROZEN[frozen])
        for cuts in [*combinations(range(1, 6), 1), *combinations(range(1, 6), 2), (1, 2, 4)]:
            balance = tuple(b - a for a, b in pairwise((0, *cuts, 6)))
            for recompute in RECOMPUTE:
                case = Case(schedule=schedule, partitions=len(balance), balance=balance, recompute=recompute)
                assert_same_bits(run_frozen(case, FROZEN[frozen]), whole)
    began = materialize(tricky_model(), 0, 6, run_seed=7, device=torch.device("cpu")).state_dict()
    names = (*FROZEN[frozen].modules, *FROZEN[frozen].parameters)
    for name, tensor in began.items():
        expected = name in names or any(name.startswith(f"{module}.") for module in names)
        assert torch.equal(whole[f"final {name}"], tensor) == expected, name
