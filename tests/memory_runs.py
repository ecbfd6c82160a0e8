"""Steps of small models on real stages in this process, with the bytes that they hold and those that were predicted."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, pairwise
from typing import Any

import torch
from engine_runs import CPU, build_stages, local_transport
from networks import VOCABULARY, small_amoebanet, small_transformer
from torch import nn

from gpipe_cli.assembly.loss import CrossEntropy, loss_of_shapes
from gpipe_cli.data.micro_batches import micro_batch_sizes
from gpipe_cli.pipeline.profile.layer_cost import ActivationMemory, LayerCost
from gpipe_cli.pipeline.profile.tracing import trace_layers
from gpipe_cli.pipeline.runtime.boundary import Boundary, BoundaryTensor, Tensors, as_boundary
from gpipe_cli.pipeline.runtime.executor import Executor
from gpipe_cli.pipeline.runtime.stage import Stage
from gpipe_cli.schedule.in_flight_memory import peak_bytes
from gpipe_cli.schedule.schedule import Retain, Schedule

CLASSES, TOKENS, SIZE = 10, 12, 32


@dataclass(frozen=True)
class Sample:
    """A model on the meta device and what it reads: images, or where there are `lengths` sentences."""

    build: Callable[[], nn.Sequential]
    inputs: Boundary
    lengths: tuple[int, ...] = ()
    auxiliary_weight: float = 0.0
    channels_last: bool = False
    autocast_dtype: torch.dtype | None = None

    @property
    def memory_format(self) -> torch.memory_format:
        return torch.channels_last if self.channels_last else torch.contiguous_format

    def model(self) -> nn.Sequential:
        with torch.device("meta"):
            return self.build()

    def data(self, samples: int) -> Tensors:
        if self.lengths:
            return tuple(torch.randint(1, VOCABULARY, (samples, TOKENS)) for _ in self.lengths)
        return (torch.randn(samples, 3, SIZE, SIZE).contiguous(memory_format=self.memory_format),)

    def objective(self, samples: int, sizes: Sequence[int]) -> CrossEntropy:
        targets = self.data(samples)[-1] if self.lengths else torch.randint(CLASSES, (samples,))
        return CrossEntropy(targets, sizes, label_smoothing=0.1, auxiliary_weight=self.auxiliary_weight, device=CPU)

    def costs(self, splits: bool = False) -> tuple[LayerCost, ...]:
        return trace_layers(
            self.model(),
            self.inputs,
            training=True,
            lengths=self.lengths,
            loss=loss_of_shapes(0.1, self.auxiliary_weight),
            memory_format=self.memory_format,
            autocast_dtype=self.autocast_dtype,
            splits=splits,
        )


class _Turning(nn.Module):
    """(N, C, H, W) -> the same shape. Copies where its input, or its convolution's output, has one memory format and
    not where it has the other."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.inside = nn.Conv2d(channels, channels, 3, padding=1)
        self.gate = nn.Linear(channels, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inside(x.contiguous())
        return self.gate(y.tanh().permute(0, 2, 3, 1)).sigmoid().permute(0, 3, 1, 2) * y


def _flattening() -> nn.Sequential:
    """As users write them: custom layers, and features flattened for a linear layer."""
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 6, 3, stride=2), nn.BatchNorm2d(6), nn.ReLU(inplace=True)),
        nn.MaxPool2d(2),
        _Turning(6),
        nn.Conv2d(6, 4, 3, stride=2, bias=False),
        nn.Flatten(),
        nn.Sequential(nn.Linear(4 * 9, 8), nn.ReLU(inplace=True), nn.Dropout(0.2)),
        nn.Linear(8, CLASSES),
    )


_IMAGES = as_boundary((torch.empty(1, 3, SIZE, SIZE),))
_TEXT = (BoundaryTensor((0, 0), (1, 0), torch.int64, False, ((0, 1),)),)
_PAIRS = tuple(
    BoundaryTensor((0, 0), (1, 0), torch.int64, False, slopes) for slopes in (((0, 1), (0, 0)), ((0, 0), (0, 1)))
)
_amoebanet = partial(small_amoebanet, filters=8, auxiliary_head=True, batch_norm_momentum=0.1, drop_path=0.2)
_language_model = partial(small_transformer, "language model", 0.1)
_translation = partial(
    small_transformer, "separate embeddings", 0.1, attention_dropout=0.0, depth_scaled=True, logit_clip=5.0
)

