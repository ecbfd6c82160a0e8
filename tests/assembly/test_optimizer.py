"""Optimizers against their formulas, their state under parameter names, and the learning rates in closed form."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from gpipe_cli.assembly.learning_rate import learning_rate, warm_up_steps
from gpipe_cli.assembly.optimizer import (
    build_optimizer,
    load_optimizer_state,
    optimizer_state,
    set_learning_rate,
    state_bytes,
)
from gpipe_cli.config import groups

RATES = (0.1, 0.1, 0.02, 0.5, 0.003)


def config(**changes: float) -> groups.RMSPropConfig:
    settings = {"decay": 0.9, "momentum": 0.8, "epsilon": 1.0, "weight_decay": 0.01} | changes
    return groups.RMSPropConfig(name="rmsprop", **settings)


def module() -> nn.Sequential:
    generator = torch.Generator().manual_seed(5)
    layers = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 4)).double()
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return layers


def gradient(shape: torch.Size, step: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + number)
    return torch.randn(shape, generator=generator, dtype=torch.float64) * 3


def train(layers: nn.Module, steps: range, *optimizers: torch.optim.Optimizer | None) -> None:
    for step in steps:
        for number, parameter in enumerate(layers.parameters()):
            parameter.grad = gradient(parameter.shape, step, number)
        for optimizer in optimizers:
            assert optimizer is not None
            set_learning_rate(optimizer, RATES[step])
            optimizer.step()


@pytest.mark.parametrize(("epsilon", "momentum"), [(1.0, 0.8), (1e-3, 0.8), (1.0, 0.0)])
def test_it_is_tensorflows(epsilon: float, momentum: float) -> None:
    """`ApplyRMSProp` of TensorFlow: ms += (g^2 - ms)(1 - decay); mom = momentum mom + lr g / sqrt(ms + epsilon); with
    ms = 1 at first, and the L2 penalty in the gradients of kernels only."""
    layers = module()
    optimizer = build_optimizer(config(epsilon=epsilon, momentum=momentum), dict(layers.named_parameters()))
    expected = []
    for number, parameter in enumerate(layers.parameters()):
        value, square, moved = parameter.detach().clone(), 1.0, 0.0
        for step, rate in enumerate(RATES):
            g = gradient(parameter.shape, step, number) + (0.01 * value if parameter.ndim > 1 else 0)
            square = square + (g * g - square) * (1 - 0.9)
            moved = momentum * moved + rate * g / torch.sqrt(square + epsilon)
            value = value - moved
        expected.append(value)
    train(layers, range(len(RATES)), optimizer)
    for parameter, value in zip(layers.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.detach(), value, rtol=1e-12, atol=1e-12)


ADAM = {"beta1": 0.9, "beta2": 0.98, "epsilon": 1e-9, "weight_decay": 1e-2}
SGD = groups.SGDConfig("sgd", 0.9, nesterov=True, weight_decay=1e-3)
PLAIN_SGD = groups.SGDConfig("sgd", 0.0, nesterov=False, weight_decay=0)
ADAFACTOR = groups.AdafactorConfig("adafactor", beta2_decay=-0.8, clipping=1.0, weight_decay=0)
EXPECTED: dict[groups.OptimizerConfig, tuple[type, dict[str, Any]]] = {
    SGD: (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    PLAIN_SGD: (torch.optim.SGD, {"momentum": 0.0, "nesterov": False}),
    groups.AdamConfig("adam", **ADAM, decoupled=True): (torch.optim.AdamW, {"betas": (0.9, 0.98), "eps": 1e-9}),
    groups.AdamConfig("adam", **ADAM, decoupled=False): (torch.optim.Adam, {"betas": (0.9, 0.98), "eps": 1e-9}),
    ADAFACTOR: (torch.optim.Adafactor, {"beta2_decay": -0.8, "d": 1.0, "eps": (None, 1e-3)}),
}
OTHERS = tuple(EXPECTED)


def test_others_are_the_librarys_and_spare_vectors_the_penalty() -> None:
    for settings, (kind, arguments) in EXPECTED.items():
        optimizer = build_optimizer(settings, dict(module().named_parameters()))
        assert type(optimizer) is kind
        assert all(arguments.items() <= group.items() for group in optimizer.param_groups)
        decays = {(p.ndim > 1, group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]}
        assert decays == {(True, settings.weight_decay), (False, 0.0)}


@pytest.mark.parametrize("settings", [config(), *OTHERS], ids=lambda settings: settings.name)
def test_state_goes_by_name_through_another_cut(settings: groups.OptimizerConfig) -> None:
    """Saved by one optimizer of all layers, loaded by two of some layers each: the next steps have the same bits.
    Adafactor keeps rows and columns, also of a kernel of width 1, which have its shape but not its strides: once
    restored with these, they were added up in another order."""
    kernel = nn.Conv2d(5, 12, (33, 1)).double()
    layers = nn.Sequential(*module(), kernel).to(memory_format=torch.channels_last)
    whole, again = layers, copy.deepcopy(layers)
    names = dict(whole.named_parameters())
    optimizer = build_optimizer(settings, names)
    train(whole, range(3), optimizer)
    saved = optimizer_state(optimizer, names)
    saved = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in saved.items()}
    assert {name.rpartition("/")[0] for name in saved} <= set(names)
    again.load_state_dict(whole.state_dict())
    parts = []
    for places in ("01", "234"):
        own = {name: p for name, p in again.named_parameters() if name.partition(".")[0] in places}
        part = build_optimizer(settings, own)
        load_optimizer_state(part, own, {n: t for n, t in saved.items() if n.partition(".")[0] in places})
        parts.append(part)
    train(whole, range(3, 5), optimizer)
    train(again, range(3, 5), *parts)
    for name, value in whole.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


def test_a_stage_without_parameters_has_no_optimizer() -> None:
    assert build_optimizer(config(), {}) is None
    assert optimizer_state(None, {}) == {}
    load_optimizer_state(None, {}, {})
    frozen = nn.Linear(2, 2).requires_grad_(False)
    assert build_optimizer(config(), dict(frozen.named_parameters())) is None


@pytest.mark.parametrize("settings", [config(), config(momentum=0.0), *OTHERS], ids=lambda settings: settings.name)
def test_the_bytes_of_its_state_are_known_from_shapes(settings: groups.OptimizerConfig) -> None:
    """Of matrices, kernels, vectors and numbers; what is frozen has none."""
    shapes = [(3, 4), (5,), (2, 3, 5, 7), (), (6, 1)]
    parameters = [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in shapes]
    optimizer = build_optimizer(settings, {str(at): parameter for at, parameter in enumerate(parameters)})
    assert optimizer is not None
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    kept = (value for state in optimizer.state.values() for value in state.values())
    real = sum(value.nbytes for value in kept if isinstance(value, torch.Tensor))
    frozen = nn.Parameter(torch.zeros(9, 9), requires_grad=False)
    assert state_bytes(settings, [*(nn.Parameter(p.to("meta")) for p in parameters), frozen]) == real
    assert (real > 0) == (getattr(settings, "momentum", 1.0) > 0 or settings.name == "rmsprop")


# --- learning rates


@pytest.mark.parametrize(("every_epochs", "steps_per_epoch", "steps"), [(3, 1, 3), (3, 49, 147), (2.4, 10, 24)])
def test_a_staircase_of_whole_steps(every_epochs: float, steps_per_epoch: int, steps: int) -> None:
    """2.4 epochs of 10 steps are 24 steps, though 24 / 10 / 2.4 is not quite 1 in floats for every such number."""
    settings = groups.PaperLearningRateConfig("paper", 0.00125, 0.97, every_epochs=every_epochs, warmup_epochs=0)
    rates = [learning_rate(settings, step, steps_per_epoch, 1024) for step in range(4 * steps)]
    assert rates == pytest.approx([0.00125 * 1024 * 0.97 ** (step // steps) for step in range(4 * steps)], rel=1e-12)


def test_the_inverse_square_root() -> None:
    """Vaswani et al.: both branches of the minimum meet at the peak, which is the last step of the warm-up."""
    settings = groups.InverseSqrtLearningRateConfig("inverse_sqrt", peak=0.2, warmup_steps=40)
    expected = [0.2 * 40**0.5 * min(step * 40**-1.5, step**-0.5) for step in range(1, 200)]
    assert [learning_rate(settings, step, 10, 8, 500) for step in range(199)] == pytest.approx(expected, rel=1e-12)


def test_the_cosine_goes_from_the_peak_to_its_final_share() -> None:
    settings = groups.CosineLearningRateConfig("cosine", peak=0.4, warmup_epochs=2, final_share=0.1)
    rates = [learning_rate(settings, step, 10, 8, 100) for step in range(101)]
    assert [rates[20], rates[60], rates[100]] == pytest.approx([0.4, 0.5 * (0.4 + 0.04), 0.04])
    assert rates[20:] == sorted(rates[20:], reverse=True)


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        (groups.PaperLearningRateConfig("paper", per_sample=0.05, decay=0.97, every_epochs=3, warmup_epochs=1), 10),
        (groups.CosineLearningRateConfig("cosine", peak=0.4, warmup_epochs=2, final_share=0.1), 20),
        (groups.ConstantLearningRateConfig("constant", peak=0.4, warmup_epochs=0.5), 5),
    ],
)
def test_the_warm_up_ends_where_the_rate_is_highest(settings: groups.LearningRateConfig, steps: int) -> None:
    """What the banner shows: not the rate of the first step, which is a small part of it."""
    assert warm_up_steps(settings, 10) == steps
    rates = [learning_rate(settings, step, 10, 8, 100) for step in range(100)]
    assert rates[max(0, steps - 1)] == pytest.approx(0.4) == pytest.approx(max(rates))
    assert rates[:steps] == sorted(rates[:steps])
    if isinstance(settings, groups.ConstantLearningRateConfig):
        assert set(rates[steps:]) == {0.4}
