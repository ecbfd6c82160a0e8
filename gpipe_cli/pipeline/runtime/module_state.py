"""The state that modules hold besides their parameters, restored after runs that must leave it as it was."""

import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from torch import nn

from gpipe_cli.pipeline.runtime.boundary import same_bits


@contextmanager
def restoring_state(module: nn.Module, *, keep_attributes: bool = False, keep_buffers: bool = False) -> Iterator[None]:
    """Restores gradients, attributes and buffers below `module`; while active, gradients begin as None.

    Unless an exception is raised, `keep_attributes` leaves attributes as they are at the end, and `keep_buffers` the
    tensors that replaced buffers; a buffer that was changed in place gets its values back in any case.
    """
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    # attributes and buffers are often replaced rather than changed in place
    entries = [
        (entries, dict(entries), keep)
        for inner in module.modules()
        for entries, keep in ((vars(inner), keep_attributes), (inner._buffers, keep_buffers))
    ]
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    succeeded = False
    try:
        yield
        succeeded = True
    finally:
        for current, before, keep in entries:
            if not (keep and succeeded):
                current.clear()
                current.update(before)
        for buffer, value in buffers:
            if not same_bits(buffer, value):  # an unchanged buffer may not be writable
                buffer.data.copy_(value)  # unseen by autograd, which may need the buffer for a backward
        for parameter, gradient in gradients:
            parameter.grad = gradient


def python_and_numpy_rng_state() -> bytes:
    """The states of the generators that torch does not control and no stage seeds."""
    return pickle.dumps((random.getstate(), np.random.get_state(legacy=True)))
