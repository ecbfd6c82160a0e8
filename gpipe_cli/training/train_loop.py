"""The training loop that every process of a run executes: data, pipeline, steps, evaluations, checkpoints.

All processes run the same code and take the same decisions (which mini-batch is next, whether the weights are the best
so far, whether the run is over), because these depend only on numbers that every process has; see `milestones.py`.
"""

import math
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

import torch

from gpipe_cli.assembly.learning_rate import learning_rate
from gpipe_cli.assembly.loss import Totals
from gpipe_cli.config.groups import CustomConfig, HuggingFaceConfig, TimmConfig, group_choice
from gpipe_cli.config.settings import DecodeConfig, SplitName, TrainConfig, to_yaml
from gpipe_cli.data.batches import MiniBatches
from gpipe_cli.data.splits import Splits
from gpipe_cli.distributed.control_group import BlockedOn, ControlGroup, Stop
from gpipe_cli.distributed.rendezvous import Decision
from gpipe_cli.errors import InputError, InvalidSettingError
from gpipe_cli.pipeline.profile.layer_probes import checking_repeatability
from gpipe_cli.pipeline.runtime.module_state import restoring_state
from gpipe_cli.pipeline.runtime.randomness import restoring_rng_state
from gpipe_cli.planner.pipeline_spec import PipelineSpec
from gpipe_cli.schedule.named_schedules import build
from gpipe_cli.system.accelerator import device_name
from gpipe_cli.system.process_memory import anonymous_bytes
from gpipe_cli.training import events
from gpipe_cli.training.checkpoint.background_writer import CheckpointWriter
from gpipe_cli.training.checkpoint.files import Progress, checkpoint_path, clean_staging, link_checkpoint_into
from gpipe_cli.training.checkpoint.restore import restore
from gpipe_cli.training.data_feed import Data, MiniBatch, SplitReader, check_last_mini_batch
from gpipe_cli.training.engine import Engine, WorkerProcess, build_engine
from gpipe_cli.training.fine_tuning import fine_tune
from gpipe_cli.training.milestones import Milestones, check_finite, initial_progress, is_best, score_of
from gpipe_cli.training.step import (
    PendingMetrics,
    StepMetrics,
    compute_gradients,
    evaluate,
    gather_metrics,
    run_one_micro_batch,
    update_weights,
)
from gpipe_cli.training.translation import PREVIEW_DECODING, score_translations, translate


def train(
    config: TrainConfig, spec: PipelineSpec, decision: Decision, process: WorkerProcess, *, only_steps: bool = False
) -> None:
    """Train as a process of the run, into the folder and from the checkpoint that `decision` names for all processes.

    With `only_steps`, for a measurement, nothing is evaluated and no checkpoint is written.

    Raises InputError for errors that the user can fix, ActionFailedError and PeerLostError from the executor,
    CheckpointError, DivergedError and UnreadableError.
    """
    # The order matters: data loaders must be forked while this process has no threads, connections or CUDA context (1);
    # a process without data gets the lengths of samples from a process that has it (2); weights take memory, and are
    # created once the data is known to be good (3); nothing is written into the run folder before all checks have
    # passed (4).

    config_yaml, folder, source = to_yaml(config), decision.folder, decision.source
    config = replace(config, resume=decision.resume)

    # --- 1. Find the starting point; open the data, start its loaders --------------------------------------------
    bytes_at_start = anonymous_bytes()
    start = initial_progress(config, source)
    data = Data(config, spec, process.rank, start, source, only_steps=only_steps)

    # --- 2. Connect the processes; the mini-batches are the same in all of them ----------------------------------
    control, groups = process.connect()
    _check_same_cuts(control, spec)
    readers = data.readers(control)
    training = readers.training
    check_last_mini_batch(config, training.batches)
    milestones = Milestones(config, training.batches.steps_per_epoch, only_steps)

    # --- 3. Build this process's part of the pipeline, with initial weights or a checkpoint's --------------------
    engine = build_engine(config, spec, control, groups, on_action=process.on_action, pretrained=source is None)
    resume_from = None if config.resume is None else source
    if resume_from is not None:
        restore(engine, resume_from, optimizer=True)
    notes = fine_tune(engine, source, data.classes)
    progress = replace(start, steps_per_epoch=training.batches.steps_per_epoch)
    compiled = _compile(engine, training.batches) if config.compile else None
    user_supplied = isinstance(config.model, CustomConfig | TimmConfig | HuggingFaceConfig)
    if config.check_layers and not only_steps and user_supplied:
        notes = (*notes, _check_layers(engine, training, progress))
    captured = _capture_graphs(engine, training, progress) if engine.uses_cuda_graphs else None

    # --- 4. Write the first files into the run folder; the parent shows the banner -------------------------------
    if control.is_rank_zero:
        clean_staging(folder)
        data.save_vocabulary(folder)  # first: a folder with a checkpoint can be resumed
        if resume_from is not None:
            link_checkpoint_into(resume_from, folder)
        process.report(
            events.TrainingReady(
                data.facts(),
                notes,
                progress.step,
                progress.steps_per_epoch,
                gpu_names=_gpu_names(engine.spec),
                compiled=compiled,
                graphs=captured,
                test=progress.test,
                best=progress.best,
            )
        )
    checkpoints = CheckpointWriter(engine, folder, config_yaml, data.classes, process, start)
    process.on_failure.append(checkpoints.drain)
    training.watch(control)
    Training(engine, process, readers, milestones, checkpoints, progress, bytes_at_start).run()


