"""Layers that share something stay in one stage, in whatever way they share it; what nobody would train is refused."""

import functools
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import custom_models
import pytest
import torch
from custom_models import READERS
from torch import nn
from training_runs import TINY, configure, spec_of, train_here

from gpipe_cli.commands.check_run import _Check
from gpipe_cli.distributed.control_group import ControlGroup
from gpipe_cli.errors import InputError
from gpipe_cli.planner.shared_layers import Shared, check_cut, ends_with_shared_layers_together, find_shared
from gpipe_cli.schedule.partitioner import NoCutFitsError, partition
from gpipe_cli.training.checkpoint.files import find_checkpoint
from gpipe_cli.training.checkpoint.whole_model import whole_model
from gpipe_cli.training.engine import WorkerProcess
from gpipe_cli.verify.self_check import Check, Row

CUSTOM = ["model=custom", "dataset.image_size=8", *TINY[2:3], *TINY[4:], "executor=in_process"]
CONTIGUOUS = "memory_format=contiguous"
ALIASES = ("detached", "data")  # tensors that are kept, and no parameters


def reads_another(*ways: str, **more: bool) -> list[str]:
    arguments = ", ".join(f"{key}: {value}" for key, value in more.items())
    named = ", ".join(f"'{way}'" for way in ways)
    target = "model.target=custom_models:reads_another"
    return [*CUSTOM, target, f"model.arguments={{ways: [{named}]{arguments and ', ' + arguments}}}"]


@pytest.mark.parametrize("partitions", [2, 3, 4])
def test_the_remedy_for_a_separated_module_is_one(partitions: int) -> None:
    """Whatever two of five layers share it, the balance in the message is a cut that keeps them together."""
    balances = [[1] * place + [6 - partitions] + [1] * (partitions - 1 - place) for place in range(partitions)]
    for first, second in itertools.combinations(range(5), 2):
        layers = [nn.Sequential(nn.Linear(2, 2)) for _ in range(5)]
        layers[second][0] = layers[first][0]
        shared = find_shared(nn.Sequential(*layers))
        assert [(one.first, one.second) for one in shared] == [(first, second)]
        assert "share module 0: " in shared[0].text
        for balance in balances:
            if not any(first < end <= second for end in itertools.accumulate(balance[:-1])):
                check_cut(shared, balance)
                continue
            with pytest.raises(InputError) as refused:
                check_cut(shared, balance)
            remedy = str(refused.value).rpartition("; ")[2]
            fewest = first + (5 - second - 1) + 1
            if fewest < partitions:
                assert f"use partitions={fewest} or fewer" in remedy
            else:
                wanted = json.loads(remedy.rpartition("=")[2])
                assert (len(wanted), sum(wanted), min(wanted) > 0) == (partitions, 5, True)
                check_cut(shared, wanted)


