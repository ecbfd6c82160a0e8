"""Keeps torch from importing its compiler, `torch._dynamo`, in processes that compile nothing: 2.5 s of computing.

Torch's functions for shapes, and the methods of its optimizers, are wrapped (`torch._compile`): the first call imports
the compiler, only to tell it not to compile them. The wrapper looks for a mark on the function first, which is made
here. With a version of torch that has other wrappers or another mark, nothing changes.
"""

from contextlib import suppress
from inspect import isfunction
from typing import Any

import torch

_MARK = "__dynamo_disable"


def leave_compiler_out() -> None:
    waiting: list[Any] = [*vars(torch._refs).values(), *vars(torch._refs.nn.functional).values()]
    waiting += vars(torch.optim.Optimizer).values()
    while waiting:
        for cell in getattr(waiting.pop(), "__closure__", None) or ():
            with suppress(ValueError):  # an empty cell
                if isfunction(function := cell.cell_contents) and not hasattr(function, _MARK):
                    setattr(function, _MARK, function)
                    waiting.append(function)
