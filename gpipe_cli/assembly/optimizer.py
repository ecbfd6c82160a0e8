"""The optimizer of each stage, its state under parameter names, and its learning rate.

TensorFlow's RMSProp, which AmoebaNet is trained with, is not torch's: epsilon stands under the root, the squared
average starts at one, and the learning rate enters the momentum buffer. With AmoebaNet's epsilon of 1.0 these are two
different optimizers; timm has TensorFlow's (`timm/optim/rmsprop_tf.py`).
"""

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from gpipe_cli.assembly.adafactor import Adafactor
from gpipe_cli.config import groups

Named = Mapping[str, nn.Parameter]


def build_optimizer(config: groups.OptimizerConfig, parameters: Named) -> torch.optim.Optimizer | None:
    """The optimizer of one stage; None if nothing of it can be trained.

    The L2 penalty is added to the gradient, and spares biases and batch norm (all that is a vector), as the reference's
    regularizer sits on convolution and dense kernels only.
    """
    trainable = [parameter for parameter in parameters.values() if parameter.requires_grad]
    if not trainable:
        return None
    parts = [
        {"params": [p for p in trainable if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.ndim <= 1], "weight_decay": 0.0},
    ]
    parts = [group for group in parts if group["params"]]
    fused = trainable[0].device.type == "cuda"  # one kernel for all; timm's RMSProp and Adafactor have a few
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
            # eps=(None, ...): the machine's epsilon for the square, and no scale below 1e-3 for small parameters
            return Adafactor(parts, lr=0.0, beta2_decay=config.beta2_decay, d=config.clipping)


@cache
def _timms_rmsprop() -> Any:
    """timm.optim.rmsprop_tf in a package of ours: timm itself imports all its models and torchvision, which takes most
    of a second."""
    found = find_spec("timm")
    assert found is not None
    package = sys.modules["gpipe_timm_optim"] = ModuleType("gpipe_timm_optim")
    package.__path__ = [str(Path(folder) / "optim") for folder in found.submodule_search_locations or ()]
    return import_module("gpipe_timm_optim.rmsprop_tf")


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def optimizer_state(optimizer: torch.optim.Optimizer | None, parameters: Named) -> dict[str, torch.Tensor]:
    """`parameter name/key` -> tensor. torch keys state by position, which means nothing once the cut is another one."""
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
    """Put back what `optimizer_state` gave; a parameter without saved state starts fresh, a frozen one has none."""
    if optimizer is None:
        return
    for path, tensor in saved.items():
        name, _, key = path.rpartition("/")
        parameter = parameters.get(name)
        if parameter is None or not parameter.requires_grad:
            continue
        if key == "step":  # on the CPU, but where the optimizer is fused
            value = tensor.to(parameter.device if optimizer.defaults.get("fused") else "cpu", copy=True)
        elif tensor.shape != parameter.shape:  # Adafactor's rows and columns
            value = tensor.to(parameter.device, copy=True)
        else:
            value = torch.empty_like(parameter).copy_(tensor)
        optimizer.state[parameter][key] = value


def state_bytes(config: groups.OptimizerConfig, parameters: Sequence[nn.Parameter]) -> int:
    """The bytes that the optimizer keeps for these parameters from its first step on; nothing is allocated."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return sum(tensor.nbytes for p in trained for tensor in state_of(config, tuple(p.shape), p.dtype).values())


@cache
def state_of(config: groups.OptimizerConfig, shape: tuple[int, ...], dtype: torch.dtype) -> Mapping[str, torch.Tensor]:
    """What the optimizer keeps for a parameter from its first step on, by key; tensors without values."""
    parameter = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
    parameter.grad = torch.empty_like(parameter)
    optimizer = build_optimizer(config, {"": parameter})
    assert optimizer is not None
    optimizer.step()
    return {key: value for key, value in optimizer.state[parameter].items() if isinstance(value, torch.Tensor)}


def gradients_of(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def learning_rate(
    config: groups.LearningRateConfig, step: int, steps_per_epoch: int, batch_size: int | None, total_steps: int = 1
) -> float:
    """The learning rate of step number `step`, counted from 0 over the whole run of `total_steps`.

    The paper's decay (v4, "Training and results on ImageNet"): 0.00125 x mini-batch size, times 0.97 every 3 epochs, in
    steps. Warm-ups rise linearly. Departs from the paper: TensorFlow's warm-up begins at exactly zero, which wastes a
    step; here step 0 has 1/n of it.
    """
    warm_up = warm_up_steps(config, steps_per_epoch)
    match config:
        case groups.PaperLearningRateConfig():
            assert batch_size is not None  # nothing per sample where mini-batches are counted in tokens
            initial = config.per_sample * batch_size
            # whole steps: 3 epochs are exactly 3 * steps_per_epoch steps; a quotient of floats could fall just short
            decay_steps = max(1, round(config.every_epochs * steps_per_epoch))
            after = float(initial * config.decay ** (step // decay_steps))
        case groups.InverseSqrtLearningRateConfig():
            initial = config.peak
            after = initial * math.sqrt(warm_up / (step + 1))
        case groups.CosineLearningRateConfig():
            initial = config.peak
            done = min(1.0, (step - warm_up) / max(1, total_steps - warm_up))
            cosine = 0.5 * (1 + math.cos(math.pi * done))
            after = initial * (config.final_share + (1 - config.final_share) * cosine)
        case groups.ConstantLearningRateConfig():
            initial = after = config.peak
    return initial * (step + 1) / warm_up if step < warm_up else after


def warm_up_steps(config: groups.LearningRateConfig, steps_per_epoch: int) -> int:
    """How many steps the learning rate rises for."""
    if isinstance(config, groups.InverseSqrtLearningRateConfig):
        return config.warmup_steps
    return round(config.warmup_epochs * steps_per_epoch)
