"""Final summaries: of a training, of a measurement (`gpipe bench`) and of `gpipe evaluate`."""

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from gpipe_cli.config.settings import SAMPLE_WORDS, TEXT_TASKS, Task
from gpipe_cli.reporting.page.page import PAGE
from gpipe_cli.reporting.run.description import RunContext, to_evaluation
from gpipe_cli.reporting.run.lines import align_or_stack, print_fields, show_text
from gpipe_cli.reporting.run.step_breakdown import STAGES_SHOWN, show_shares
from gpipe_cli.results.dict_conversion import to_dict
from gpipe_cli.results.files import write_result
from gpipe_cli.results.metrics import METRICS, select_metrics
from gpipe_cli.results.run import Evaluation, RunResult, StageMemory
from gpipe_cli.training.events import EvaluationDone, PairScores, TranslationScores
from gpipe_cli.units import duration, memory_unit, operations, percent, plural, round_preserving_sum

EVALUATION = "evaluate.json"
SAMPLES, TOKENS = select_metrics("samples_per_second", "tokens_per_second")
MAX_EXAMPLES = 5  # translations that the console shows; evaluate.json has all
MAX_PAIRS = 3  # language pairs with the best, and with the worst scores, that the console shows; evaluate.json has all


def show_summary(
    console: Console, run: RunContext, result: RunResult, folder: Path, checkpoint: str, resume_command: str | None
) -> None:
    """Shows the outcome of a training or a measurement. `checkpoint`: where the last checkpoint of a stopped training
    is; `resume_command`: the command that resumes it, None if there is nothing to do."""
    status, bench = result.status, result.command == "bench"
    line, colour = describe_outcome(result)
    if status != "dry_run":  # a dry run has only the banner above, which ends with an empty line
        console.print()
    show_text(console, line, f"bold {colour}")
    if result.error:
        print_fields(console, [("error", result.error)])
    print_fields(console, _score_fields(result))
    if result.breakdown.measured is not None:
        show_shares(console, vars(result.breakdown), result.bubble.ideal or 0.0, run.plan)
    if result.memory:
        print_fields(console, align_or_stack(console, memory_rows(result.memory)))
    if bench:
        print_fields(console, _flops(result, run.peak_source))
    facts = [("run folder", str(folder))]
    if not bench and (failed := result.failed_checkpoints):
        facts.append(("not written", f"{plural(failed, 'checkpoint')} (see the warnings above)"))
    page = folder / PAGE
    curves = f"tensorboard --logdir {shlex.quote(str(folder))}"
    has_curves = not bench and result.steps and "tensorboard" in result.config["logger"] and folder.is_dir()
    if run.next_commands is not None and status == "completed":
        looks = [shlex.quote(str(page))] * page.exists() + [curves] * bool(has_curves)
        facts += [*zip(("look", ""), looks, strict=False), *run.next_commands]
        print_fields(console, facts)
        return
    if page.exists():
        facts.append(("page", str(page)))
    if not bench:
        if status in ("interrupted", "failed"):
            facts.append(("checkpoint", checkpoint))
            facts += [] if resume_command is None else [("resume with", resume_command)]
        if has_curves:
            facts.append(("curves", curves))
    print_fields(console, facts)


def describe_outcome(result: RunResult) -> tuple[str, str]:
    """How a training or a measurement ended, in a line, and the line's colour."""
    status, bench = result.status, result.command == "bench"
    seconds = METRICS["seconds"].text(result)
    epochs = f" ({plural(result.epochs, 'whole epoch')})" if result.epochs and not bench else ""
    done = plural(result.steps, "step") + epochs
    since = ""
    if len(result.starts) > 1:
        steps = plural(result.steps - result.starts[-1].first_step, "step")
        since = f"; since it was resumed, {steps} in {METRICS['start_seconds'].text(result)}"
    match status:
        case "completed" if bench:
            measured = f"measured {plural(result.speed_steps, 'step')} after {result.warm_up_steps} of warm-up"
            return f"{measured}, in {seconds}", "green"
        case "completed":
            return f"completed in {seconds}: {done}{since}", "green"
        case "dry_run":
            return "dry run: the model was cut and placed, not trained", "green"
    when = f"after {seconds}: {done} done" if result.steps else "before the first step was complete"
    return f"{status} {when}{since}", "yellow" if status == "interrupted" else "red"


