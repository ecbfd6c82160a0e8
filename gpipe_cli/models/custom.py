"""A user's network: any function that returns a sequence of layers. The paper pipelines any such sequence.

The function is named as `package.module:function` and found from the current directory, as `python -m` finds modules.
"""

import importlib
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from gpipe_cli.config.groups import TARGET
from gpipe_cli.errors import InputError, InvalidSettingError, describe_error
from gpipe_cli.models.skips import SkipSequential


def build_custom(target: str, arguments: Mapping[str, object]) -> nn.Sequential:
    """The layers that the function `target`, `package.module:function`, returns for `arguments`.

    The current directory is put in front of Python's search path and stays there, for modules imported later.

    Raises InvalidSettingError if there is no such function, if it does not take the arguments, if its result cannot be
    a pipeline, or if it fails on the meta device. Its exceptions on other devices are passed on.
    """
    function = _find(target)
    signature = inspect.signature(function)
    try:
        signature.bind(**arguments)  # the call itself could also raise a TypeError from within the function
    except TypeError as error:
        takes = ", ".join(map(str, signature.parameters.values()))
        raise InvalidSettingError(TARGET, target, f"the arguments do not fit, {error}; it takes ({takes})") from error
    try:
        model = function(**arguments)
    except InputError as error:  # from a skip that cannot be made
        raise InvalidSettingError(TARGET, target, str(error)) from error
    except (Exception, SystemExit) as error:
        if not torch.empty(0).is_meta:
            raise
        why = f"fails when it is called on the meta device, where tensors have no values ({describe_error(error)})"
        use = "no .item(), no tolist() and no loading of files there"
        raise InvalidSettingError(TARGET, target, f"{why}; {use}") from error
    if fault := why_not_sequential(model):
        raise InvalidSettingError(TARGET, target, fault)
    return model


def _find(target: str) -> Any:
    module_name, _, name = target.partition(":")
    current_folder = str(Path.cwd())
    if current_folder not in sys.path:
        sys.path.insert(0, current_folder)
    importlib.invalidate_caches()  # or a module written a moment ago may not be found
    try:
        with torch.device("cpu"):  # tensors made by its import are not part of the model
            module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        where = f"there is no module {error.name}, neither in {current_folder} nor installed"
        raise InvalidSettingError(TARGET, target, f"{where}; run the command where it is, or install it") from error
    except (Exception, SystemExit) as error:  # the module's own code ran, and may raise anything
        why = f"{module_name} cannot be imported ({describe_error(error)})"
        raise InvalidSettingError(TARGET, target, f"{why}; try `python -c 'import {module_name}'`") from error
    function = getattr(module, name, None)
    if not callable(function):
        where = f"{module_name} ({module.__file__})"
        why = f"{where} has no function {name}; name one that returns an nn.Sequential"
        raise InvalidSettingError(TARGET, target, why)
    return function


def why_not_sequential(model: Any) -> str:
    """Why a model cannot be a pipeline: it is not a plain sequence, has a module in two places, of which only the first
    would be run, has no shapes yet, or nothing to train; otherwise ""."""
    kind = type(model).__name__
    if not isinstance(model, nn.Sequential):
        return f"is an object of type {kind}, not an nn.Sequential, whose children are the layers"
    extras = [name for name, _ in (*model.named_parameters(recurse=False), *model.named_buffers(recurse=False))]
    if type(model).forward not in (nn.Sequential.forward, SkipSequential.forward) or "forward" in vars(model):
        extras.append("a forward")
    if any((model._forward_pre_hooks, model._forward_hooks, model._backward_pre_hooks, model._backward_hooks)):
        extras.append("hooks")
    if extras:
        why = f"the {kind} has {extras[0]}, and a pipeline runs only the layers"
        return f"{why}; put that into one of the layers"
    places: dict[nn.Module, str] = {}
    for name, layer in model._modules.items():  # `named_children` skips duplicates
        if (first := places.setdefault(layer, name)) != name:
            return (
                f"layers {first} and {name} are the same module, and a layer has one place; make a module for each "
                "place (they may share parameters)"
            )
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            why = f"layer {name} is compiled by TorchScript, and its shapes cannot be traced"
            return f"{why}; give the module that was scripted, and compile=true for a compiled layer"
        if any(map(is_lazy, (*module.parameters(recurse=False), *module.buffers(recurse=False)))):
            lazy = f"layer {name} ({type(module).__name__}) has no shapes before its first forward"
            return f"{lazy}, and the cut is made from them; give them, as in nn.Linear(in_features, out_features)"
    if not any(parameter.requires_grad for parameter in model.parameters()):
        return "its layers have no parameters, there is nothing to train"
    return ""
