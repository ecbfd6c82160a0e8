"""Laws 1, 2 and 4 of the engine, over executor, schedule, recomputation, number of partitions and frozen layers."""

import random
from collections.abc import Iterator
from functools import cache
from itertools import combinations, cycle, pairwise, product
from typing import Any

import pytest
import torch
from engine_runs import (
    Case,
    CrossEntropy,
    Pool,
    build_stages,
    costs_of,
    covering,
    data,
    local_transport,
    run_in_process,
    tied_model,
    tricky_model,
)
from torch import nn
from torch.nn import functional as F
from training_runs import assert_same_tensors

from gpipe_cli.data.micro_batches import micro_batch_sizes
from gpipe_cli.pipeline.runtime.executor import Executor
from gpipe_cli.pipeline.runtime.frozen import Frozen
from gpipe_cli.pipeline.runtime.initial_weights import materialize
from gpipe_cli.pipeline.runtime.tied_weights import TiedWeights, find_ties, share_memory, trained_parameters
from gpipe_cli.schedule.named_schedules import SCHEDULES, build
from gpipe_cli.schedule.schedule import RECOMPUTE_MODES

# of the six layers: the first two; one in the middle; batch norms inside layers and weights, but no whole layer
FROZEN = {
    "nothing": Frozen(),
    "prefix": Frozen(modules=("spread", "a")),
    "middle": Frozen(modules=("b",)),
    "inside": Frozen(modules=("a.norm", "c.norm"), parameters=("b.left.weight", "head.logits.bias")),
    "both": Frozen(modules=("spread", "a", "c"), parameters=("b.right.weight",)),
}
CASES = covering(
    executor=("in_process", "distributed"),
    partitions=(1, 2, 3, 4),
    micro_batches=(1, 4, 8),  # of 10, 7 and 3 samples: even and uneven, and more than there are samples
    schedule=SCHEDULES,
    stages_per_process=(1, 2),
    recompute=RECOMPUTE_MODES,
    channels_last=(False, True),
    frozen=("nothing", "inside", "both"),  # test_no_cut_matters has the others
    bfloat16=(False, True),
    graphs=(False, True),
)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    pool = Pool(4)
    yield pool
    pool.close()


@cache
def whole(**settings: Any) -> dict[str, torch.Tensor]:
    """One partition, nothing recomputed: what every other way of running must equal, bit for bit."""
    return run_in_process(Case(**settings))


def summed_as(schedule: str) -> str:
    """The schedule that adds up gradients in the same order."""
    return "gpipe" if schedule == "gpipe" else "1f1b"


@pytest.mark.parametrize("settings", CASES, ids=lambda settings: "-".join(map(str, settings.values())))
def test_partitions_do_not_matter(settings: dict[str, Any], pool: Pool) -> None:
    """Losses, gradients, weights, running statistics and evaluation are the same bits: with dropout, uneven
    micro-batches, tensors handed over twice, layers that are not trained, and bytes counted or not. Where backwards run
    upwards they are 1f1b's."""
    same = {name: settings[name] for name in ("micro_batches", "channels_last", "bfloat16")}
    same |= {"frozen": FROZEN[settings["frozen"]], "samples": (10, 7, 3)}
    ways = {name: settings[name] for name in ("schedule", "partitions", "recompute", "stages_per_process", "graphs")}
    case = Case(**same, **ways)
    found = run_in_process(case) if settings["executor"] == "in_process" else pool.run(case)
    assert_same_tensors(found, whole(**same, schedule=summed_as(settings["schedule"])))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble"])
def test_graphs_for_an_output_without_gradient_are_captured_once_more(schedule: str) -> None:
    """The last layer drops an output of the layer before, which a cut between them shows in the first backward: the
    graphs of all micro-batches in flight are dropped. A GPU once took no new ones into their pools."""
    case = Case(schedule=schedule, partitions=4, recompute="never", graphs=True)
    assert_same_tensors(run_in_process(case), whole(schedule=summed_as(schedule)))


LINKED_CASES = covering(
    model=("tied", "skipping"),
    executor=("in_process", "distributed"),
    partitions=(2, 3, 4),
    micro_batches=(1, 4, 8),
    schedule=SCHEDULES,
    stages_per_process=(1, 2),
    recompute=RECOMPUTE_MODES,
    bfloat16=(False, True),
    channels_last=(False, True),
    graphs=(False, True),
)


@pytest.mark.parametrize("settings", LINKED_CASES, ids=lambda settings: "-".join(map(str, settings.values())))
def test_tied_weights_and_skips_do_not_depend_on_the_cut(settings: dict[str, Any], pool: Pool) -> None:
    """A weight of three layers on one to three stages, which all have the same gradient; skips of images, of one tensor
    under two names, of several tensors, with batch norm. Dropout is on; the bits are one partition's."""
    same = {name: settings[name] for name in ("model", "micro_batches", "bfloat16", "channels_last")}
    same |= {"samples": (10, 7, 3)}
    ways = {name: settings[name] for name in ("schedule", "partitions", "recompute", "stages_per_process", "graphs")}
    case = Case(**same, **ways)
    found = run_in_process(case) if settings["executor"] == "in_process" else pool.run(case)
    assert_same_tensors(found, whole(**same, schedule=summed_as(settings["schedule"])))