@dataclass
class Training:
    """The steps, evaluations and checkpoints of a process, once everything is set up."""

    engine: Engine
    process: WorkerProcess
    readers: Splits[SplitReader]  # the data as this process reads it
    milestones: Milestones
    checkpoints: CheckpointWriter
    progress: Progress
    bytes_at_start: int  # this process's memory when `train` began

    def __post_init__(self) -> None:
        self._first_step = self.progress.step
        self._activations_counted = False
        # metrics of the step that is launched but not reported yet, and what reports it
        self._pending_step: tuple[PendingMetrics, Callable[[StepMetrics], None]] | None = None
        self._first_stage_free_at = -math.inf  # end of the last reported step on stage 0
        self._step_end_at = -math.inf  # and on all stages

    def run(self) -> None:
        """Run all steps, with the evaluations and checkpoints that are due after them."""
        begun = self.progress
        reason = 0
        for epoch, position in self.readers.training.batches.stream(
            begun.epoch, begun.position, self.engine.config.epochs
        ):
            self._step(epoch, position)
            step = self.progress.step
            # A step is reported during the next step, so that the host never waits for a GPU; but before an evaluation
            # or a checkpoint its loss and gradient norm must be known to be finite.
            tests = self.milestones.evaluates_after(step)
            saves = self.milestones.saves_after(step)
            ends = step == self.milestones.end_step
            reason = self.engine.control.any_stop_asked()
            if tests or saves or reason or ends:
                self._gather_pending()()
            best = False
            if tests and reason < Stop.UNREADABLE:
                best = self._evaluate()
                reason = max(reason, self.engine.control.any_stop_asked())
            stops = (reason and not ends) or reason >= Stop.UNREADABLE
            saves = best or saves or (stops and not self.milestones.only_steps)
            self._checkpoint(best=best, save=saves)
            if ends or stops:
                break
        self._finish(0 if self.progress.step >= self.milestones.end_step else reason)

    def _step(self, epoch: int, position: int) -> None:
        """Train on a mini-batch, and report the previous step."""
        began = time.perf_counter()
        config, engine, step = self.engine.config, self.engine, self.progress.step
        batches = self.readers.training.batches
        total_steps = self.milestones.total_steps
        rate = learning_rate(config.learning_rate, step, batches.steps_per_epoch, config.batch_size, total_steps)
        engine.set_progress(step / total_steps)
        # Activations are counted in a single step, with a full mini-batch; not in the first step, in which memory that
        # grows with use has not grown yet.
        full = config.batch_size in (None, batches.size(epoch, position))
        counts = full and not self._activations_counted and step > self._first_step
        self._activations_counted = self._activations_counted or counts
        mini_batch = MiniBatch(self.readers.training, epoch, position)
        # if the run is short, the first step is the only step that is reported
        bytes_at_start = self.bytes_at_start if counts or step == self._first_step else None
        pending = compute_gradients(engine, mini_batch, step, bytes_at_start, counts=counts)
        report_step_before = self._gather_pending()
        update_weights(engine, pending, rate)
        report_step_before()
        updates = next((average.updates for average in engine.averages.values()), 0)
        self.progress = replace(self.progress, step=step + 1, epoch=epoch, position=position + 1, ema_updates=updates)
        self._pending_step = pending, partial(self._report, self.progress, rate, began, counts)

    def _gather_pending(self) -> Callable[[], None]:
        """Begin to gather the metrics of the launched step, if any. In process 0 the function returned waits for them,
        reports them, and raises DivergedError if the loss or the gradient norm is not finite."""
        if self._pending_step is None:
            self.engine.control.gather(torch.zeros(0, dtype=torch.float64))  # only whether the run is to stop
            return lambda: None
        (pending, report), self._pending_step = self._pending_step, None
        metrics = gather_metrics(self.engine, pending)
        return lambda: report(metrics()) if self.engine.control.is_rank_zero else None

    def _report(
        self, progress: Progress, rate: float, launched: float, activations_counted: bool, metrics: StepMetrics
    ) -> None:
        """Report a step, which a GPU may have computed after other steps were launched; `progress` is that after it,
        `launched` when its launch began, in seconds on the clock of its timings."""
        config, batches, totals = self.engine.config, self.readers.training.batches, metrics.totals
        epoch, position = progress.epoch, progress.position
        check_finite(config, totals.loss, metrics.gradient_norm, progress.step, epoch + 1, rate)
        of_epoch = totals if position == 1 else self.progress.epoch_totals + totals
        self.progress = replace(self.progress, epoch_totals=of_epoch)
        # a GPU begins a step when the previous step has ended, however early it was launched
        began, begins = max(launched, self._first_stage_free_at), max(launched, self._step_end_at)
        self._first_stage_free_at = metrics.seconds[0][-1]
        self._step_end_at = max(seconds[-1] for seconds in metrics.seconds)
        loss, cross_entropy, top1, top5 = totals.means
        _, epoch_cross_entropy, epoch_top1, _ = of_epoch.means
        stages = metrics.stages
        overhead_bytes = tuple(int(stage.overhead_bytes) for stage in stages)
        self.process.report(
            events.StepDone(
                step=progress.step,
                epoch=epoch + 1,
                position=position,
                samples=batches.size(epoch, position - 1),
                tokens=totals.elements if config.text else None,
                lengths=batches.lengths(epoch, position - 1),
                seconds=self._step_end_at - begins,
                loss=loss,
                cross_entropy=cross_entropy,
                top1=top1,
                top5=top5 if config.has_top5 else None,
                epoch_cross_entropy=epoch_cross_entropy,
                epoch_top1=epoch_top1,
                learning_rate=rate,
                gradient_norm=metrics.gradient_norm,
                memory_bytes=tuple(int(stage.memory_bytes) for stage in stages),
                cpu_starved_share=tuple(stage.cpu_starved_share for stage in stages),
                activation_bytes=tuple(int(stage.activation_bytes) for stage in stages)
                if activations_counted
                else None,
                overhead_bytes=overhead_bytes if any(overhead_bytes) else None,
            )
        )
        self.process.report(events.StepRecorded(metrics.seconds, began))

    def _evaluate(self) -> bool:
        """Evaluate on the validation set, or if there is none on the test set; returns whether the score is the best so
        far; False if a sample could not be read."""
        progress = self.progress
        step, epoch = progress.step, progress.epoch + 1
        score, evaluated = self._evaluate_split(
            "test" if self.readers.validation is None else "validation", step, epoch
        )
        if self.engine.control.any_stop_asked() == Stop.EVALUATION_UNREADABLE:
            return False
        best = is_best(score, progress)
        tested = events.EvalRecord(step, epoch, evaluated.scores) if math.isfinite(evaluated.scores.loss) else None
        self.progress = replace(progress, test=tested)
        if best:
            self.progress = replace(self.progress, best_score=score, best_step=step, best=tested)
        if self.engine.control.is_rank_zero:
            self.process.report(replace(evaluated, is_best=best))
        return best

    def _evaluate_split(self, split: SplitName, step: int, epoch: int) -> tuple[float, events.Evaluated]:
        """The score of a split, greater is better, and its message, with averaged weights if there are any."""
        config, engine, averaged = self.engine.config, self.engine, bool(self.engine.averages)
        reader = dict(self.readers.each())[split]
        with engine.evaluation_mode(averages=averaged):
            totals = evaluate(engine, reader)
            examples = tuple(translate(engine, PREVIEW_DECODING, reader))
        scores = to_scores(config, totals, averaged=averaged)
        return score_of(totals, text=config.text), events.Evaluated(step, epoch, scores, split, False, examples)

    def _checkpoint(self, *, best: bool, save: bool) -> None:
        """Begin a checkpoint if `save`, once the previous one is complete; it is written during the next steps. A step
        stays the best only if its checkpoint could be written: otherwise the last complete checkpoint has the best."""
        self.checkpoints.poll()
        if save:
            self.checkpoints.wait_until_idle(self.progress.step)
        if self.checkpoints.state == "idle" and not best:
            last = self.checkpoints.last
            self.progress = replace(self.progress, best_score=last.best_score, best_step=last.best_step, best=last.best)
        if save:
            self.checkpoints.start(self.progress)

    def _finish(self, stopped_by: int) -> None:
        """Complete the last checkpoint, score the test set if the validation set has chosen the best weights, and wait
        for all processes before this process disconnects. `stopped_by`: the signal that has ended the training early;
        or 0."""
        self.checkpoints.close(self.progress.step)
        self.readers.training.check_read(self.engine.control)  # all splits share its loader
        if stopped_by:
            self.process.report(events.TrainingStopped(stopped_by))
        elif self.readers.validation is not None and not self.milestones.only_steps:
            self._score_best()
        self.readers.training.close()
        self.engine.finish()

    def _score_best(self) -> None:
        """On the test set, evaluate the weights that the validation set has chosen. Raises CorruptCheckpointError if
        their checkpoint cannot be read."""
        step = self.progress.best_step or self.progress.step
        if step != self.progress.step:
            restore(self.engine, checkpoint_path(self.checkpoints.folder, step), optimizer=False)
        epoch = (step - 1) // self.progress.steps_per_epoch + 1
        _, evaluated = self._evaluate_split("test", step, epoch)
        self.readers.training.check_read(self.engine.control)
        if self.engine.control.is_rank_zero:
            self.process.report(evaluated)


