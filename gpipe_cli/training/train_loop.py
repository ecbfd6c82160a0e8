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

from gpipe_cli.assembly.build import build_model
from gpipe_cli.assembly.learning_rate import learning_rate
from gpipe_cli.config.model import CustomConfig, TimmConfig, choice_of
from gpipe_cli.config.optimizer import LearningRateConfig
from gpipe_cli.config.settings import DecodeConfig, TrainConfig
from gpipe_cli.config.typed import show
from gpipe_cli.distributed.control_group import ControlGroup
from gpipe_cli.pipeline.profile.layer_probes import watching
from gpipe_cli.pipeline.runtime.executor import Watch
from gpipe_cli.pipeline.runtime.frozen import freeze
from gpipe_cli.planner.placement import Placement
from gpipe_cli.system.process_memory import own_bytes
from gpipe_cli.training.checkpoint.restore import restore, save_checkpoint
from gpipe_cli.training.checkpoint.store import (
    Progress,
    adopt,
    read_index,
)
from gpipe_cli.training.data_feed import Data, Reading, check_epochs, refuse_short_last
from gpipe_cli.training.engine import Engine, Groups, build_engine
from gpipe_cli.training.fine_tuning import fine_tune
from gpipe_cli.training.step import evaluate, gather_recording, rehearse, train_step
from gpipe_cli.training.translation.translations import translated_examples, translated_test_set

Report = Callable[[str, dict[str, Any]], None]
Join = Callable[[], tuple[ControlGroup, Groups | None]]


def train(
    config: TrainConfig,
    config_yaml: str,
    layout: Placement,
    folder: Path,
    process: int,
    join: Join,
    report: Report,
    watch: Watch,
    *,
    source: Path | None = None,
    only_steps: bool = False,
) -> None:
    """Train as process number `process`, from the checkpoint `source` on if the run is resumed, or with its weights.

    `join` connects the processes; `report` speaks to the parent, which shows and writes what it hears; `watch` hears
    every action before it is performed. With `only_steps`, for a measurement, nothing is evaluated and no checkpoint is
    written.

    Raises ValueError for what the user can mend, ActionFailedError and PeerLostError as the executor does,
    CheckpointError and DivergedError.
    """
    begun_bytes = own_bytes()
    start = _starting_point(config, source)
    data = Data(config, layout, process, start, None if source is None else source.parent.parent)
    team, groups = join()
    _refuse_other_cuts(team, layout)
    training, test = data.training_set(team), data.test_set(team)
    if only_steps:
        test.close()  # what loads it would take time from the steps
    batches = training.batches
    check_epochs(config, start, batches.steps_per_epoch)
    refuse_short_last(config, batches)
    start = replace(start, steps_per_epoch=batches.steps_per_epoch)
    model = build_model(config)
    freeze(model, layout.frozen)
    engine = build_engine(config, layout, process, groups, model, watch, begins=source is None)
    if config.resume is not None and source is not None:
        restore(engine, source, optimizer=True)
    notes = fine_tune(config, engine, model, source)
    progress, text = start, config.task != "classification"
    total_steps = config.epochs * batches.steps_per_epoch
    end_step = min(total_steps, config.max_steps or total_steps)
    if progress.step >= end_step:
        limit, more = ("max_steps", progress.step + 1) if end_step < total_steps else ("epochs", config.epochs + 1)
        raise ValueError(
            f"resume={config.resume}: that run has done {progress.step} steps, and {limit} allows {end_step}; "
            f"nothing is left to do, use {limit}={more} or more"
        )
    if config.check_layers and not only_steps and isinstance(config.model, CustomConfig | TimmConfig):
        notes = (*notes, _check_layers(config, engine, team, training, progress))
    if config.resume is not None and source is not None and team.leads:
        adopt(source, folder)
    if team.leads:
        data.save_vocabulary(folder)
        facts = data.facts()
        facts["notes"] = (*facts.get("notes", ()), *notes)
        report("ready", {**facts, "first_step": progress.step, "steps_per_epoch": batches.steps_per_epoch,
                         "gpu_names": _gpu_names(layout)})  # fmt: skip

    def save() -> None:
        save_checkpoint(engine, team, folder, progress, config_yaml, keep=config.checkpoint.keep)
        if team.leads:
            report("checkpoint", {"step": progress.step})

    written, recording, recorded_began = -1, None, 0.0
    counted = False
    for epoch, position in batches.stream(progress.epoch, progress.position, config.epochs):
        began = time.perf_counter()
        step = progress.step
        rate = learning_rate(config.learning_rate, step, batches.steps_per_epoch, config.batch_size, total_steps)
        engine.set_progress(step / total_steps)
        # saved activations are counted once: of a full mini-batch, and after the first step, when what grows with use
        # has grown
        full = config.batch_size in (None, batches.size(epoch, position))
        count = full and not counted and step > start.step
        counted = counted or count
        result = train_step(
            config, engine, team, step, rate, training, epoch, position,
            before=recording, count=count, begun_bytes=begun_bytes,
        )  # fmt: skip
        progress = replace(progress, step=step + 1, epoch=epoch, position=position + 1, ema_updates=_updates(engine))
        if team.leads:
            numbers = result.read()
            totals, norm = numbers.totals, numbers.gradient_norm
            _refuse_nonsense(totals.loss, norm, step, epoch, rate, config.learning_rate)
            loss, cross_entropy, top1, top5 = totals.means
            report("recorded", {"seconds": result.read_before(), "began_seconds": recorded_began})
            report("step", {"step": step + 1, "epoch": epoch + 1, "position": position + 1,
                            "samples": batches.size(epoch, position), "lengths": batches.lengths(epoch, position),
                            "tokens": totals.elements if text else None,
                            "seconds": time.perf_counter() - began, "loss": loss, "cross_entropy": cross_entropy,
                            "top1": top1, "top5": None if text else top5, "learning_rate": rate,
                            "gradient_norm": norm, "memory_bytes": numbers.memory_bytes,
                            "activation_bytes": numbers.activation_bytes, "library_bytes": numbers.library_bytes,
                            "without_core": numbers.without_core})  # fmt: skip
        recording, recorded_began = result.recording, began
        epoch_ends = position + 1 == batches.steps_per_epoch
        over = progress.step == end_step
        if only_steps:
            if over:
                break
            continue
        if over or (epoch_ends and (epoch + 1) % config.evaluate_every_epochs == 0):
            with engine.evaluating(averages=bool(engine.averages)):
                totals = evaluate(config, engine, team, test)
                examples = translated_examples(config, engine, team, test)
            loss, _, top1, top5 = totals.means
            score = -loss if text else top1
            best = math.isfinite(score) and (progress.best_score is None or score > progress.best_score)
            if best:
                progress = replace(progress, best_score=score, best_step=progress.step)
            if team.leads:
                report("evaluated", {"step": progress.step, "epoch": epoch + 1, "loss": loss, "top1": top1,
                                     "top5": None if text else top5, "tokens": totals.elements if text else None,
                                     "averaged": bool(engine.averages), "is_best": best,
                                     "translations": examples})  # fmt: skip
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
    if recording is not None:
        seconds = gather_recording(engine, team, recording, config.micro_batches)
        if team.leads:
            report("recorded", {"seconds": seconds, "began_seconds": recorded_began})
    training.close()
    test.close()
    engine.executor.settle()
    team.barrier()  # nobody hangs up while another still listens


