"""The bytes that real stages save, and that plans know them."""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from engine_runs import CPU, covering
from memory_runs import SAMPLES, cuts_of, held, held_between_halves
from random_orders import random_orders
from schedule_runs import build
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gpipe_cli.data.micro_batches import micro_batch_sizes
from gpipe_cli.pipeline.runtime.boundary import Boundary, BoundaryTensor
from gpipe_cli.pipeline.runtime.saved_activations import storage_id
from gpipe_cli.pipeline.runtime.stage import Stage
from gpipe_cli.schedule.named_schedules import SCHEDULES
from gpipe_cli.schedule.schedule import RECOMPUTE_MODES, Retain

WAYS = covering(
    name=tuple(SAMPLES),
    partitions=(1, 3, 4),
    schedule=SCHEDULES,
    recompute=RECOMPUTE_MODES,
    sizes=((8, 4), (7, 3)),  # samples and micro-batches: even, and of 3, 2 and 2 samples
)
MOST = {"amoebanet": 1, "translation": 2, "translation in bfloat16": 1}  # layers between two cuts


@pytest.mark.parametrize("name", SAMPLES)
def test_stages_hold_what_was_predicted(name: str) -> None:
    """To the byte: at most, for several numbers of partitions, schedules and ways of recomputation, and between the
    halves of a backward, wherever the model is cut."""
    sample = SAMPLES[name]
    costs = sample.costs(splits=True)
    for way in (way for way in WAYS if way["name"] == name):
        order = build(way["schedule"], way["partitions"], way["sizes"][1], way["recompute"])
        ends = accumulate(micro_batch_sizes(len(costs), way["partitions"]), initial=0)
        measured, predicted = held(sample, costs, order, *way["sizes"], list(pairwise(ends)))
        assert measured == predicted, way
        assert min(measured) > 0
    for samples, cuts in ((2, 0), (3, 2)):
        for spans in cuts_of(len(costs), cuts, MOST.get(name, 99)):
            halves, predicted_halves = held_between_halves(sample, costs, samples, spans)
            assert halves == predicted_halves, spans


def test_stages_hold_what_was_predicted_in_every_order() -> None:
    """Random ones, on random placements: what is held follows from each stage's own actions."""
    sample = SAMPLES["flattening"]
    costs = sample.costs(splits=True)
    for one in random_orders(30, seed=1, max_stages=min(4, len(costs))):
        ends = accumulate(micro_batch_sizes(len(costs), len(one.device_of_stage)), initial=0)
        sizes = 2 * one.schedule.micro_batches + 1, one.schedule.micro_batches
        measured, predicted = held(sample, costs, one.schedule, *sizes, list(pairwise(ends)))
        assert measured == predicted, one


@pytest.mark.parametrize("name", ["amoebanet", "flattening", "translation"])
def test_every_cut_holds_what_was_predicted(name: str) -> None:
    """Of tensors that are passed on, returned twice, or saved by several layers."""
    sample = SAMPLES[name]
    costs = sample.costs()
    order = build("gpipe", 3, 2, "never")
    for spans in cuts_of(len(costs), 2, MOST.get(name, 99)):
        measured, predicted = held(sample, costs, order, 4, 2, spans)
        assert measured == predicted, spans


def stage(layers: nn.Sequential, inputs: Boundary) -> Stage:
    """A stage that counts, in its first step."""
    made = Stage(1, layers, first_layer=0, inputs=inputs, device=CPU, run_seed=3)
    made.set_training(True)
    made.counter.on = True
    made.begin_step(0, None)
    return made


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x)[0]


class Allocated(TorchDispatchMode):
    """The memory that operations have made; `known` is there already."""

    def __init__(self, known: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._known = set(map(storage_id, known))
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(returned):
            if isinstance(tensor, torch.Tensor) and storage_id(tensor) not in self._known:
                storage = tensor.untyped_storage()
                self._made[storage_id(tensor)] = StorageWeakRef(storage), storage.nbytes()
        return returned

    @property
    def alive_bytes(self) -> int:
        return sum(size for reference, size in self._made.values() if not reference.expired())


def test_what_is_counted_is_what_is_alive() -> None:
    """Attention that returns its weights keeps keys and values, and with them the memory of the queries, which are a
    part of the same tensor. Between the halves of a backward no graph is alive."""
    made = stage(nn.Sequential(Attends()), (BoundaryTensor((0, 3, 8), (1, 0, 0), torch.float32, True),))
    given, gradient = torch.rand(2, 3, 8), torch.rand(2, 3, 8)
    with Allocated([given, gradient, *made.module.parameters()]) as allocated:
        made.forward(0, (given,), Retain.ACTIVATIONS)
    assert made.counter.bytes == given.nbytes + allocated.alive_bytes
    with allocated:
        made.backward(0, (gradient,), split=True)
    done = sum(parameter.grad.nbytes for parameter in made.module.parameters() if parameter.grad is not None)
    assert made.counter.bytes == allocated.alive_bytes - done, "products keep copies of both"
