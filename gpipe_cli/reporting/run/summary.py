"""The words around a run: the banner before it, the summary after it, the answer of an evaluation.

The banner names what the paper calls a run by: K, M, partitions and the ideal bubble (section 2.3), and writes the
mini-batch as the product it is. Labelled lines, readable at 80 columns. The words are ASCII: logs are read in places
without UTF-8, where the sentences of a translation are shown as escapes.
"""

import re
import shlex
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from gpipe_cli.reporting.run.description import PartitionDescription, RunDescription
from gpipe_cli.reporting.run.step_breakdown import STAGES_SHOWN, share_facts
from gpipe_cli.reporting.run.task import words_of
from gpipe_cli.reporting.tables.table import Column, Table, show_table
from gpipe_cli.training.events import TranslationScores
from gpipe_cli.units import (
    count,
    duration,
    learning_rate,
    loss,
    percent,
    perplexity,
    plural,
    rate,
    rounded,
    size,
)

LABEL_WIDTH = 12  # of the longest label, `ideal bubble`
MEMORY_PER_LINE = 3
TIMELINE_PAGE = "timeline.html"
COMMANDS = ("gpipe ", "tensorboard ")  # lines that are copied begin with these
EXAMPLES = 5  # translations that the console shows; evaluate.json has all


def show_line(console: Console, text: str, style: str = "") -> None:
    """Prints one line as it is; long ones are not broken, so that paths and commands can be copied."""
    writable = text.encode(console.encoding, "backslashreplace").decode(console.encoding)
    console.print(Text(writable, style), soft_wrap=True)


def show_error(text: str) -> None:
    """Says in one line on stderr what went wrong."""
    sys.stderr.write(f"{' '.join(text.split())}\n")
    sys.stderr.flush()


def show_facts(console: Console, facts: Iterable[tuple[str, str]]) -> None:
    """Prints labelled lines; in a terminal that is narrower than one, it goes on below the fact, at a blank."""
    for label, fact in facts:
        lines = [f"{label:<{LABEL_WIDTH}} {fact}"]
        if console.is_terminal and not fact.startswith(COMMANDS):
            indent = " " * (LABEL_WIDTH + 1)
            lines = textwrap.wrap(
                lines[0], console.width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
            )
        for line in lines:
            show_line(console, line)


def show_banner(console: Console, description: RunDescription, folder: Path) -> None:
    """Shows what a run is: facts, then its partitions."""
    show_facts(console, _banner(description, folder))
    stages = description.partitions
    columns = (
        Column("stage", cells=[str(stage) for stage in range(len(stages))], number=True),
        Column("device", cells=[partition.device for partition in stages]),
        Column("layers", cells=[_layers(partition) for partition in stages]),
        Column("parameters", cells=[count(partition.parameters) for partition in stages], number=True),
        Column("cost", cells=[percent(partition.cost_share) for partition in stages], number=True),
    )
    console.print()
    show_table(console, Table("", columns), gap=3)
    console.print()


def show_summary(console: Console, result: dict[str, Any], folder: Path, checkpoint: str, resume: str | None) -> None:
    """Shows what became of a run.

    Args:
        result: what result.json holds.
        checkpoint: where the last checkpoint is; shown where a run was stopped.
        resume: the run folder to go on from; None if there is no checkpoint.
    """
    steps = result["steps"]
    done = f"{plural(result['epochs'], 'epoch')}, " * (result["epochs"] > 0) + plural(steps, "step")
    stopped = f"after {duration(result['seconds'])}: {done} done" if steps else "before the first step was done"
    if result["status"] != "dry_run":  # whose banner ends with an empty line and is all that came before
        console.print()
    match result["status"]:
        case "completed":
            show_line(console, f"completed in {duration(result['seconds'])}: {done}", "bold green")
        case "dry_run":
            show_line(console, "dry run: cut and placed; nothing was trained", "bold green")
        case "interrupted":
            show_line(console, f"interrupted {stopped}", "bold yellow")
        case status:
            show_line(console, f"{status} {stopped}", "bold red")
    show_facts(console, _outcome(result))
    show_facts(console, [("run folder", str(folder))])
    if (folder / TIMELINE_PAGE).exists():
        show_facts(console, [("timeline", str(folder / TIMELINE_PAGE))])
    if result["status"] in ("interrupted", "failed"):
        show_facts(console, [("checkpoint", checkpoint)])
        if resume is not None:
            show_facts(console, [("go on with", f"gpipe train {override('resume', resume)}")])
    if steps:
        show_facts(console, [("curves", f"tensorboard --logdir {shlex.quote(str(folder))}")])


