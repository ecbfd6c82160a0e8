"""The banner before a run: what the paper calls a run by, K, M, partitions and the ideal bubble (section 2.3)."""

from collections.abc import Iterable
from pathlib import Path

from rich.console import Console

from gpipe_cli.reporting.run.description import PartitionDescription, RunDescription
from gpipe_cli.reporting.run.lines import show_facts
from gpipe_cli.reporting.run.task_words import words_of
from gpipe_cli.reporting.tables.table import Column, Table, show_table
from gpipe_cli.units import count, learning_rate, percent, plural


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
    factors = f"1 replica x {micro_batches}"
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
