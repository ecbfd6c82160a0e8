"""The model of a run in one piece, out of a checkpoint: plain modules that know nothing of stages."""

import warnings
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from gpipe_cli.assembly.build import build_model, real_model
from gpipe_cli.config.settings import TrainConfig, find_run, load
from gpipe_cli.config.typed import RefusedError
from gpipe_cli.pipeline.runtime.initial_weights import materialize
from gpipe_cli.training.checkpoint.files import find_checkpoint, read_index, read_tensors, select
from gpipe_cli.training.checkpoint.restore import CheckpointMatch, check_restorable


def load_run(run: str, averaged: bool | None, which: str) -> nn.Sequential:
    """What `gpipe_cli.load` gives. Raises InputError, one line, as it says."""
    if which not in ("best", "last"):
        raise RefusedError("checkpoint", which, "must be one of best, last; for example checkpoint=last")
    folder = find_run("run_folder", run, "outputs")
    config = load(folder)
    if averaged and not config.ema_decay:
        raise RefusedError("averaged", True, "the run kept no average of its weights, as ema_decay=0; leave it out")
    if averaged is False:
        config = replace(config, ema_decay=0.0)
    model = build_model(config)

    def check(checkpoint: Path) -> None:
        both = CheckpointMatch.of("run_folder", folder, checkpoint, config, model)
        check_restorable(both, model, optimizer=False)

    found = find_checkpoint(folder, which, "run_folder", check, lambda line: warnings.warn(line, stacklevel=5))
    return whole_model(config, found)


def whole_model(config: TrainConfig, checkpoint: Path) -> nn.Sequential:
    """The layers of a run with the weights of `checkpoint`, on the CPU, in evaluation mode; `config` are its settings.

    Batch norm is torch's own: only a stage defers it. With `ema_decay` the moving averages take the place of weights
    and statistics, where the run kept them; with 0 they do not.

    Raises DamagedError for a checkpoint that cannot be read. Whether it is of this model is not checked.
    """
    model, layers = new_model(config), read_index(checkpoint).layers
    tensors = read_tensors(checkpoint, layers, ("model", "ema") if config.ema_decay else ("model",))
    # averages are of what is floating-point only
    model.load_state_dict(select(tensors, "model") | select(tensors, "ema"))
    return model.eval()


def new_model(config: TrainConfig) -> nn.Sequential:
    """The layers of a run before its first step, without pretrained weights, on the CPU."""
    model, whole = build_model(config), real_model(config, pretrained=False)
    return materialize(model, 0, len(model), run_seed=config.seed, device=torch.device("cpu"), whole=whole)
