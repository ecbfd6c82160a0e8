"""FLOPs, bytes, boundaries and what is saved of layers against closed forms; equal layers are traced once."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from operator import call
from typing import Any

import pytest
import torch
from custom_models import Does
from memory_runs import SAMPLES
from torch import nn

from gpipe_cli.pipeline.profile import forward_trace, tracing
from gpipe_cli.pipeline.profile.forward_trace import layer_kinds
from gpipe_cli.pipeline.profile.layer_cost import LayerCost, OperationKind, SavedMemory
from gpipe_cli.pipeline.profile.tracing import trace_layers
from gpipe_cli.pipeline.runtime.boundary import BoundaryTensor, as_boundary
from gpipe_cli.pipeline.runtime.layer_call import ChangedInputError, traced_call


def trace(example: tuple[int, ...], *, training: bool = True, **layers: nn.Module) -> dict[str, LayerCost]:
    model = nn.Sequential(OrderedDict(layers)).to("meta")
    costs = trace_layers(model, as_boundary((torch.empty(1, *example),)), training=training)
    return {cost.name: cost for cost in costs}


def traced(*layers: nn.Module, **settings: Any) -> list[LayerCost]:
    """Costs of layers on the meta device, of which the first takes (N, 6)."""
    return list(trace_layers(nn.Sequential(*layers), as_boundary((torch.empty(1, 6),)), training=True, **settings))


def test_linear_layers() -> None:
    """2 m n FLOPs a sample forwards; backwards the same for the weights, and again for the inputs where they need it.
    Weights are moved once for a micro-batch of any size."""
    costs = trace((20,), first=nn.Linear(20, 30, bias=False), second=nn.Linear(30, 7))
    assert [cost.forward.flops for cost in costs.values()] == [2 * 20 * 30, 2 * 30 * 7]
    assert [cost.backward.flops for cost in costs.values()] == [2 * 20 * 30, 2 * 2 * 30 * 7]
    assert costs["first"].flops == 4 * 20 * 30
    assert [cost.parameters for cost in costs.values()] == [20 * 30, 30 * 7 + 7]
    for work in (costs["first"].forward, costs["first"].backward):  # the image needs no gradient
        product = work[OperationKind.PRODUCT]
        assert (product.bytes, product.fixed_bytes) == (4 * (20 + 30), 4 * 20 * 30)
    added = costs["first"].backward[OperationKind.ELEMENTWISE]
    assert (added.count, added.bytes, added.fixed_bytes) == (1, 0, 3 * 4 * 20 * 30)
    for cost in trace((20,), training=False, first=nn.Linear(20, 30), tanh=nn.Tanh()).values():
        assert cost.saved == SavedMemory(same_memory=(None,))
        assert not cost.backward
        assert not any(tensor.has_gradient for tensor in cost.outputs)


@pytest.mark.parametrize(("stride", "groups"), [(1, 1), (2, 4)])
def test_a_convolution(stride: int, groups: int) -> None:
    """2 x outputs x (kernel x inputs / groups) a sample."""
    layers = {"first": nn.Conv2d(3, 8, 1), "second": nn.Conv2d(8, 12, 3, stride=stride, padding=1, groups=groups)}
    cost, side = trace((3, 10, 10), **layers)["second"], 10 // stride
    flops = 2 * side * side * 12 * 9 * 8 // groups
    assert (cost.forward.flops, cost.backward.flops) == (flops, 2 * flops)
    assert cost.outputs[0].shape(5) == (5, 12, side, side)


def test_the_halves_of_a_backward() -> None:
    """The gradients of weights that wait, and the rest: of layers with separate weights, and with tied ones, which a
    stage keeps apart until the step's end."""
    with torch.device("meta"):
        layers = OrderedDict(
            first=nn.Linear(20, 30), second=nn.Linear(30, 30), norm=nn.BatchNorm1d(30), tied=nn.Linear(30, 30)
        )
    layers["tied"].bias = layers["second"].bias
    model = nn.Sequential(layers)
    costs = trace_layers(model, as_boundary((torch.empty(1, 20),)), training=True, splits=True)
    split_backward = [cost.split_backward for cost in costs]
    assert [each and each.weights.flops for each in split_backward] == [2 * 20 * 30, 2 * 30 * 30, 0, 2 * 30 * 30]
    assert [each and each.inputs.flops for each in split_backward] == [0, 2 * 30 * 30, 0, 2 * 30 * 30]
    assert [each and each.saved_gradients.tensors for each in split_backward] == [(0,), (0,), (), (0,)]
    assert all(parameter.grad is None for parameter in model.parameters())
    counts = [[sum(each.count for each in work.values()) for work in (half.inputs, half.weights)]
              for half in split_backward if half is not None]  # fmt: skip
    # a product, the sum of its bias's gradient, and to each weight what is added
    assert counts == [[0, 4], [1, 4], [1 + 2, 0], [1, 4]]
    assert trace((20,), first=nn.Linear(20, 30))["first"].split_backward is None