def evaluate_checkpoint(
    config: TrainConfig, decode: DecodeConfig, checkpoint: Path, spec: PipelineSpec, process: WorkerProcess
) -> None:
    """`gpipe evaluate`: restore a checkpoint, run the test set through the pipeline once, report the scores."""
    data = Data(config, spec, process.rank, None, checkpoint)
    control, groups = process.connect()
    test = data.reader(control, "test")
    engine = build_engine(config, spec, control, groups, on_action=process.on_action, pretrained=False)
    restore(engine, checkpoint, optimizer=False)
    facts = data.facts() if control.is_rank_zero else events.DataFacts()

    def report(message: object) -> None:
        if control.is_rank_zero:
            process.report(message)

    report(events.EvaluationReady())
    averaged = bool(engine.averages)
    began = time.perf_counter()
    with engine.evaluation_mode(averages=averaged):
        totals = evaluate(engine, test)
        evaluated = time.perf_counter()
        rows = translate(engine, decode, test, lambda done, total: report(events.SentencesDecoded(done, total)))
        decoded = time.perf_counter()
    test.close()
    scores = to_scores(config, totals, averaged=averaged)
    samples = test.batches.split_index.samples
    decoding_seconds, seconds = decoded - evaluated, evaluated - began
    translation = score_translations(rows, of=samples, beam=decode.beam, seconds=decoding_seconds) if rows else None
    report(events.EvaluationDone(samples, scores, seconds, facts.unigram_perplexity, translation, data.class_notes()))
    engine.finish()


