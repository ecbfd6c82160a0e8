"""The bits of tensors in a few characters: what two runs are compared by where they are not in one process (law 1)."""

import hashlib

import torch

from gpipe_cli.pipeline.runtime.boundary import Tensors


def digest(tensors: Tensors) -> str:
    """The same for the same shapes, types and bits, on whatever device and in whatever layout."""
    found = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        found.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        found.update(_bits(tensor).cpu().numpy().data)
    return found.hexdigest()


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors on one device have the same digest; where they lie in memory, and how, does not matter."""
    return one.dtype is other.dtype and one.shape == other.shape and torch.equal(_bits(one), _bits(other))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)
