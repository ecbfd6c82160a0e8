"""The optimizer of each stage, and its state by parameter names.

AmoebaNet is trained with TensorFlow's RMSProp, which differs from torch's: epsilon is added inside the root, the
squared average starts at 1, and the momentum buffer includes the learning rate. With AmoebaNet's epsilon of 1.0
these are two different optimizers; timm has TensorFlow's (`timm/optim/rmsprop_tf.py`).
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from inspect import unwrap
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from gpipe_cli.config import groups
from gpipe_cli.distributed.control_group import global_norm
from gpipe_cli.system.accelerator import is_accelerator
from gpipe_cli.system.hidden_gpus import hidden_gpus

Named = Mapping[str, nn.Parameter]


def build_optimizer(config: groups.OptimizerConfig, parameters: Named) -> torch.optim.Optimizer | None:
    """The optimizer of a stage; None if the stage has no trainable parameter.

    Weight decay, an L2 penalty in the gradient except for AdamW and Adafactor, spares vectors (biases and batch norm),
    as the reference's regularizer applies to convolution and dense kernels only.
    """
    trainable = [parameter for parameter in parameters.values() if parameter.requires_grad]
    if not trainable:
        return None
    parts = [
        {"params": [p for p in trainable if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.ndim <= 1], "weight_decay": 0.0},
    ]
    parts = [group for group in parts if group["params"]]
    fused = is_accelerator(trainable[0].device)  # one kernel for all parameters; not in timm's RMSProp and Adafactor
    match config:  # the learning rate is set before every step
        case groups.RMSPropConfig():
            settings = {"alpha": config.decay, "momentum": config.momentum, "eps": config.epsilon}
            made: torch.optim.Optimizer = _timms_rmsprop().RMSpropTF(parts, lr=0.0, **settings)
            return made
        case groups.SGDConfig():
            return torch.optim.SGD(parts, lr=0.0, momentum=config.momentum, nesterov=config.nesterov, fused=fused)
        case groups.AdamConfig():
            kind = torch.optim.AdamW if config.decoupled else torch.optim.Adam
            return kind(parts, lr=0.0, betas=(config.beta1, config.beta2), eps=config.epsilon, fused=fused)
        case groups.AdafactorConfig():
            # torch's default eps=(None, 1e-3): the dtype's epsilon for the squares, and the least scale of a parameter
            return torch.optim.Adafactor(parts, lr=0.0, beta2_decay=config.beta2_decay, d=config.clipping)


@cache
def _timms_rmsprop() -> Any:
    """timm.optim.rmsprop_tf, imported as part of a package of ours: `import timm` would import all of timm's models and
    torchvision, which takes most of a second."""
    spec = find_spec("timm")
    assert spec is not None
    package = sys.modules["gpipe_timm_optim"] = ModuleType("gpipe_timm_optim")
    package.__path__ = [str(Path(folder) / "optim") for folder in spec.submodule_search_locations or ()]
    return import_module("gpipe_timm_optim.rmsprop_tf")


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def optimizer_state(optimizer: torch.optim.Optimizer | None, parameters: Named) -> dict[str, torch.Tensor]:
    """`parameter name/key` -> tensor. torch keys state by position, which means nothing after another partitioning."""
    if optimizer is None:
        return {}
    return {
        f"{name}/{key}": torch.as_tensor(value)
        for name, parameter in parameters.items()
        for key, value in optimizer.state.get(parameter, {}).items()
        if value is not None  # SGD without momentum
    }


def load_optimizer_state(
    optimizer: torch.optim.Optimizer | None, parameters: Named, saved: Mapping[str, torch.Tensor]
) -> None:
    """Restore what `optimizer_state` returned; parameters without saved state start fresh, frozen ones are skipped."""
    if optimizer is None:
        return
    for path, tensor in saved.items():
        name, _, key = path.rpartition("/")
        parameter = parameters.get(name)
        if parameter is None or not parameter.requires_grad:
            continue
        if key == "step":  # on the CPU unless the optimizer is fused
            value = tensor.to(parameter.device if optimizer.defaults.get("fused") else "cpu", copy=True)
        elif key in ("row_var", "col_var"):  # Adafactor's are contiguous, also where they have the parameter's shape
            value = torch.empty(tensor.shape, dtype=tensor.dtype, device=parameter.device).copy_(tensor)
        else:
            value = torch.empty_like(parameter).copy_(tensor)
        optimizer.state[parameter][key] = value


def state_bytes(config: groups.OptimizerConfig, parameters: Sequence[nn.Parameter]) -> int:
    """The bytes of optimizer state for these parameters after the first step; nothing is allocated."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return sum(tensor.nbytes for p in trained for tensor in state_of(config, tuple(p.shape), p.dtype).values())


@cache
@hidden_gpus()
def state_of(config: groups.OptimizerConfig, shape: tuple[int, ...], dtype: torch.dtype) -> Mapping[str, torch.Tensor]:
    """The optimizer state of a parameter after the first step: key -> tensor without values. Hides the GPUs: this
    process can use none afterwards, unless it has before (`hidden_gpus`)."""
    parameter = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
    parameter.grad = torch.empty_like(parameter)
    optimizer = build_optimizer(config, {"": parameter})
    assert optimizer is not None
    if isinstance(optimizer, torch.optim.Adafactor):  # its step reads norms, which nothing on meta has
        for group in optimizer.param_groups:
            optimizer._init_group(group, *([] for _ in range(6)))
        return dict(optimizer.state[parameter])
    with torch.no_grad():
        unwrap(type(optimizer).step)(optimizer)  # what torch wraps it in imports torch._dynamo
    return {key: value for key, value in optimizer.state[parameter].items() if isinstance(value, torch.Tensor)}


def gradients_of(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def gradient_norms(gradients: list[torch.Tensor]) -> torch.Tensor:
    """The norm of each gradient, float64 (P,), on the device of the first gradient; without waiting for a GPU."""
    if not gradients:
        return torch.zeros(0, dtype=torch.float64)
    by_device = groupby(torch._foreach_norm(gradients), key=attrgetter("device"))
    stacks = [torch.stack(list(norms)).double() for _, norms in by_device]
    return torch.cat([stack.to(stacks[0].device, non_blocking=True) for stack in stacks])


def clip_gradients(gradients: list[torch.Tensor], norms: torch.Tensor, largest: float) -> None:
    """Scale this process's gradients so that the global norm, from the `norms` of all gradients, is <= `largest`."""
    norm = global_norm(norms)
    factor = torch.full_like(norm, largest).div_(norm).clamp_(max=1.0)  # stays on the device
    for (device, dtype), group in groupby(gradients, key=attrgetter("device", "dtype")):
        torch._foreach_mul_(list(group), factor.to(device, dtype, non_blocking=True))
