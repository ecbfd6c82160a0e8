"""The bytes of every possible stage against counting them one by one."""

import random
from itertools import combinations, product

import torch

from gpipe_cli.pipeline.profile.layer_cost import ActivationMemory, LayerCost, Saved, Work
from gpipe_cli.pipeline.runtime.boundary import Boundary, BoundaryTensor


def tensor(width: int, has_gradient: bool = True) -> BoundaryTensor:
    return BoundaryTensor((0, width), (1, 0), torch.float32, has_gradient)


def layer(outputs: Boundary, saved: Saved, trained: int = 1) -> LayerCost:
    return LayerCost("layer", 1, Work(), Work(), outputs, trained=trained, saved=saved)


def counted(costs: list[LayerCost], inputs: Boundary, samples: int, first: int, end: int) -> int:
    """Run the layers of the stage by hand: a set of all memory that is held, each with its bytes."""
    boundary = inputs if first == 0 else costs[first - 1].outputs
    current = [("input", position) for position in range(len(boundary))]
    held = {name: described.bytes(samples) for name, described in zip(current, boundary, strict=True)}
    for at in range(first, end):
        saved = costs[at].saved
        made: list[tuple[object, int]] = []
        sizes = {}
        for position, described in enumerate(costs[at].outputs):
            shared = saved.same_memory[position]
            if shared is None:
                made.append((at, position))
                sizes[at, position] = described.bytes(samples)
            else:
                made.append([*current, *made][shared])
        for name in ([*current, *made][position] for position in saved.tensors):
            if name not in held:
                held[name] = sizes[name] if name in sizes else bytes_of(costs, name, samples)
        held["inside", at] = saved.inside_bytes(samples)
        current = made
    if end < len(costs):
        for name in current:
            if name not in held:
                held[name] = bytes_of(costs, name, samples)
    return sum(held.values())


def bytes_of(costs: list[LayerCost], name: tuple[object, int], samples: int) -> int:
    where, position = name
    assert isinstance(where, int)
    return costs[where].outputs[position].bytes(samples)


def random_layers(generator: random.Random) -> tuple[list[LayerCost], Boundary]:
    """Layers that save some of what comes and goes, pass tensors on and hand them over twice, but never a tensor that
    came in twice: at a boundary these are two."""
    widths = {number: generator.randint(1, 9) for number in range(100)}
    inputs = tuple(tensor(widths[number]) for number in range(2))
    costs, names, fresh = [], [0, 1], 2
    for _ in range(generator.randint(1, 7)):
        same_memory: list[int | None] = []
        made: list[int] = []
        for _ in range(generator.randint(1, 3)):
            choices = [i for i, name in enumerate(names) if name not in made]
            if choices and generator.random() < 0.4:
                position = generator.choice(choices)
                same_memory.append(position)
                made.append(names[position])
            else:
                same_memory.append(None)
                made.append(fresh)
                fresh += 1
        saved = Saved(
            tuple(
                i
                for i in range(len(names) + len(made))
                if (i < len(names) or same_memory[i - len(names)] is None) and generator.random() < 0.4
            ),
            generator.randint(0, 5),
            generator.randint(0, 5),
            tuple(same_memory),
        )
        costs.append(layer(tuple(tensor(widths[name]) for name in made), saved))
        names = made
    return costs, inputs


def test_every_stage_holds_what_counting_finds() -> None:
    for seed, samples in product(range(100), (1, 3)):
        costs, inputs = random_layers(random.Random(seed))
        memory = ActivationMemory(costs, inputs, samples)
        for first, end in combinations(range(len(costs) + 1), 2):
            assert memory.graph_bytes(first, end) == counted(costs, inputs, samples, first, end), (seed, first, end)
            boundary = inputs if first == 0 else costs[first - 1].outputs
            assert memory.input_bytes(first) == sum(t.bytes(samples) for t in boundary)


def test_a_tensor_handed_over_twice_is_held_once_by_who_made_it_and_received_twice() -> None:
    costs = [
        layer((tensor(5), tensor(5)), Saved(same_memory=(None, 1))),
        layer((tensor(1),), Saved((0, 1), same_memory=(None,))),
    ]
    memory = ActivationMemory(costs, (tensor(2),), 1)
    assert memory.graph_bytes(0, 1) == 4 * (2 + 5)
    assert memory.graph_bytes(1, 2) == 4 * (5 + 5)
    assert memory.graph_bytes(0, 2) == 4 * (2 + 5)


def test_a_stage_that_nothing_comes_back_through_holds_nothing() -> None:
    frozen = [layer((tensor(5, False),), Saved(same_memory=(None,)), trained=0) for _ in range(2)]
    last = layer((tensor(1),), Saved(same_memory=(None,)))
    costs = [*frozen, layer((tensor(3),), Saved((0,), 0, 1, (None,))), last]
    memory = ActivationMemory(costs, (tensor(2, False),), 1)
    assert memory.graph_bytes(0, 2) == memory.input_bytes(0, 2) == 0
    assert memory.input_bytes(0) == memory.input_bytes(0, 3) == 4 * 2
    assert memory.graph_bytes(1, 3) == 4 * 5 + 4 * 5 + 1 + 4 * 3
