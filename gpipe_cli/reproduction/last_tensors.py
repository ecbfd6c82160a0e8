"""The tensors of a run's last checkpoint, compared bit by bit."""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from gpipe_cli.units import plural

if TYPE_CHECKING:
    from torch import Tensor

DIGITS = 12  # digits of a digest in a table; whole digests are compared


def last_tensors(run: Path) -> "dict[str, Tensor]":
    """All tensors of the last checkpoint of a run by name: weights, averaged weights, optimizer state."""
    from gpipe_cli.training.checkpoint.files import find_checkpoint, read_index, read_tensors

    checkpoint = find_checkpoint(run, "last", "run")
    return read_tensors(checkpoint, read_index(checkpoint).layers, ("model", "optimizer", "ema"))


def digest(tensors: "dict[str, Tensor]") -> str:
    """SHA-256 of the names, dtypes, shapes and bits of ``tensors``, in hexadecimal."""
    from torch import uint8

    sha = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        sha.update(tensor.reshape(-1).view(uint8).numpy().tobytes())
    return sha.hexdigest()


def compare_tensors(first: "dict[str, Tensor]", second: "dict[str, Tensor]") -> str:
    """How far two sets of tensors are apart: `12 of 345 tensors differ, by 1.2e-07 at most`."""
    from gpipe_cli.pipeline.runtime.boundary import same_bits

    if first.keys() != second.keys():
        return f"{plural(len(first.keys() ^ second.keys()), 'tensor')} in one of them only"
    names = [name for name in first if not same_bits(first[name], second[name])]
    shaped = [name for name in names if first[name].shape == second[name].shape]
    most = max((float((first[name].double() - second[name].double()).abs().max()) for name in shaped), default=0.0)
    return f"{len(names)} of {len(first)} tensors differ, by {most:.1e} at most"
