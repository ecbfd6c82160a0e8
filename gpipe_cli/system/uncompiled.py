"""Keeps torch's compiler, whose import takes a second or two, out of processes that compile nothing."""

import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache, wraps
from types import FunctionType
from typing import Any, TypeVar, cast

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])


def skip_compiler(function: _Function) -> _Function:
    """The function, run as it is where a program compiles its caller: the compiler would enter the engine, and compile
    each of its functions again and again."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (torch.compiler.disable(function) if torch.compiler.is_compiling() else function)(*args, **kwargs)

    return cast(_Function, call)


@cache
def avoid_dynamo_import() -> None:
    """Let operations on the meta device, and the constructors of optimizers, run without torch._dynamo.

    Torch wraps the functions that its compiler must not enter. At the first call of each, the wrapper imports the
    compiler, and keeps what is to be called instead in an attribute of the function. Here that is the function itself.
    In a torch that does this in another way, the compiler is imported.
    """
    places = [
        torch.optim.Optimizer,
        *(module for name, module in sys.modules.items() if name.startswith("torch._refs")),
    ]
    waiting: list[Any] = [value for place in places for value in vars(place).values()]
    seen = set()
    with suppress(AttributeError, ValueError):
        wrapper = torch._disable_dynamo(lambda: None).__code__
        while waiting:
            function = waiting.pop()
            if not isinstance(function, FunctionType) or function in seen:
                continue
            seen.add(function)
            inner = [cell.cell_contents for cell in function.__closure__ or ()]
            waiting += inner
            for wrapped in inner if function.__code__ is wrapper else ():
                if isinstance(wrapped, FunctionType):
                    wrapped.__dynamo_disable = wrapped  # type: ignore[attr-defined]  # torch reads it
