"""I and W compute what B does, bit for bit, and keep no more than W needs."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from engine_runs import CPU, NOTHING_FROZEN, Mix
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from gpipe_cli.pipeline.runtime import deferred_weights
from gpipe_cli.pipeline.runtime.boundary import Boundary, BoundaryTensor, Tensors, in_layout
from gpipe_cli.pipeline.runtime.frozen import Frozen, freeze
from gpipe_cli.pipeline.runtime.stage import Stage
from gpipe_cli.schedule.schedule import Retain

IMAGES = (BoundaryTensor((0, 8, 9, 9), (1, 0, 0, 0), torch.float32, True),)
SENTENCES = (BoundaryTensor((0, 5, 8), (1, 0, 0), torch.float32, True),)
ROWS = (BoundaryTensor((0, 8), (1, 0), torch.float32, True),)
MASK = BoundaryTensor((0,), (1,), torch.int64, False)


class Twice(nn.Module):
    """One module called twice, one weight used in two ways, a weight that is another's, and one of two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.tied, self.own = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.tied.weight = self.shared.weight
        self.used = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Tensors:
        y = self.shared(self.shared(x).relu()) + self.tied(x)
        return y + self.used(x) @ self.used.weight.tanh(), self.own(y)


class Joined(nn.Module):
    """Two inputs, one of them as a weight would be; adds a whole parameter to the output of a product."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.added = nn.Linear(8, 8, bias=False), nn.Parameter(torch.randn(4, 8))

    def forward(self, inputs: Tensors) -> torch.Tensor:
        x, y = inputs
        return self.linear(x[:4] @ y[:8].t()[:, :8]).add(self.added)


class Repeats(nn.Module):
    """Drops activations on its own and computes them again."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.inside, self.use_reentrant = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inside, x, use_reentrant=self.use_reentrant)


class Transposing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 6), nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x.transpose(1, 2)).transpose(1, 2)).mean(dim=1)


def convolutions() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(8, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 16, 1),
        nn.ReLU(inplace=True),
        nn.Conv2d(16, 16, 3, stride=2, padding=1, groups=4),
        nn.Conv2d(16, 16, 3, padding=2, dilation=2, padding_mode="circular"),
        nn.Conv2d(16, 16, 3, groups=16, padding="same"),
        nn.ConvTranspose2d(16, 8, 3, stride=2),
        nn.Flatten(2),
        nn.Conv1d(8, 4, 5, stride=3),
    )


def parametrized() -> nn.Sequential:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(8, 8)), nn.ReLU(), nn.Linear(8, 8))


def linears() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 24, bias=False), nn.Linear(24, 1))


@dataclass(frozen=True)
class Case:
    """A stage of one layer, and how many of its weights wait for W."""

    build: Callable[[], nn.Module]
    inputs: Boundary
    waiting: int
    first: bool = False  # stage: its inputs need no gradient
    frozen: Frozen = NOTHING_FROZEN
    samples: int = 4


CASES = {
    "convolutions": Case(convolutions, IMAGES, 7),
    "rows": Case(linears, ROWS, 3),
    "sentences": Case(linears, SENTENCES, 3),
    "transposed": Case(Transposing, SENTENCES, 2),
    "attention": Case(lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True), SENTENCES, 4),
    "used twice": Case(Twice, ROWS, 1),
    "an input for a weight": Case(Joined, ROWS * 2, 1, samples=8),
    "returned twice": Case(partial(Mix, 8, 8, 6), (*IMAGES, *IMAGES, MASK), 0),
    "parametrized": Case(parametrized, ROWS, 1),
    "first stage": Case(convolutions, IMAGES, 7, first=True),
    "frozen": Case(convolutions, IMAGES, 5, frozen=Frozen(modules=("layer.0", "layer.1", "layer.3"))),
    "frozen parameters": Case(
        convolutions, IMAGES, 5, frozen=Frozen(parameters=("layer.0.weight", "layer.3.bias", "layer.5.weight"))
    ),
    "all frozen": Case(linears, ROWS, 0, frozen=Frozen(modules=("layer",))),
    "recomputes itself": Case(partial(Repeats, False), ROWS, 2),
    "runs a nested backward": Case(partial(Repeats, True), ROWS, 0),
}
FORMATS = {
    "contiguous": (torch.contiguous_format, None),
    "channels last": (torch.channels_last, None),
    "bfloat16": (torch.channels_last, torch.bfloat16),
}


def stage_of(case: Case, memory_format: torch.memory_format, autocast_dtype: torch.dtype | None) -> Stage:
    torch.manual_seed(0)
    module = nn.Sequential(OrderedDict(layer=case.build()))
    for parameter in module.parameters():
        parameter.data = in_layout(parameter.data, memory_format)
    freeze(module, case.frozen)
    inputs = () if case.first else case.inputs
    made = Stage(
        0, module, first_layer=0, inputs=inputs, device=CPU, run_seed=3, memory_format=memory_format,
        autocast_dtype=autocast_dtype,
    )  # fmt: skip
    made.set_training(True)
    return made


