"""Whether two runs ended with the same weights, bit for bit, whatever number of partitions wrote them (section 1).

A checkpoint has a safetensors file for each stage, and names tensors by layer: the files differ where the tensors do
not.
"""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from gpipe_cli.units import plural

if TYPE_CHECKING:
    from torch import Tensor

LAST = Path("checkpoints", "last")


def final_tensors(run: Path) -> "dict[str, Tensor]":
    """Everything in the last checkpoint of the run in ``run`` by name: weights, averages, the optimizer's state.

    Raises:
        ValueError: it has none.
    """
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = {}
    for file in sorted((run / LAST).glob("*.safetensors")):
        tensors |= load_file(file)
    if not tensors:
        raise ValueError(f"{run / LAST}: no checkpoint to compare; leave checkpoint.every_epochs as it is")
    return tensors


def digest(tensors: "dict[str, Tensor]") -> str:
    """SHA-256 of names, types, shapes and bits, in hexadecimal digits."""
    from torch import uint8

    sha = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        sha.update(tensor.reshape(-1).view(uint8).numpy().tobytes())
    return sha.hexdigest()


def difference(one: "dict[str, Tensor]", other: "dict[str, Tensor]") -> str:
    """How far two sets of weights are from each other: `12 of 345 tensors differ, by 1.2e-07 at most`."""
    if one.keys() != other.keys():
        return f"{plural(len(one.keys() ^ other.keys()), 'tensor')} in one of them only"
    # by their digests: NaN is like NaN here, and 0 unlike -0
    names = [name for name in one if digest({name: one[name]}) != digest({name: other[name]})]
    shaped = [name for name in names if one[name].shape == other[name].shape]
    most = max((float((one[name].double() - other[name].double()).abs().max()) for name in shaped), default=0.0)
    return f"{len(names)} of {len(one)} tensors differ, by {most:.1e} at most"