def test_a_layer_that_changes_its_input_is_named() -> None:
    """Whether or not autograd would refuse it; an evaluation may do as it likes."""
    for layer in (nn.ReLU(inplace=True), Does(lambda x: x.detach().add_(1) * x)):
        with pytest.raises(ChangedInputError, match="layer second changes its input in place"):
            trace((4,), first=nn.Linear(4, 4), second=layer)
        trace((4,), training=False, first=nn.Linear(4, 4), second=layer)


def test_what_is_frozen_costs_no_gradients_of_its_own() -> None:
    """A frozen prefix has no backward and passes on what needs no gradient; a frozen layer behind one that is trained
    has half of one."""
    layers = {
        "a": nn.Linear(20, 30), "b": nn.Linear(30, 30), "norm": nn.BatchNorm1d(30), "c": nn.Linear(30, 7),
    }  # fmt: skip
    for name in ("a", "norm", "c"):
        layers[name].requires_grad_(False)
    costs = trace((20,), **layers)
    assert [cost.backward.flops for cost in costs.values()] == [0, 2 * 30 * 30, 0, 2 * 30 * 7]
    assert not costs["a"].backward
    assert costs["norm"].backward
    assert [cost.outputs[0].has_gradient for cost in costs.values()] == [False, True, True, True]
    assert [cost.parameters for cost in costs.values()] == [630, 930, 60, 217], "they are there all the same"


