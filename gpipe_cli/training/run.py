"""The story of a run as one of its processes lives it, from top to bottom: data, pipeline, epochs, evaluation,
checkpoints.

Every process of the run goes through the same lines. Decisions (which mini-batch, is it the best, is it over) follow
from numbers that all processes have, so that none has to be told.
"""

import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gpipe_cli.config import TrainConfig
from gpipe_cli.data.batches import MiniBatches
from gpipe_cli.data.images import ImageSplit
from gpipe_cli.data.loading import load_images
from gpipe_cli.optimizer_settings import LearningRateConfig
from gpipe_cli.pipeline.schedule import Action
from gpipe_cli.training.build import build_model, open_data
from gpipe_cli.training.checkpoint import (
    Progress,
    adopt,
    find_checkpoint,
    read_progress,
)
from gpipe_cli.training.engine import Engine, Groups, build_engine
from gpipe_cli.training.inputs import (
    START_METHOD,
    Loaders,
    refuse_single_samples,
    test_targets_of,
    training_batches,
    workers_of,
)
from gpipe_cli.training.layout import Layout
from gpipe_cli.training.learning_rate import learning_rate
from gpipe_cli.training.restore import restore, save_checkpoint
from gpipe_cli.training.step import evaluate, train_step
from gpipe_cli.training.team import Team

Report = Callable[[str, dict[str, Any]], None]
Join = Callable[[], tuple[Team, Groups | None]]


def train(
    config: TrainConfig,
    config_yaml: str,
    layout: Layout,
    folder: Path,
    process: int,
    join: Join,
    report: Report,
    watch: Callable[[Action], None],
) -> None:
    """Train as process number `process`. `join` connects the processes; `report` speaks to the parent, which shows and
    writes what it hears; `watch` hears every action before it is performed.

    Raises ValueError for what the user can mend, ActionFailedError and PeerLostError as the executor does, and
    DivergedError.
    """
    stages = layout.stages_of(process)
    first, last = 0 in stages, layout.partitions - 1 in stages
    start = _starting_point(config)
    training: ImageSplit | None = None
    test: ImageSplit | None = None
    loaders: Loaders | None = None
    counts: tuple[int, int] | None = None
    if first or last:  # stages in between never see a sample
        training, test = open_data(config)
        counts = len(training), len(test)
        if first:
            # loader processes are forked here, before this process has threads, connections or a CUDA context
            loaders = Loaders(config, training, test, start)
    team, groups = join()
    folder = Path(team.collect(str(folder))[0])  # under torchrun every process guessed its own
    training_samples, test_samples = next(known for known in team.collect(counts) if known is not None)
    batches = training_batches(config, training_samples)
    test_batches = MiniBatches(test_samples, config.batch_size, config.seed, shuffle=False)
    model = build_model(config)
    refuse_single_samples(config, model, batches)
    engine = build_engine(config, layout, process, groups, model, watch)
    if config.resume is not None:
        restore(
            engine, find_checkpoint(Path(config.resume), "last", "resume"), f"resume={config.resume}", optimizer=True
        )
    progress = start
    total_steps = config.epochs * batches.steps_per_epoch
    end_step = min(total_steps, config.max_steps or total_steps)
    if progress.step >= end_step:
        limit, more = ("max_steps", progress.step + 1) if end_step < total_steps else ("epochs", config.epochs + 1)
        raise ValueError(
            f"resume={config.resume}: that run has done {progress.step} steps, and {limit} allows {end_step}; "
            f"nothing is left to do, use {limit}={more} or more"
        )
    if config.resume is not None and team.leads:
        adopt(Path(config.resume), folder)
    if team.leads:
        report("ready", {"train_samples": training_samples, "test_samples": test_samples, "first_step": progress.step,
                         "steps_per_epoch": batches.steps_per_epoch, "gpu_names": _gpu_names(layout)})  # fmt: skip
    test_targets = test_targets_of(test, test_batches, 0, last)

    def save() -> None:
        save_checkpoint(engine, team, folder, progress, config_yaml, keep=config.checkpoint.keep)
        if team.leads:
            report("checkpoint", {"step": progress.step})

    written = -1
    for epoch, position in batches.stream(progress.epoch, progress.position, config.epochs):
        began = time.perf_counter()
        step, samples = progress.step, batches.size(epoch, position)
        images = next(loaders.training) if loaders is not None else None
        targets = training.targets[batches.indices(epoch, position)] if training is not None else torch.empty(0)
        rate = learning_rate(config.learning_rate, step, batches.steps_per_epoch, config.batch_size, total_steps)
        engine.set_progress(step / total_steps)
        result = train_step(config, engine, team, step, rate, samples, images, targets)
        progress = replace(progress, step=step + 1, epoch=epoch, position=position + 1, ema_updates=_updates(engine))
        if team.leads:
            totals, norm, memory = result.read()
            _refuse_nonsense(totals.loss, norm, step, epoch, rate, config.learning_rate)
            report("step", {"step": step + 1, "epoch": epoch + 1, "position": position + 1, "samples": samples,
                            "seconds": time.perf_counter() - began, "loss": totals.loss / samples,
                            "cross_entropy": totals.cross_entropy / samples, "top1": totals.top1 / samples,
                            "top5": totals.top5 / samples, "learning_rate": rate, "gradient_norm": norm,
                            "memory_bytes": memory})  # fmt: skip
        epoch_ends = position + 1 == batches.steps_per_epoch
        over = progress.step == end_step
        if over or (epoch_ends and (epoch + 1) % config.evaluate_every_epochs == 0):
            with engine.evaluating(averages=bool(engine.averages)):
                totals = evaluate(config, engine, team, loaders.test if loaders is not None else None, test_targets)
            top1 = totals.top1 / totals.samples
            best = progress.best_top1 is None or top1 > progress.best_top1
            if best:
                progress = replace(progress, best_top1=top1, best_step=progress.step)
            if team.leads:
                report("evaluated", {"step": progress.step, "epoch": epoch + 1, "loss": totals.loss / totals.samples,
                                     "top1": top1, "top5": totals.top5 / totals.samples,
                                     "averaged": bool(engine.averages), "is_best": best})  # fmt: skip
            if best:
                save()
                written = progress.step
        every_epochs, every_steps = config.checkpoint.every_epochs, config.checkpoint.every_steps
        due = epoch_ends and every_epochs and (epoch + 1) % every_epochs == 0
        due = due or (every_steps and progress.step % every_steps == 0) or over
        if due and written != progress.step:
            save()
            written = progress.step
        if over:
            break
    if loaders is not None:
        loaders.close()
    engine.executor.settle()
    team.barrier()  # nobody hangs up while another still listens


