"""Seeds for everything random in the data: computed from what identifies a number, never from a running generator.

Training does not depend on the number of partitions (paper, Sections 1 and 7); to show it, sample i of epoch e must be
the same tensor whatever loads it: this process or a worker, from the start or after a resume. A seed that is a
function of (run seed, epoch, index) gives that; a generator with a state does not.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def seed_of(purpose: str, *numbers: int) -> int:
    """Mix a purpose ("order", "augmentation", …) and numbers into a seed in [0, 2**63).

    The purpose keeps uses apart: epoch 3's order and image 3's noise must not be drawn from the same numbers.
    """
    text = " ".join([purpose, *map(str, numbers)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Run the block with torch's default CPU generator started from `seed`, then restore its old state.

    Needed because torchvision's transforms draw from the default generator only. `torch.manual_seed` would also
    re-seed every accelerator.
    """
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(state)
