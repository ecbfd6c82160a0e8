"""AmoebaNet: operations that behave and start as TensorFlow's, cells wired by the TPU reference's tables, and the whole
network with the paper's sizes, the reference's layout, and its ends."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from networks import small_amoebanet
from torch import Tensor, nn

from gpipe_cli.errors import InputError
from gpipe_cli.models.amoebanet import (
    NORMAL,
    REDUCTION,
    Cell,
    CellGenotype,
    Classifier,
    FeatureMap,
    Variant,
)
from gpipe_cli.models.amoebanet_ops import (
    Convolution,
    FactorizedReduction,
    Linear,
    PreActivated,
    SameConvolution,
    make_operation,
)
from gpipe_cli.models.drop_path import ScheduledDropPath, set_progress

# --- operations


def same(x: Tensor, kernel: tuple[int, int], stride: tuple[int, int], value: float = 0.0) -> Tensor:
    """`x` in a frame, from the definition of TensorFlow's SAME rule: of the pixels that the last window lacks, half
    (rounded down) are before the first."""
    lacks = [
        max((math.ceil(length / step) - 1) * step + size - length, 0)
        for length, size, step in zip(x.shape[2:], kernel, stride, strict=True)
    ]
    (top, bottom), (left, right) = ((lack // 2, lack - lack // 2) for lack in lacks)
    return F.pad(x, (left, right, top, bottom), value=value)


@pytest.mark.parametrize(
    ("name", "stride"),
    [("max_pool_2x2", 2), ("max_pool_3x3", 1), ("max_pool_3x3", 2), ("avg_pool_3x3", 1), ("avg_pool_3x3", 2)],
)
def test_pool(name: str, stride: int) -> None:
    kernel = int(name[-1])
    for size in ((1, 2), (6, 7)):
        # Negative almost everywhere: a zero taken from the padding would be the maximum.
        x = torch.randn(2, 8, *size) - 3
        frame = (kernel, kernel), (stride, stride)
        if name.startswith("max"):
            expected = F.max_pool2d(same(x, *frame, value=-math.inf), kernel, stride)
        else:  # of the real pixels
            sums, counts = (F.avg_pool2d(same(each, *frame), kernel, stride) for each in (x, torch.ones_like(x)))
            expected = sums / counts
        torch.testing.assert_close(make_operation(name, 8, 8, stride, nn.BatchNorm2d)(x), expected)


@pytest.mark.parametrize(("kernel", "stride"), [((3, 3), (2, 2)), ((1, 7), (1, 2)), ((3, 3), (1, 1))])
def test_same_convolution(kernel: tuple[int, int], stride: tuple[int, int]) -> None:
    apply = SameConvolution(2, 3, kernel, stride)
    x = torch.randn(2, 2, 7, 6)
    torch.testing.assert_close(apply(x), F.conv2d(same(x, kernel, stride), apply.weight, stride=stride))


def test_separable_is_depthwise_then_pointwise() -> None:
    apply = make_operation("separable_3x3_2", 6, 8, 2, nn.Identity)
    depthwise, pointwise, depthwise_2, pointwise_2 = apply.parameters()
    assert next(make_operation("separable_5x5_2", 6, 8, 2, nn.Identity).parameters()).shape == (6, 1, 5, 5)
    assert [tuple(p.shape) for p in apply.parameters()] == [(6, 1, 3, 3), (8, 6, 1, 1), (8, 1, 3, 3), (8, 8, 1, 1)]
    x = torch.rand(2, 6, 8, 8)
    y = F.conv2d(same(x, (3, 3), (2, 2)), depthwise, stride=2, groups=6)
    y = F.relu(torch.einsum("oc,nchw->nohw", pointwise[:, :, 0, 0], y))
    y = F.conv2d(y, depthwise_2, padding=1, groups=8)
    torch.testing.assert_close(apply(x), torch.einsum("oc,nchw->nohw", pointwise_2[:, :, 0, 0], y))


@pytest.mark.parametrize("size", [6, 7])
def test_factorized_reduction_reads_both_lattices(size: int) -> None:
    apply = FactorizedReduction(1, 2, nn.Identity)
    for parameter in apply.parameters():
        nn.init.ones_(parameter)
    x = torch.arange(1.0, size * size + 1).reshape(1, 1, size, size)
    even, odd = apply(x)[0]
    assert torch.equal(even, x[0, 0, ::2, ::2])
    expected = torch.zeros_like(even)
    lattice = x[0, 0, 1::2, 1::2]
    expected[: lattice.shape[0], : lattice.shape[1]] = lattice  # zeros where an odd size leaves no pixel
    assert torch.equal(odd, expected)
    assert torch.equal(apply(-x), torch.zeros_like(apply(x))), "ReLU comes first"
    # torch 2.15 wrote past its memory in the backward of a strided one
    assert apply.even.stride == apply.odd.stride == (1, 1)


@pytest.mark.parametrize(
    ("module", "fan_out"),
    [
        (SameConvolution(64, 64, (1, 7)), 7 * 64),
        (SameConvolution(4096, 4096, (3, 3), groups=4096), 9),  # depth-wise: TensorFlow's kernel is (3, 3, channels, 1)
        (Linear(300, 100), 100),
    ],
)
def test_initial_weights(module: Convolution | Linear, fan_out: int) -> None:
    """As TensorFlow's variance scaling draws them: variance 2 / fan-out, cut at two standard deviations."""
    module.reset_parameters()
    assert module.weight.std().item() == pytest.approx(math.sqrt(2 / fan_out), rel=0.02)
    assert module.weight.mean().item() == pytest.approx(0, abs=0.02 * math.sqrt(2 / fan_out))
    # The largest of so many normal values would be beyond 3.5 deviations if nothing cut them off.
    assert module.weight.abs().max().item() <= 2 * math.sqrt(2.6 / fan_out)
    assert module.bias is None or not module.bias.any()


