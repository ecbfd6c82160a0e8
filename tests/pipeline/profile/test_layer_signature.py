"""Equal layers must do the same; layers that might not are never equal."""

from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from torch import nn

from gpipe_cli.pipeline.profile.layer_signature import signature


class Size(NamedTuple):
    width: int


class Setting:
    """An object that nothing is known of."""


class Layer(nn.Module):
    def __init__(self, setting: Any) -> None:
        super().__init__()
        self.setting = setting
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


def same(one: nn.Module, other: nn.Module) -> bool:
    return hash(signature(one)) == hash(signature(other)) and signature(one) == signature(other)


def test_layers_with_the_same_settings_are_equal() -> None:
    for setting in (None, True, 3, 2.5, "x", (1, "a"), [1, [2.0]], {"a": [1]}, OrderedDict(a=1), {1, 2}, Size(3),
                    torch.float16, torch.relu, torch.device("cpu")):  # fmt: skip
        assert same(Layer(setting), Layer(setting)), setting


def test_layers_that_differ_in_an_attribute_are_not_equal() -> None:
    shared = Setting()
    for one, other in (
        (1, 2), (1, True), (1, 1.0), (0, False), ("a", "b"), ((1, 2), [1, 2]), ({"a": 1}, {"a": 2}), (Size(1), (1,)),
        (Setting(), Setting()), (torch.zeros(2), torch.zeros(2)), (lambda x: x, lambda x: x), (torch.relu, torch.tanh),
        ([Setting()], [Setting()]), (shared, shared), (None, 0), ({}, None),
    ):  # fmt: skip
        assert not same(Layer(one), Layer(other)), (one, other)


def test_parameters_modules_hooks_and_modes_count() -> None:
    """By shape, type and whether they are trained; by order and which are one; and functions of an instance."""
    plain, frozen, hooked, marked = (nn.Linear(4, 4) for _ in range(4))
    assert same(plain, nn.Linear(4, 4))
    frozen.weight.requires_grad_(False)
    hooked.weight.register_hook(lambda gradient: gradient)
    marked.weight.mark = 1  # type: ignore[attr-defined]
    others = [frozen, hooked, marked, nn.Linear(4, 4).double(), nn.Linear(4, 5), nn.Linear(4, 4, bias=False)]
    assert not any(same(plain, other) for other in others)
    assert not same(nn.BatchNorm1d(4), nn.BatchNorm1d(4, track_running_stats=False))

    two, tied = (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2))
    twice = nn.Sequential(*[plain] * 2)
    assert same(twice, nn.Sequential(*[nn.Linear(4, 4)] * 2))
    assert same(two, tied)
    tied[1].weight = tied[0].weight
    assert not any(same(two, other) for other in (tied, twice))
    assert not same(nn.Sequential(nn.ReLU(), nn.Tanh()), nn.Sequential(nn.Tanh(), nn.ReLU()))

    layer, hooked_layer, evaluated, replaced = (Layer(0) for _ in range(4))
    hooked_layer.register_forward_hook(lambda module, inputs, outputs: outputs * 2)
    evaluated.inner.eval()
    replaced.forward = lambda x: x  # type: ignore[method-assign]
    assert not any(same(layer, other) for other in (hooked_layer, evaluated, replaced))
