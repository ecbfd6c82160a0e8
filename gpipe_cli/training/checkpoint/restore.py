"""Between a running pipeline and the names in a checkpoint. Law 3: resumed with any cut, the weights end up the same
bits."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from gpipe_cli.assembly.optimizer import load_optimizer_state, optimizer_state, state_of
from gpipe_cli.config.settings import TrainConfig
from gpipe_cli.distributed.control_group import ControlGroup
from gpipe_cli.training.checkpoint.same_model import Comparison
from gpipe_cli.training.checkpoint.store import (
    FORMAT,
    Index,
    Progress,
    begin_checkpoint,
    finish_checkpoint,
    read_index,
    read_tensors,
    select,
    write_stage,
)
from gpipe_cli.training.engine import Engine


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
        index = Index(FORMAT, progress, tuple(layers), tuple(files), tuple(without_state))
        finish_checkpoint(draft, index, config=config_yaml, keep=keep)
    control.barrier()


def check_restorable(both: Comparison, model: nn.Sequential, *, optimizer: bool) -> None:
    """Whether a checkpoint has all that `model`, on the meta device and frozen as the run says, needs to go on.

    Raises ValueError if the checkpoint belongs to another model (and what differs), and DamagedError if a tensor is
    missing.
    """
    layers = dict(model.named_children())
    for here, there in ((layers, both.index.layers), (both.here, both.there)):
        only_here, only_there = [one for one in here if one not in there], [one for one in there if one not in here]
        both.refuse_other_names(only_here, only_there)
    both.refuse_other_shapes(both.here)
    state, config = model.state_dict(), both.config
    wanted = {f"model/{name}": tensor for name, tensor in state.items()}
    if config.ema_decay and both.index.progress.ema_updates:
        wanted |= {f"ema/{name}": tensor for name, tensor in state.items() if tensor.is_floating_point()}
    for name, parameter in model.named_parameters() if optimizer else ():
        if parameter.requires_grad and name not in both.index.without_state:
            kept = state_of(config.optimizer, tuple(parameter.shape), parameter.dtype)
            wanted |= {f"optimizer/{name}/{key}": tensor for key, tensor in kept.items()}
    both.refuse_damaged(wanted)


def refuse_other_optimizer(config: TrainConfig, saved: TrainConfig) -> None:
    """Raises ValueError if the optimizer needs a state that the one of the run that is resumed has not kept."""
    needed, kept = (state_of(one.optimizer, (1,), torch.float32).keys() for one in (config, saved))
    if missing := sorted(needed - kept):
        raise ValueError(
            f"optimizer={config.optimizer.name}: needs {', '.join(missing)} of every parameter, and the run that is "
            f"resumed was trained by {saved.optimizer.name} without; leave the optimizer's settings out"
        )


def restore(engine: Engine, checkpoint: Path, *, optimizer: bool) -> None:
    """Put the values of a checkpoint into the stages of this process, whatever cut
    it was written with.

    Raises DamagedError if it has been damaged since it was checked.
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


def _copy(targets: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
    for name, target in targets.items():
        value = values[name]
        assert (value.shape, value.dtype) == (target.shape, target.dtype), name
        target.copy_(value)
