"""Tasks for the workers of gpu_acceptance.py, in a module of their own, as workers get their tasks by pickle."""

import json
import os
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

from gpipe_cli.config.settings import TrainConfig
from gpipe_cli.pipeline.schedule.schedule import Action, Kind
from gpipe_cli.planner.pipeline_spec import PipelineSpec
from gpipe_cli.training.engine import WorkerProcess
from gpipe_cli.training.train_loop import train

WATCHED = range(3, 7)  # steps, counted from 1


def wide(channels: int, layers: int, classes: int) -> nn.Sequential:
    """A model with large boundaries: a micro-batch (n, 3, s, s) leaves each layer as (n, channels, s, s)."""
    convolutions = [
        nn.Sequential(nn.Conv2d(*ends, 3, padding=1), nn.Tanh()) for ends in pairwise([3, *[channels] * layers])
    ]
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))
    return nn.Sequential(*convolutions, head)


def shares_gpu(name: str) -> dict[str, str]:
    """The environment variables with which NCCL lets several processes share a GPU.

    NCCL has one for this since 2.30; earlier versions refuse a GPU that processes of one host share, and take ``name``
    for the host (by the source code of 2.28.9; untested).
    """
    own = {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    if torch.cuda.nccl.version() >= (2, 30):
        return own | {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    return own | {"NCCL_HOSTID": name}


def train_on_one_gpu(config: TrainConfig, spec: PipelineSpec, folder: Path, process: WorkerProcess) -> None:
    if spec.layout.device_of(process.number) != "cpu":
        os.environ |= shares_gpu(f"process-{process.number}")
    train(config, "", spec, folder, process)


def train_watched(config: TrainConfig, spec: PipelineSpec, folder: Path, process: WorkerProcess) -> None:
    """Train; write to ``folder``/watched.json how often each line of code waited for the GPU in steps WATCHED."""
    on_gpu = spec.layout.device_of(0) != "cpu"
    waits: Counter[str] = Counter()
    step = 0

    def note(
        message: Warning | str, category: object, filename: str, lineno: int, file: object = None, line: object = None
    ) -> None:
        if "synchronizing" in str(message):
            package = filename.rpartition("site-packages/")[2].rpartition("gpipe_cli/")
            waits[f"{''.join(package[1:])}:{lineno}"] += 1

    def watch(action: Action, samples: int, lengths: Sequence[int]) -> None:
        nonlocal step
        process.on_action(action, samples, lengths)
        if (action.kind, action.stage, action.micro_batch) != (Kind.F, 0, 0):
            return
        step += 1
        if step in (WATCHED.start, WATCHED.stop):
            warnings.simplefilter("always" if step in WATCHED else "ignore")
            warnings.showwarning = note
            if on_gpu:
                torch.cuda.set_sync_debug_mode("warn" if step in WATCHED else "default")

    try:
        train(config, "", spec, folder, replace(process, on_action=watch))
    finally:  # even if the run fails
        (folder / "watched.json").write_text(json.dumps(waits))
