"""What became of a run: the summary of a training, of a measurement (`gpipe bench`) and of `gpipe evaluate`."""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from gpipe_cli.reporting.page.page import PAGE
from gpipe_cli.reporting.run.description import Task, scores_of, words_of
from gpipe_cli.reporting.run.lines import in_columns, override, show_facts, show_text
from gpipe_cli.reporting.run.step_breakdown import STAGES_SHOWN, show_shares
from gpipe_cli.results.files import write_result
from gpipe_cli.training.events import EvaluationDone, TranslationScores
from gpipe_cli.units import duration, loss, operations, percent, perplexity, plural, rate, rounded

EVALUATION = "evaluate.json"
EXAMPLES = 5  # translations that the console shows; evaluate.json has all


def show_summary(
    console: Console, result: Mapping[str, Any], folder: Path, peak: str, checkpoint: str, resume: str | None
) -> None:
    """Shows what became of a training or of a measurement, as result.json has it.

    Args:
        peak: where the peak that the MFU is a share of comes from, or why it is not known.
        checkpoint: where the last checkpoint is, and the run folder to ``resume``; for a training that was stopped.
    """
    status, seconds, bench = result["status"], duration(result["seconds"]), result["command"] == "bench"
    epochs = f"{plural(result['epochs'], 'epoch')}, " if result["epochs"] and not bench else ""
    done = epochs + plural(result["steps"], "step")
    match status:
        case "completed" if bench:
            measured = f"measured {plural(result['speed_steps'], 'step')} after {result['warm_up_steps']} of warm-up"
            line, colour = f"{measured}, in {seconds}", "green"
        case "completed":
            line, colour = f"completed in {seconds}: {done}", "green"
        case "dry_run":
            line, colour = "dry run: cut and placed; nothing was trained", "green"
        case _:
            when = f"after {seconds}: {done} done" if result["steps"] else "before the first step was done"
            line, colour = f"{status} {when}", "yellow" if status == "interrupted" else "red"
    if status != "dry_run":  # whose banner ends with an empty line and is all that came before
        console.print()
    show_text(console, line, f"bold {colour}")
    if result["error"]:
        show_facts(console, [("error", result["error"])])
    show_facts(console, _outcome(result))
    if result["breakdown"]["measured"] is not None:
        show_shares(console, result["breakdown"], result["bubble"]["ideal"])
    if result["memory"]:
        show_facts(console, in_columns(console, memory_rows(result["memory"])))
    if bench:
        show_facts(console, _flops(result, peak))
    show_facts(console, [("run folder", str(folder))])
    if (folder / PAGE).exists():
        show_facts(console, [("page", str(folder / PAGE))])
    if bench:
        return
    if failed := result["failed_checkpoints"]:
        show_facts(console, [("not written", f"{plural(failed, 'checkpoint')} of those that were due")])
    if status in ("interrupted", "failed"):
        show_facts(console, [("checkpoint", checkpoint)])
        if resume is not None:
            show_facts(console, [("go on with", f"gpipe train {override('resume', resume)}")])
    if result["steps"] and "tensorboard" in result["config"]["logger"] and folder.is_dir():
        show_facts(console, [("curves", f"tensorboard --logdir {shlex.quote(str(folder))}")])


def show_evaluation(console: Console, folder: Path, checkpoint: str, task: Task, message: EvaluationDone) -> None:
    """Shows an evaluation and writes evaluate.json beside the run's result.json, which stays as it was."""
    words, translation = words_of(task), message.translation
    found: dict[str, Any] = {
        "checkpoint": checkpoint,
        "task": task,
        "samples": message.samples,
        **scores_of(task, message.scores),
        "averaged": message.scores.averaged,
        "seconds": message.seconds,
    }
    if words.text:
        found |= {"tokens": message.scores.tokens, "unigram_perplexity": message.unigram_perplexity}
    if task == "translation":
        found["translation"] = None if translation is None else asdict(translation)
    try:
        write_result(folder, found, EVALUATION)
    finally:  # what cannot be written is shown all the same
        tokens = "" if message.scores.tokens is None else f" with {plural(message.scores.tokens, 'token')}"
        seen = f"{message.samples:,}{tokens} in {duration(message.seconds)}"
        facts = [("checkpoint", checkpoint), ("test", outcome_of_test(found, message.unigram_perplexity))]
        facts.append((f"{words.sample}s", seen))
        if translation is not None:
            facts += outcome_of_translation(translation)
        show_facts(console, [*facts, ("written to", str(folder / EVALUATION))])


def outcome_of_test(test: dict[str, Any], unigram_perplexity: float | None = None) -> str:
    """`top-1 98.6 %, top-5 100.0 %, loss 0.0512`, or `perplexity 41.3 (unigram model 312.0), token accuracy 31.2 %,
    loss 3.7210 nats per token`. A unigram model knows the frequencies of the tokens only."""
    if "perplexity" in test:
        unigram = "" if unigram_perplexity is None else f" (unigram model {perplexity(unigram_perplexity)})"
        scores = [
            f"perplexity {perplexity(test['perplexity'])}{unigram}",
            f"token accuracy {percent(test['token_accuracy'])}",
            f"loss {loss(test['loss'])} nats per token",
        ]
    else:
        top5 = [] if test["top5"] is None else [f"top-5 {percent(test['top5'])}"]
        scores = [f"top-1 {percent(test['top1'])}", *top5, f"loss {loss(test['loss'])}"]
    return ", ".join(scores) + (" (averaged weights)" if test["averaged"] else "")