def test_pointwise_convolution_is_an_ordinary_one() -> None:
    """The faster routine on CPU changes neither result nor gradients beyond rounding."""
    apply = make_operation("identity", 8, 16, 1, nn.Identity)  # it cannot be one where the channels differ
    assert isinstance(apply, PreActivated)
    (weight,) = apply.parameters()
    x = torch.randn(2, 8, 5, 5, requires_grad=True)
    ours, expected = apply(x), torch.einsum("oc,nchw->nohw", weight[:, :, 0, 0], x)
    torch.testing.assert_close(ours, expected)
    found, right = (torch.autograd.grad(y.square().sum(), (x, weight)) for y in (ours, expected))
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-4)


# --- cells


CURRENT = FeatureMap(12, 7)
PREVIOUS = FeatureMap(8, 7)  # as many channels as a state, so it is state 1 as it is


def cell_of(kind: CellGenotype, stride: int, previous: FeatureMap | None = PREVIOUS, drop_path: float = 0.0) -> Cell:
    shapes = {"current": CURRENT, "previous": previous}
    return Cell(kind, filters=8, stride=stride, norm=nn.BatchNorm2d, drop_path=drop_path, **shapes)  # type: ignore[arg-type]


def inputs(previous: FeatureMap) -> tuple[Tensor, Tensor]:
    return torch.randn(2, *CURRENT, CURRENT.size), torch.randn(2, *previous, previous.size)


def by_hand(cell: Cell, current: Tensor, previous: Tensor) -> Tensor:
    """The cell again, with a separate ReLU for each operation."""
    states = [cell.current(F.relu(current)), cell.previous(previous)]
    operations = iter(cell.operations)
    for pair in cell.genotype.pairs:
        terms = []
        for (_, state), apply in zip(pair, operations, strict=False):
            terms.append(apply(F.relu(states[state]) if isinstance(apply, PreActivated) else states[state]))
        states.append(terms[0] + terms[1])
    return torch.cat([states[index] for index in cell.genotype.output], dim=1)