def outcome_of_test(test: dict[str, Any], unigram_perplexity: float | None = None) -> str:
    """`top-1 98.6 %, top-5 100.0 %, loss 0.0512`, or `perplexity 41.3 (unigram model 312.0), token accuracy 31.2 %,
    loss 3.7210 nats per token`.

    Args:
        test: the scores of a task.
        unigram_perplexity: that of a model which knows the frequencies of the tokens only, on the same test set.
    """
    averaged = " (averaged weights)" if test.get("averaged") else ""
    if "perplexity" in test:
        unigram = "" if unigram_perplexity is None else f" (unigram model {perplexity(unigram_perplexity)})"
        parts = [f"perplexity {perplexity(test['perplexity'])}{unigram}"]
        parts += [f"token accuracy {percent(test['token_accuracy'])}", f"loss {loss(test['loss'])} nats per token"]
        return ", ".join(parts) + averaged
    parts = [f"top-1 {percent(test['top1'])}", f"top-5 {percent(test['top5'])}", f"loss {loss(test['loss'])}"]
    if test["top5"] is None:
        del parts[1]
    return ", ".join(parts) + averaged


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


def _banner(run: RunDescription, folder: Path) -> Iterable[tuple[str, str]]:
    layers = sum(len(partition.layers) for partition in run.partitions)
    partitions, micro_batches = len(run.partitions), plural(run.micro_batch_count, "micro-batch")
    yield "model", f"{run.model_name}: {plural(layers, 'layer')}, {count(run.parameters)} parameters"
    yield "dataset", run.dataset_name + _samples_of_data(run)
    if run.vocabulary is not None:
        yield "vocabulary", plural(run.vocabulary, "token")
    if run.preset is not None:
        yield "preset", f"{run.preset}: settings that suit this model and data set; what is given wins"
    yield "pipeline", f"K = {plural(partitions, 'partition')}, M = {micro_batches}"
    yield "schedule", f"{run.schedule}, recompute {run.recompute}"
    yield "executor", f"{run.executor}, {plural(run.threads, 'thread')} for each process"
    yield "ideal bubble", f"{percent(run.ideal_bubble)} of the stages' time"
    yield "mini-batch", _global_batch(run, micro_batches)
    if run.command == "bench":
        assert run.max_steps is not None
        yield "measuring", f"{plural(run.max_steps - run.warm_up_steps, 'step')} after {run.warm_up_steps} of warm-up"
    else:
        yield "training", _training(run)
        yield "", f"learning rate {_learning_rate(run)}"
    yield from run.notes
    yield "run folder", str(folder)
    if run.resumed_from is not None:
        yield "resumed from", f"{run.resumed_from}, {plural(run.first_step, 'step')} done"


def _training(run: RunDescription) -> str:
    training = plural(run.epochs, "epoch")
    if run.steps_per_epoch is not None:
        training += f" of {plural(run.steps_per_epoch, 'step')}"
    if run.max_steps is not None and run.steps_per_epoch is not None:
        training += f", stopping after {plural(run.total_steps, 'step')}"
    return training


def _learning_rate(run: RunDescription) -> str:
    """`0.04`, or `0.04, after a warm-up of 45 steps from 0.000889`."""
    if run.warm_up is None:
        return learning_rate(run.learning_rate)
    steps, rate = run.warm_up
    return f"{learning_rate(rate)}, after a warm-up of {plural(steps, 'step')} from {learning_rate(run.learning_rate)}"


def _samples_of_data(run: RunDescription) -> str:
    """`: 412 training and 46 test sequences of 128 tokens`; nothing in a dry run."""
    if not run.train_samples:
        return ""
    samples = f": {run.train_samples:,} training and {run.test_samples:,} test {words_of(run.task).sample}s"
    if run.task == "language_model" and run.length is not None:
        samples += f" of {plural(run.length, 'token')}"
    return samples if run.languages is None else f"{samples}, {plural(run.languages, 'language')}"


def _global_batch(run: RunDescription, micro_batches: str) -> str:
    """`32 = 1 replica x 4 micro-batches x 8 samples`, or `4,096 tokens = 1 replica x 4 micro-batches`."""
    factors = f"{plural(run.replicas, 'replica')} x {micro_batches}"
    if run.global_batch is None:
        return f"{run.global_batch_tokens:,} tokens = {factors}"
    return f"{run.global_batch:,} = {factors} x {_micro_batch(run)}"


