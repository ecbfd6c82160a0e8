"""What real stages hold, and that it was known before."""

from collections.abc import Sequence
from dataclasses import replace
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
from gpipe_cli.pipeline.profile.layer_cost import ActivationMemory, Halves, KeptMemory, LayerCost, Work
from gpipe_cli.pipeline.profile.tracing import trace_layers
from gpipe_cli.pipeline.runtime.boundary import Boundary, BoundaryTensor
from gpipe_cli.pipeline.runtime.saved_activations import StorageBytes, byte_range, storage_of
from gpipe_cli.pipeline.runtime.stage import Stage
from gpipe_cli.pipeline.schedule.named_schedules import SCHEDULES
from gpipe_cli.pipeline.schedule.schedule import RECOMPUTE, Retain

WAYS = covering(
    name=tuple(SAMPLES),
    partitions=(1, 3, 4),
    schedule=SCHEDULES,
    recompute=RECOMPUTE,
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
    for one in random_orders(30, seed=1, most_stages=min(4, len(costs))):
        ends = accumulate(micro_batch_sizes(len(costs), len(one.device_of_stage)), initial=0)
        sizes = 2 * one.schedule.micro_batches + 1, one.schedule.micro_batches
        measured, predicted = held(sample, costs, one.schedule, *sizes, list(pairwise(ends)))
        assert measured == predicted, one


@pytest.mark.parametrize("name", ["amoebanet", "flattening", "translation"])
def test_every_cut_holds_what_was_predicted(name: str) -> None:
    """Of tensors that are passed on, handed over twice, or saved by several layers."""
    sample = SAMPLES[name]
    costs = sample.costs()
    order = build("gpipe", 3, 2, "never")
    for spans in cuts_of(len(costs), 2, MOST.get(name, 99)):
        measured, predicted = held(sample, costs, order, 4, 2, spans)
        assert measured == predicted, spans


def tensor(width: int, has_gradient: bool = True) -> BoundaryTensor:
    return BoundaryTensor((0, width), (1, 0), torch.float32, has_gradient)


def stage(layers: nn.Sequential, inputs: Boundary) -> Stage:
    """A stage that counts, in its first step."""
    made = Stage(1, layers, first_layer=0, inputs=inputs, device=CPU, run_seed=3)
    made.set_training(True)
    made.counter.on = True
    made.begin_step(0, None)
    return made


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_views_of_one_memory_count_once_and_of_what_was_given_as_far_as_they_reach(device: str) -> None:
    x, weight = torch.zeros(10, 4, device=device), torch.zeros(5, 5, device=device)
    whole = StorageBytes(without={storage_of(weight)})
    whole.add([x[2:4], x[3:5].flatten(), weight.t()])
    assert whole.bytes == x.nbytes
    counted = StorageBytes(without={storage_of(weight)}, given=[x])
    counted.add([x[2:4], x[3:5].flatten(), x[2:5].t(), weight.t()])
    assert counted.bytes == 3 * 4 * 4
    assert counted.meets(byte_range(x[4:]))
    assert not counted.meets(byte_range(x[5:]))
    assert not counted.meets(byte_range(torch.zeros(10, 4, device=device)))
    counted.add([x, torch.zeros(3, 0)])
    assert counted.bytes == 10 * 4 * 4
    assert byte_range(torch.zeros(3, 1, device=device).expand(3, 100)).bytes == 3 * 4


def layer(outputs: Boundary, saved: KeptMemory, trained: int = 1) -> LayerCost:
    return LayerCost("layer", 1, Work(), Work(), outputs, trained=trained, saved=saved)


def test_a_tensor_handed_over_twice_is_held_once_by_who_made_it_and_received_twice() -> None:
    costs = [
        layer((tensor(5), tensor(5)), KeptMemory(same_memory=(None, 1))),
        layer((tensor(1),), KeptMemory((0, 1), same_memory=(None,))),
    ]
    memory = ActivationMemory(costs, (tensor(2),), 1)
    assert memory.held(0, 1).graph == 4 * 2, "nobody has saved it yet"
    assert memory.held(1, 2).graph == 4 * (5 + 5)
    assert memory.held(0, 2).graph == 4 * (2 + 5)


def test_a_stage_that_nothing_comes_back_through_holds_nothing() -> None:
    frozen = [layer((tensor(5, False),), KeptMemory(same_memory=(None,)), trained=0) for _ in range(2)]
    last = layer((tensor(1),), KeptMemory(same_memory=(None,)))
    costs = [*frozen, layer((tensor(3),), KeptMemory((0,), 0, 1, (None,))), last]
    memory = ActivationMemory(costs, (tensor(2, False),), 1)
    assert memory.held(0, 2).graph == memory.held(0, 2).input == 0
    assert memory.held(0, 3).input == 4 * 2
    assert memory.held(1, 3).graph == 4 * 5 + 4 * 5 + 1


def test_between_halves_a_tensor_counts_once_and_a_gradient_where_it_was_kept_first() -> None:
    """Both layers multiply what the first one gets; the gradient that comes into the second one goes on to the first
    as it is, and both keep it."""
    passing = Halves(
        kept_inputs=KeptMemory((0,), 0, 2, (0,)), kept_gradients=KeptMemory((0,), 1, 0, (0,)),
    )  # fmt: skip
    costs = [replace(layer((tensor(5),), KeptMemory()), halves=passing) for _ in range(2)]
    costs.append(layer((tensor(1),), KeptMemory()))
    memory = ActivationMemory(costs, (tensor(5),), 3)
    whole = 3 * 4 * 5
    assert memory.held(0, 1).gradients == memory.held(1, 2).gradients == whole + 1
    assert memory.held(0, 2).gradients == whole + 2
    assert memory.held(0, 2).weights == (whole + 2 * 3 * 2) + (whole + 2)
    assert memory.held(2, 3).weights == 0


def test_a_gradient_of_which_a_part_is_kept_is_held_whole() -> None:

    class Joins(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = nn.Conv1d(4, 4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([x[..., :1], self.convolution(x)], dim=2)

    inputs = (BoundaryTensor((0, 4, 3), (1, 0, 0), torch.float32, True),)
    model = nn.Sequential(Joins(), nn.Tanh())
    memory = ActivationMemory(trace_layers(model.to("meta"), inputs, training=True, splits=True), inputs, 2)
    made = stage(nn.Sequential(Joins()), inputs)
    made.forward(0, (torch.rand(2, 4, 3),), Retain.GRAPH)
    made.backward_inputs(0, (torch.rand(2, 4, 4),))
    kept = 4 * (2 * 4 * 3 + 2 * 4 * 4)
    assert memory.held(0, 1).weights == kept
    assert made.counter.bytes == kept, "also the first number, which is the gradient of something else"


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
        self._known = set(map(storage_of, known))
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(returned):
            if isinstance(tensor, torch.Tensor) and storage_of(tensor) not in self._known:
                storage = tensor.untyped_storage()
                self._made[storage_of(tensor)] = StorageWeakRef(storage), storage.nbytes()
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
        made.forward(0, (given,), Retain.GRAPH)
    assert made.counter.bytes == given.nbytes + allocated.alive_bytes
    with allocated:
        made.backward_inputs(0, (gradient,))
    done = sum(parameter.grad.nbytes for parameter in made.module.parameters() if parameter.grad is not None)
    assert made.counter.bytes == allocated.alive_bytes - done, "products keep copies of both"
