"""Modules at paths: a layer cut out of a larger model holds the model's modules under their names in it."""

from torch import nn


def add_submodule_at(owner: nn.Module, path: str, module: nn.Module) -> None:
    """Make `module` the submodule `path` of `owner`, with plain modules between the two."""
    *parents, last = path.split(".")
    for parent in parents:
        if parent not in owner._modules:
            owner.add_module(parent, nn.Module())
        owner = owner.get_submodule(parent)
    owner.add_module(last, module)
