from collections import OrderedDict

import torch
from engine_runs import CPU
from torch import nn

from gpipe_cli.pipeline.runtime.boundary import BoundaryTensor, Tensors
from gpipe_cli.pipeline.runtime.frozen import Frozen, freeze
from gpipe_cli.pipeline.runtime.stage import Stage
from gpipe_cli.schedule.schedule import Retain

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


def test_a_frozen_layer_is_as_in_evaluation_and_lets_gradients_through() -> None:
    body = Body()
    module = nn.Sequential(OrderedDict(body=body))
    freeze(module, Frozen(modules=("body",)))
    made = Stage(1, module, first_layer=4, inputs=(FEATURES, MASK), device=CPU, run_seed=3)
    body.norm.running_mean.fill_(0.5)
    before = {name: tensor.clone() for name, tensor in body.state_dict().items()}
    for mode in (True, False, True):  # an evaluation between two steps undoes nothing
        made.set_training(mode)
    made.begin_step(0, None)
    x, mask = torch.randn(3, 3, 4, 4), torch.tensor([1, 2, 1])
    outputs = made.forward(0, (x, mask), Retain.ACTIVATIONS)
    (gradient, none) = made.backward(0, (torch.ones(3, 2, 4, 4), None))
    made.finish_step()
    scale = (1 + body.norm.eps) ** -0.5
    expected = (body.conv(x) - 0.5) * scale * mask[:, None, None, None]
    torch.testing.assert_close(outputs[0], expected)
    weight = body.conv.weight.sum(dim=0) * scale
    torch.testing.assert_close(gradient, (weight * mask.view(3, 1, 1, 1)).expand_as(x))
    assert none is None
    assert all(parameter.grad is None for parameter in body.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in body.state_dict().items())