def score(
    config: TrainConfig, checkpoint: Path, layout: Layout, process: int, join: Join, report: Report,
    watch: Callable[[Action], None],
) -> None:  # fmt: skip
    """`gpipe evaluate`: restore a checkpoint, run the test set through the pipeline once, report the sums."""
    stages = layout.stages_of(process)
    first, last = 0 in stages, layout.partitions - 1 in stages
    test = open_data(config)[1] if first or last else None
    batches = MiniBatches(len(test), config.batch_size, config.seed, shuffle=False) if test is not None else None
    images = (
        load_images(test, batches, 0, 0, 1, workers_of(config), start_method=START_METHOD)
        if test is not None and batches and first
        else None
    )
    team, groups = join()
    samples = next(c for c in team.collect(len(test) if test is not None else None) if c is not None)
    batches = batches or MiniBatches(samples, config.batch_size, config.seed, shuffle=False)
    engine = build_engine(config, layout, process, groups, build_model(config), watch)
    restore(engine, checkpoint, f"run={checkpoint.parent.parent}", optimizer=False)
    if team.leads:
        report("ready", {"test_samples": samples})
    began = time.perf_counter()
    with engine.evaluating(averages=bool(engine.averages)):
        totals = evaluate(config, engine, team, images, test_targets_of(test, batches, 0, last))
    if images is not None:
        images.close()
    if team.leads:
        report("evaluated", {"samples": totals.samples, "loss": totals.loss / totals.samples,
                             "top1": totals.top1 / totals.samples, "top5": totals.top5 / totals.samples,
                             "averaged": bool(engine.averages), "seconds": time.perf_counter() - began})  # fmt: skip
    engine.executor.settle()
    team.barrier()


def _starting_point(config: TrainConfig) -> Progress:
    """Where to begin. Raises ValueError if the mini-batches would be others than those of the run that is resumed."""
    if config.resume is None:
        return Progress(0, 0, 0, config.seed, config.batch_size, 0, None, None)
    progress = read_progress(find_checkpoint(Path(config.resume), "last", "resume"))
    for setting, given, saved in (
        ("seed", config.seed, progress.seed),
        ("batch_size", config.batch_size, progress.batch_size),
    ):
        if given != saved:
            raise ValueError(
                f"{setting}={given}: the run that is resumed has {setting}={saved}, and its position in the data means "
                f"something else with another; leave the setting out"
            )
    return progress


def _updates(engine: Engine) -> int:
    return next((average.updates for average in engine.averages.values()), 0)


class DivergedError(RuntimeError):
    """The loss or a gradient is not a number any more."""


def _refuse_nonsense(
    loss: float, norm: float, step: int, epoch: int, rate: float, settings: LearningRateConfig
) -> None:
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise DivergedError(
            f"step {step + 1} (epoch {epoch + 1}): the loss is {loss} and the gradient norm {norm}; it has diverged "
            f"at learning rate {rate:g}; use a smaller learning_rate.{settings.scale}, a longer warm-up, or "
            "gradient_clipping=10"
        )


def _gpu_names(layout: Layout) -> tuple[str, ...]:
    """Asked here and not in the parent, where it would open a CUDA context."""
    devices = dict.fromkeys(device for device in layout.devices if device != "cpu")
    return tuple(torch.cuda.get_device_name(device) for device in devices)
