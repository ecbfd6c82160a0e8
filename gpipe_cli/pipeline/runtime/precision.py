"""The numbers that layers compute with: float32, or bfloat16 where torch's autocast has that; weights stay float32.

Departs from the paper, which says nothing of its numbers; TPUs multiply in bfloat16. Nothing is cast once for several
uses: such a cast would be shared inside of a stage and not across a cut, and gradients be summed in another order. So
each micro-batch that keeps its graph keeps a copy of the weights with it, which a plan counts among its activations:
as many as there are graphs: one with `recompute=always`, and with `except_last` in the schedule gpipe, up to M with
`never`.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def autocast(device: torch.device, dtype: torch.dtype | None) -> Iterator[None]:
    """Inside, products and convolutions compute in `dtype`; None: in what they are given.

    `torch.autocast` does nothing for CUDA where there is no GPU; what is planned here may run elsewhere.
    """
    if dtype is None:
        yield
        return
    kind = device.type
    before = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()
    torch.set_autocast_enabled(kind, True)
    torch.set_autocast_dtype(kind, dtype)
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_enabled(kind, before[0])
        torch.set_autocast_dtype(kind, before[1])
        torch.set_autocast_cache_enabled(before[2])
