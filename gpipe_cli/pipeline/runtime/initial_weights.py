"""Initial weights that are the same for every cut: a layer's depend only on the run's seed and the layer's global name.
(With a seed per process, each number of partitions would start from other weights.)
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from copy import deepcopy
from itertools import chain

import torch
from torch import nn

from gpipe_cli.errors import InputError
from gpipe_cli.models.skips import SkipSequential, Stash
from gpipe_cli.pipeline.runtime.randomness import mix, seed_generator
from gpipe_cli.pipeline.runtime.tied_weights import Tie, set_parameter, uses_in

NO_VALUES = (
    "has no values, as it was kept from a call on the meta device (by functools.cache, or in a global variable); "
    "create all tensors and modules in every call"
)


def seed_of_name(run_seed: int, name: str) -> int:
    """The seed of a layer's initial weights: from its global name alone, so that weights do not depend on the cut."""
    return mix(run_seed, int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little"))


def materialize(
    model: nn.Sequential,
    first_layer: int,
    layers: int,
    *,
    run_seed: int,
    build_whole: Callable[[], nn.Sequential] | None = None,
    ties: Sequence[Tie] = (),
) -> nn.Sequential:
    """Initialise `layers` layers of `model`, from number `first_layer` on; they keep their global names.

    `model` is on the meta device: a process allocates and initialises only its own layers. They are on the CPU, so that
    their values are the same for every kind of device. If layers cannot initialise themselves, `build_whole` builds the
    model instead, with all values and from the run's seed, and the layers are taken from that. A tied weight has the
    values that the first layer with it gives it; all its uses are the same parameter. Raises InputError for a layer
    that cannot initialise itself, or that has tensors of an earlier call on the meta device.
    """
    if build_whole is not None:
        seed_generator(torch.device("cpu"), mix(run_seed))
        model = build_whole()
    stage = SkipSequential() if any(isinstance(layer, Stash) for layer in model) else nn.Sequential()
    for name, layer in list(model.named_children())[first_layer : first_layer + layers]:
        # copies, as a later stage of this process may need the first layer with a tied weight as it was described
        stage.add_module(name, deepcopy(layer) if ties and build_whole is None else layer)
        if build_whole is None:
            _initialise(name, stage.get_submodule(name), run_seed)
    for tie in ties:
        if used := uses_in(tie, stage):
            holder: nn.Sequential = stage
            first = tie.layers[0]
            if build_whole is None and first not in stage._modules:
                holder = nn.Sequential(OrderedDict({first: deepcopy(model.get_submodule(first))}))
                _initialise(first, holder.get_submodule(first), run_seed)
            value = holder.get_parameter(tie.name if first in holder._modules else used[0][0])
            # a copy, as other stages in this process also have the weight
            parameter = nn.Parameter(value.detach().clone(), value.requires_grad)
            set_parameter(stage, list(chain.from_iterable(used)), parameter)
    for name, tensor in (*stage.named_parameters(), *stage.named_buffers()):
        if tensor.is_meta:
            raise InputError(f"model.target: {name} {NO_VALUES}")
    return stage


@torch.no_grad()
def _initialise(name: str, layer: nn.Module, run_seed: int) -> None:
    """Allocate a layer on the CPU and set all its values, which depend on the run's seed and the layer's name only: by
    its own `initialise_weights`, or else by the `reset_parameters` of its modules."""
    layer.to_empty(device="cpu")
    seed_generator(torch.device("cpu"), seed_of_name(run_seed, name))
    if (initialise := getattr(layer, "initialise_weights", None)) is not None:
        initialise()
        return
    for path, module in layer.named_modules():
        if not [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            continue
        reset = getattr(module, "reset_parameters", None)
        if reset is None:
            where = f"{name}.{path}" if path else name
            raise InputError(
                f"layer {where} ({type(module).__name__}) has parameters or buffers but no reset_parameters(); "
                "give it one that sets them all, so that every process can initialise its own layers alone"
            )
        reset()
