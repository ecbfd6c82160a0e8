"""The speed of a step on the device at hand, one factor at a time; plain PyTorch and torchgpipe beside it; CUDA graphs.

Everything is in one process, on random data that is there already. A factor and what it is compared with are measured
in turns, so that a clock that changes changes both; reported is the median of the ratios. A step is forward,
recomputation and backward by the schedule, and the optimizer's.

Usage: python recipes/measurements/gpu_speed.py [--device cuda|cpu] [--only factors|peers|graphs|precision ...]
       on a GPU four minutes; on a CPU tiny models, to see that it runs
"""

import argparse
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from functools import partial
from statistics import median
from unittest.mock import patch

import torch
from hydra import compose, initialize_config_module
from recording_overhead import Silent
from torch import nn
from torch.nn import functional as F

from gpipe_cli.assembly import optimizer as optimizers
from gpipe_cli.assembly.build import (
    COMPUTED_IN,
    MEMORY_FORMATS,
    build_model,
    memory_format_of,
    outputs_of,
    real_model,
)
from gpipe_cli.assembly.loss import CrossEntropy
from gpipe_cli.config.settings import TrainConfig, from_tree
from gpipe_cli.data.micro_batches import micro_batch_sizes
from gpipe_cli.distributed.control_group import ControlGroup
from gpipe_cli.errors import InputError
from gpipe_cli.launch import worker
from gpipe_cli.pipeline.runtime.boundary import Boundary, Tensors, as_tuple, as_value, in_layout
from gpipe_cli.pipeline.runtime.executor import ActionFailedError
from gpipe_cli.pipeline.runtime.precision import autocast
from gpipe_cli.pipeline.runtime.randomness import materialize
from gpipe_cli.planner.placement import Placement, make_placement
from gpipe_cli.training.engine import build_engine

# Name, what held (None: a figure), the figures, and torchgpipe's published speed on P40s.
Found = Iterator[tuple[str, bool | None, str, str]]
Step = Callable[[], None]

# On a GPU the models of the benchmarks of torchgpipe and of the paper's Table 2, in a size that one device holds.
IMAGES = {
    "cuda": ["model.normal_cells=18", "model.filters=256", "dataset.image_size=224", "dataset.num_classes=1000",
             "batch_size=32"],
    "cpu": ["model.normal_cells=3", "model.filters=4", "dataset.image_size=16", "dataset.num_classes=4",
            "batch_size=4"],
}  # fmt: skip
TEXT = {
    "cuda": ["model.layers=6", "model.width=1024", "model.hidden=4096", "model.heads=16", "model.length=1024",
             "dataset.vocabulary=32000", "batch_size=16"],
    "cpu": ["model.layers=3", "model.width=8", "model.hidden=16", "model.heads=2", "model.length=8",
            "dataset.vocabulary=300", "batch_size=4"],
}  # fmt: skip
RESNET = {
    "cuda": ["model.depth=101", "dataset.image_size=224", "dataset.num_classes=1000", "batch_size=64"],
    "cpu": ["model.depth=18", "dataset.image_size=64", "dataset.num_classes=4", "batch_size=4"],
}
# torchgpipe 0.0.5 on Tesla P40s, one for each partition, torch 1.3, float32: samples/s of AmoebaNet-D (18, 256) at 224
# pixels by K, M = 4, and of ResNet-101 without a pipeline and with one of K = 1 (docs/benchmarks, and arXiv 2004.09910)
PUBLISHED_AMOEBANET = {2: 41.1, 4: 44.5, 8: 70.1}
PUBLISHED_RESNET = {"plain PyTorch": 92.5, "torchgpipe": 70.0}
GRAPHED_SAMPLES = (1, 4, 16)


def settings_of(model: str, device: str) -> list[str]:
    sizes = {"amoebanet": IMAGES, "resnet": RESNET, "transformer_lm": TEXT}[model][device]
    data = "dataset=synthetic_text batch_tokens=null" if model == "transformer_lm" else "dataset=synthetic_images"
    return [f"model={model}", *data.split(), *sizes, f"device={device}", "partitions=1", "micro_batches=4", "threads=1",
            "executor=in_process", "hardware=cpu"]  # fmt: skip


def training(settings: Sequence[str]) -> TrainConfig:
    """Of settings that are given twice the later ones count."""
    given = {setting.partition("=")[0]: setting for setting in settings}
    with initialize_config_module("gpipe_cli.conf", version_base="1.3"):
        return from_tree(TrainConfig, compose("train", list(given.values())))


