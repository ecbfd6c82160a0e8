"""Speeds on the device at hand: gpipe with one setting varied at a time, and beside plain PyTorch and torchgpipe.

gpu_acceptance.py runs these functions. gpipe is always measured by `gpipe bench`; its peers run in this process, on
random data that already are on the device. On a CPU the models are tiny.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from gpu_report import attempt, first_line
from runs import config_of
from torch import nn
from torch.nn import functional as F

from gpipe_cli.assembly.build import COMPUTED_IN, MEMORY_FORMATS, build_model, outputs_of, real_model
from gpipe_cli.assembly.optimizer import build_optimizer, set_learning_rate
from gpipe_cli.config.settings import TrainConfig
from gpipe_cli.launch import worker
from gpipe_cli.pipeline.runtime.boundary import Tensors, as_value, in_layout
from gpipe_cli.pipeline.runtime.initial_weights import materialize
from gpipe_cli.pipeline.runtime.precision import autocast
from gpipe_cli.planner.pipeline_spec import PipelineSpec, make_pipeline_spec

# Rows: what was measured, None (nothing must hold), the figures, and torchgpipe's published speed on P40s.
Found = Iterator[tuple[str, bool | None, str, str]]
# Runs `gpipe bench` on the device with these settings, which may be a sweep; returns the rows of its table.
Bench = Callable[..., Sequence[dict[str, Any]]]
Step = Callable[[], None]

# Settings of each model on a GPU and on a CPU. On a GPU: the models of torchgpipe's benchmarks and of the paper's Table
# 2, in a size that one device holds.
SIZES = {
    "amoebanet": ("model.normal_cells=18 model.filters=256 dataset.image_size=224 dataset.num_classes=1000 "
                  "batch_size=32",
                  "model.normal_cells=3 model.filters=4 dataset.image_size=16 dataset.num_classes=4 batch_size=4"),
    "resnet": ("model.depth=101 dataset.image_size=224 dataset.num_classes=1000 batch_size=64",
               "model.depth=18 dataset.image_size=64 dataset.num_classes=4 batch_size=4"),
    "transformer_lm": ("model.layers=6 model.width=1024 model.hidden=4096 model.heads=16 model.length=1024 "
                       "dataset.vocabulary=32000 batch_size=16",
                       "model.layers=3 model.width=8 model.hidden=16 model.heads=2 model.length=8 "
                       "dataset.vocabulary=300 batch_size=4"),
}  # fmt: skip
FACTORS = {
    "amoebanet": ("precision=float32,tf32,bfloat16 deterministic=true,false",
                  "memory_format=channels_last,contiguous recompute=except_last,never", "partitions=1,2,4,8"),
    "transformer_lm": ("precision=float32,tf32,bfloat16 deterministic=true,false",
                       "compile=false,true precision=bfloat16"),
}  # fmt: skip
# Samples/s of torchgpipe 0.0.5 on Tesla P40s, one for each partition, torch 1.3, float32 (docs/benchmarks and arXiv
# 2004.09910): AmoebaNet-D (18, 256) at 224 pixels with M = 4, by K; and ResNet-101 without a pipeline and with K = 1
PUBLISHED_AMOEBANET = {2: 41.1, 4: 44.5, 8: 70.1}
PUBLISHED_RESNET = {"plain PyTorch": 92.5, "torchgpipe": 70.0}


def settings_of(model: str, device: str) -> list[str]:
    data = "dataset=synthetic_text batch_tokens=null" if model == "transformer_lm" else "dataset=synthetic_images"
    return [f"model={model}", *data.split(), *SIZES[model][device == "cpu"].split(), f"device={device}",
            "partitions=1", "micro_batches=4", "threads=1", "executor=in_process", "hardware=cpu"]  # fmt: skip


def factors(device: str, bench: Bench) -> Found:
    """Measure sweeps over settings that may change the speed; each row is relative to the first of its sweep."""
    tables = FACTORS if device == "cuda" else {"amoebanet": ("partitions=1,2",)}
    for model, swept in tables.items():
        for one in swept:
            try:
                rows = bench(*settings_of(model, device), *one.split())
            except RuntimeError as error:
                yield f"{model}, {one}", False, first_line(error), ""
                continue
            for row in rows:
                chosen = ", ".join(f"{key}={value}" for key, value in row["settings"].items())
                partitions = PUBLISHED_AMOEBANET.get(row["settings"].get("partitions"))
                published = f"{partitions} samples/s" if partitions else ""
                yield f"{model}, {chosen}", None, shown(row), published


def shown(row: dict[str, Any]) -> str:
    if row["status"] != "measured":
        return f"{row['status']}: {row['reason']}"
    return f"{1e3 * row['step_seconds']:.1f} ms, {row['samples_per_second']:.1f} samples/s, {row['relative']:.2f} x"


def peers(device: str, bench: Bench) -> Found:
    """Measure gpipe, plain PyTorch and torchgpipe at K = 1: the same model, settings and sizes."""
    for model in SIZES if device == "cuda" else ("amoebanet",):
        for precision in ("float32", "bfloat16"):
            settings = [*settings_of(model, device), "model.dropout=0", f"precision={precision}"]
            what = f"{model}, {precision}, gpipe, K=1, M=4"
            yield *attempt(what, partial(benched, what, bench, settings)), ""
            config = config_of(settings)
            for name, chunks in (("plain PyTorch", None), ("torchgpipe", config.micro_batches)):
                published = PUBLISHED_RESNET[name] if (model, precision) == ("resnet", "float32") else None
                figures = figures_of_peer(config, chunks, device)
                yield f"{model}, {precision}, {name}", None, figures, f"{published} samples/s" if published else ""
                if device != "cpu":
                    torch.cuda.empty_cache()


def benched(what: str, bench: Bench, settings: Sequence[str]) -> tuple[str, None, str]:
    (row,) = bench(*settings)
    return what, None, shown(row)


def figures_of_peer(config: TrainConfig, chunks: int | None, device: str) -> str:
    try:
        step = plain(config, chunks)
        seconds_of(step, device, 3)
        seconds = median(seconds_of(step, device, 1) for _ in range(5))
    except ModuleNotFoundError:
        return "not installed: pip install --no-deps torchgpipe==0.0.7"
    except Exception as error:  # such as out of memory; the other peers still run
        return first_line(error)
    return f"{1e3 * seconds:.1f} ms, {(config.batch_size or 0) / seconds:.1f} samples/s"


def plain(config: TrainConfig, chunks: int | None) -> Step:
    """A training step of the same model and optimizer without a pipeline, or by torchgpipe if ``chunks`` is given."""
    spec, device, layers, inputs = built(config)
    whole = nn.Sequential(InPrecision(layers, device, COMPUTED_IN[config.precision]))
    optimizer = build_optimizer(config.optimizer, dict(whole.named_parameters()))
    assert optimizer is not None
    set_learning_rate(optimizer, 1e-4)
    model: nn.Module = whole
    if chunks is not None:
        from torchgpipe import GPipe

        model = GPipe(whole, [1], devices=[device], chunks=chunks, checkpoint=config.recompute)
    targets = torch.randint(outputs_of(config), (config.batch_size or 0, *spec.lengths[:1]), device=device)

    def step() -> None:
        F.cross_entropy(model(as_value(inputs)).float().flatten(0, -2), targets.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


class InPrecision(nn.Module):
    """Autocast inside the model: torchgpipe runs it in threads of its own, which do not inherit autocast."""

    def __init__(self, layers: nn.Module, device: torch.device, computed_in: torch.dtype | None) -> None:
        super().__init__()
        self.layers, self.device, self.computed_in = layers, device, computed_in

    def forward(self, inputs: Any) -> torch.Tensor:
        with autocast(self.device, self.computed_in):
            outputs: torch.Tensor = self.layers(inputs)
        return outputs


def built(config: TrainConfig) -> tuple[PipelineSpec, torch.device, nn.Sequential, Tensors]:
    """The model of a training with one partition, with its initial weights, and random inputs for it."""
    if config.device != "cpu":
        worker._set_up_gpu(config.precision, config.deterministic)
        torch.cuda.init()  # tracing hides the GPUs from a process that has not opened them before
    spec, device = make_pipeline_spec(config), torch.device(config.device)
    layout = MEMORY_FORMATS[spec.memory_format]
    model = materialize(
        build_model(config), 0, len(spec.layer_names[0]), run_seed=0, device=device,
        whole=real_model(config, pretrained=False),
    ).to(memory_format=layout).train()  # fmt: skip
    made = []
    for one in spec.inputs:
        shape = one.shape(config.batch_size or 0, spec.lengths)
        if one.dtype.is_floating_point:
            made.append(in_layout(torch.randn(shape, device=device).to(one.dtype), layout))
        else:
            made.append(torch.randint(outputs_of(config), shape, device=device))
    return spec, device, model, tuple(made)


def seconds_of(step: Step, device: str, steps: int) -> float:
    """Mean seconds per step; on a CPU, CPU seconds of this process, which do not depend on other programs."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    if device != "cpu":
        torch.cuda.synchronize()
    began = clock()
    for _ in range(steps):
        step()
    if device != "cpu":
        torch.cuda.synchronize()
    return (clock() - began) / steps
