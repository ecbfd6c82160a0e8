"""Hides the GPUs from CUDA in a process that only reads shapes, as the parent of the workers does."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_VARIABLE = "CUDA_VISIBLE_DEVICES"
_LOCK = threading.RLock()


@contextmanager
def hidden_gpus() -> Iterator[None]:
    """While active, CUDA finds no GPU, as on a machine without GPUs, if nothing in this process has asked it before.

    Otherwise the first backward of a process, even on the meta device, starts a thread for each GPU, and no fork of the
    process can call backward; fake tensors of a GPU open a context on GPU 0; and Adam's step asks which stream is
    current. CUDA remembers its answer: this process cannot use a GPU afterwards, but processes that it starts can.
    Meanwhile do not call `system.gpus.usable_gpus`, which reads the same variable.
    """
    with _LOCK:  # two threads would restore each other's values
        before = os.environ.get(_VARIABLE)
        os.environ[_VARIABLE] = ""
        try:
            # Autograd counts the devices once, at the first backward. This comes before any fake tensor: without GPUs,
            # fake tensors replace CUDA's part of torch with another, which counts as a device.
            empty = torch.empty(0, device="meta", requires_grad=True)
            torch.autograd.grad(empty.sum(), empty)
            yield
        finally:
            if before is None:
                del os.environ[_VARIABLE]
            else:
                os.environ[_VARIABLE] = before