def test_no_cut_of_a_model_with_skips_matters() -> None:
    """Every cut of its 21 layers in two, and 12 cuts in three and four."""
    chance, every = random.Random(0), cycle(product(SCHEDULES, RECOMPUTE_MODES))
    some = [tuple(sorted(chance.sample(range(1, 21), pieces - 1))) for pieces in [3, 4] * 6]
    for cuts in [*combinations(range(1, 21), 1), *some]:
        balance = tuple(b - a for a, b in pairwise((0, *cuts, 21)))
        schedule, recompute = next(every)
        case = Case(model="skipping", partitions=len(balance), balance=balance, schedule=schedule, recompute=recompute)
        assert_same_tensors(run_in_process(case), whole(model="skipping", schedule=summed_as(schedule)))


@pytest.mark.parametrize("partitions", [1, 2, 4])
def test_gradients_of_tied_weights_are_those_of_plain_pytorch(partitions: int) -> None:
    """In float64, against autograd on the whole model, which sums the uses in another order."""
    model = tied_model()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    ties, costs = find_ties(model), costs_of("tied", Frozen())
    case = Case(model="tied", partitions=partitions, samples=(10,))
    images, targets = data(case, 0)
    balance = micro_batch_sizes(len(model), partitions)
    plain = materialize(model, 0, len(model), run_seed=7, ties=ties).double()
    F.cross_entropy(plain(images.double()), targets).backward()
    stages = build_stages(model, costs, balance, here=range(partitions))
    modules = {k: stage.module.double() for k, stage in stages.items()}
    for module in modules.values():
        share_memory(module, ties)
    sizes = micro_batch_sizes(10, 3)
    executor = Executor(stages, range(partitions), local_transport(stages))
    order = build("1f1b", partitions, 3, "always")
    executor.run(order, 0, sizes, (images.double(),), CrossEntropy(targets.split(sizes), 10))
    stage_of = [k for k, size in enumerate(balance) for _ in range(size)]
    TiedWeights(ties, [[stage_of[at] for at in (0, 2, 3)]], stages, rank_of_stage=[0] * partitions).sum_gradients()
    for module in modules.values():
        for name, parameter in trained_parameters(module, ties).items():
            expected = plain.get_parameter(name).grad
            assert expected is not None
            assert parameter.grad is not None
            assert float((parameter.grad - expected).norm() / expected.norm()) <= 1e-12, name


@pytest.mark.parametrize("frozen", FROZEN)
def test_no_cut_matters(frozen: str) -> None:
    """Every cut of the six layers in two and in three, also where a whole stage has nothing to train (where other
    layers are frozen, one cut in four); and what is frozen ends as it began, buffers too."""
    every, cuts_of_all = cycle(product(SCHEDULES, RECOMPUTE_MODES)), [(1, 2, 4)]
    cuts_of_all += [*combinations(range(1, 6), 1), *combinations(range(1, 6), 2)]
    for cuts in cuts_of_all if frozen == "both" else cuts_of_all[::4]:
        balance = tuple(b - a for a, b in pairwise((0, *cuts, 6)))
        schedule, recompute = next(every)
        ways = {"schedule": schedule, "recompute": recompute, "stages_per_process": 2}
        case = Case(partitions=len(balance), balance=balance, frozen=FROZEN[frozen], **ways)
        expected = whole(schedule=summed_as(schedule), frozen=FROZEN[frozen])
        assert_same_tensors(run_in_process(case), expected)
    began = materialize(tricky_model(), 0, 6, run_seed=7).state_dict()
    names = (*FROZEN[frozen].modules, *FROZEN[frozen].parameters)
    for name, tensor in began.items():
        expected = name in names or any(name.startswith(f"{module}.") for module in names)
        assert torch.equal(whole(schedule="gpipe", frozen=FROZEN[frozen])[f"final {name}"], tensor) == expected, name


def test_dropout_is_on_and_steps_differ() -> None:
    """The laws would hold trivially without randomness: the same images at another step give another loss."""
    same_images, other_step = whole(samples=(10,)), whole(samples=(10, 10))
    assert torch.equal(same_images["loss 0 0"], other_step["loss 0 0"])
    assert not torch.equal(other_step["gradient 0 a.left.weight"], other_step["gradient 1 a.left.weight"])


@pytest.mark.parametrize("micro_batches", [2, 8])
def test_micro_batches_hardly_matter(micro_batches: int) -> None:
    """Law 2: without batch norm and dropout only the order of sums changes, also for uneven pieces."""
    one = whole(model="plain", micro_batches=1)
    many = run_in_process(Case(model="plain", micro_batches=micro_batches, partitions=2, recompute="always"))
    for name in one:
        if name.startswith(("gradient", "final")):
            torch.testing.assert_close(many[name], one[name], rtol=1e-5, atol=1e-6)
