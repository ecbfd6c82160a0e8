"""Between a running pipeline and the names in a checkpoint. Law 3: resumed with any cut, the weights end up the same
bits."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from gpipe_cli.assembly.optimizer import load_optimizer_state, optimizer_state, state_of
from gpipe_cli.config.settings import TrainConfig
from gpipe_cli.distributed.control_group import ControlGroup
from gpipe_cli.training.checkpoint.same_model import OtherModelError, refuse_other_shapes
from gpipe_cli.training.checkpoint.store import (
    DamagedError,
    Index,
    Progress,
    begin_checkpoint,
    check_files,
    finish_checkpoint,
    heads,
    read_index,
    read_tensors,
    select,
    write_stage,
)
from gpipe_cli.training.engine import Engine

# As the head of a safetensors file calls them.
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def state_of_stage(engine: Engine, stage: int) -> dict[str, torch.Tensor]:
    """Everything stage number `stage` must remember, under global names."""
    module = engine.stages[stage].module
    state = {f"model/{name}": tensor for name, tensor in module.state_dict().items()}
    optimizer = optimizer_state(engine.optimizers[stage], engine.parameters[stage])
    state |= {f"optimizer/{name}": tensor for name, tensor in optimizer.items()}
    if stage in engine.averages:
        state |= {f"ema/{name}": tensor for name, tensor in engine.averages[stage].average.items()}
    return state


def save_checkpoint(
    engine: Engine, control: ControlGroup, folder: Path, progress: Progress, config_yaml: str, *, keep: int
) -> None:
    """Every process writes the files of its stages, then the leading one completes the checkpoint.

    Raises CheckpointError.
    """
    draft = control.collect(begin_checkpoint(folder, progress.step) if control.leads else None)[0]
    states = {k: state_of_stage(engine, k) for k in engine.stages}
    written = [write_stage(draft, k, state) for k, state in states.items()]
    without = [
        name
        for k, state in states.items()
        for name in engine.parameters[k]
        if not any(key.startswith(f"optimizer/{name}/") for key in state)
    ]
    files, without_state = ([one for part in control.collect(mine) for one in part] for mine in (written, without))
    if control.leads:
        layers = [name for names in engine.placement.layer_names for name in names]
        finish_checkpoint(
            draft, progress, files, layers=layers, without_state=without_state, config=config_yaml, keep=keep
        )
    control.barrier()


def check_restorable(
    config: TrainConfig, source: TrainConfig, model: nn.Sequential, checkpoint: Path, setting: str, *, optimizer: bool
) -> None:
    """Whether a checkpoint has all that `model`, on the meta device and frozen as the run says, needs to go on.

    `setting` led here, as it was given; `source` are the settings of the run that wrote it. Raises
    ValueError if the checkpoint belongs to another model (and what differs), and DamagedError if it is not whole.
    """
    index = read_index(checkpoint)
    layers, state = list(dict(model.named_children())), model.state_dict()
    found = heads(checkpoint, index.files)
    there = {name.removeprefix("model/"): shape for name, (_, shape) in found.items() if name.startswith("model/")}
    for mine, theirs in ((layers, list(index.layers)), (list(state), list(there))):
        if {*mine} != {*theirs}:
            only_here, only_there = (
                [one for one in mine if one not in theirs],
                [one for one in theirs if one not in mine],
            )
            raise OtherModelError(setting, checkpoint, only_here, only_there, config, source)
    here = {name: tuple(tensor.shape) for name, tensor in state.items()}
    refuse_other_shapes(setting, config, source, here, there, here)
    for name, tensor in _wanted(config, model, index, optimizer=optimizer).items():
        wanted = DTYPES.get(tensor.dtype), tuple(tensor.shape)
        if found.get(name) != wanted:
            raise DamagedError(f"{checkpoint}: {name} is {found.get(name, 'missing')}, the run needs {wanted}")
    check_files(checkpoint, index.files)  # last, as it reads all of them


def refuse_other_optimizer(config: TrainConfig, saved: TrainConfig) -> None:
    """Raises ValueError if the optimizer needs a state that the one of the run that is resumed has not kept."""
    needed, kept = (state_of(one.optimizer, (1,), torch.float32).keys() for one in (config, saved))
    if missing := sorted(needed - kept):
        raise ValueError(
            f"optimizer={config.optimizer.name}: needs {', '.join(missing)} of every parameter, and the run that is "
            f"resumed was trained by {saved.optimizer.name} without; leave the optimizer's settings out"
        )


def restore(engine: Engine, checkpoint: Path, *, optimizer: bool) -> None:
    """Put the values of a checkpoint, which `check_restorable` has seen, into the stages of this process, whatever cut
    it was written with.

    Raises DamagedError if it has been damaged since.
    """
    updates = read_index(checkpoint).progress.ema_updates
    for k, stage in engine.stages.items():
        own = engine.placement.layer_names[k]
        tensors = read_tensors(checkpoint, own, ("model", "optimizer", "ema") if optimizer else ("model", "ema"))
        _copy(stage.module.state_dict(), select(tensors, "model"))
        if k in engine.averages:
            average = engine.averages[k]
            average.updates = updates
            # a run that had no average until now starts one from the weights it has
            _copy(average.average, select(tensors, "ema") if updates else stage.module.state_dict())
        if optimizer:
            load_optimizer_state(engine.optimizers[k], engine.parameters[k], select(tensors, "optimizer"))


def _wanted(config: TrainConfig, model: nn.Sequential, index: Index, *, optimizer: bool) -> dict[str, torch.Tensor]:
    """What a run needs of a checkpoint; tensors without values."""
    state = model.state_dict()
    wanted = {f"model/{name}": tensor for name, tensor in state.items()}
    if config.ema_decay and index.progress.ema_updates:
        wanted |= {f"ema/{name}": tensor for name, tensor in state.items() if tensor.is_floating_point()}
    for name, parameter in model.named_parameters() if optimizer else ():
        if parameter.requires_grad and name not in index.without_state:
            kept = state_of(config.optimizer, tuple(parameter.shape), parameter.dtype)
            wanted |= {f"optimizer/{name}/{key}": tensor for key, tensor in kept.items()}
    return wanted


def _copy(targets: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
    for name, target in targets.items():
        value = values[name]
        assert (value.shape, value.dtype) == (target.shape, target.dtype), name
        target.copy_(value)