def show_evaluation(console: Console, folder: Path, checkpoint: str, task: Task, message: EvaluationDone) -> None:
    """Shows an evaluation and writes evaluate.json next to the run's result.json, which stays. Raises OSError."""
    text = task in TEXT_TASKS
    translation = message.translation
    tested = to_evaluation(task, message.scores)
    results: dict[str, Any] = {
        "checkpoint": checkpoint,
        "task": task,
        "samples": message.samples,
        **{key: value for key, value in to_dict(tested, text).items() if key not in ("step", "epoch")},
        "seconds": message.seconds,
    }
    if text:
        results["unigram_perplexity"] = message.unigram_perplexity
    if task == "translation":
        results["translation"] = None if translation is None else asdict(translation)
    try:
        write_result(folder, results, EVALUATION)
    finally:  # if the file cannot be written, the summary is still shown
        tokens = "" if message.scores.tokens is None else f" with {plural(message.scores.tokens, 'token')}"
        amount = f"{message.samples:,}{tokens} in {duration(message.seconds)}"
        outcome = format_scores(task, tested, message.unigram_perplexity)
        facts = [("checkpoint", checkpoint), ("test", outcome), (f"{SAMPLE_WORDS[task]}s", amount), *message.notes]
        if translation is not None:
            facts += translation_fields(translation)
        print_fields(console, [*facts, ("written to", str(folder / EVALUATION))])


def format_scores(task: Task, test: Evaluation, unigram_perplexity: float | None = None) -> str:
    """`top-1 98.6 %, top-5 100.0 %, loss 0.0512`, or `perplexity 41.3 (unigram model 312.0), token accuracy 31.2 %,
    loss 3.7210 nats per token`. A unigram model knows only the frequencies of tokens."""
    result = RunResult("completed", task=task, test=test)
    keys = ("test_perplexity", "test_token_accuracy") if result.text else ("test_top1", "test_top5")
    measures = [metric for metric in select_metrics(*keys, "test_loss") if metric.value(result) is not None]
    scores = {metric.key: f"{metric.name.removeprefix('test ')} {metric.text(result)}" for metric in measures}
    if result.text:
        scores["test_loss"] += " nats per token"
        if unigram_perplexity is not None:
            scores["test_perplexity"] += f" (unigram model {METRICS['unigram_perplexity'].format(unigram_perplexity)})"
    return ", ".join(scores.values()) + (" (averaged weights)" if test.averaged else "")


def translation_fields(translation: TranslationScores) -> Iterable[tuple[str, str]]:
    """Labelled lines: scores, also for copying the source, which are high if the languages share names."""
    sentences = f"{translation.sentences:,} of {plural(translation.of, 'sentence')}"
    yield "BLEU", f"{translation.bleu:.1f} (copying the source: {translation.bleu_copy:.1f})"
    yield "chrF", f"{translation.chrf:.1f} (copying the source: {translation.chrf_copy:.1f})"
    if len(translation.pairs) > 1:
        yield "BLEU by pair", _format_pairs(translation.pairs)
    yield "decoded", f"{sentences}, beam {translation.beam}, {duration(translation.seconds)}"
    for example in translation.examples[:MAX_EXAMPLES]:
        yield example.pair, _one_line(example.source)
        yield "  reference", _one_line(example.reference)
        yield "  decoded", _one_line(example.translation)


def _format_pairs(pairs: Sequence[PairScores]) -> str:
    """`fr-en 41.2, de-en 38.0, es-en 37.1 ... am-en 2.1, my-en 1.0, km-en 0.4, of 102 pairs`, the best first."""
    ordered = sorted(pairs, key=lambda pair: (-pair.bleu, -pair.chrf))
    shown = [f"{pair.pair} {pair.bleu:.1f}" for pair in ordered]
    if len(pairs) <= 2 * MAX_PAIRS:
        return ", ".join(shown)
    return f"{', '.join(shown[:MAX_PAIRS])} ... {', '.join(shown[-MAX_PAIRS:])}, of {len(pairs)} pairs"