def to_scores(config: TrainConfig, totals: Totals, *, averaged: bool) -> events.Scores:
    """The scores of a pass over the test set; `averaged`: whether it used the moving averages of the weights."""
    loss, _, top1, top5 = totals.means
    tokens = totals.elements if config.text else None
    return events.Scores(tokens, loss, top1, top5 if config.has_top5 else None, averaged)


def _check_same_cuts(control: ControlGroup, spec: PipelineSpec) -> None:
    """Raises InputError if processes made different plans: under torchrun each plans by itself, on its own machine."""
    plans = control.collect((spec.layer_names, spec.recompute))
    if any(plan != plans[0] for plan in plans):
        cuts = " and ".join(sorted({str([len(names) for names in cut]).replace(" ", "") for cut, _ in plans}))
        raise InputError(
            f"partition.balance=null: the processes came to different plans ({cuts}), as their machines differ; give "
            f"partition.balance={cuts.partition(' and ')[0]} and recompute=except_last"
        )


def _gpu_names(spec: PipelineSpec) -> tuple[str, ...]:
    """The names of all replicas' GPUs: looked up here and not in the parent, where that would open a CUDA context."""
    devices = dict.fromkeys(device for replica in spec.layout.replica_devices for device in replica)
    return tuple(device_name(torch.device(device)) for device in devices if device != "cpu")


