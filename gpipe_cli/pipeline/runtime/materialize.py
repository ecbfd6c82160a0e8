"""From a model on the meta device to the real layers of one stage, and no others.

Every process describes the whole model without memory, then gives memory and initial weights to its own layers only.
The weights of a layer come from the run's seed and the layer's global name, so they are the same for every cut; a peer
that seeds once per process starts with other weights for every number of partitions.
"""

from collections.abc import Callable

import torch
from torch import nn

from gpipe_cli.pipeline.runtime.randomness import mix, seed_generator, seed_of_name


def materialize(
    model: nn.Sequential,
    first_layer: int,
    layers: int,
    *,
    run_seed: int,
    device: torch.device,
    whole: Callable[[], nn.Sequential] | None = None,
) -> nn.Sequential:
    """`layers` layers of `model` from number `first_layer` on, initialised, on `device`, under their global names.

    `model` is on the meta device; the chosen layers get memory and weights. Initial values are drawn on
    the CPU, so that they are the same on every kind of device. A model whose layers cannot initialise themselves is
    built by `whole` instead, with all of its values and from the run's seed, and the layers are taken from that.
    Raises ValueError for a layer that cannot initialise itself.
    """
    if whole is not None:
        seed_generator(torch.device("cpu"), mix(run_seed))
        model = whole()
    stage = nn.Sequential()
    for name, layer in list(model.named_children())[first_layer : first_layer + layers]:
        if whole is None:
            layer.to_empty(device="cpu")
            seed_generator(torch.device("cpu"), seed_of_name(run_seed, name))
            _initialise(name, layer)
        stage.add_module(name, layer.to(device))
    return stage


@torch.no_grad()
def _initialise(name: str, layer: nn.Module) -> None:
    for path, module in layer.named_modules():
        if not [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            continue
        reset = getattr(module, "reset_parameters", None)
        if reset is None:
            where = f"{name}.{path}" if path else name
            raise ValueError(
                f"layer {where} ({type(module).__name__}) has parameters or buffers but no reset_parameters(); "
                "give it one that sets them all, so that every process can initialise its own layers alone"
            )
        reset()
