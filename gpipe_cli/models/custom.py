"""A network of the user's own: any function that returns a sequence of layers. The paper pipelines any such sequence.

The function is named as `package.module:function` and found from the current directory, as `python -m` finds modules.
"""

import importlib
import inspect
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from gpipe_cli.config.typed import one_line

_TARGET = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")


def build_custom(target: str, arguments: Mapping[str, object]) -> nn.Sequential:
    """Call the function that `target` names, `package.module:function`, with `arguments`; returns its layers.

    The current directory is put in front of Python's search path and stays there, for modules imported later.

    Raises ValueError, in one line, if there is no such function, if the arguments are not its own, or if what it
    returns is not a sequence of layers or has nothing to train, or if it fails on the meta device, on which the layers
    are described. What it raises elsewhere is not touched.
    """
    if not _TARGET.fullmatch(target):
        raise ValueError(f"model.target={target}: not of the form package.module:function; use e.g. my_models:build")
    module_name, _, name = target.partition(":")
    module = _import(target, module_name)
    if not hasattr(module, name):
        raise ValueError(
            f"model.target={target}: {module_name} ({module.__file__ or 'a folder without a file of its own'}) has no "
            f"{name}; name a function that it defines"
        )
    function = getattr(module, name)
    if not callable(function):
        raise ValueError(
            f"model.target={target}: {name} is not a function but of type {type(function).__name__}; "
            "name a function that returns an nn.Sequential"
        )
    _check_arguments(target, function, arguments)
    try:
        model = function(**arguments)
    except (Exception, SystemExit) as error:
        if not torch.empty(0).is_meta:
            raise
        raise ValueError(
            f"model.target={target}: fails when it is called on the meta device, where tensors have no values "
            f"({type(error).__name__}: {one_line(error)}); no .item(), no tolist() and no loading of files there"
        ) from error
    if not isinstance(model, nn.Sequential):
        raise ValueError(
            f"model.target={target}: returned an object of type {type(model).__name__}; "
            "return an nn.Sequential, whose children are the layers"
        )
    if len(model) == 0:
        raise ValueError(f"model.target={target}: returned an nn.Sequential without layers; put at least one in it")
    _check_layers(target, model)
    return model


def _check_layers(target: str, model: nn.Sequential) -> None:
    """Raise ValueError for layers that cannot be told apart from the model, have no shapes yet, or nothing to train."""
    own = next((name for name, _ in (*model.named_parameters(recurse=False), *model.named_buffers(recurse=False))), "")
    hooks = (model._forward_pre_hooks, model._forward_hooks, model._backward_pre_hooks, model._backward_hooks)
    for found, what in (
        (type(model).forward is not nn.Sequential.forward or "forward" in vars(model), "a forward of its own"),
        (own, f"{own} of its own"),
        (any(hooks), "hooks of its own"),
    ):
        if found:
            raise ValueError(
                f"model.target={target}: the {type(model).__name__} that it returns has {what}, and a pipeline runs "
                "the layers only; put that into one of the layers"
            )
    for name, module in model.named_modules():
        tensors = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        if any(is_lazy(tensor) for tensor in tensors):
            raise ValueError(
                f"model.target={target}: layer {name} ({type(module).__name__}) has no shapes before its first "
                "forward, and the cut is made from them; give its shapes, as of nn.Linear(in_features, out_features)"
            )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(f"model.target={target}: its layers have no parameters, there is nothing to train")


def _import(target: str, module_name: str) -> ModuleType:
    """The module of the function. Raises ValueError if it is not there or cannot be imported."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    importlib.invalidate_caches()  # it may have been written a moment ago
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise ValueError(
                f"model.target={target}: there is no module {error.name}, neither in {here} nor installed; "
                "run the command where the module is, or install it"
            ) from error
        raise ValueError(
            f"model.target={target}: {module_name} imports {error.name}, which is not installed; install it"
        ) from error
    except (Exception, SystemExit) as error:  # the module's own code ran, and may raise anything
        raise ValueError(
            f"model.target={target}: {module_name} cannot be imported ({type(error).__name__}: {one_line(error)}); "
            f"see what `python -c 'import {module_name}'` says"
        ) from error


def _check_arguments(target: str, function: Any, arguments: Mapping[str, object]) -> None:
    """Raise ValueError if a call with `arguments` does not fit. A TypeError of the call could come from within."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some built-in functions have none
        return
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise ValueError(
            f"model.target={target}: the arguments do not fit, {error}; it takes "
            f"({', '.join(map(str, signature.parameters.values()))})"
        ) from error