class Block(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.conv, self.inner = nn.Conv2d(4, 4, 1), inner


def buffered(table: torch.Tensor) -> nn.Module:
    block = Block(nn.ReLU())
    block.register_buffer("table", table)
    return block


@pytest.mark.parametrize(
    ("layers", "what"),
    [
        (lambda: [Block(norm := nn.BatchNorm2d(4, affine=False)), nn.Sequential(nn.Flatten(), norm)], "module 1"),
        (lambda: [buffered(table := torch.ones(4)), buffered(table)], "buffer table"),
        (lambda: [Block(inner := custom_models.CountsCalls()), Block(inner)], "module inner"),
        (lambda: [Block(activation := nn.ReLU()), Block(activation)], None),  # one of torch's functions
    ],
)
def test_whatever_two_layers_share_stays_in_one_partition(
    layers: Callable[[], Sequence[nn.Module]], what: str | None
) -> None:
    """Buffers too, and modules, which may count: in two processes each had its own, and after three steps they were
    others."""
    first, second = layers()
    shared = find_shared(nn.Sequential(first, nn.ReLU(), second, nn.ReLU()))
    assert [(one.first, one.second) for one in shared] == ([] if what is None else [(0, 2)])
    assert all(f"share {what}: " in one.text for one in shared)
    if what is not None:
        with pytest.raises(InputError, match=rf"layers 0 and 2 share {what}"):
            check_cut(shared, (1, 3))


def balances(layers: int, partitions: int) -> Iterator[tuple[int, ...]]:
    for cut in itertools.combinations(range(1, layers), partitions - 1):
        yield tuple(end - begin for begin, end in itertools.pairwise((0, *cut, layers)))


def test_a_cut_that_is_chosen_keeps_together_what_is_shared() -> None:
    """It is the best of those that do. It was the best of all, and then refused."""
    costs, layers = [5.0, 1.0, 1.0, 1.0, 1.0, 3.0], 6

    def greatest(balance: Sequence[int]) -> float:
        ends = list(itertools.accumulate(balance))
        return max(sum(costs[end - size : end]) for size, end in zip(balance, ends, strict=True))

    for (first, second), partitions in itertools.product(itertools.combinations(range(layers), 2), (1, 2, 3, 5)):
        shared = [Shared(first, second, "")]
        allowed = [
            balance
            for balance in balances(layers, partitions)
            if not any(first < end <= second for end in itertools.accumulate(balance[:-1]))
        ]
        choose = functools.partial(partition, costs, partitions)
        if allowed:
            found = choose(furthest=ends_with_shared_layers_together(shared, layers, partitions, None))
            assert found in allowed
            assert greatest(found) == min(map(greatest, allowed))
        else:
            with pytest.raises(NoCutFitsError):
                choose(furthest=ends_with_shared_layers_together(shared, layers, partitions, None))
    rows = [[3, 3, 5, 6, 6, 6], [6] * 6]
    assert ends_with_shared_layers_together([], layers, 2, rows) is rows
    assert ends_with_shared_layers_together([Shared(1, 2, "")], layers, 2, rows) == [
        [3, 3, 2, 6, 6, 6],
        [6, 6, 2, 6, 6, 6],
    ]


@pytest.mark.parametrize("way", READERS)
def test_layers_of_which_one_reads_the_others_weight_stay_in_one_stage(way: str) -> None:
    """Torch does not know of it. A cut between the two was trained without a word: each process had its own copy, and
    gradients were wrong by two thirds."""
    for more in ({}, {"before": True}, {"frozen": True}):
        settings = [*reads_another(way, **more), CONTIGUOUS, "partitions=2"]
        owner = 4 if "before" in more else 2
        with pytest.raises(InputError, match=rf"layers 2 and 4 share {owner}\.weight: ") as refused:
            spec_of(configure(*settings, "partition.balance=[3,6]"))
        remedy = str(refused.value).rpartition("=")[2]
        assert len(spec_of(configure(*settings, f"partition.balance={remedy}")).layer_names) == 2
        for names in spec_of(configure(*settings)).layer_names:
            assert ("2" in names) == ("4" in names)
    with pytest.raises(InputError, match="use partitions=7 or fewer"):
        spec_of(configure(*settings, "partitions=8"))


def test_on_one_stage_they_are_what_plain_pytorch_makes_of_them(tmp_path: Path) -> None:
    """The weight that is trained is the one that they read: bit by bit, also in two halves and recomputed."""
    config = configure(*reads_another(*READERS), CONTIGUOUS, "partitions=3")
    specs = _Check(config).groups[0]
    ways = [("gpipe", "never", 1), ("1f1b", "never", 1), ("gpipe", "always", 3), ("zero_bubble", "always", 3)]
    chosen = [v for v in specs if (v.schedule, v.recompute, v.partitions) in ways and v.micro_batches > 1]
    messages: list[object] = []
    process = WorkerProcess(0, lambda: (ControlGroup(0, 1), None), messages.append, lambda *action: None)
    Check(config, {v: specs[v] for v in chosen}, folder=tmp_path, source=None)(process)
    rows = {row.variant: row.verdict for row in messages if isinstance(row, Row)}
    verdicts = {(v.executor, v.schedule, v.partitions): verdict for v, verdict in rows.items()}
    assert verdicts == {
        ("in_process", "gpipe", 1): "reference",
        ("pytorch", "gpipe", 1): "identical",
        ("in_process", "1f1b", 1): "within tolerance",  # another order of sums
        ("in_process", "gpipe", 3): "identical",
        ("in_process", "zero_bubble", 3): "identical",
    }


def test_a_trained_model_that_is_loaded_reads_its_weights_too(tmp_path: Path) -> None:
    """What a function holds was left with the first values, as loading put other parameters into their place."""
    config = configure(*reads_another("partial"), CONTIGUOUS, "partitions=2", "epochs=1", "max_steps=1")
    train_here(config, tmp_path)
    model = whole_model(config, find_checkpoint(tmp_path, "last", "run"))
    assert model[4].function.keywords["weight"] is model[2].weight


@pytest.mark.parametrize("way", ALIASES)
def test_a_tensor_that_would_keep_the_first_values_is_refused(way: str) -> None:
    """Channels last, a stage gives a kernel other memory: what was taken from it before was never trained."""
    with pytest.raises(InputError, match=r"layer 4 reads 2\.weight through a tensor .* take it from 2\.weight"):
        spec_of(configure(*reads_another(way), "partitions=1"))
    with pytest.raises(InputError, match=r"4\.tensor: .*precision=float32"):
        spec_of(configure(*reads_another(way), "partitions=1", "precision=bfloat16"))


@pytest.mark.parametrize("registered", ["buffer", "parameter"])
def test_two_tensors_in_the_same_memory_are_refused(registered: str) -> None:
    """Torch knows both, and not that they are one: a stage would move them apart, and a moving average mix them up."""
    settings = ["model.target=custom_models:same_memory", f"model.arguments={{registered: {registered}}}"]
    with pytest.raises(InputError, match=r"1\.weight and 2\.tensor are two .* same memory.*; let them be one"):
        spec_of(configure(*CUSTOM, *settings, "partitions=1"))


OF_NO_LAYER = [*CUSTOM, "model.target=custom_models:reads_what_no_layer_has", "partitions=1"]


@pytest.mark.parametrize("what", ["parameter of the module", "module"])
def test_a_parameter_that_no_layer_has_is_refused(what: str) -> None:
    """Nothing would train it, and no checkpoint keep it."""
    for precision, remedy in (("float32", "make it, or its module, an attribute"), ("bfloat16", "")):
        with pytest.raises(InputError, match=rf"layer 1 reads a .*; .*{remedy}"):
            spec_of(configure(*OF_NO_LAYER, f"model.arguments={{what: {what}}}", f"precision={precision}"))