def outcome_of_translation(translation: TranslationScores) -> Iterable[tuple[str, str]]:
    """Labelled lines: scores beside those of copying the source, which names alike in two languages make high."""
    sentences = f"{translation.sentences:,} of {plural(translation.of, 'sentence')}"
    yield "BLEU", f"{translation.bleu:.1f} (copying the source: {translation.bleu_copy:.1f})"
    yield "chrF", f"{translation.chrf:.1f} (copying the source: {translation.chrf_copy:.1f})"
    yield "decoded", f"{sentences}, beam {translation.beam}, {duration(translation.seconds)}"
    for example in translation.examples[:EXAMPLES]:
        yield example.pair, _one_line(example.source)
        yield "  reference", _one_line(example.reference)
        yield "  decoded", _one_line(example.translation)


def _outcome(result: Mapping[str, Any]) -> Iterable[tuple[str, str]]:
    test, best = result["test"], result["best"]
    if test is not None:
        yield "test", outcome_of_test(test, result.get("unigram_perplexity"))
    if best is not None and best != test:
        yield "best", f"{outcome_of_test(best)}, after epoch {best['epoch']}"
    elif best is not None:
        yield "", f"the best of the run, after epoch {best['epoch']}"
    if result["samples_per_second"] is None:
        return
    words, step = words_of(result["task"]), f"{duration(result['step_seconds'])} per step"
    units = {"tokens_per_second": "tokens/s"} if words.text else {}
    units["samples_per_second"] = f"{words.sample}s/s"
    if result["command"] == "bench":
        label = "speed"
        for key, unit in units.items():
            first, third = result[f"{key}_quartiles"]
            spread = f"quartiles {rate(first)} and {rate(third)}, {plural(result['speed_steps'], 'step')}"
            yield label, f"{rate(result[key])} {unit} (median; {spread})"
            label = ""
        yield "", f"{step}, warm-up included" if result["speed_includes_warm_up"] else step
    else:
        steps = f"after the first {plural(result['warm_up_steps'], 'step')}"
        if result["speed_includes_warm_up"]:
            steps = f"of the first {plural(result['speed_steps'], 'step')}, which are slow"
        speeds = ", ".join(f"{rate(result[key])} {unit}" for key, unit in units.items())
        yield "speed", f"{speeds}, {step} (medians {steps})"
    yield "", speed_kind(result["samples_per_second_kind"], result["without_core"])


def speed_kind(kind: str, without_core: float | None = None) -> str:
    """Whether it is the speed of a pipeline; ``kind`` is a SpeedKind as result.json has it."""
    match kind:
        case "measured_one_device":
            return f"{kind}: stages shared a device or cores"
        case "measured_contended":
            share = "at times" if without_core is None else f"{percent(without_core)} of the time"
            return f"{kind}: other programs had the cores {share}"
    return f"{kind}: every process had a device or cores of its own"


def memory_rows(stages: Sequence[Mapping[str, Any]]) -> Sequence[tuple[str, Sequence[str]]]:
    """Parts of each stage's memory and their sum, from the entry of result.json; of many stages the fullest one's."""
    parts = ("libraries", "weights", "gradients", "optimizer", "activations", "other")
    unit, name = (2**30, "GiB") if max(stage["peak"] for stage in stages) >= 10 * 2**30 else (2**20, "MiB")
    rows = [(f"memory, {name}", [f"{part:>7}" for part in parts] + ["=", "peak"])]
    fullest = max(stages, key=lambda stage: int(stage["peak"]))
    for stage in stages if len(stages) <= STAGES_SHOWN else [fullest]:
        shown = rounded({part: stage[part] / unit for part in parts})
        label = (
            "all stages" if stage["stage"] is None else f"stage{'s' * isinstance(stage['stage'], str)} {stage['stage']}"
        )
        rows.append((label, [f"{value:,.1f}" for value in shown.values()] + ["=", f"{sum(shown.values()):,.1f}"]))
    return rows


def _flops(result: Mapping[str, Any], note: str) -> Iterable[tuple[str, str]]:
    if result["model_flops_per_second"] is None:
        return
    step = f"{operations(result['model_flops'])}FLOP of a full step, recomputation not counted"
    yield "model", f"{operations(result['model_flops_per_second'])}FLOP/s ({step})"
    yield "MFU", f"{percent(result['mfu'])} of {note}" if result["mfu"] is not None else f"not known: {note}"


def _one_line(text: str) -> str:
    """``text`` without line breaks and without what would move a terminal's cursor."""
    return " ".join(re.sub(r"[\x00-\x1f\x7f-\x9f]", " ", text).split())