def _micro_batch(run: RunDescription) -> str:
    """`8 samples`, or `6 or 5 samples` where micro-batches are uneven."""
    sizes, sample = sorted(set(run.micro_batch_sizes), reverse=True), words_of(run.task).sample
    return " or ".join(f"{samples:,}" for samples in sizes) + (f" {sample}" if sizes == [1] else f" {sample}s")


def _layers(partition: PartitionDescription) -> str:
    """`8: stem ... normal_5`."""
    names = partition.layers
    if len(names) <= 2:
        return f"{len(names)}: {', '.join(names)}"
    return f"{len(names)}: {names[0]} ... {names[-1]}"


def _outcome(result: dict[str, Any]) -> Iterable[tuple[str, str]]:
    test, best = result["test"], result["best"]
    if result["error"]:
        yield "error", result["error"]
    if test is not None:
        yield "test", outcome_of_test(test, result.get("unigram_perplexity"))
    if best is not None and best != test:
        yield "best", f"{outcome_of_test(best)}, after epoch {best['epoch']}"
    elif best is not None:
        yield "", f"the best of the run, after epoch {best['epoch']}"
    if result["samples_per_second"] is not None:
        steps = f"medians after the first {plural(result['warm_up_steps'], 'step')}"
        if result["speed_includes_warm_up"]:
            steps = f"medians of the first {plural(result['speed_steps'], 'step')}, which are slow"
        yield "speed", f"{_speed(result)}, {duration(result['step_seconds'])} per step ({steps})"
        yield "", speed_kind(result["samples_per_second_kind"], result["without_core"])
    yield from share_facts(result)
    yield from memory_table(result)


def speed_kind(kind: str, without_core: float | None = None) -> str:
    """Whether it is the speed of a pipeline; ``kind`` is a SpeedKind as result.json has it."""
    match kind:
        case "measured_one_device":
            return f"{kind}: stages shared a device or cores"
        case "measured_contended":
            share = "at times" if without_core is None else f"{percent(without_core)} of the time"
            return f"{kind}: other programs had the cores {share}"
    return f"{kind}: every stage had a device or cores of its own"


def memory_table(result: dict[str, Any]) -> Iterable[tuple[str, str]]:
    """Parts of each stage's memory and their sum, from the entry of result.json; of many stages the fullest one's. The
    peaks alone where parts are not known."""
    stages = result.get("memory")
    if not stages:
        yield from memory_facts("peak memory", result["memory_bytes"])
        return
    parts = ("libraries", "weights", "gradients", "optimizer", "activations", "other")
    widths = [max(len(part), len("1,234.5")) for part in parts]

    def line(cells: Sequence[str], peak: str) -> str:
        return " ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)) + f" = {peak:>5}"

    unit, name = (2**30, "GiB") if max(stage["peak"] for stage in stages) >= 10 * 2**30 else (2**20, "MiB")
    yield f"memory, {name}", line(parts, "peak")
    fullest = max(stages, key=lambda stage: int(stage["peak"]))
    for stage in stages if len(stages) <= STAGES_SHOWN else [fullest]:
        shown = rounded({part: stage[part] / unit for part in parts})
        label = "all stages" if stage["stage"] is None else f"stage {stage['stage']}"
        yield label, line([f"{value:,.1f}" for value in shown.values()], f"{sum(shown.values()):,.1f}")


def memory_facts(label: str, sizes: Sequence[int]) -> Iterable[tuple[str, str]]:
    """Labelled lines: `stage 0 605.2 MiB, stage 1 605.8 MiB`."""
    memory = [f"stage {stage} {size(peak)}" for stage, peak in enumerate(sizes)]
    for first in range(0, len(memory), MEMORY_PER_LINE):
        yield "" if first else label, ", ".join(memory[first : first + MEMORY_PER_LINE])


def _speed(result: dict[str, Any]) -> str:
    """`512.0 samples/s`, or `12,345 tokens/s, 96.4 sentences/s`."""
    words = words_of(result["task"])
    samples = f"{rate(result['samples_per_second'])} {words.sample}s/s"
    return f"{rate(result['tokens_per_second'])} tokens/s, {samples}" if words.text else samples


def _one_line(text: str) -> str:
    """``text`` without line breaks and without what would move a terminal's cursor."""
    return " ".join(re.sub(r"[\x00-\x1f\x7f-\x9f]", " ", text).split())


def override(key: str, value: str) -> str:
    """`key=value` as one types it: Hydra takes commas and brackets for its own, the shell takes blanks."""
    if re.fullmatch(r"[\w./-]+", value):
        return f"{key}={value}"
    override = f"{key}='" + value.replace("'", "\\'") + "'"
    return shlex.quote(override) if re.search(r'["$`!\\]', override) else f'"{override}"'
