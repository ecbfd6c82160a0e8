from collections import OrderedDict
from dataclasses import replace

import pytest
import torch
from engine_runs import CPU, NOTHING_FROZEN
from torch import nn

from gpipe_cli.pipeline.runtime.boundary import BoundaryTensor, Tensors
from gpipe_cli.pipeline.runtime.frozen import Frozen, freeze
from gpipe_cli.pipeline.runtime.stage import Stage
from gpipe_cli.pipeline.schedule.schedule import Retain

FEATURES = BoundaryTensor((0, 3, 4, 4), (1, 0, 0, 0), torch.float32, True)
MASK = BoundaryTensor((0,), (1,), torch.int64, False)


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 2, 1)
        self.norm = nn.BatchNorm2d(2)

    def forward(self, inputs: Tensors) -> Tensors:
        x, mask = inputs
        return nn.functional.dropout(self.norm(self.conv(x)), 0.5, self.training) * mask[:, None, None, None], mask


def stage(frozen: Frozen = NOTHING_FROZEN, features: BoundaryTensor = FEATURES) -> tuple[Stage, Body]:
    body = Body()
    module = nn.Sequential(OrderedDict(body=body))
    freeze(module, frozen)
    made = Stage(1, module, first_layer=4, inputs=(features, MASK), device=CPU, run_seed=3)
    made.set_training(True)
    return made, body


def inputs(m: int) -> Tensors:
    generator = torch.Generator().manual_seed(m)
    return torch.randn(3, 3, 4, 4, generator=generator), torch.tensor([1, 2, 1])


GRADIENT = (torch.ones(3, 2, 4, 4), None)


def test_what_is_kept_between_forward_and_backward() -> None:
    """Without a backward nothing; for a recomputation the inputs and no graph."""
    made, _ = stage()
    made.begin_step(0, None)
    assert not made.forward(0, inputs(0), Retain.NOTHING)[0].requires_grad
    assert not made.forward(1, inputs(1), Retain.INPUT)[0].requires_grad
    assert made.forward(2, inputs(2), Retain.GRAPH)[0].requires_grad
    with pytest.raises(AssertionError, match=r"still holds micro-batches \[1, 2\]"):
        made.finish_step()
    with pytest.raises(AssertionError, match="has not been recomputed"):
        made.backward(1, GRADIENT)


def test_a_frozen_layer_is_as_in_evaluation_and_lets_gradients_through() -> None:
    made, body = stage(Frozen(modules=("body",)))
    body.norm.running_mean.fill_(0.5)
    before = {name: tensor.clone() for name, tensor in body.state_dict().items()}
    for mode in (True, False, True):  # an evaluation between two steps undoes nothing
        made.set_training(mode)
    made.begin_step(0, None)
    x = inputs(0)[0]
    outputs = made.forward(0, inputs(0), Retain.GRAPH)
    (gradient, none) = made.backward(0, GRADIENT)
    made.finish_step()
    scale = (1 + body.norm.eps) ** -0.5
    expected = (body.conv(x) - 0.5) * scale * torch.tensor([1, 2, 1])[:, None, None, None]
    torch.testing.assert_close(outputs[0], expected)
    weight = body.conv.weight.sum(dim=0) * scale
    torch.testing.assert_close(gradient, (weight * torch.tensor([1, 2, 1]).view(3, 1, 1, 1)).expand_as(x))
    assert none is None
    assert all(parameter.grad is None for parameter in body.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in body.state_dict().items())


@pytest.mark.parametrize("keep", [Retain.GRAPH, Retain.INPUT])
def test_a_stage_that_nothing_comes_back_through_keeps_nothing(keep: Retain) -> None:
    """Nothing to train in it or before it: no graph, and no inputs."""
    made, _ = stage(Frozen(modules=("body",)), replace(FEATURES, has_gradient=False))
    assert not made.needs_backward
    made.begin_step(0, None)
    assert not made.forward(0, inputs(0), keep)[0].requires_grad
    made.finish_step()
