"""FLOPs, bytes and boundaries of layers against closed forms."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

from gpipe_cli.pipeline.layer_cost import BoundaryTensor, LayerCost, as_boundary, run_shapes, trace_layers


def trace(example: tuple[int, ...], *, training: bool = True, **layers: nn.Module) -> dict[str, LayerCost]:
    model = nn.Sequential(OrderedDict(layers)).to("meta")
    costs = trace_layers(model, as_boundary((torch.empty(1, *example),)), training=training)
    return {cost.name: cost for cost in costs}


@pytest.mark.parametrize("bias", [False, True])
def test_a_linear_layer(bias: bool) -> None:
    """2 m n a sample forwards; backwards the same for the weights, and again for the inputs where they need it."""
    costs = trace((20,), first=nn.Linear(20, 30, bias=bias), second=nn.Linear(30, 7, bias=bias))
    assert costs["first"].forward_flops == 2 * 20 * 30
    assert costs["first"].backward_flops == 2 * 20 * 30
    assert costs["second"].forward_flops == 2 * 30 * 7
    assert costs["second"].backward_flops == 2 * 2 * 30 * 7
    assert costs["first"].flops == 4 * 20 * 30
    assert [cost.parameters for cost in costs.values()] == [20 * 30 + bias * 30, 30 * 7 + bias * 7]


@pytest.mark.parametrize(("stride", "groups"), [(1, 1), (2, 1), (1, 4), (2, 4)])
def test_a_convolution(stride: int, groups: int) -> None:
    """2 x outputs x (kernel x inputs / groups) a sample."""
    layers = {"first": nn.Conv2d(3, 8, 1), "second": nn.Conv2d(8, 12, 3, stride=stride, padding=1, groups=groups)}
    costs = trace((3, 10, 10), **layers)
    side = 10 // stride
    flops = 2 * side * side * 12 * 9 * 8 // groups
    assert costs["second"].forward_flops == flops
    assert costs["second"].backward_flops == 2 * flops
    assert costs["second"].outputs[0].shape(5) == (5, 12, side, side)


def test_a_depthwise_and_a_transposed_convolution() -> None:
    layers = {"stem": nn.Conv2d(3, 6, 1), "depth": nn.Conv2d(6, 6, 5, padding=2, groups=6)}
    costs = trace((3, 7, 7), **layers, up=nn.ConvTranspose2d(6, 4, 2, stride=2))
    assert costs["depth"].forward_flops == 2 * 7 * 7 * 6 * 25
    assert costs["up"].forward_flops == 2 * 7 * 7 * 6 * 4 * 4
    for name in ("depth", "up"):
        assert costs[name].backward_flops == 2 * costs[name].forward_flops
    assert costs["stem"].backward_flops == costs["stem"].forward_flops, "images need no gradient"


def test_work_grows_with_bytes_where_there_are_no_flops() -> None:
    small, large = (trace((4, side, side), norm=nn.BatchNorm2d(4), relu=nn.ReLU()) for side in (8, 16))
    for name in ("norm", "relu"):
        assert small[name].flops == 0
        assert small[name].forward_bytes >= 2 * 4 * 4 * 8 * 8  # read once, written once, float32
        assert large[name].work == pytest.approx(4 * small[name].work, rel=0.05)


def test_an_evaluation_has_no_backward() -> None:
    costs = trace((3, 8, 8), training=False, conv=nn.Conv2d(3, 8, 3), relu=nn.ReLU())
    assert costs["conv"].forward_flops > 0
    assert all(cost.backward_flops == cost.backward_bytes == 0 for cost in costs.values())
    assert not any(tensor.has_gradient for cost in costs.values() for tensor in cost.outputs)


class Fan(nn.Module):
    """Hands on features, features that nobody uses, a mask of integers, and a table without a sample dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = self.conv(images)
        return x, x * 2, (images.sum(dim=(1, 2, 3)) > 0).long(), self.conv.weight.flatten(), torch.cat([x, x])


class Join(nn.Module):
    def forward(self, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        x, _, mask, table, doubled = inputs
        return x.sum(dim=(1, 2, 3)) * mask * table.sum() + doubled.sum()


def test_what_crosses_a_boundary() -> None:
    fan = trace((3, 6, 6), fan=Fan(), join=Join())["fan"].outputs
    assert [tensor.has_gradient for tensor in fan] == [True, False, False, True, True]
    assert [tensor.dtype for tensor in fan] == [torch.float32, torch.float32, torch.int64, torch.float32, torch.float32]
    for samples in (1, 2, 5, 64):
        shapes = [tensor.shape(samples) for tensor in fan]
        assert shapes == [(samples, 4, 6, 6), (samples, 4, 6, 6), (samples,), (12,), (2 * samples, 4, 6, 6)]
    assert [tensor.bytes(3) for tensor in fan] == [3 * 144 * 4, 3 * 144 * 4, 3 * 8, 12 * 4, 6 * 144 * 4]


def test_layers_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match=r"layer second does not accept inputs of shape \(2, 5\)"):
        trace((4,), first=nn.Linear(4, 5), second=nn.Linear(6, 5))


def test_one_value_per_channel_is_refused_by_batch_norm() -> None:
    model = nn.Sequential(OrderedDict(conv=nn.Conv2d(3, 4, 8), norm=nn.BatchNorm2d(4))).to("meta")
    with pytest.raises(ValueError, match="layer norm"):
        run_shapes(model, as_boundary((torch.empty(1, 3, 8, 8),)))
    run_shapes(model, as_boundary((torch.empty(1, 3, 9, 9),)))


class _Sentences(nn.Module):
    """(source (N, S), target (N, T)) of token ids -> (source (N, S), states (N, T, 6), source states (N, S + 1, 6))."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        source, target = inputs
        longer = torch.cat([source, source[:, :1]], dim=1)
        return source, self.embedding(target), self.embedding(longer)


def test_shapes_follow_samples_and_both_lengths() -> None:
    """Sentences are padded anew in every mini-batch: what crosses a boundary must be known without a handshake."""
    ids = torch.int64
    inputs = (
        BoundaryTensor((0, 0), (1, 0), ids, False, ((0, 1), (0, 0))),
        BoundaryTensor((0, 0), (1, 0), ids, False, ((0, 0), (0, 1))),
    )
    model = nn.Sequential(OrderedDict(only=_Sentences())).to("meta")
    (cost,) = trace_layers(model, inputs, training=True, lengths=(9, 7))
    shapes = [tensor.shape(5, (4, 3)) for tensor in cost.outputs]
    assert shapes == [(5, 4), (5, 3, 6), (5, 5, 6)]
    assert [tensor.dtype for tensor in cost.outputs] == [ids, torch.float32, torch.float32]
    assert [tensor.has_gradient for tensor in cost.outputs] == [False, True, True]
    assert cost.outputs[1].bytes(5, (4, 3)) == 5 * 3 * 6 * 4