def test_shapes_follow_samples_and_both_lengths() -> None:
    """Sentences are padded separately in every mini-batch: what crosses a boundary must be known without a
    handshake."""
    ids, embedding = torch.int64, nn.Embedding(11, 6, device="meta")

    def forward(inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        source, target = inputs
        longer = torch.cat([source, source[:, :1]], dim=1)
        return source, embedding(target), embedding(longer), embedding.weight.flatten()

    only = Does(forward)
    only.embedding = embedding
    inputs = (
        BoundaryTensor((0, 0), (1, 0), ids, False, ((0, 1), (0, 0))),
        BoundaryTensor((0, 0), (1, 0), ids, False, ((0, 0), (0, 1))),
    )
    (cost,) = trace_layers(nn.Sequential(only), inputs, training=True, lengths=(9, 7))
    shapes = [tensor.shape(5, (4, 3)) for tensor in cost.outputs]
    assert shapes == [(5, 4), (5, 3, 6), (5, 5, 6), (66,)]
    assert [tensor.dtype for tensor in cost.outputs] == [ids, *[torch.float32] * 3]
    assert [tensor.has_gradient for tensor in cost.outputs] == [False, True, True, True]


@pytest.mark.parametrize(("name", "sizes"), [("amoebanet", {"normal_cells": 9}), ("translation", {"layers": 4})])
def test_equal_layers_are_traced_once_and_cost_what_each_of_them_costs(
    name: str, sizes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal are layers of one kind with equal inputs, whether they are separate modules or, for a plan, the same."""
    sample = SAMPLES[name]
    build = partial(sample.build, **sizes)
    runs: list[str] = []

    def counted(name: str, *given: Any, **settings: Any) -> Any:
        runs.append(name)
        return traced_call(name, *given, **settings)

    def costs_of(build: Callable[[], nn.Sequential]) -> tuple[LayerCost, ...]:
        model = replace(sample, build=build).model()
        return trace_layers(model, sample.inputs, training=True, lengths=sample.lengths)

    monkeypatch.setattr(forward_trace, "traced_call", counted)
    shared = costs_of(build)
    kinds = layer_kinds(replace(sample, build=build).model())
    different = set(zip(kinds, [(), *(cost.outputs for cost in shared[:-1])], strict=True))
    assert len(runs) == (2 + len(sample.lengths)) * len(different)
    assert len(different) < len(kinds)
    assert costs_of(partial(build, make=cache(call))) == shared
    monkeypatch.setattr(forward_trace, "signature", id)  # none is equal to another one
    assert costs_of(build) == shared


@pytest.mark.skipif(torch.__version__ < tracing._RECORDS_WITHOUT_GPU, reason="records no graph without a CUDA driver")
def test_bfloat16_has_the_types_of_the_device_and_the_operations_of_float32() -> None:
    """Layer normalization returns bfloat16 on a CPU and float32 on a GPU. Asking a tensor without memory where it is
    once counted as an operation on all its bytes: ten times as many as there were."""
    layers = nn.Sequential(nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8)), nn.Linear(8, 4)).to("meta")
    types = {"cpu": [torch.bfloat16, torch.bfloat16], "cuda": [torch.float32, torch.bfloat16]}
    for device, expected in types.items():
        found = traced(*layers, device=device, autocast_dtype=torch.bfloat16)
        assert [cost.outputs[0].dtype for cost in found] == expected
        for cost, full in zip(found, traced(*layers, device=device), strict=True):
            assert cost.forward.flops == full.forward.flops
            counted, before = (sum(each.count for each in one.forward.values()) for one in (cost, full))
            assert before < counted <= before + 4  # casts of an input, a weight, a bias, and before a normalization


class Reads(nn.Module):
    """A product with the weight of another layer, which it holds in a list."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.others = [other]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.others[0].weight)


def test_a_weight_that_is_read_costs_what_a_module_in_common_costs() -> None:
    """Gradients, what is saved, and the halves of backwards, in which no weight can wait that is used elsewhere."""
    with torch.device("meta"):
        inner, own = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        known = traced(nn.Sequential(inner), nn.Tanh(), nn.Sequential(inner), own, splits=True)
        reads = traced(nn.Sequential(inner), nn.Tanh(), Reads(inner), own, splits=True)
    assert [cost.cross_layer_tensors for cost in reads] == [(), (), ("0.0.weight",), ()]
    assert reads[2].split_backward is not None
    assert reads[2].split_backward.weights.flops == 0
    assert [replace(cost, cross_layer_tensors=(), parameters=0, trained=0) for cost in reads] == [
        replace(cost, parameters=0, trained=0) for cost in known
    ]


def test_what_a_layer_reads_is_what_it_computes_with_or_returns() -> None:
    with torch.device("meta"):
        first = nn.Linear(6, 6)
        given = nn.Sequential(first, Does(lambda x: (x, first.weight)), Does(lambda pair: pair[0] @ pair[1]))
        shape = Does(lambda x: torch.empty_like(first.weight).sum() + x.view(-1, *first.weight.shape[1:]))
        inside = Does(lambda x: x * nn.Linear(6, 1, device="meta").weight * torch.tensor(0.5, device="meta"))
        assert [cost.cross_layer_tensors for cost in traced(*given, shape, inside)] == [(), ("0.weight",), (), (), ()]
