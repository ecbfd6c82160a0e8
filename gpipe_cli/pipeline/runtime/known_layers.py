"""Layers of torch.nn that are known to need fewer checks, which are most of a step's cost where layers are small.

Known are modules of exactly these types, without hooks, replaced forwards or parameters of another type: what a
subclass or a hook does is not known, and such a layer gets all checks (`stage.py`).
"""

from typing import NamedTuple

from torch import nn

_ELEMENTWISE = frozenset({
    nn.CELU, nn.ELU, nn.GELU, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.Identity, nn.LeakyReLU, nn.LogSigmoid,
    nn.Mish, nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU, nn.Sigmoid, nn.Softplus, nn.Softsign, nn.Tanh,
})  # fmt: skip
_DRAW_NOTHING = _ELEMENTWISE | {
    nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AvgPool1d, nn.AvgPool2d, nn.BatchNorm1d, nn.BatchNorm2d, nn.Conv1d,
    nn.Conv2d, nn.Embedding, nn.Flatten, nn.GroupNorm, nn.LayerNorm, nn.Linear, nn.MaxPool1d, nn.MaxPool2d, nn.RMSNorm,
    nn.Sequential, nn.Unflatten,
}  # fmt: skip
_RETURN_DENSE_GRADIENTS = _ELEMENTWISE - {nn.Identity} | {nn.LayerNorm, nn.Linear}


class StageLayer(NamedTuple):
    """A layer of a stage, and what is known of it."""

    name: str
    module: nn.Module
    draws: bool  # whether it may draw random numbers, so that generators are seeded before it
    has_dense_gradient: bool  # whether the gradient of its output is dense, as far as the next layer returns it
    is_plain: bool  # whether it maps a dense tensor to another, with such a gradient, and leaves its input as it was


def layers_of(stage: nn.Sequential, *, compiled: bool = False) -> list[StageLayer]:
    """The layers of a stage, before anything replaces their forwards. Of `compiled` layers no gradient's strides are
    known, as the compiler may choose them."""
    named = list(stage.named_children())
    following = [not compiled and returns_dense_gradients(layer) for _, layer in named[1:]] + [False]
    return [
        StageLayer(name, layer, not draws_nothing(layer), dense, dense and makes_dense_outputs(layer))
        for (name, layer), dense in zip(named, following, strict=True)
    ]


def draws_nothing(layer: nn.Module) -> bool:
    """Whether a layer is known to draw no random numbers."""
    return all(_is_as_in_torch(module) and type(module) in _DRAW_NOTHING for module in layer.modules())


def returns_dense_gradients(layer: nn.Module) -> bool:
    """Whether, for a dense tensor of other than four dimensions, a layer is known to return a gradient of its strides,
    at the beginning of a separate storage, if the gradient of its output is dense."""
    while type(layer) is nn.Sequential and len(layer) and _is_as_in_torch(layer):
        layer = layer[0]
    return _is_as_in_torch(layer) and type(layer) in _RETURN_DENSE_GRADIENTS


def makes_dense_outputs(layer: nn.Module) -> bool:
    """Whether a layer is known to return a dense tensor in separate memory for a dense input, with as many dimensions,
    and not to change that in place."""
    return _is_as_in_torch(layer) and type(layer) in _RETURN_DENSE_GRADIENTS and not getattr(layer, "inplace", False)


def _is_as_in_torch(module: nn.Module) -> bool:
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return (
        not any(hooks)
        and "forward" not in vars(module)
        and all(parameter is None or type(parameter) is nn.Parameter for parameter in module._parameters.values())
    )