def step(case: Case, made: Stage, actions: str) -> tuple[dict[str, torch.Tensor | None], list[int]]:
    """The gradients of inputs and weights after `actions`, of which F keeps a graph and f the inputs; and how many
    weights each W found waiting."""
    torch.manual_seed(1)
    memory_format = made._memory_format
    given = [
        tuple(in_layout(random(described, case.samples), memory_format) for described in case.inputs) for _ in range(3)
    ]
    outputs: dict[int, Tensors] = {}
    found: dict[str, torch.Tensor | None] = {}
    waited: list[int] = []
    made.begin_step(0, None)
    for kind, m in ((action[0], int(action[1])) for action in actions.split()):
        if kind in "Ff":
            outputs[m] = made.forward(m, given[m], Retain.ACTIVATIONS if kind == "F" else Retain.INPUT)
        elif kind == "R":
            made.recompute(m)
        elif kind in "BI":
            generator = torch.Generator().manual_seed(m)
            gradients = [torch.randn(t.shape, generator=generator).to(t.dtype) for t in outputs[m]]
            given_gradients = [in_layout(gradient, memory_format) for gradient in gradients]
            returned = made.backward(m, given_gradients, split=kind == "I")
            found |= {f"input {m} {at}": gradient for at, gradient in enumerate(returned)}
        else:
            waited.append(len(made._deferred.get(m, ())))
            made.backward_weights(m)
    made.finish_step()
    return found | {name: parameter.grad for name, parameter in made.module.named_parameters()}, waited


def random(described: BoundaryTensor, samples: int) -> torch.Tensor:
    shape = described.shape(samples)
    return torch.randn(shape) if described.dtype.is_floating_point else torch.ones(shape, dtype=described.dtype)


def assert_same(found: dict[str, torch.Tensor | None], expected: dict[str, torch.Tensor | None]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        other = found[name]
        if gradient is None or other is None:
            assert gradient is other, name
        else:
            assert torch.equal(gradient, other), name
            assert gradient.stride() == other.stride(), name


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # a recomputing layer's, where none is kept
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", CASES)
def test_both_halves_give_the_bits_of_the_whole(name: str, form: str) -> None:
    """For three micro-batches that wait in turn, one of them recomputed; and the weights wait that should."""
    case = CASES[name]
    whole, _ = step(case, stage_of(case, *FORMATS[form]), "F0 f1 F2 B0 R1 B1 B2")
    halves, waited = step(case, stage_of(case, *FORMATS[form]), "F0 f1 F2 I0 R1 I1 W0 I2 W1 W2")
    assert_same(halves, whole)
    assert waited == [case.waiting] * 3


@pytest.mark.parametrize(("limit", "calls"), [(1 << 20, 1), (0, 4)], ids=["small weights", "each more than a call's"])
def test_on_an_accelerator_one_call_of_the_engine_adds_up_many_weights(
    limit: int, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There each call costs the host as much as several launches; there was one for each weight."""
    case = CASES["rows"]
    whole, _ = step(case, stage_of(case, torch.contiguous_format, None), "F0 F1 B0 B1")
    handed: list[int] = []
    backward = torch.autograd.backward

    def counted(edges: Any, gradients: Any) -> None:
        handed.append(len(edges))
        backward(edges, gradients)

    made = stage_of(case, torch.contiguous_format, None)
    monkeypatch.setattr(deferred_weights, "is_accelerator", lambda device: True)
    monkeypatch.setattr(deferred_weights, "_MIN_BYTES_PER_CALL", limit)
    compute = made.backward_weights

    def with_count(micro_batch: int) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(torch.autograd, "backward", counted)
            compute(micro_batch)

    monkeypatch.setattr(made, "backward_weights", with_count)
    halves, waited = step(case, made, "F0 F1 I0 I1 W0 W1")
    assert_same(halves, whole)
    assert len(handed) == 2 * min(calls, waited[0])
    assert waited[0] > 1


def test_hooks_see_what_they_see_otherwise() -> None:
    """Of weights that wait, one that changes the gradient among them, and of outputs that are changed in place."""
    case = CASES["rows"]
    seen: list[torch.Tensor] = []

    def triples(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        output.register_hook(lambda given: 3 * given)

    def hooked() -> Stage:
        made = stage_of(case, torch.contiguous_format, None)
        first, last = made.module.layer[0], made.module.layer[3]
        first.weight.register_hook(lambda gradient: seen.append(gradient.clone()))
        first.weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad.clone()))
        last.bias.register_hook(lambda gradient: 2 * gradient)
        first.register_forward_hook(triples)
        return made

    whole, _ = step(case, hooked(), "F0 F1 B0 B1")
    expected = list(seen)
    seen.clear()
    halves, _ = step(case, hooked(), "F0 F1 I0 I1 W0 W1")
    assert_same(halves, whole)
    assert len(seen) == 4
    assert all(map(torch.equal, seen, expected))