def score(
    config: TrainConfig,
    decode: DecodeConfig,
    checkpoint: Path,
    layout: Placement,
    process: int,
    join: Join,
    report: Report,
    watch: Watch,
) -> None:
    """`gpipe evaluate`: restore a checkpoint, run the test set through the pipeline once, report the sums."""
    data = Data(config, layout, process, None, checkpoint.parent.parent)
    team, groups = join()
    test = data.test_set(team)
    engine = build_engine(config, layout, process, groups, build_model(config), watch, begins=False)
    restore(engine, checkpoint, optimizer=False)
    facts = data.facts() if team.leads else {}
    if team.leads:
        report("ready", facts)

    def tell(done: int, of: int) -> None:
        if team.leads:
            report("translated", {"done": done, "of": of})

    began = time.perf_counter()
    with engine.evaluating(averages=bool(engine.averages)):
        totals = evaluate(config, engine, team, test)
        seconds = time.perf_counter() - began
        translation = translated_test_set(config, decode, engine, team, test, tell)
    test.close()
    if team.leads:
        text = config.task != "classification"
        loss, _, top1, top5 = totals.means
        report("evaluated", {"task": config.task, "samples": test.batches.samples, "loss": loss, "top1": top1,
                             "top5": None if text else top5, "tokens": totals.elements if text else None,
                             "unigram_perplexity": facts.get("unigram_perplexity"),
                             "averaged": bool(engine.averages), "seconds": seconds,
                             "translation": translation})  # fmt: skip
    engine.executor.settle()
    team.barrier()


def _starting_point(config: TrainConfig, source: Path | None) -> Progress:
    """Where to begin. Raises ValueError if the mini-batches would be others than those of the run that is resumed."""
    if config.resume is None or source is None:
        return Progress(0, 0, 0, config.seed, config.batch_size, config.batch_tokens, 0, 0, None, None)
    progress = read_index(source).progress
    for setting, given, saved in (
        ("seed", config.seed, progress.seed),
        ("batch_size", config.batch_size, progress.batch_size),
        ("batch_tokens", config.batch_tokens, progress.batch_tokens),
    ):
        if given != saved:
            raise ValueError(
                f"{setting}={show(given)}: the run that is resumed has {setting}={show(saved)}, and its position in "
                "the data means something else with another; leave the setting out"
            )
    return progress


def _refuse_other_cuts(team: ControlGroup, layout: Placement) -> None:
    """Under torchrun every process plans for itself. Raises ValueError if machines that differ came to other plans."""
    plans = team.collect((layout.layer_names, layout.recompute))
    if any(plan != plans[0] for plan in plans):
        cuts = " and ".join(sorted({str([len(names) for names in cut]).replace(" ", "") for cut, _ in plans}))
        raise ValueError(
            f"partition.balance=null: the processes came to different plans ({cuts}), as their machines differ; give "
            f"partition.balance={cuts.partition(' and ')[0]} and recompute=except_last"
        )


def _check_layers(
    config: TrainConfig, engine: Engine, team: ControlGroup, training: Reading, progress: Progress
) -> tuple[str, str]:
    """Watch every layer on the first micro-batch of what comes next; returns a line of the banner.

    Raises ValueError for a layer whose results, or whose state, would depend on what is recomputed.
    """
    began = time.perf_counter()
    epoch, position = next(iter(training.batches.stream(progress.epoch, progress.position, config.epochs)))
    with watching(engine.stages.values()) as watch:
        rehearse(config, engine, team, training, epoch, position)
    findings = [finding for part in team.collect(watch.findings) for finding in part]
    if findings:
        raise ValueError(f"model={choice_of(config.model)}: {findings[0].text}; check_layers=false trains it as it is")
    return "layers", f"run twice on a micro-batch, the same both times ({time.perf_counter() - began:.1f} s)"


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


def _gpu_names(layout: Placement) -> tuple[str, ...]:
    """Asked here and not in the parent, where it would open a CUDA context."""
    devices = dict.fromkeys(device for device in layout.devices if device != "cpu")
    return tuple(torch.cuda.get_device_name(device) for device in devices)
