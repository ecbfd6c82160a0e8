"""Random numbers, and initial weights, that do not know how the model was cut.

The paper promises that the number of partitions changes nothing (sections 1 and 7). With dropout that holds only if a
layer draws the same mask wherever it runs and however often its forward is repeated. Lingvo derives its dropout seed
from step and micro-batch (`lingvo/core/gpipe.py`); here the seed is mixed from (run seed, step, micro-batch among
those of all replicas, layer), so no generator state is ever saved or restored: a recomputation just starts from the
same seed again.

The weights of a layer come from the run's seed and the layer's global name; a peer that seeds once per process starts
with other weights for every number of partitions.
"""

import hashlib
from collections.abc import Callable

import torch
from torch import nn

from gpipe_cli.errors import InputError

_MASK = (1 << 64) - 1
NO_VALUES = (
    "has no values, as it was kept from a call on the meta device (by functools.cache, or in a global variable); make "
    "all tensors and modules anew in every call"
)


def mix(*values: int) -> int:
    """One well-spread 64-bit number out of any integers (SplitMix64's finaliser, applied after each value).

    An explicit integer hash and not `hash()`: the result must be the same in every process, Python version and machine.
    """
    state = 0x9E3779B97F4A7C15
    for value in values:
        state = (state ^ (value & _MASK)) & _MASK
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state


def seed_of_name(run_seed: int, name: str) -> int:
    """The seed of a layer's initial weights: from its global name alone, so that weights do not depend on the cut."""
    return mix(run_seed, int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little"))


def seed_generator(device: torch.device, seed: int) -> None:
    """Seed the default generators that `F.dropout` and friends draw from on `device` and on the CPU.

    `torch.manual_seed` would seed every device of the machine; called before each layer of each micro-batch, that
    costs.
    """
    torch.default_generator.manual_seed(seed)  # a layer on a GPU may draw on the CPU
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(seed)


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

    `model` is on the meta device: a process gives memory and weights to its own layers only. Initial values are drawn
    on the CPU, so that they are the same on every kind of device. A model whose layers cannot initialise themselves is
    built by `whole` instead, with all of its values and from the run's seed, and the layers are taken from that. Raises
    InputError for a layer that cannot initialise itself, or was not built anew.
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
        for path, tensor in (*layer.named_parameters(), *layer.named_buffers()):
            if tensor.is_meta:
                raise InputError(f"model.target: {name}.{path} {NO_VALUES}")
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
            raise InputError(
                f"layer {where} ({type(module).__name__}) has parameters or buffers but no reset_parameters(); "
                "give it one that sets them all, so that every process can initialise its own layers alone"
            )
        reset()