def set_up(config: TrainConfig) -> None:
    """What a worker sets for its whole process."""
    if config.device != "cpu":
        worker._set_up_gpu(config.precision, config.deterministic)


def random_inputs(config: TrainConfig, described: Boundary, samples: int, lengths: Sequence[int]) -> Tensors:
    device, layout = torch.device(config.device), MEMORY_FORMATS[memory_format_of(config)]
    made = []
    for one in described:
        shape = one.shape(samples, lengths)
        if one.dtype.is_floating_point:
            tensor = in_layout(torch.randn(shape, device=device).to(one.dtype), layout)
            made.append(tensor.requires_grad_(one.has_gradient))
        else:
            made.append(torch.randint(outputs_of(config), shape, device=device))
    return tuple(made)


def random_targets(config: TrainConfig, placement: Placement) -> torch.Tensor:
    assert config.batch_size is not None
    return torch.randint(outputs_of(config), (config.batch_size, *placement.lengths[:1]))


def pipeline(config: TrainConfig, *, recording: bool = True) -> Step:
    """As a training does it, but for the data and what is reported."""
    set_up(config)
    placement = make_placement(config)
    engine = build_engine(config, placement, ControlGroup(0, 1), pretrained=False)
    if not recording:
        engine.executor.recorder = Silent(placement.partitions)  # type: ignore[assignment]
    assert config.batch_size is not None
    sizes = micro_batch_sizes(config.batch_size, config.micro_batches)
    schedule = placement.schedule(config.micro_batches)
    inputs = random_inputs(config, placement.inputs, config.batch_size, placement.lengths)
    targets = random_targets(config, placement)
    numbers = iter(range(10**9))

    def step() -> None:
        objective = CrossEntropy(targets, sizes, label_smoothing=config.label_smoothing, auxiliary_weight=0.0,
                                 device=engine.last_device)  # fmt: skip
        engine.executor.run(schedule, next(numbers), sizes, inputs, objective, placement.lengths)
        for optimizer in filter(None, engine.optimizers.values()):
            optimizers.set_learning_rate(optimizer, 1e-4)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return step


