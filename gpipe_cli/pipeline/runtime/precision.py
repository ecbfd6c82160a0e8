"""The numbers that layers compute with: float32, or bfloat16 where torch's autocast has that; weights stay float32.

Departs from the paper, which says nothing of its numbers; TPUs multiply in bfloat16. Nothing is cast once for several
uses: such a cast would be shared inside of a stage and not across a cut, and gradients be summed in another order. So
each micro-batch that keeps its graph keeps a copy of the weights with it, which a plan counts among its activations:
one copy in all with `recompute=except_last` and `always`, up to M with `never`.
"""

from contextlib import AbstractContextManager, nullcontext

import torch


def autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[object]:
    """Inside, products and convolutions compute in `dtype`; None: in what they are given."""
    if dtype is None:
        return nullcontext()
    return torch.autocast(device.type, dtype, cache_enabled=False)