OPERATIONS = {
    ("b", 1): "1x1 max_pool_3x3, identity separable_3x3_2, 1x1 separable_3x3_2, 1x1 identity, avg_pool_3x3 1x1",
    ("d", 1): "1x1 max_pool_3x3, identity 1x7_7x1, 1x1 1x7_7x1, max_pool_3x3 identity, avg_pool_3x3 1x1",
    ("b", 2): "max_pool_2x2 max_pool_3x3, identity 3x3, separable_5x5_2 max_pool_3x3, identity separable_3x3_2, "
    "avg_pool_3x3 1x1",
    ("d", 2): "max_pool_2x2 max_pool_3x3, identity 3x3, 1x7_7x1 max_pool_3x3, identity max_pool_2x2, avg_pool_3x3 1x1",
}


@pytest.mark.parametrize(
    ("variant", "stride", "wiring", "output", "previous"),
    [
        ("b", 1, [(1, 1), (1, 0), (1, 0), (2, 2), (1, 5)], [0, 3, 4, 6], PREVIOUS),
        ("d", 1, [(1, 1), (1, 0), (0, 0), (2, 2), (1, 5)], [0, 3, 4, 6], FeatureMap(12, 7)),
        ("b", 2, [(0, 0), (2, 1), (2, 2), (3, 1), (4, 3)], [5, 6], FeatureMap(4, 14)),
        ("d", 2, [(0, 0), (2, 1), (2, 2), (3, 1), (2, 3)], [4, 5, 6], FeatureMap(4, 13)),
    ],
)
def test_wiring(
    variant: Variant, stride: int, wiring: list[tuple[int, int]], output: list[int], previous: FeatureMap
) -> None:
    genotype = (NORMAL if stride == 1 else REDUCTION)[variant]
    assert ", ".join(" ".join(name for name, _ in pair) for pair in genotype.pairs) == OPERATIONS[variant, stride]
    assert [tuple(state for _, state in pair) for pair in genotype.pairs] == wiring
    assert list(genotype.output) == output
    cell = cell_of(genotype, stride, previous)
    x, skip = inputs(previous)
    logits = torch.randn(2, 10)  # of the auxiliary head
    result, current, passed_on = cell((x, skip, logits))
    assert current is x
    assert passed_on is logits
    assert result.shape == (2, cell.output.channels, cell.output.size, cell.output.size)
    assert cell.output == (8 * len(output), 7 if stride == 1 else 4)
    torch.testing.assert_close(result, by_hand(cell, x, skip))


def test_drop_path_spares_identities_only() -> None:
    kind = NORMAL["b"]
    cell = cell_of(kind, 1, drop_path=0.5)
    dropped: list[Tensor] = []
    results: list[Tensor] = []
    cell.drop_path.register_forward_pre_hook(lambda _, args: dropped.append(args[0]))
    names = [name for pair in kind.pairs for name, _ in pair]
    for name, apply in zip(names, cell.operations, strict=True):
        if name != "identity":
            apply.register_forward_hook(lambda _, args, result: results.append(result))
    cell(inputs(PREVIOUS))
    assert len(dropped) == len(names) - 2  # the cell has two identities
    assert all(a is b for a, b in zip(dropped, results, strict=True))


def test_drop_path_removes_whole_examples_and_scales_the_rest() -> None:
    drop_path = ScheduledDropPath(0.4)
    drop_path.progress = 0.5  # keep = 1 - 0.5 * 0.4 = 0.8
    x = torch.ones(4000, 3, 2, 2, requires_grad=True)
    whole = drop_path(x)
    whole.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, whole.detach())  # the gradient has the same mask
    y = whole.detach().flatten(1)
    assert torch.equal(y, y[:, :1].expand(-1, 12)), "all channels and pixels of an example share one fate"
    dropped = y[:, 0] == 0
    torch.testing.assert_close(y[~dropped], torch.full_like(y[~dropped], 1 / 0.8))
    # Standard deviation of the mean: sqrt(0.8 * 0.2 / 4000) = 0.0063.
    assert dropped.float().mean().item() == pytest.approx(0.2, abs=0.03)


