"""The banner before a run: K, M, the partitions and the ideal bubble, as in the paper (section 2.3), and settings."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from gpipe_cli.assembly.learning_rate import learning_rate, warm_up_steps
from gpipe_cli.config.groups import AmoebaNetConfig, CosineLearningRateConfig, ImagesConfig, group_choice
from gpipe_cli.config.settings import SAMPLE_WORDS, TrainConfig, flatten, load_preset
from gpipe_cli.data.micro_batches import micro_batch_sizes
from gpipe_cli.errors import format_value
from gpipe_cli.reporting.run.description import RunContext, dataset_label, precision_note
from gpipe_cli.reporting.run.lines import print_fields
from gpipe_cli.reporting.tables.table import Column, Table, show_table
from gpipe_cli.results.files import RESULT_FILE
from gpipe_cli.training.events import GraphsCaptured, LayersCompiled
from gpipe_cli.units import count, percent, plural
from gpipe_cli.units import learning_rate as shown_rate


def show_banner(console: Console, run: RunContext, folder: Path) -> None:
    print_fields(console, _banner(run, folder))
    stages = run.spec
    several = 1 < stages.layout.processes < stages.partitions  # some process has several stages
    # of each stage, in all replicas: `cpu`, or `cuda:0, cuda:2`
    devices = [", ".join(dict.fromkeys(of_stage)) for of_stage in zip(*stages.layout.replica_devices, strict=True)]
    columns = (
        Column("stage", cells=[str(stage) for stage in range(stages.partitions)], number=True),
        *([Column("process", cells=[*map(str, stages.layout.rank_of_stage)], number=True)] if several else []),
        Column("device", cells=devices),
        Column("layers", cells=[_layers(names) for names in stages.layer_names]),
        Column("parameters", cells=[count(parameters) for parameters in stages.parameters], number=True),
        Column("cost", cells=[percent(share) for share in run.cost_shares], number=True),
    )
    console.print()
    show_table(console, Table("", columns), gap=3, elsewhere=RESULT_FILE)
    console.print()


def _banner(run: RunContext, folder: Path) -> Iterable[tuple[str, str]]:
    config, spec = run.config, run.spec
    micro_batches = plural(config.micro_batches, "micro-batch")
    parameters = count(sum(spec.parameters))
    yield "model", f"{run.model_name}: {plural(run.layers, 'layer')}, {parameters} parameters"
    yield "dataset", dataset_label(config.dataset) + _sample_counts(run)
    crop = getattr(getattr(config.dataset, "augmentation", None), "random_resized_crop", None)
    if crop is not None and not run.bench:
        yield "", f"training images are random crops of {100 * crop[0]:g} to {100 * crop[1]:g} % of the area"
    if run.ready.data.vocabulary is not None:
        tokenizer = getattr(config.dataset, "tokenizer", None)
        yield "vocabulary", plural(run.ready.data.vocabulary, "token") + (f" of {tokenizer}" if tokenizer else "")
    if config.preset is not None:
        given = " ".join(_preset_settings(config)) or "settings that suit this model and data set"
        yield "preset", f"{config.preset}: {given}; yours override it, ~presets removes it"
    replicas = f", R = {spec.layout.replicas} replicas" if spec.layout.replicas > 1 else ""
    yield "pipeline", f"K = {plural(spec.partitions, 'partition')}, M = {micro_batches}{replicas}"
    yield "schedule", f"{config.schedule}, recompute {config.recompute}"
    yield "executor", f"{run.executor}, {plural(spec.layout.threads, 'thread')} per process"
    yield from precision_note(config.precision, spec.effective_precision)
    yield "ideal bubble", f"{percent(run.ideal_bubble)} of the devices' time"
    yield "mini-batch", _global_batch(run, micro_batches)
    if run.bench:
        yield "measuring", f"{plural(run.total_steps - run.warm_up_steps, 'step')} after {run.warm_up_steps} of warm-up"
    else:
        training = plural(config.epochs, "epoch")
        if run.ready.steps_per_epoch is not None:
            training += f" of {plural(run.ready.steps_per_epoch, 'step')}"
            if config.max_steps is not None:
                training += f", stopping after {plural(run.total_steps, 'step')}"
        yield "training", training
        yield "", f"learning rate {_learning_rate(run)}"
        if run.ready.steps_per_epoch is not None:
            yield from _unfinished_curves(run, run.ready.steps_per_epoch)
        yield "best", f"chosen on the {'test' if config.dataset.validation is None else 'validation'} set"
    if run.ready.compiled is not None:
        yield "compiled", _compilation_line(run.ready.compiled)
    if run.ready.graphs is not None:
        yield from _cuda_graph_lines(run.ready.graphs)
    yield from run.ready.notes
    yield "run folder", str(folder)
    if config.resume is not None:
        yield "resumed from", f"{config.resume}, {plural(run.ready.first_step, 'step')} done"


def _preset_settings(config: TrainConfig) -> Iterator[str]:
    """The settings of the preset that this run uses, as they would be typed."""
    mine = dict(flatten(asdict(config)))
    for key, value in flatten(load_preset(f"{group_choice(config.model)}_{config.dataset.name}")):
        if key != "preset" and mine.get(key) == value:
            yield f"{key}={format_value(value)}"


def _learning_rate_at(run: RunContext, step: int) -> str:
    """The learning rate of step `step`, counted from 0."""
    config, epoch_steps = run.config, run.ready.steps_per_epoch or 1
    total = config.epochs * epoch_steps
    return shown_rate(learning_rate(config.learning_rate, step, epoch_steps, config.batch_size, total_steps=total))


def _learning_rate(run: RunContext) -> str:
    """`0.04`, or `0.04, after a warm-up of 45 steps from 0.000889`."""
    warm_up = 0 if (steps := run.ready.steps_per_epoch) is None else warm_up_steps(run.config.learning_rate, steps)
    if run.ready.first_step >= warm_up:
        return _learning_rate_at(run, run.ready.first_step)
    first = _learning_rate_at(run, 0)
    return f"{_learning_rate_at(run, warm_up - 1)}, after a warm-up of {plural(warm_up, 'step')} from {first}"


def _unfinished_curves(run: RunContext, epoch_steps: int) -> Iterator[tuple[str, str]]:
    """Lines about curves over the whole training that this run does not finish."""
    config, end = run.config, run.total_steps
    if end < warm_up_steps(config.learning_rate, epoch_steps):
        by_steps = hasattr(config.learning_rate, "warmup_steps")
        use = f"warmup_steps={max(1, end // 10)}" if by_steps else "warmup_epochs=0"
        ends = f"the run ends within the warm-up, at a learning rate of {_learning_rate_at(run, end - 1)}"
        yield "", f"{ends}; learning_rate.{use} shortens it"
    curves = ["the cosine"] if isinstance(config.learning_rate, CosineLearningRateConfig) else []
    if isinstance(config.model, AmoebaNetConfig) and config.model.drop_path:
        curves.append("the rise of drop-path")
    total = config.epochs * epoch_steps
    if end < total and curves:
        share = f"{percent(end / total)} of {' and '.join(curves)} over {plural(config.epochs, 'epoch')}"
        needed = -(-end // epoch_steps)
        use = f"; epochs={needed} shortens {'it' if len(curves) == 1 else 'both'}" if needed < config.epochs else ""
        yield "", f"max_steps={config.max_steps} ends the run at {share}{use}"


def _compilation_line(done: LayersCompiled) -> str:
    """`10 layers for micro-batches of 8: 9 graphs in 41.2 s, 18 parts compiled, 0 from the cache`."""
    took = f"{done.seconds:.1f} s, {plural(done.made, 'part')} compiled, {done.found} from the cache"
    sizes = " and ".join(map(str, done.sizes))
    return f"{plural(done.layers, 'layer')} for micro-batches of {sizes}: {plural(done.graphs, 'graph')} in {took}"


def _cuda_graph_lines(done: GraphsCaptured) -> Iterator[tuple[str, str]]:
    """`4 of 4 stages replayed as graphs, recorded in 1.3 s; ...`, and a line for each stage that is not."""
    stages = f"{done.stages} of {plural(done.stages + len(done.fallback_reasons), 'stage')}"
    yield "graphs", f"{stages} replayed as graphs, recorded in {done.seconds:.1f} s; graphs=false launches each kernel"
    for cause in done.fallback_reasons:
        yield "", f"launched kernel by kernel: {cause}"


def _sample_counts(run: RunContext) -> str:
    """`: 412 training and 46 test sequences of 128 tokens`, or `samples of 10 classes`; nothing in a dry run."""
    data, task = run.ready.data, run.config.task
    if not data.train_samples:
        return ""
    held_out = "" if data.validation_samples is None else f", {data.validation_samples:,} validation"
    samples = f": {data.train_samples:,} training{held_out} and {data.test_samples:,} test {SAMPLE_WORDS[task]}s"
    if isinstance(run.config.dataset, ImagesConfig):
        samples += f" of {plural(run.config.dataset.model_classes, 'class')}"
    if task == "language_model":
        samples += f" of {plural(run.spec.lengths[0], 'token')}"
    return samples if data.languages is None else f"{samples}, {plural(data.languages, 'language')}"


def _global_batch(run: RunContext, micro_batches: str) -> str:
    """`32 = 1 replica x 4 micro-batches x 8 samples`, or `4,096 tokens = 1 replica x 4 micro-batches`."""
    replicas, batch_size = run.config.replicas, run.config.batch_size
    factors = f"{plural(replicas, 'replica')} x {micro_batches}"
    if batch_size is None:
        return f"{run.config.batch_tokens:,} tokens = {factors}"
    sizes = sorted(set(micro_batch_sizes(batch_size, replicas * run.config.micro_batches)), reverse=True)
    sample = SAMPLE_WORDS[run.config.task]
    each = " or ".join(f"{samples:,}" for samples in sizes) + (f" {sample}" if sizes == [1] else f" {sample}s")
    return f"{batch_size:,} = {factors} x {each}"


def _layers(names: Sequence[str]) -> str:
    """`8: stem ... normal_5`."""
    shown = ", ".join(names) if len(names) <= 2 else f"{names[0]} ... {names[-1]}"
    return f"{len(names)}: {shown}"