def plain(config: TrainConfig, *, chunks: int | None = None) -> Step:
    """The same model, optimizer and settings without a pipeline, the whole mini-batch at once; `chunks`: torchgpipe."""
    set_up(config)
    placement = make_placement(config)
    device = torch.device(placement.devices[0])
    model: nn.Module = materialize(
        build_model(config), 0, len(placement.layer_names[0]), run_seed=0, device=device,
        whole=real_model(config, pretrained=False),
    ).to(memory_format=MEMORY_FORMATS[placement.memory_format]).train()  # fmt: skip
    optimizer = optimizers.build_optimizer(config.optimizer, dict(model.named_parameters()))
    assert optimizer is not None
    assert config.batch_size is not None
    optimizers.set_learning_rate(optimizer, 1e-4)
    if chunks is not None:
        from torchgpipe import GPipe

        model = GPipe(model, [len(placement.layer_names[0])], devices=[device], chunks=chunks,
                      checkpoint=config.recompute)  # fmt: skip
    inputs = random_inputs(config, placement.inputs, config.batch_size, placement.lengths)
    targets = random_targets(config, placement).to(device).flatten()

    def step() -> None:
        with autocast(device, COMPUTED_IN[config.precision]):
            logits = model(as_value(inputs))
            loss = F.cross_entropy(logits.float().flatten(0, -2), targets, label_smoothing=config.label_smoothing)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def synchronise(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def seconds_of(step: Step, device: str, steps: int) -> float:
    """On a CPU those of this process: others may have the cores meanwhile."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    synchronise(device)
    began = clock()
    for _ in range(steps):
        step()
    synchronise(device)
    return (clock() - began) / steps


@dataclass
class Turns:
    """Steps beside a first one; each with what it needs its process to be set to."""

    device: str
    first: Step
    config: TrainConfig
    rounds: int = 2
    warm: bool = False

    def beside(self, other: Step, config: TrainConfig) -> tuple[float, float]:
        """Seconds of the other step, and how many times as fast as the first one it is."""
        if not self.warm:
            self._seconds(self.first, self.config, 2)
            self.warm = True
        self._seconds(other, config, 2)
        taken = [
            (self._seconds(self.first, self.config, 1), self._seconds(other, config, 1)) for _ in range(self.rounds)
        ]
        return median(seconds for _, seconds in taken), median(first / seconds for first, seconds in taken)

    def _seconds(self, step: Step, config: TrainConfig, steps: int) -> float:
        set_up(config)
        return seconds_of(step, self.device, steps)


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def speed(config: TrainConfig, seconds: float, ratio: float | None = None) -> str:
    assert config.batch_size is not None
    shown = f"{1e3 * seconds:.1f} ms, {config.batch_size / seconds:.1f} samples/s"
    return shown if ratio is None else f"{shown}, {ratio:.2f} x"


def factors(device: str) -> Found:
    """7. One factor at a time, each beside what a run does unless told otherwise (float32, deterministic)."""
    jobs = {
        "amoebanet": ["precision=tf32", "precision=bfloat16", "deterministic=false", "memory_format=contiguous",
                      "recompute=never", "recording=off", "partitions=2", "partitions=4", "partitions=8",
                      "micro_batches=1", "precision=bfloat16 deterministic=false"],
        "transformer_lm": ["precision=tf32", "precision=bfloat16", "deterministic=false", "fused=off",
                           "recording=off", "precision=bfloat16 deterministic=false", "compile=true",
                           "precision=bfloat16 deterministic=false compile=true"],
    }  # fmt: skip
    if device == "cpu":
        jobs = {"amoebanet": ["partitions=2"], "transformer_lm": ["fused=off"]}
    for model, of_model in jobs.items():
        base = training(settings_of(model, device))
        turns = Turns(device, pipeline(base), base)
        seconds, _ = turns.beside(turns.first, base)
        yield f"{model}, as it is: K=1, M=4", None, speed(base, seconds), ""
        for factor in of_model:
            partitions = factor.partition("partitions=")[2]
            there = f"{PUBLISHED_AMOEBANET[int(partitions)]} samples/s on {partitions} P40" if partitions else ""
            yield f"{model}, {factor}", None, with_factor(turns, model, factor), there
            give_back()


def with_factor(turns: Turns, model: str, factor: str) -> str:
    given = factor.split()
    settings = [one for one in given if one not in ("recording=off", "fused=off")]
    if "compile=true" in given and "compile" not in {field.name for field in fields(TrainConfig)}:
        return "not available"
    config = training([*settings_of(model, turns.device), *settings])
    began = time.perf_counter()
    try:
        # a GPU has fused optimizers
        with patch.object(optimizers, "_fused", lambda _: False) if "fused=off" in given else nullcontext():
            step = pipeline(config, recording="recording=off" not in given)
        figures = speed(config, *turns.beside(step, config))
    except (torch.OutOfMemoryError, ActionFailedError, InputError) as error:  # InputError: what is refused here
        return first_line(error)
    started = f"; {time.perf_counter() - began:.0f} s until then" if "compile=true" in given else ""
    return figures + started


def peers(device: str) -> Found:
    """7. Plain PyTorch and torchgpipe at K = 1: the same model, settings and data."""
    for model in ("amoebanet", "resnet", "transformer_lm"):
        config = training([*settings_of(model, device), "model.dropout=0.0"])
        turns = Turns(device, pipeline(config), config)
        seconds, _ = turns.beside(turns.first, config)
        yield f"{model}, gpipe, K=1, M=4", None, speed(config, seconds), ""
        bfloat16 = training([*settings_of(model, device), "model.dropout=0.0", "precision=bfloat16"])
        others: dict[str, tuple[Callable[[], Step], TrainConfig]] = {
            "plain PyTorch": (lambda: plain(config), config),  # noqa: B023
            "torchgpipe": (lambda: plain(config, chunks=4), config),  # noqa: B023
            "plain PyTorch, bfloat16": (lambda: plain(bfloat16), bfloat16),  # noqa: B023
        }
        if model == "resnet":  # which torchgpipe has figures of
            del others["plain PyTorch, bfloat16"]
        for name, (build, set_to) in others.items():
            speed_there = PUBLISHED_RESNET.get(name) if model == "resnet" else None
            published = "" if speed_there is None else f"{speed_there} samples/s on 1 P40"
            try:
                figures = f"{speed(config, *turns.beside(build(), set_to))} gpipe's speed"
            except ModuleNotFoundError:
                figures = "not installed: pip install --no-deps torchgpipe==0.0.7"
            except RuntimeError as error:  # not enough memory, too
                figures = first_line(error)
            yield f"{model}, {name}", None, figures, published
            give_back()


def precisions(device: str) -> Found:
    """bfloat16 beside float32 at the sizes that the program has for two CPU cores."""
    worker.keep_freed_memory()  # as a run does
    jobs = {
        "AmoebaNet-D (6, 16), digits": ["model=amoebanet"],
        "ResNet-18, digits": ["model=resnet", "model.depth=18"],
        "Transformer, CLDR": ["model=transformer_nmt", "batch_tokens=null", "batch_size=32"],
        "Transformer-4, CPython's documents": ["model=transformer_lm"],
    }
    for name, job in jobs.items():
        settings = [*job, f"device={device}", "partitions=1", "threads=1", "executor=in_process", "hardware=cpu"]
        base, other = training(settings), training([*settings, "precision=bfloat16"])
        turns = Turns(device, pipeline(base), base, rounds=5)
        yield name, None, speed(other, *turns.beside(pipeline(other), other)), ""


class OfTensors(nn.Module):
    """Layers that take and return tensors, not tuples of them: what can be captured."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, *tensors: torch.Tensor) -> Tensors:
        return as_tuple(self.layers(as_value(tensors)))


def graphs(device: str) -> Found:
    """7. CUDA graphs for the F, and for the F and B, of the third of four stages, beside eager."""
    models = (("amoebanet", "float32"), ("amoebanet", "bfloat16"), ("transformer_lm", "bfloat16"))
    for model, precision in models if device == "cuda" else models[1:]:
        config = training([*settings_of(model, device), "partitions=4", f"precision={precision}"])
        set_up(config)
        placement, stage = make_placement(config), 2
        layers = materialize(
            build_model(config), placement.first_layers[stage], len(placement.layer_names[stage]), run_seed=0,
            device=torch.device(device),
        ).to(memory_format=MEMORY_FORMATS[placement.memory_format])  # fmt: skip
        module = OfTensors(layers).train()
        for samples in GRAPHED_SAMPLES if device == "cuda" else GRAPHED_SAMPLES[:1]:
            described = placement.training_boundaries[stage - 1]
            inputs = random_inputs(config, described, samples, placement.lengths)
            name = f"{model}, {precision}, stage of {len(layers)} layers, {samples} samples"
            # the cast of weights is part of the graph, as it is part of every F and R
            with autocast(torch.device(device), COMPUTED_IN[precision]):
                yield name, None, "; ".join(graphed_beside_eager(module, inputs, device)), ""
        give_back()


def graphed_beside_eager(module: OfTensors, inputs: Tensors, device: str) -> Iterator[str]:
    """Milliseconds of an F that keeps nothing, and of an F and a B, eager and as a graph, in turns."""
    gradients = [torch.ones_like(output) for output in module(*inputs)]

    def forward() -> None:
        with torch.no_grad():
            module(*inputs)

    def both(of: Callable[..., Tensors] = module) -> None:
        torch.autograd.backward(of(*inputs), gradients)

    def both_captured() -> Step:
        # it puts the graphs in place of the module's forward
        return partial(
            both, torch.cuda.make_graphed_callables(OfTensors(module.layers), inputs, allow_unused_input=True)
        )

    pairs: dict[str, tuple[Step, Callable[[], Step]]] = {
        "F": (forward, lambda: captured(forward)),
        "F and B": (both, both_captured),
    }
    for name, (eager, capture) in pairs.items():
        for _ in range(3):
            eager()
        if device == "cpu":
            yield f"{name} {1e3 * seconds_of(eager, device, 1):.2f} ms eager, graphs need a GPU"
            continue
        try:
            graph = capture()
            taken = [(seconds_of(eager, device, 3), seconds_of(graph, device, 3)) for _ in range(3)]
        except RuntimeError as error:
            yield f"{name}: not captured ({first_line(error)})"
            continue
        slow, fast = (1e3 * median(column) for column in zip(*taken, strict=True))
        yield f"{name} {slow:.2f} ms eager, {fast:.2f} as a graph, {median(a / b for a, b in taken):.2f} x"


def captured(work: Step) -> Step:
    """As torch's notes on CUDA graphs do it: warmed up on a stream of its own, then captured."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def give_back() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    measured = {"factors": factors, "peers": peers, "graphs": graphs, "precision": precisions}
    parser.add_argument("--only", choices=measured, action="append", help="(all)")
    options = parser.parse_args(arguments)
    if options.device == "cpu":
        torch.set_num_threads(1)
    for name in options.only or measured:
        for what, _, figures, published in measured[name](options.device):
            print(f"{what:<60}  {figures}{f'  (published: {published})' if published else ''}", flush=True)


if __name__ == "__main__":
    main()
