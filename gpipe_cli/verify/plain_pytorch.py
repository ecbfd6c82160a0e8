"""The same mini-batch in plain PyTorch: what `gpipe check` compares a pipeline with that nothing has been done to.

All variants of a pipeline could be wrong in the same way. So the model is built anew and called as its user would call
it: one call of `nn.Sequential` for each micro-batch, and autograd. Only the seeds are those of a pipeline, set before
each layer, or else dropout would be another.
"""

import torch
from torch import nn

from gpipe_cli.assembly.build import MEMORY_FORMATS, build_model, real_model
from gpipe_cli.assembly.loss import CrossEntropy
from gpipe_cli.config.settings import TrainConfig
from gpipe_cli.models.drop_path import set_progress
from gpipe_cli.pipeline.runtime.boundary import Tensors, as_tuple, as_value
from gpipe_cli.pipeline.runtime.digests import digest
from gpipe_cli.pipeline.runtime.frozen import freeze, set_training
from gpipe_cli.pipeline.runtime.materialize import materialize
from gpipe_cli.pipeline.runtime.micro_batch import split_all
from gpipe_cli.pipeline.runtime.randomness import mix, seed_generator
from gpipe_cli.planner.placement import Placement
from gpipe_cli.verify.differences import Digests, Place, What

CPU = torch.device("cpu")


def build_untouched(config: TrainConfig, placement: Placement) -> nn.Sequential:
    """The model with the values that a run begins with, in training mode, where the only stage of `placement` is."""
    device = torch.device(placement.devices[0])
    whole = real_model(config, pretrained=config.init_from is None)
    if whole is None:
        model = build_model(config)
        model = materialize(model, 0, len(model), run_seed=config.seed, device=device)
    else:
        seed_generator(CPU, mix(config.seed))
        model = whole().to(device)
    freeze(model, placement.frozen)
    model.to(memory_format=MEMORY_FORMATS[placement.memory_format])
    set_training(model, True)
    set_progress(model, 1.0)
    return model


def run_untouched(
    model: nn.Sequential, run_seed: int, inputs: Tensors, sizes: tuple[int, ...], objective: CrossEntropy
) -> Digests:
    """Run a mini-batch `inputs` (N, ...): returns the digests of the layers' outputs, and leaves gradients in the
    parameters, added up as by schedule gpipe."""
    device, current = inputs[0].device, 0
    digests: Digests = {}

    def watch(number: int, name: str, layer: nn.Module) -> None:
        def begins(module: nn.Module, given: object) -> None:
            seed_generator(device, mix(run_seed, 0, 0, current, number))

        def ended(module: nn.Module, given: object, output: torch.Tensor | Tensors) -> None:
            digests[Place(What.OUTPUT, number, current, name)] = digest(as_tuple(output))

        layer.register_forward_pre_hook(begins, prepend=True)
        layer.register_forward_hook(ended)

    for number, (name, layer) in enumerate(model.named_children()):
        watch(number, name, layer)
    losses = []
    for current, piece in enumerate(split_all(inputs, sizes)):
        outputs = as_tuple(model(as_value(piece)))
        losses.append(objective.loss(current, outputs))
        objective.observe(current, outputs, losses[-1].detach())
    for loss in reversed(losses):
        loss.backward()
    return digests
