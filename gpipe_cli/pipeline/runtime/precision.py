"""The precision that layers compute in: float32, or bfloat16 where torch's autocast uses it; weights stay float32.

Departs from the paper, which does not state its precision; TPUs multiply in bfloat16. Autocast's cache of cast weights
is off: a cast would be shared inside a stage but not across a cut, so gradients would be summed in another order. So
each graph that is kept has its own copy of the cast weights, which a plan counts among the activations: a copy with
`recompute=always`, and with `except_last` in the schedule gpipe; up to M with `never`.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def autocast(device: torch.device, dtype: torch.dtype | None) -> Iterator[None]:
    """While active, products and convolutions compute in `dtype`; None: in the type of their inputs.

    Sets autocast's state itself: `torch.autocast` ignores CUDA on a machine without a GPU, where runs may be planned.
    """
    if dtype is None:
        yield
        return
    kind = device.type
    enabled, dtype_before = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    caches = torch.is_autocast_cache_enabled()
    torch.set_autocast_enabled(kind, True)
    torch.set_autocast_dtype(kind, dtype)
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype_before)
        torch.set_autocast_cache_enabled(caches)
