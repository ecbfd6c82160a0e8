"""Random numbers that do not know how the model was cut.

The paper promises that the number of partitions changes nothing (sections 1 and 7). With dropout that holds only if a
layer draws the same mask wherever it runs and however often its forward is repeated. Lingvo derives its dropout seed
from step and micro-batch (`lingvo/core/gpipe.py`); here the seed is mixed from (run seed, step, micro-batch among
those of all replicas, layer), so no generator state is ever saved or restored: a recomputation just starts from the
same seed again.
"""

import torch

_MASK = (1 << 64) - 1


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


def seed_layer(device: torch.device, run_seed: int, step: int, micro_batch: int, layer: int) -> None:
    """Seed the generators before layer number `layer` runs on a micro-batch, counted over all replicas."""
    seed_generator(device, mix(run_seed, step, 0, micro_batch, layer))


def seed_generator(device: torch.device, seed: int) -> None:
    """Seed the default generators that `F.dropout` and friends draw from on `device` and on the CPU.

    `torch.manual_seed` would seed every device of the machine; called before each layer of each micro-batch, that
    costs.
    """
    torch.default_generator.manual_seed(seed)  # a layer on a GPU may draw on the CPU
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(seed)