# --- the network


def shapes(**settings: Any) -> nn.Sequential:
    with torch.device("meta"):
        return small_amoebanet(**settings)


def outputs(model: nn.Sequential, x: Tensor) -> dict[str, Tensor]:
    """First tensor that leaves each layer."""
    result = {}
    for name, layer in model.named_children():
        x = layer(x)
        result[name] = x[0] if isinstance(x, tuple) else x
    return result


@pytest.mark.parametrize(("variant", "filters", "count"), [("d", 256, 121_911_016), ("b", 512, 557_277_864)])
def test_parameter_counts(variant: str, filters: int, count: int) -> None:
    """The TPU reference's own counts; the paper reports 557M for B (18, 512)."""
    model = shapes(variant=variant, normal_cells=18, filters=filters, image_size=224, num_classes=1000)
    assert sum(parameter.numel() for parameter in model.parameters()) == count


def test_sizes_of_maps() -> None:
    """The auxiliary head ends in a convolution as large as what is left of the map, in training only. A third of
    eight cells, rounded down, is before each reduction."""
    model = shapes(normal_cells=8, filters=64, image_size=331, num_classes=1000, auxiliary_head=True)
    weights = [tuple(p.shape) for p in model.get_submodule("auxiliary_head").parameters() if p.ndim > 1]
    assert weights == [(51, 512, 1, 1), (307, 51, 6, 6), (1000, 307)]
    images = torch.empty(2, 3, 331, 331, device="meta")
    assert [each.shape for each in model(images)] == [(2, 1000), (2, 1000)]
    maps = outputs(model.eval(), images)
    expected = {"stem": (32, 165), "stem_reduction_0": (3 * 16, 83), "stem_reduction_1": (3 * 32, 42)}
    expected |= {"cell_01": (4 * 64, 42), "reduction_0": (3 * 128, 21), "cell_04": (4 * 128, 21)}
    expected |= {"reduction_1": (3 * 256, 11), "cell_07": (4 * 256, 11), "classifier": (1000,)}
    assert {name: tuple(maps[name].shape[1:3]) for name in expected} == expected
    cells = [f"cell_{index:02d}" for index in range(8)]
    middle = ["reduction_0", *cells[2:5], "auxiliary_head", "reduction_1"]
    assert list(maps) == [*list(expected)[:3], *cells[:2], *middle, *cells[5:], "classifier"]


def test_drop_path_is_scheduled_and_evaluation_draws_nothing_and_treats_each_image_alone() -> None:
    model = small_amoebanet(drop_path=0.5, dropout=0.0).double()
    images = torch.randn(4, 3, 32, 32, dtype=torch.float64)
    assert torch.equal(model(images), model(images)), "nothing is dropped before the first step"
    set_progress(model, 1.0)
    assert not torch.equal(model(images), model(images))
    model.eval()
    state = torch.get_rng_state()
    together = model(images)
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(together, torch.cat([model(image[None]) for image in images]))


def test_classifier_rectifies_before_it_pools() -> None:
    classifier = Classifier(4, 3, dropout=0.5).eval()
    x = torch.randn(2, 4, 5, 5)
    expected = F.linear(F.relu(x).mean((2, 3)), classifier.logits.weight, classifier.logits.bias)
    torch.testing.assert_close(classifier((x, x)), expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"filters": 18}, "^model.filters=18: .* multiple of 4; use 16 or 20$"),
        ({"image_size": 8, "auxiliary_head": True}, "^dataset.image_size=8: .* 4x4 .* model.auxiliary_head=false$"),
    ],
)
def test_what_does_not_fit(settings: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        shapes(**settings)
