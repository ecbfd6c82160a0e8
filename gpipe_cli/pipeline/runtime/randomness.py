"""Random numbers that do not depend on how the model is cut.

The paper promises that the number of partitions changes nothing (sections 1 and 7). With dropout that holds only if a
layer draws the same mask wherever it runs and however often its forward is repeated. Lingvo derives its dropout seed
from step and micro-batch (`lingvo/core/gpipe.py`); here the seed is mixed from (run seed, step, micro-batch counted
over all replicas, layer), so no generator state is ever saved or restored: a recomputation starts from the same seed.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from gpipe_cli.system.accelerator import generators

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mix(*values: int) -> int:
    """Hash any integers to a 64-bit number (SplitMix64's finaliser, applied after each value).

    Unlike `hash()`, it returns the same in every process and Python version and on every machine.
    """
    state = _GOLDEN
    for value in values:
        state = mix_in(state, value)
    return state


def mix_in(state: int, value: int) -> int:
    """`mix(*values, value)`, where `state` is `mix(*values)`."""
    state = ((state ^ (value & _MASK)) + _GOLDEN) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


def step_seed(run_seed: int, step: int) -> int:
    """The seed of a step, from which `mix_in` derives each micro-batch's by its number over all replicas, and from that
    each layer's by its number."""
    return mix(run_seed, step, 0)


def seed_generator(device: torch.device, seed: int) -> None:
    """Seed the default generators, which `F.dropout` and others draw from, of `device` and of the CPU.

    `torch.manual_seed` would seed all devices of the machine, too slow before each layer of each micro-batch.
    """
    for generator in generators(device):
        generator.manual_seed(seed)


@contextmanager
def restoring_rng_state(devices: Iterable[torch.device]) -> Iterator[None]:
    """Restores the default generators, for a program that also draws from them: otherwise each process would continue
    from the seed of another layer."""
    states = [(generator, generator.get_state()) for device in devices for generator in generators(device)]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)