SAMPLES = {
    "amoebanet": Sample(_amoebanet, _IMAGES, auxiliary_weight=0.4, channels_last=True),
    "flattening": Sample(_flattening, _IMAGES),
    "flattening channels last": Sample(_flattening, _IMAGES, channels_last=True),
    "language model": Sample(partial(_language_model, attention_dropout=0.0), _TEXT, (TOKENS,)),
    "attention with dropout": Sample(_language_model, _TEXT, (TOKENS,)),
    "translation": Sample(_translation, _PAIRS, (TOKENS, TOKENS)),
    # each micro-batch keeps a copy of the weights in bfloat16 with its graph
    "translation in bfloat16": Sample(_translation, _PAIRS, (TOKENS, TOKENS), autocast_dtype=torch.bfloat16),
}


def cuts_of(layers: int, cuts: int, most: int = 99) -> list[list[tuple[int, int]]]:
    """Every way to cut this many layers, as the first and the end of each stage; of the stages between two cuts none
    has more than `most` layers."""
    all_ends = ((0, *ends, layers) for ends in combinations(range(1, layers), cuts))
    return [list(pairwise(ends)) for ends in all_ends if all(b - a <= most for a, b in pairwise(ends[1:-1]))]


def stages_of(sample: Sample, costs: Sequence[LayerCost], spans: Sequence[tuple[int, int]]) -> dict[int, Stage]:
    torch.manual_seed(0)
    stages = build_stages(
        sample.model(), costs, [end - first for first, end in spans], here=range(len(spans)),
        memory_format=sample.memory_format, autocast_dtype=sample.autocast_dtype,
    )  # fmt: skip
    for stage in stages.values():
        stage.counter.on = True
    return stages


def held(
    sample: Sample,
    costs: Sequence[LayerCost],
    order: Schedule,
    samples: int,
    micro_batches: int,
    spans: Sequence[tuple[int, int]],
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The most bytes that each stage holds in one training step: on real stages, one after the other in this process,
    and as predicted."""
    stages, sizes = stages_of(sample, costs, spans), micro_batch_sizes(samples, micro_batches)
    executor = Executor(stages, order.row_of_stage, local_transport(stages))
    executor.run(order, 0, sizes, sample.data(samples), sample.objective(samples, sizes))
    memories = [ActivationMemory(costs, sample.inputs, size, sample.lengths) for size in sizes]
    predicted = peak_bytes(order, [[memory.saved_amounts(*span) for memory in memories] for span in spans])
    return tuple(stage.counter.peak_bytes for stage in stages.values()), predicted


def held_between_halves(
    sample: Sample, costs: Sequence[LayerCost], samples: int, spans: Sequence[tuple[int, int]]
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Of each stage, the bytes that I adds to the graph's, and the bytes that are saved when it has ended: on real
    stages, and as predicted."""
    stages = stages_of(sample, costs, spans)
    objective = sample.objective(samples, (samples,))
    boundary: Any = sample.data(samples)
    for k, stage in stages.items():
        stage.begin_step(0, objective if k == len(spans) - 1 else None)
        boundary = tuple(tensor.detach().clone() for tensor in stage.forward(0, boundary, Retain.ACTIVATIONS))
    memory = ActivationMemory(costs, sample.inputs, samples, sample.lengths)
    measured, predicted = [], []
    boundary = (None,)
    for k, span in reversed(list(enumerate(spans))):
        given = tuple(None if gradient is None else gradient.clone() for gradient in boundary)
        boundary = stages[k].backward(0, given, split=True)
        added = stages[k].counter.peak_bytes - memory.saved_amounts(*span).graph
        measured.append((added, stages[k].counter.bytes))
        predicted.append(memory.saved_amounts(*span)[2:])
        stages[k].backward_weights(0)
        assert stages[k].counter.bytes == 0
    return measured, predicted
