"""What frozen layers cost, and what crosses the boundaries behind them."""

from collections import OrderedDict

import torch
from torch import nn

from gpipe_cli.pipeline.profile.tracing import run_shapes, trace_layers
from gpipe_cli.pipeline.runtime.boundary import as_boundary
from gpipe_cli.pipeline.runtime.frozen import Frozen, freeze


def test_what_is_frozen_costs_no_gradients_of_its_own() -> None:
    """A frozen prefix has no backward and hands on what needs no gradient; a frozen layer behind one that is trained
    has half of one."""
    layers = {
        "a": nn.Linear(20, 30), "b": nn.Linear(30, 30), "norm": nn.BatchNorm1d(30), "c": nn.Linear(30, 7),
    }  # fmt: skip
    model = nn.Sequential(OrderedDict(layers)).to("meta")
    freeze(model, Frozen(modules=("a", "norm", "c")))
    costs = {c.name: c for c in trace_layers(model, as_boundary((torch.empty(1, 20),)), training=True)}
    assert [cost.backward.flops for cost in costs.values()] == [0, 2 * 30 * 30, 0, 2 * 30 * 7]
    assert not costs["a"].backward.by_kind
    assert costs["norm"].backward.by_kind
    assert [cost.outputs[0].has_gradient for cost in costs.values()] == [False, True, True, True]
    assert [cost.parameters for cost in costs.values()] == [630, 930, 60, 217], "they are there all the same"


def test_a_frozen_batch_norm_takes_a_single_value_per_channel() -> None:
    model = nn.Sequential(OrderedDict(conv=nn.Conv2d(3, 4, 8), norm=nn.BatchNorm2d(4))).to("meta")
    freeze(model, Frozen(modules=("norm",)))
    run_shapes(model, as_boundary((torch.empty(1, 3, 8, 8),)))
