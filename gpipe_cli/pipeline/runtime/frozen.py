"""Layers that are not trained, as in the fine-tuning of paper section 4.

A frozen module stays in evaluation mode: its parameters keep their values, its batch norms use their running statistics
and do not change them, its dropout drops nothing. Gradients still pass through it to the layers before. `nn.Module` has
no such state: `train()` puts all of a model in training mode. So modules that stay in evaluation mode carry a mark, and
the engine changes modes only by `set_training`.
"""

from collections.abc import Collection
from typing import NamedTuple

from torch import nn

_MARK = "stays_in_evaluation"


class Frozen(NamedTuple):
    """The modules and parameters that are not trained, by global names."""

    modules: tuple[str, ...] = ()  # layers, or modules inside them, that stay in evaluation mode
    parameters: tuple[str, ...] = ()  # parameters of other modules, which just get no gradient


def freeze(sequence: nn.Sequential, frozen: Frozen) -> None:
    """Freeze those modules and parameters named by `frozen` that are in `sequence`, a model or a stage."""
    layers = dict(sequence.named_children())
    for path in frozen.modules:
        if path.partition(".")[0] in layers:
            module = sequence.get_submodule(path)
            for inner in module.modules():
                setattr(inner, _MARK, True)
            module.requires_grad_(False).eval()
    for path in frozen.parameters:
        if path.partition(".")[0] in layers:
            sequence.get_parameter(path).requires_grad_(False)


def keep_in_evaluation(module: nn.Module, names: Collection[str]) -> None:
    """Let `set_training` keep the modules of these names, and no others, in evaluation mode."""
    named = list(module.named_modules(remove_duplicate=False))
    for _, inner in named:
        vars(inner).pop(_MARK, None)
    for name, inner in named:
        if name in names:
            setattr(inner, _MARK, True)


def set_training(module: nn.Module, training: bool) -> None:
    """`module.train(training)`, except that marked modules stay in evaluation mode."""
    module.train(training)
    if training:
        for inner in module.modules():
            if getattr(inner, _MARK, False):
                inner.training = False
