"""Between a running pipeline and the names in a checkpoint. Law 3: resumed with any cut, the weights end up the same
bits."""

from collections.abc import Mapping
from pathlib import Path

import torch

from gpipe_cli.training.checkpoint import (
    Progress,
    begin_checkpoint,
    finish_checkpoint,
    read_index,
    read_tensors,
    select,
    write_stage,
)
from gpipe_cli.training.engine import Engine
from gpipe_cli.training.optimizer import load_optimizer_state, optimizer_state
from gpipe_cli.training.team import Team


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
    engine: Engine, team: Team, folder: Path, progress: Progress, config_yaml: str, *, keep: int
) -> None:
    """Every process writes the files of its stages, then the leading one completes the checkpoint."""
    draft = team.collect(begin_checkpoint(folder, progress.step) if team.leads else None)[0]
    written = [write_stage(draft, k, state_of_stage(engine, k)) for k in engine.stages]
    files = [file for part in team.collect(written) for file in part]
    if team.leads:
        layers = [name for names in engine.layout.layer_names for name in names]
        finish_checkpoint(draft, progress, files, layers=layers, config=config_yaml, keep=keep)
    team.barrier()


def restore(engine: Engine, checkpoint: Path, asked: str, *, optimizer: bool) -> None:
    """Put a checkpoint's values into the stages of this process, whatever cut it was written with.

    `asked` is the setting that led here, as it was given. Raises ValueError, naming it, if the checkpoint belongs to
    another model (and what differs), or is damaged.
    """
    index = read_index(checkpoint)
    layers = [name for names in engine.layout.layer_names for name in names]
    if index["layers"] != layers:
        missing = [name for name in layers if name not in index["layers"]]
        surplus = [name for name in index["layers"] if name not in layers]
        raise ValueError(
            f"{asked}: {checkpoint.name} is of another model (not in it: {_some(missing)}; only in it: "
            f"{_some(surplus)}); give the model's settings as they were"
        )
    for k, stage in engine.stages.items():
        own = engine.layout.layer_names[k]
        tensors = read_tensors(checkpoint, own, ("model", "optimizer", "ema") if optimizer else ("model", "ema"))
        _copy(stage.module.state_dict(), select(tensors, "model"), asked)
        if k in engine.averages:
            average = engine.averages[k]
            average.updates = index["ema_updates"]
            # a run that had no average until now starts one from the weights it has
            _copy(average.average, select(tensors, "ema") or stage.module.state_dict(), asked)
        if optimizer:
            load_optimizer_state(engine.optimizers[k], engine.parameters[k], select(tensors, "optimizer"))


def _copy(targets: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor], asked: str) -> None:
    for name, target in targets.items():
        value = values.get(name)
        if value is None or value.shape != target.shape:
            found = "nothing" if value is None else f"shape {tuple(value.shape)}"
            raise ValueError(
                f"{asked}: {name} needs shape {tuple(target.shape)}, the checkpoint has {found}; "
                "give the model's settings as they were"
            )
        target.copy_(value)


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (" …" if len(names) > 4 else "") if names else "none"
