"""What gpu_acceptance.py has the processes of a run do: it is pickled, so it needs a module of its own."""

import json
import os
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from gpipe_cli.config.settings import TrainConfig
from gpipe_cli.pipeline.schedule.schedules import Action, Kind
from gpipe_cli.planner.placement import Placement
from gpipe_cli.training.engine import WorkerProcess
from gpipe_cli.training.train_loop import train

WATCHED, PROFILED = range(3, 7), range(9, 13)  # steps, counted from 1
OF_STEPS = PROFILED.stop


def wide(channels: int, layers: int, classes: int) -> nn.Sequential:
    """Large boundaries and little else: a micro-batch (n, 3, s, s) leaves each layer as (n, channels, s, s)."""
    convolutions = [
        nn.Sequential(nn.Conv2d(*ends, 3, padding=1), nn.Tanh()) for ends in pairwise([3, *[channels] * layers])
    ]
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))
    return nn.Sequential(*convolutions, head)


def shares_gpu(name: str) -> dict[str, str]:
    """The environment with which NCCL lets a process use a GPU that another one uses too.

    From 2.30 on it has a variable for that; before, processes of different hosts may do so (untested before this).
    """
    own = {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo"}
    if torch.cuda.nccl.version() >= (2, 30):
        return own | {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    return own | {"NCCL_HOSTID": name}


def train_on_one_gpu(config: TrainConfig, placement: Placement, folder: Path, process: WorkerProcess) -> None:
    if placement.device_of(process.number) != "cpu":
        os.environ |= shares_gpu(f"process-{process.number}")
    train(config, "", placement, folder, process)


def train_watched(config: TrainConfig, placement: Placement, folder: Path, process: WorkerProcess) -> None:
    """Trains OF_STEPS steps; writes to `folder`/watched.json, by line, how often the steps WATCHED waited for the GPU,
    and how long in the steps PROFILED a kernel ran."""
    on_gpu = placement.device_of(0) != "cpu"
    waits: Counter[str] = Counter()
    profiler = profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU])
    found: dict[str, object] = {}
    began, step = 0.0, 0

    def note(message: object, category: object, filename: str, line: int, *rest: object) -> None:
        if "synchronizing" in str(message):
            package = filename.rpartition("site-packages/")[2].rpartition("gpipe_cli/")
            waits[f"{''.join(package[1:])}:{line}"] += 1

    def synchronise() -> None:
        if on_gpu:
            torch.cuda.synchronize()

    def watch(action: Action, samples: int, lengths: Sequence[int]) -> None:
        nonlocal began, step
        process.watch(action, samples, lengths)
        if (action.kind, action.stage, action.micro_batch) != (Kind.F, 0, 0):
            return
        step += 1
        if step == WATCHED.start:
            warnings.simplefilter("always")
            warnings.showwarning = note
            if on_gpu:
                torch.cuda.set_sync_debug_mode("warn")
        elif step == WATCHED.stop:
            if on_gpu:
                torch.cuda.set_sync_debug_mode("default")
            warnings.simplefilter("ignore")
            found["waits"] = dict(waits)
        elif step == PROFILED.start:
            synchronise()
            profiler.start()
            began = time.perf_counter()
        elif step == PROFILED.stop:
            synchronise()
            seconds = time.perf_counter() - began
            profiler.stop()
            found.update(seconds=seconds, busy_seconds=busy_seconds(profiler, on_gpu))

    try:
        train(config, "", placement, folder, replace(process, watch=watch))
    finally:  # a profiler that fails does not hide where steps wait
        (folder / "watched.json").write_text(json.dumps(found))


def busy_seconds(profiler: profile, on_gpu: bool) -> float:
    """How long at least one kernel (on a CPU: one operation) ran."""
    wanted = torch.autograd.DeviceType.CUDA if on_gpu else torch.autograd.DeviceType.CPU
    events = profiler.events()
    assert events is not None
    running = (e for e in events if e.device_type == wanted and not e.is_user_annotation)
    spans = sorted((e.time_range.start, e.time_range.end) for e in running)
    busy, until = 0.0, 0.0
    for start, end in spans:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return busy * 1e-6
