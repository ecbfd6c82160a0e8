"""A network of the user's own: any function that returns a sequence of layers. The paper pipelines any such sequence.

The function is named as `package.module:function` and found from the current directory, as `python -m` finds modules.
"""

import importlib
import inspect
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from gpipe_cli.config.typed import one_line

_TARGET = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


class _RefusedError(Exception):
    """What is wrong with the function that the user named, and what to do."""


def build_custom(target: str, arguments: Mapping[str, object]) -> nn.Sequential:
    """Call the function that `target` names, `package.module:function`, with `arguments`; returns its layers.

    The current directory is put in front of Python's search path and stays there, for modules imported later.

    Raises ValueError, in one line, if there is no such function, if the arguments are not its own, or if what it
    returns is not a sequence of layers or has nothing to train, or if it fails on the meta device, on which the layers
    are described. What it raises elsewhere is not touched.
    """
    try:
        function = _find(target)
        _check_arguments(function, arguments)
        model = _call(function, arguments)
        _check_layers(model)
    except _RefusedError as error:
        raise ValueError(f"model.target={target}: {error}") from error
    return model


def _find(target: str) -> Any:
    if not _TARGET.fullmatch(target):
        raise _RefusedError("not of the form package.module:function; use e.g. my_models:build")
    module_name, _, name = target.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    importlib.invalidate_caches()  # it may have been written a moment ago
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise _RefusedError(
            f"there is no module {error.name}, neither in {here} nor installed; "
            "run the command where the module is, or install it"
        ) from error
    except (Exception, SystemExit) as error:  # the module's own code ran, and may raise anything
        raise _RefusedError(
            f"{module_name} cannot be imported ({type(error).__name__}: {one_line(error)}); "
            f"see what `python -c 'import {module_name}'` says"
        ) from error
    if not hasattr(module, name):
        place = module.__file__ or "a folder without a file of its own"
        raise _RefusedError(f"{module_name} ({place}) has no {name}; name a function that it defines")
    function = getattr(module, name)
    if not callable(function):
        kind = type(function).__name__
        raise _RefusedError(
            f"{name} is not a function but of type {kind}; name a function that returns an nn.Sequential"
        )
    return function


def _check_arguments(function: Any, arguments: Mapping[str, object]) -> None:
    """Before the call, whose own TypeError could come from within the function."""
    signature = inspect.signature(function)
    try:
        signature.bind(**arguments)
    except TypeError as error:
        takes = ", ".join(map(str, signature.parameters.values()))
        raise _RefusedError(f"the arguments do not fit, {error}; it takes ({takes})") from error


def _call(function: Any, arguments: Mapping[str, object]) -> Any:
    try:
        return function(**arguments)
    except (Exception, SystemExit) as error:
        if not torch.empty(0).is_meta:
            raise
        raise _RefusedError(
            f"fails when it is called on the meta device, where tensors have no values "
            f"({type(error).__name__}: {one_line(error)}); no .item(), no tolist() and no loading of files there"
        ) from error


def _check_layers(model: Any) -> None:
    """Raise _RefusedError for what is not only a sequence, has no shapes yet, or has nothing to train."""
    kind = type(model).__name__
    if not isinstance(model, nn.Sequential):
        raise _RefusedError(
            f"returned an object of type {kind}; return an nn.Sequential, whose children are the layers"
        )
    if len(model) == 0:
        raise _RefusedError("returned an nn.Sequential without layers; put at least one in it")
    own = next((name for name, _ in (*model.named_parameters(recurse=False), *model.named_buffers(recurse=False))), "")
    hooks = (model._forward_pre_hooks, model._forward_hooks, model._backward_pre_hooks, model._backward_hooks)
    for found, what in (
        (type(model).forward is not nn.Sequential.forward or "forward" in vars(model), "a forward of its own"),
        (own, f"{own} of its own"),
        (any(hooks), "hooks of its own"),
    ):
        if found:
            raise _RefusedError(
                f"the {kind} that it returns has {what}, and a pipeline runs the layers only; "
                "put that into one of the layers"
            )
    for name, module in model.named_modules():
        if any(map(is_lazy, (*module.parameters(recurse=False), *module.buffers(recurse=False)))):
            raise _RefusedError(
                f"layer {name} ({type(module).__name__}) has no shapes before its first forward, and the cut is made "
                "from them; give its shapes, as of nn.Linear(in_features, out_features)"
            )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise _RefusedError("its layers have no parameters, there is nothing to train")
