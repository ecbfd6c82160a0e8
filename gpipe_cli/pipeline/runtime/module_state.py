"""The state that modules hold besides their parameters, restored after runs that must leave it as it was."""

import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
from torch import nn

from gpipe_cli.pipeline.runtime.boundary import same_bits

Attributes: TypeAlias = list[tuple[dict[str, Any], dict[str, Any]]]
"""The attributes and the buffers of modules: each dict of a module, and a copy of what was in it."""


@contextmanager
def restoring_state(module: nn.Module) -> Iterator[Attributes]:
    """Restores buffers, attributes and gradients below `module`; inside, gradients begin as None. Attributes that are
    taken out of the list that this gives stay as they are then."""
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    # attributes and buffers are often replaced rather than changed in place
    attributes = attributes_of(module)
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield attributes
    finally:
        for entries, entries_before in attributes:
            entries.clear()
            entries.update(entries_before)
        for buffer, value in buffers:
            if not same_bits(buffer, value):  # an unchanged buffer may not be writable
                buffer.data.copy_(value)  # unseen by autograd, which may need the buffer for a backward
        for parameter, gradient in gradients:
            parameter.grad = gradient


def attributes_of(module: nn.Module) -> Attributes:
    return [(entries, dict(entries)) for inner in module.modules() for entries in (vars(inner), inner._buffers)]


def python_and_numpy_rng_state() -> bytes:
    """The states of the generators that torch does not control and no stage seeds."""
    return pickle.dumps((random.getstate(), np.random.get_state(legacy=True)))
