"""The whole model of a run, from a checkpoint: plain modules without stages."""

import warnings
from dataclasses import replace
from pathlib import Path

from torch import nn

from gpipe_cli.assembly.build import build_model, full_model_builder
from gpipe_cli.config.settings import ONE_DEVICE, TrainConfig, find_run, load_run_config
from gpipe_cli.errors import InvalidSettingError
from gpipe_cli.pipeline.runtime.initial_weights import materialize
from gpipe_cli.pipeline.runtime.tied_weights import canonical_names, find_ties
from gpipe_cli.training.checkpoint.files import find_checkpoint, read_index, read_tensors, select
from gpipe_cli.training.checkpoint.restore import CheckpointCompatibility, check_restorable


def load_run(run: str, averaged: bool | None, which: str, target: str | None) -> nn.Sequential:
    """The implementation of `gpipe_cli.load`, which documents the arguments and errors."""
    if which not in ("best", "last"):
        raise InvalidSettingError("checkpoint", which, "must be one of best, last; for example checkpoint=last")
    folder = find_run("run_folder", run, "outputs")
    uncut = {**ONE_DEVICE, "partition.balance": None}
    config = load_run_config(folder, target, lambda saved: f"target={saved!r} to the call", uncut)
    if averaged and not config.ema_decay:
        raise InvalidSettingError("averaged", True, "the run kept no average of its weights, as ema_decay=0; remove it")
    if averaged is False:
        config = replace(config, ema_decay=0.0)
    model = build_model(config)

    def check(checkpoint: Path) -> None:
        match = CheckpointCompatibility("run_folder", folder, checkpoint, config, model)
        check_restorable(match, model, optimizer=False)

    def warn(line: str) -> None:
        warnings.warn(line, stacklevel=5)

    checkpoint = find_checkpoint(folder, which, "run_folder", check, warn)
    return whole_model(config, checkpoint, intact={file.name for file in read_index(checkpoint).files})


def whole_model(config: TrainConfig, checkpoint: Path, intact: set[str] | None = None) -> nn.Sequential:
    """The layers of a run with the weights of `checkpoint`, on the CPU, in evaluation mode; `config` has its settings.

    Batch norm is torch's: only a stage defers it. If `ema_decay` is not 0, weights and statistics are the checkpoint's
    moving averages, if it has any. `intact`: as in `read_tensors`.

    Raises CorruptCheckpointError for an unreadable checkpoint; does not check that it fits the model.
    """
    model = new_model(config)
    layers = read_index(checkpoint).layers
    tensors = read_tensors(checkpoint, layers, ("model", "ema") if config.ema_decay else ("model",), intact)
    # only floating-point tensors have averages
    values = select(tensors, "model") | select(tensors, "ema")
    model.load_state_dict(values | {name: values[saved] for name, saved in canonical_names(find_ties(model)).items()})
    return model.eval()


def new_model(config: TrainConfig) -> nn.Sequential:
    """The layers of a run with their initial weights (not pretrained ones), on the CPU."""
    model, whole = build_model(config), full_model_builder(config, pretrained=False)
    return materialize(model, 0, len(model), run_seed=config.seed, build_whole=whole, ties=find_ties(model))