def _score_fields(result: RunResult) -> Iterable[tuple[str, str]]:
    test, best, validation = result.test, result.best, result.validation
    if validation is not None:
        yield "validation", format_scores(result.task, validation)
        yield "", f"the best, {_at_step(validation)}"
    if test is not None:
        yield "test", format_scores(result.task, test, result.unigram_perplexity)
    if validation is not None:
        yield "", "of the weights that the validation set has chosen" if test else "the test set is scored at the end"
    elif best is not None and best != test:
        yield "best", format_scores(result.task, best)
        yield "", f"chosen on the test set, {_at_step(best)}"
    elif best is not None:
        yield "", f"the best, chosen on the test set, {_at_step(best)}"
    if result.samples_per_second_kind is None:
        return
    sample = SAMPLE_WORDS[result.task]
    step = f"{METRICS['step_seconds'].text(result)} per step"
    speeds = [(TOKENS, f"{TOKENS.text(result)} tokens/s")] if result.text else []
    speeds.append((SAMPLES, f"{SAMPLES.text(result)} {sample}s/s"))
    if result.command == "bench":
        for metric, speed in speeds:
            first, third = (METRICS[f"{metric.key}_{quartile}"].text(result) for quartile in ("q1", "q3"))
            spread = f"quartiles {first} and {third}, {plural(result.speed_steps, 'step')}"
            yield "speed" if metric is speeds[0][0] else "", f"{speed} (median; {spread})"
        yield "", f"{step}, warm-up included" if result.speed_includes_warm_up else step
    else:
        steps = f"after the first {plural(result.warm_up_steps, 'step')}"
        if result.speed_includes_warm_up:
            steps = f"of the first {plural(result.speed_steps, 'step')}, which are slow"
        yield "speed", f"{', '.join(speed for _, speed in speeds)}, {step} (medians {steps})"
    yield "", describe_speed_kind(result.samples_per_second_kind, result.cpu_starved_share)


def _at_step(test: Evaluation) -> str:
    return f"after step {test.step:,}, in epoch {test.epoch}"


def describe_speed_kind(kind: str, cpu_starved_share: float | None = None) -> str:
    """Whether a speed is that of a pipeline, in words; ``cpu_starved_share``: 0 to 1."""
    match kind:
        case "measured_one_device":
            return f"{kind}: stages shared a device or cores"
        case "measured_contended":
            share = "" if cpu_starved_share is None else f", active {percent(cpu_starved_share)} of the time"
            return f"{kind}: times are inflated by other programs{share}"
    return f"{kind}: every process had its own device or cores"


def results_depend_on_threads(results: Iterable[RunResult]) -> str:
    """A clause, if trainings of the same work on CPUs had different numbers of threads, which split sums in different
    places, so that the last bits differ at first, and the scores after some steps; "" otherwise."""
    trained = [run for run in results if run.command == "train" and run.steps]
    on_cpu = [run for run in trained if {stage.device for stage in run.partitions} == {"cpu"}]
    work = [(run.model, run.dataset, run.global_batch) for run in on_cpu]
    if len({*zip(work, (run.threads for run in on_cpu), strict=True)}) == len({*work}):
        return ""
    return "results differ by it, and not only speeds; with threads=1 for all they do not"


def memory_rows(stages: Sequence[StageMemory]) -> Sequence[tuple[str, Sequence[str]]]:
    """Parts of each stage's peak memory, and their sum; of more than STAGES_SHOWN stages, only of the fullest."""
    parts = ("libraries", "weights", "gradients", "optimizer", "activations", "other")
    unit, name = memory_unit(max(stage.peak for stage in stages))
    rows = [(f"memory, {name}", [f"{part:>7}" for part in parts] + ["=", "peak"])]
    fullest = max(stages, key=lambda stage: stage.peak)
    for stage in stages if len(stages) <= STAGES_SHOWN else [fullest]:
        shown = round_preserving_sum({part: getattr(stage, part) / unit for part in parts})
        label = "all stages" if stage.stage is None else f"stage{'s' * isinstance(stage.stage, str)} {stage.stage}"
        rows.append((label, [f"{value:,.1f}" for value in shown.values()] + ["=", f"{sum(shown.values()):,.1f}"]))
    return rows


def _flops(result: RunResult, note: str) -> Iterable[tuple[str, str]]:
    if result.model_flops is None or result.model_flops_per_second is None:
        return
    step = f"{operations(result.model_flops)}FLOP per full step, recomputation not counted"
    yield "model", f"{METRICS['model_flops_per_second'].text(result)}FLOP/s ({step})"
    yield "MFU", f"not known: {note}" if result.mfu is None else f"{METRICS['mfu'].text(result)} of {note}"


def _one_line(text: str) -> str:
    """``text`` without line breaks and without control characters, which could move a terminal's cursor."""
    return " ".join(re.sub(r"[\x00-\x1f\x7f-\x9f]", " ", text).split())
