"""The words around a run: the banner before it, the summary after it, the answer of an evaluation.

The banner names what the paper calls a run by: K, M, partitions and the ideal bubble (section 2.3), and writes the
global batch as the product it is. Labelled lines, readable at 80 columns. The words are ASCII: logs are read in places
without UTF-8.
"""

import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gpipe_cli.reporting.description import PartitionDescription, RunDescription
from gpipe_cli.reporting.units import count, duration, learning_rate, loss, percent, plural, rate, size

LABEL_WIDTH = 12  # of the longest label, so that its line reads as a sentence: `global batch 32 = 1 replica x ...`
MEMORY_PER_LINE = 3


def show_line(console: Console, text: str, style: str = "") -> None:
    """Prints one line as it is; long ones are not broken, so that paths and commands can be copied."""
    console.print(Text(text, style), soft_wrap=True)


def show_facts(console: Console, facts: Iterable[tuple[str, str]]) -> None:
    """Prints labelled lines."""
    for label, fact in facts:
        show_line(console, f"{label:<{LABEL_WIDTH}} {fact}")


def show_banner(console: Console, description: RunDescription, folder: Path) -> None:
    """Shows what a run is: facts, then its partitions."""
    show_facts(console, _banner(description, folder))
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for heading in ("stage", "device", "layers", "parameters", "cost"):
        table.add_column(heading, justify="left" if heading in ("device", "layers") else "right", overflow="fold")
    for stage, partition in enumerate(description.partitions):
        share = percent(partition.cost_share)
        cells = (str(stage), partition.device, _layers(partition), count(partition.parameters), share)
        table.add_row(*(Text(cell) for cell in cells))
    console.print()
    console.print(table)
    console.print()


def show_summary(console: Console, result: dict[str, Any], folder: Path, checkpoint: str, resume: str | None) -> None:
    """Shows what became of a run.

    Args:
        result: what result.json holds.
        checkpoint: where the last checkpoint is; shown where a run was stopped.
        resume: the run folder to go on from; None if there is no checkpoint.
    """
    steps = result["steps"]
    done = f"{plural(result['epochs'], 'epoch')}, {plural(steps, 'step')}"
    stopped = f"after {duration(result['seconds'])}: {done} done" if steps else "before the first step was done"
    if result["status"] != "dry_run":  # whose banner ends with an empty line and is all that came before
        console.print()
    match result["status"]:
        case "completed":
            show_line(console, f"completed in {duration(result['seconds'])}: {done}", "bold green")
        case "dry_run":
            show_line(console, "dry run: everything was built, nothing was trained", "bold green")
        case "interrupted":
            show_line(console, f"interrupted {stopped}", "bold yellow")
        case status:
            show_line(console, f"{status} {stopped}", "bold red")
    show_facts(console, _outcome(result))
    show_facts(console, [("run folder", str(folder))])
    if result["status"] in ("interrupted", "failed"):
        show_facts(console, [("checkpoint", checkpoint)])
        if resume is not None:
            show_facts(console, [("go on with", f"gpipe train {_override('resume', resume)}")])
    if steps:
        show_facts(console, [("curves", f"tensorboard --logdir {shlex.quote(str(folder))}")])


def outcome_of_test(test: dict[str, Any]) -> str:
    """`top-1 98.6 %, top-5 100.0 %, loss 0.0512`."""
    parts = [f"top-1 {percent(test['top1'])}", f"top-5 {percent(test['top5'])}", f"loss {loss(test['loss'])}"]
    if test["top5"] is None:
        del parts[1]
    return ", ".join(parts) + (" (averaged weights)" if test.get("averaged") else "")


def _banner(run: RunDescription, folder: Path) -> Iterable[tuple[str, str]]:
    layers = sum(len(partition.layers) for partition in run.partitions)
    partitions, micro_batches = len(run.partitions), plural(len(run.micro_batch_sizes), "micro-batch")
    yield "model", f"{run.model_name}: {plural(layers, 'layer')}, {count(run.parameters)} parameters"
    samples = f": {run.train_samples:,} training and {run.test_samples:,} test samples" if run.train_samples else ""
    yield "dataset", run.dataset_name + samples
    yield "pipeline", f"K = {plural(partitions, 'partition')}, M = {micro_batches}"
    yield "schedule", f"{run.schedule}, recompute {run.recompute}"
    yield "executor", f"{run.executor}, {plural(run.threads, 'thread')} for each process"
    yield "ideal bubble", f"{percent(run.ideal_bubble)} of the stages' time"
    yield (
        "global batch",
        f"{run.global_batch:,} = {plural(run.replicas, 'replica')} x {micro_batches} x {_samples(run)}",
    )
    training = plural(run.epochs, "epoch")
    if run.steps_per_epoch is not None:
        training += f" of {plural(run.steps_per_epoch, 'step')}"
    if run.max_steps is not None and run.steps_per_epoch is not None:
        training += f", stopping after {plural(run.total_steps, 'step')}"
    yield "training", f"{training}, learning rate {learning_rate(run.learning_rate)}"
    yield "run folder", str(folder)
    if run.resumed_from is not None:
        yield "resumed from", f"{run.resumed_from}, {plural(run.first_step, 'step')} done"


def _samples(run: RunDescription) -> str:
    """`8 samples`, or `6 or 5 samples` where micro-batches are uneven."""
    sizes = sorted(set(run.micro_batch_sizes), reverse=True)
    return " or ".join(f"{samples:,}" for samples in sizes) + (" sample" if sizes == [1] else " samples")


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
        yield "test", outcome_of_test(test)
    if best is not None and best != test:
        yield "best", f"{outcome_of_test(best)}, after epoch {best['epoch']}"
    elif best is not None:
        yield "", f"the best of the run, after epoch {best['epoch']}"
    if result["samples_per_second"] is not None:
        warm_up = "warm-up included" if result["speed_includes_warm_up"] else "warm-up excluded"
        speed = f"{rate(result['samples_per_second'])} samples/s, {duration(result['step_seconds'])} per step"
        yield "speed", f"{speed} (medians, {warm_up})"
        if result["samples_per_second_kind"] == "measured_one_device":
            yield "", "measured_one_device: all stages shared one device"
        else:
            yield "", "measured: every stage had a device or cores of its own"
    memory = [f"stage {stage} {size(peak)}" for stage, peak in enumerate(result["memory_bytes"])]
    for first in range(0, len(memory), MEMORY_PER_LINE):
        yield "" if first else "peak memory", ", ".join(memory[first : first + MEMORY_PER_LINE])


def _override(key: str, value: str) -> str:
    """`key=value` as one types it: Hydra takes commas and brackets for its own, the shell takes blanks."""
    if re.fullmatch(r"[\w./-]+", value):
        return f"{key}={value}"
    override = f"{key}='" + value.replace("'", "\\'") + "'"
    return shlex.quote(override) if re.search(r'["$`!\\]', override) else f'"{override}"'
