"""Layers that are not trained, as in the fine-tuning of paper section 4, and what stays as it is in them.

A frozen module works as in evaluation all the time: its parameters keep their values, its batch norms use their running
statistics and keep them, nothing in it is dropped. Gradients still pass through it to the layers before. `nn.Module`
has no such state: `train()` on a model puts all of it in training mode. So frozen modules carry a mark, and the engine
changes modes by `set_training` only.
"""

from dataclasses import dataclass

from torch import nn

_MARK = "is_frozen"


@dataclass(frozen=True)
class Frozen:
    """What of a model is not trained, by global names."""

    modules: tuple[str, ...] = ()  # layers, or modules inside them: as in evaluation
    parameters: tuple[str, ...] = ()  # outside of these: no gradient, and no more than that


def freeze(sequence: nn.Sequential, frozen: Frozen) -> None:
    """Freeze what `frozen` names among the layers of `sequence`: those of a whole model, or of one stage."""
    layers = dict(sequence.named_children())
    for path in frozen.modules:
        if path.partition(".")[0] in layers:
            module = sequence.get_submodule(path)
            setattr(module, _MARK, True)
            module.requires_grad_(False).eval()
    for path in frozen.parameters:
        if path.partition(".")[0] in layers:
            sequence.get_parameter(path).requires_grad_(False)


def set_training(module: nn.Module, training: bool) -> None:
    """`module.train(training)`, but for what is frozen: that stays in evaluation mode."""
    module.train(training)
    if training:
        for inner in module.modules():
            if getattr(inner, _MARK, False):
                inner.eval()
