"""A training as each of its processes runs it, from top to bottom: data, pipeline, steps, evaluations, checkpoints.

Every process runs the same lines. Decisions (which mini-batch, is it the best, is it over) follow from numbers that all
processes have; see `milestones.py`.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from gpipe_cli.assembly.build import build_model
from gpipe_cli.assembly.loss import Totals
from gpipe_cli.assembly.optimizer import learning_rate
from gpipe_cli.config.groups import CustomConfig, TimmConfig, choice_of
from gpipe_cli.config.settings import DecodeConfig, TrainConfig
from gpipe_cli.data.batches import MiniBatches
from gpipe_cli.distributed.control_group import Awaited, ControlGroup
from gpipe_cli.errors import InputError
from gpipe_cli.pipeline.profile.layer_probes import watching
from gpipe_cli.pipeline.runtime.frozen import freeze
from gpipe_cli.planner.placement import Placement
from gpipe_cli.system.process_memory import own_bytes
from gpipe_cli.training import events
from gpipe_cli.training.checkpoint.restore import restore
from gpipe_cli.training.checkpoint.store import Progress, adopt, remove_drafts
from gpipe_cli.training.checkpoint.writer import CheckpointWriter
from gpipe_cli.training.data_feed import Data, Reading, refuse_short_last
from gpipe_cli.training.engine import Engine, WorkerProcess, build_engine
from gpipe_cli.training.fine_tuning import fine_tune
from gpipe_cli.training.milestones import Milestones, is_best, refuse_nonsense, score_of, starting_point
from gpipe_cli.training.step import StepMetrics, StepNumbers, evaluate, gather_metrics, rehearse, train_step
from gpipe_cli.training.translation import WATCHED, score_translations, translate


def train(
    config: TrainConfig,
    config_yaml: str,
    placement: Placement,
    folder: Path,
    process: WorkerProcess,
    *,
    source: Path | None = None,
    only_steps: bool = False,
) -> None:
    """Train as one process of the run, from the checkpoint `source` on if the run is resumed, or with its weights.

    With `only_steps`, for a measurement, nothing is evaluated and no checkpoint is written.

    Raises InputError for what the user can mend, ActionFailedError and PeerLostError as the executor does,
    CheckpointError and DivergedError.
    """
    # Why in this order: data loaders must be forked while this process has no threads, connections or CUDA context (1);
    # a process without data gets the lengths of mini-batches from one that has it (2); the weights take memory, and are
    # made once the data is known to be good (3); nothing is written into the run folder before all that can be refused
    # has been checked (4).

    # --- 1. Where to begin; open the data, start its loaders -----------------------------------------------------
    begun_bytes = own_bytes()
    start = starting_point(config, source)
    data = Data(config, placement, process.number, start, None if source is None else source.parent.parent)

    # --- 2. Connect the processes; the mini-batches are the same in all of them ----------------------------------
    control, groups = process.connect()
    _refuse_other_cuts(control, placement)
    training, test = (data.reading(control, training=which) for which in (True, False))
    if only_steps:
        test.close()  # what loads it would take time from the steps
    batches = training.batches
    refuse_short_last(config, batches)
    milestones = Milestones(config, batches.steps_per_epoch, only_steps)

    # --- 3. This process's part of the pipeline, with its first weights or those of a checkpoint -----------------
    model = build_model(config)
    freeze(model, placement.frozen)
    engine = build_engine(config, placement, process.number, groups, model, process.watch, pretrained=source is None)
    resume_from = None if config.resume is None else source
    if resume_from is not None:
        restore(engine, resume_from, optimizer=True)
    notes = fine_tune(config, engine, model, source)
    progress = replace(start, steps_per_epoch=batches.steps_per_epoch)
    milestones.refuse_finished(progress.step)
    compiled = _compile(config, engine, control, batches) if config.compile else None
    if config.check_layers and not only_steps and isinstance(config.model, CustomConfig | TimmConfig):
        notes = (*notes, _check_layers(config, engine, control, training, progress))

    # --- 4. Ready: the run folder gets its first files, the parent shows the banner ------------------------------
    if control.leads:
        remove_drafts(folder)
        if resume_from is not None:
            adopt(resume_from, folder)
        data.save_vocabulary(folder)
        # asked here and not in the parent, where it would open a CUDA context
        devices = dict.fromkeys(device for replica in placement.replica_devices for device in replica)
        gpus = tuple(torch.cuda.get_device_name(device) for device in devices if device != "cpu")
        process.report(
            events.TrainingReady(
                data.facts(),
                notes,
                progress.step,
                batches.steps_per_epoch,
                gpus,
                compiled,
                progress.test,
                progress.best,
            )
        )
    checkpoints = CheckpointWriter(engine, control, folder, config_yaml, config.checkpoint.keep, process.report, start)
    process.before_failing.append(checkpoints.settle)

    counted = False  # whether saved activations were
    reports = _StepReports(config, batches, process.report if control.leads else None)
    before: _LaunchedStep | None = None  # the step before, as long as nothing has been reported of it
    for epoch, position in batches.stream(progress.epoch, progress.position, config.epochs):
        # --- 5. A step -------------------------------------------------------------------------------------------
        began = time.perf_counter()
        step, total_steps = progress.step, milestones.total_steps
        rate = learning_rate(config.learning_rate, step, batches.steps_per_epoch, config.batch_size, total_steps)
        engine.set_progress(step / total_steps)
        # Activations are counted in one step: with a full mini-batch, and after the first one, when what grows with use
        # has grown.
        full = config.batch_size in (None, batches.size(epoch, position))
        count = full and not counted and step > start.step
        counted = counted or count
        numbers, metrics_before = train_step(
            config, engine, control, step, rate, training, epoch, position,
            before=None if before is None else before.numbers, count=count, begun_bytes=begun_bytes,
        )  # fmt: skip
        updates = next((average.updates for average in engine.averages.values()), 0)
        progress = replace(progress, step=step + 1, epoch=epoch, position=position + 1, ema_updates=updates)
        reports.send(before, metrics_before)
        before = _LaunchedStep(numbers, progress, rate, began, counted=count)
        # Reported one step late, so that no step waits for a GPU; but nothing is tested or saved before it is known
        # that the step was one of numbers.
        tests, saves = milestones.evaluates_after(progress.step), milestones.saves_after(progress.step)
        ends = progress.step == milestones.end_step
        stops = not ends and control.stops()
        if tests or saves or stops or ends:
            reports.send(before, gather_metrics(config, engine, control, numbers))
            before = None

        # --- 6. The test set, on the averaged weights if there are any -------------------------------------------
        best = False
        if tests:
            with engine.evaluating(averages=bool(engine.averages)):
                totals = evaluate(config, engine, control, test)
                examples = tuple(translate(config, WATCHED, engine, control, test))
            score = score_of(totals, text=config.task != "classification")
            best = is_best(score, progress)
            scores = scores_of(config, totals, averaged=bool(engine.averages))
            tested = events.Tested(progress.step, epoch + 1, scores) if math.isfinite(scores.loss) else None
            progress = replace(progress, test=tested)
            if best:
                progress = replace(progress, best_score=score, best_step=progress.step, best=tested)
            if control.leads:
                process.report(events.Evaluated(progress.step, epoch + 1, scores, is_best=best, translations=examples))

        # --- 7. A checkpoint, which is written while the next steps are done -------------------------------------
        progress = checkpoints.after_step(progress, save=best or saves or stops)
        if ends or stops:
            break

    # --- 8. The end: the last checkpoint is complete, and all processes finish before one of them disconnects ------
    checkpoints.close(progress.step)
    if progress.step < milestones.end_step:
        process.report(events.TrainingStopped(progress.step))
    training.close()
    test.close()
    engine.executor.settle()
    control.barrier()


def evaluate_checkpoint(
    config: TrainConfig, decode: DecodeConfig, checkpoint: Path, placement: Placement, process: WorkerProcess
) -> None:
    """`gpipe evaluate`: restore a checkpoint, run the test set through the pipeline once, report the scores."""
    data = Data(config, placement, process.number, None, checkpoint.parent.parent)
    control, groups = process.connect()
    test = data.reading(control, training=False)
    model = build_model(config)
    engine = build_engine(config, placement, process.number, groups, model, process.watch, pretrained=False)
    restore(engine, checkpoint, optimizer=False)
    facts = data.facts() if control.leads else events.DataFacts()
    if control.leads:
        process.report(events.EvaluationReady())

    def on_decoded(done: int, of: int) -> None:
        if control.leads:
            process.report(events.SentencesDecoded(done, of))

    began = time.perf_counter()
    with engine.evaluating(averages=bool(engine.averages)):
        totals = evaluate(config, engine, control, test)
        seconds = time.perf_counter() - began
        began = time.perf_counter()
        rows = translate(config, decode, engine, control, test, on_decoded)
        decoding = time.perf_counter() - began
    test.close()
    if control.leads:
        scores, samples = scores_of(config, totals, averaged=bool(engine.averages)), test.batches.samples
        translation = score_translations(rows, of=samples, beam=decode.beam, seconds=decoding) if rows else None
        process.report(events.EvaluationDone(samples, scores, seconds, facts.unigram_perplexity, translation))
    engine.executor.settle()
    control.barrier()


@dataclass(frozen=True)
class _LaunchedStep:
    """A step that a GPU may still be at, and the progress that it leads to."""

    numbers: StepNumbers
    progress: Progress
    rate: float
    began: float  # to be launched, on the clock of the recordings
    counted: bool  # whether saved activations were


class _StepReports:
    """Steps as the parent hears of them, from the process that has `report`."""

    def __init__(self, config: TrainConfig, batches: MiniBatches, report: Callable[[object], None] | None) -> None:
        self._config, self._batches, self._report = config, batches, report
        self._freed = self._ended = -math.inf  # when the step before was done: by the first stage, and by all

    def send(self, step: _LaunchedStep | None, metrics: Callable[[], StepMetrics] | None) -> None:
        """Raises DivergedError for numbers that are none."""
        if step is None or metrics is None or self._report is None:
            return
        found = metrics()
        refuse_nonsense(
            self._config, found.totals.loss, found.gradient_norm, step.progress.step, step.progress.epoch + 1, step.rate
        )
        # a GPU begins when it is done with the step before, whenever that was launched
        began, begins = max(step.began, self._freed), max(step.began, self._ended)
        self._freed, self._ended = found.seconds[0][-1], max(seconds[-1] for seconds in found.seconds)
        self._report(_step_done(self._config, self._batches, step, found, self._ended - begins))
        self._report(events.StepRecorded(found.seconds, began))


def _step_done(
    config: TrainConfig, batches: MiniBatches, step: _LaunchedStep, metrics: StepMetrics, seconds: float
) -> events.StepDone:
    """What is reported of a step."""
    text = config.task != "classification"
    loss, cross_entropy, top1, top5 = metrics.totals.means
    progress = step.progress
    epoch, position = progress.epoch, progress.position
    return events.StepDone(
        step=progress.step,
        epoch=epoch + 1,
        position=position,
        samples=batches.size(epoch, position - 1),
        tokens=metrics.totals.elements if text else None,
        lengths=batches.lengths(epoch, position - 1),
        seconds=seconds,
        loss=loss,
        cross_entropy=cross_entropy,
        top1=top1,
        top5=None if text else top5,
        learning_rate=step.rate,
        gradient_norm=metrics.gradient_norm,
        memory_bytes=tuple(int(stage.memory_bytes) for stage in metrics.stages),
        without_core=tuple(stage.without_core for stage in metrics.stages),
        activation_bytes=tuple(int(stage.activation_bytes) for stage in metrics.stages) if step.counted else None,
        library_bytes=tuple(int(stage.library_bytes) for stage in metrics.stages) if step.counted else None,
    )


def scores_of(config: TrainConfig, totals: Totals, *, averaged: bool) -> events.Scores:
    """What is reported of a pass over the test set; `averaged`: with the moving averages of the weights."""
    text = config.task != "classification"
    loss, _, top1, top5 = totals.means
    tokens = totals.elements if text else None
    return events.Scores(tokens, loss, top1, None if text else top5, averaged)


def _refuse_other_cuts(control: ControlGroup, placement: Placement) -> None:
    """Under torchrun every process plans for itself. Raises InputError if machines that differ came to other plans."""
    plans = control.collect((placement.layer_names, placement.recompute))
    if any(plan != plans[0] for plan in plans):
        cuts = " and ".join(sorted({str([len(names) for names in cut]).replace(" ", "") for cut, _ in plans}))
        raise InputError(
            f"partition.balance=null: the processes came to different plans ({cuts}), as their machines differ; give "
            f"partition.balance={cuts.partition(' and ')[0]} and recompute=except_last"
        )


def _compile(config: TrainConfig, engine: Engine, control: ControlGroup, batches: MiniBatches) -> events.LayersCompiled:
    """Compile all layers for all micro-batches that there will be, in all processes at the same time. Raises InputError
    for a layer that cannot be compiled."""
    positions = range(batches.steps_per_epoch)
    sizes = sorted({size for position in positions for size in batches.share(0, position).sizes})
    began = time.perf_counter()
    with control.waits(Awaited.COMPILER):
        done = engine.compile(sizes)
    parts = control.collect((done, time.perf_counter() - began), patient=True)
    return events.LayersCompiled(
        layers=sum(map(len, engine.placement.layer_names)),
        sizes=tuple(sizes),
        graphs=sum(part.graphs for part, _ in parts),
        made=sum(part.made for part, _ in parts),
        found=sum(part.found for part, _ in parts),
        seconds=max(seconds for _, seconds in parts),
    )


def _check_layers(
    config: TrainConfig, engine: Engine, control: ControlGroup, training: Reading, progress: Progress
) -> tuple[str, str]:
    """Watch every layer on the first micro-batch of what comes next; returns a line of the banner.

    Raises InputError for a layer whose results, or whose state, would depend on what is recomputed.
    """
    began = time.perf_counter()
    epoch, position = next(iter(training.batches.stream(progress.epoch, progress.position, config.epochs)))
    with watching(engine.stages.values()) as watch:
        rehearse(config, engine, control, training, epoch, position)
    findings = [finding for part in control.collect(watch.findings) for finding in part]
    if findings:
        remedy = "" if findings[0].kind == "foreign" else "; check_layers=false trains it as it is"
        raise InputError(f"model={choice_of(config.model)}: {findings[0].text}{remedy}")
    return "layers", f"run twice on a micro-batch, the same both times ({time.perf_counter() - began:.1f} s)"