def _compile(engine: Engine, batches: MiniBatches) -> events.LayersCompiled:
    """Compile all layers for all sizes of micro-batches, in all processes at the same time. Raises InputError for a
    layer that cannot be compiled."""
    positions = range(batches.steps_per_epoch)
    sizes = sorted({size for position in positions for size in batches.shard(0, position).sizes})
    began = time.perf_counter()
    with engine.control.blocked_on(BlockedOn.COMPILER):
        compiled = engine.compile(engine.spec.inputs, sizes, engine.spec.lengths)
    parts = engine.control.collect((compiled, time.perf_counter() - began), patient=True)
    total = sum((counts for counts, _ in parts), Counter[str]())
    return events.LayersCompiled(
        layers=sum(map(len, engine.spec.layer_names)),
        sizes=tuple(sizes),
        graphs=total["graphs"],
        made=total["made"],
        found=total["found"],
        seconds=max(seconds for _, seconds in parts),
    )


def _capture_graphs(engine: Engine, training: SplitReader, progress: Progress) -> events.GraphsCaptured:
    """Capture each stage's CUDA graphs for the first micro-batch of the next mini-batch, if they give the layers' bits;
    leaves gradients and buffers as they were. Raises InputError if a stage has none, and graphs=true."""
    began = time.perf_counter()
    epoch, position = next(training.batches.stream(progress.epoch, progress.position, engine.config.epochs))
    spec = engine.spec
    graphs = {k: stage.cuda_graphs for k, stage in engine.stages.items() if stage.cuda_graphs is not None}
    schedule = replace(spec, recompute="never" if spec.recompute == "never" else "always").schedule(1)
    with ExitStack() as stack:
        stack.enter_context(restoring_rng_state({stage.device for stage in engine.stages.values()}))
        for k, stage_graphs in graphs.items():
            # attributes stay: graphs may read tensors that a layer has made in its first call
            stack.enter_context(restoring_state(engine.stages[k].module, keep_attributes=True, keep_buffers=True))
            stage_graphs.capture_eagerly = True
        for fraction in (0.0, 1.0):  # graphs must not depend on the progress of the training
            engine.set_progress(fraction)
            run_one_micro_batch(engine, MiniBatch(training, epoch, position), schedule)
    for stage_graphs in graphs.values():
        stage_graphs.capture_eagerly = False
    causes = {k: stage_graphs.fallback_reason for k, stage_graphs in graphs.items() if stage_graphs.fallback_reason}
    parts = engine.control.collect((causes, time.perf_counter() - began), patient=True)
    all_causes = {k: cause for part, _ in parts for k, cause in part.items()}
    lines = tuple(f"stage {k}: {cause}" for k, cause in sorted(all_causes.items()))
    if lines and engine.config.graphs is True:
        raise InvalidSettingError("graphs", True, f"{lines[0]}; use graphs=auto")
    return events.GraphsCaptured(spec.partitions - len(lines), lines, max(seconds for _, seconds in parts))


def _check_layers(engine: Engine, training: SplitReader, progress: Progress) -> tuple[str, str]:
    """Run every layer twice on the first micro-batch of the next mini-batch; returns the banner's (label, fact).

    Raises InputError for a layer whose results or state would depend on whether it is recomputed.
    """
    began = time.perf_counter()
    epoch, position = next(training.batches.stream(progress.epoch, progress.position, engine.config.epochs))
    with checking_repeatability(engine.stages.values(), engine.spec.layout.replicas) as objections:
        recomputing = build("gpipe", engine.spec.partitions, 1, "always")
        run_one_micro_batch(engine, MiniBatch(training, epoch, position), recomputing)
    for objection in chain.from_iterable(engine.control.collect(objections)):
        raise InputError(
            f"model={group_choice(engine.config.model)}: {objection}; check_layers=false trains it as it is"
        )
    return "layers", f"run twice on a micro-batch, the same both times ({time.perf_counter() - began:.1f} s)"
