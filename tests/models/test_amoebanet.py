"""The whole network: the paper's sizes, the reference's layout, and what the pipeline asks of a model."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpipe_cli.models.amoebanet import AuxiliaryHead, Classifier, amoebanet
from gpipe_cli.models.cell import Cell
from gpipe_cli.models.drop_path import set_progress
from gpipe_cli.models.genotype import Variant


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def build(
    variant: Variant = "d",
    normal_cells: int = 3,
    filters: int = 16,
    image_size: int = 32,
    num_classes: int = 10,
    *,
    auxiliary_head: bool = False,
    dropout: float = 0.5,
    drop_path: float = 0.0,
) -> nn.Sequential:
    return amoebanet(
        variant=variant,
        normal_cells=normal_cells,
        filters=filters,
        image_size=image_size,
        num_classes=num_classes,
        auxiliary_head=auxiliary_head,
        dropout=dropout,
        drop_path=drop_path,
        batch_norm_momentum=0.0003,
    )


def names(model: nn.Sequential) -> list[str]:
    return [name for name, _ in model.named_children()]


def outputs(model: nn.Sequential, x: Tensor) -> dict[str, Tensor]:
    """First tensor that leaves each layer."""
    result = {}
    for name, layer in model.named_children():
        x = layer(x)
        result[name] = x[0] if isinstance(x, tuple) else x
    return result


@pytest.mark.parametrize(("variant", "filters", "count"), [("d", 256, 121_911_016), ("b", 512, 557_277_864)])
def test_parameter_count(variant: Variant, filters: int, count: int) -> None:
    """The TPU reference's own counts; the paper reports 557M for B (18, 512)."""
    with torch.device("meta"):
        model = build(variant, 18, filters, 224, 1000)
    assert sum(parameter.numel() for parameter in model.parameters()) == count


@pytest.mark.parametrize(
    ("normal_cells", "filters", "low", "high"),
    # The last two are printed with fewer digits (1.05B, 1.8B); of the others, none is further off than 1.1 %.
    [(18, 208, 81, 83), (18, 416, 314.5, 321.5), (18, 544, 536, 548), (36, 544, 1040, 1060), (72, 512, 1750, 1850)],
)
def test_table_1(normal_cells: int, filters: int, low: float, high: float) -> None:
    """AmoebaNet-D as the paper's Table 1 counts it, in millions: 82, 318, 542, 1050 and 1800."""
    with torch.device("meta"):
        model = build("d", normal_cells, filters, 224, 1000)
    assert low < sum(parameter.numel() for parameter in model.parameters()) / 1e6 < high


@pytest.mark.parametrize("image_size", [224, 331, 480])
def test_spatial_sizes(image_size: int) -> None:
    with torch.device("meta"):
        model = build("d", 18, 64, image_size, 1000)
    sizes = {224: [111, 56, 28, 14, 7], 331: [165, 83, 42, 21, 11], 480: [239, 120, 60, 30, 15]}[image_size]
    maps = outputs(model, torch.empty(1, 3, image_size, image_size, device="meta"))
    assert [maps[name].shape[-1] for name in ("stem", "stem_reduction_0", "cell_05", "cell_11", "cell_17")] == sizes
    assert [maps[name].shape[1] for name in ("stem", "stem_reduction_0", "stem_reduction_1")] == [32, 3 * 16, 3 * 32]
    assert [maps[name].shape[1] for name in ("cell_05", "reduction_0", "cell_06")] == [4 * 64, 3 * 128, 4 * 128]
    assert [maps[name].shape[1] for name in ("reduction_1", "cell_17", "classifier")] == [3 * 256, 4 * 256, 1000]


def test_layout_of_eighteen_cells() -> None:
    with torch.device("meta"):
        model = build("d", 18, 16, 224, auxiliary_head=True)
    cells = [f"cell_{index:02d}" for index in range(18)]
    stem = ["stem", "stem_reduction_0", "stem_reduction_1"]
    assert names(model) == [
        *stem, *cells[:6], "reduction_0", *cells[6:12], "auxiliary_head", "reduction_1", *cells[12:], "classifier"
    ]  # fmt: skip


@pytest.mark.parametrize("normal_cells", range(3, 9))
def test_any_number_of_normal_cells(normal_cells: int) -> None:
    with torch.device("meta"):
        layout = names(build("b", normal_cells))
        stacks = "".join("R" if name.startswith("reduction") else "N" for name in layout[1:-1]).split("R")
    assert [len(stack) for stack in stacks] == [
        math.floor(normal_cells / 3),
        math.floor(2 * normal_cells / 3) - math.floor(normal_cells / 3),
        normal_cells - math.floor(2 * normal_cells / 3),
    ]


@pytest.mark.parametrize("variant", ["b", "d"])
@pytest.mark.parametrize("image_size", [32, 64, 96, 224, 299])
def test_gradients_reach_every_parameter(variant: Variant, image_size: int) -> None:
    model = build(variant, image_size=image_size, auxiliary_head=True)
    images = torch.randn(3, 3, image_size, image_size)
    before = images.clone()
    logits, auxiliary = model(images)
    assert logits.shape == auxiliary.shape == (3, 10)
    (F.cross_entropy(logits, torch.arange(3)) + F.cross_entropy(auxiliary, torch.arange(3))).backward()
    assert torch.equal(images, before)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


def test_drop_path_is_scheduled() -> None:
    model = build(drop_path=0.9, dropout=0.0)
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(model(images), model(images)), "nothing is dropped before the first step"
    set_progress(model, 1.0)
    assert not torch.equal(model(images), model(images))


def test_small_images_keep_their_resolution_in_the_stem() -> None:
    with torch.device("meta"):
        maps = outputs(build(image_size=32), torch.empty(1, 3, 32, 32, device="meta"))
    assert {name: each.shape[-1] for name, each in maps.items()} == {
        "stem": 32, "cell_00": 32, "reduction_0": 16, "cell_01": 16, "reduction_1": 8, "cell_02": 8, "classifier": 10
    }  # fmt: skip


def test_auxiliary_logits_in_training_only() -> None:
    model = build(auxiliary_head=True)
    images = torch.randn(2, 3, 32, 32)
    result = model(images)
    assert isinstance(result, tuple)
    assert [tuple(each.shape) for each in result] == [(2, 10), (2, 10)]
    assert model.eval()(images).shape == (2, 10)


@pytest.mark.parametrize(("image_size", "kernel"), [(224, 4), (331, 6), (480, 9)])
def test_auxiliary_head_layout(image_size: int, kernel: int) -> None:
    with torch.device("meta"):
        model = build("d", 18, 256, image_size, 1000, auxiliary_head=True)
    weights = [tuple(p.shape) for p in model.get_submodule("auxiliary_head").parameters() if p.ndim > 1]
    assert weights == [(51, 2048, 1, 1), (307, 51, kernel, kernel), (1000, 307)]


def test_auxiliary_head_rectifies_before_it_pools() -> None:
    model = build(auxiliary_head=True).eval()
    head = model.get_submodule("auxiliary_head").train()
    assert isinstance(head, AuxiliaryHead)
    x, skip = torch.randn(2, 128, 16, 16), torch.randn(2, 1)
    before = x.clone()
    a, b, logits = head((x, skip))
    assert a is x
    assert b is skip
    assert torch.equal(x, before)
    torch.testing.assert_close(head((F.relu(x), skip))[2], logits, rtol=0, atol=0)
    assert not torch.allclose(head((x.abs(), skip))[2], logits)


def test_classifier_rectifies_before_it_pools() -> None:
    classifier = Classifier(4, 3, dropout=0.5).eval()
    x = torch.randn(2, 4, 5, 5)
    expected = F.linear(F.relu(x).mean((2, 3)), classifier.logits.weight, classifier.logits.bias)
    torch.testing.assert_close(classifier((x, x)), expected)
    with torch.no_grad():
        classifier.logits.weight.fill_(1.0)
    ones = torch.ones(2000, 4, 1, 1)
    logits = classifier.train()((ones, ones)) - classifier.logits.bias
    # Half of the features are dropped and the rest doubled: 0, 2, 4, 6 or 8, and 4 on average.
    assert set(logits.flatten().round(decimals=3).tolist()) == {0.0, 2.0, 4.0, 6.0, 8.0}
    assert logits.mean().item() == pytest.approx(4, abs=0.2)


def test_stem_has_no_relu() -> None:
    stem = build(image_size=96).get_submodule("stem")
    x = torch.randn(2, 3, 96, 96)
    assert not torch.allclose(stem(x), stem(F.relu(x)))
    assert (stem(x) < 0).any()


def test_every_owner_of_parameters_or_buffers_can_fill_them() -> None:
    """What a pipeline stage does: build on meta, materialise, initialise; the values depend on the seed alone."""

    def materialised(garbage: float) -> nn.Sequential:
        with torch.device("meta"):
            model = build("b", image_size=96, auxiliary_head=False)
        model.to_empty(device="cpu")
        for tensor in model.state_dict().values():
            tensor.fill_(garbage)
        torch.manual_seed(1)
        for name, module in model.named_modules():
            if (
                next(module.parameters(recurse=False), None) is None
                and next(module.buffers(recurse=False), None) is None
            ):
                continue
            assert callable(getattr(module, "reset_parameters", None)), name
            module.reset_parameters()
        return model

    first, second = materialised(3.0).state_dict(), materialised(-5.0).state_dict()
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
    assert all(tensor.isfinite().all() for tensor in first.values())


def test_batch_norm_settings() -> None:
    norms = [module for module in build().modules() if isinstance(module, nn.BatchNorm2d)]
    assert {(module.eps, module.momentum) for module in norms} == {(1e-3, 0.0003)}


def test_evaluation_draws_nothing_and_treats_each_image_alone() -> None:
    model = build(drop_path=0.5, auxiliary_head=True).eval().double()
    set_progress(model, 1.0)
    images = torch.randn(4, 3, 32, 32, dtype=torch.float64)
    state = torch.get_rng_state()
    together = model(images)
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(together, torch.cat([model(image[None]) for image in images]))


def test_a_layer_can_start_from_detached_inputs() -> None:
    """What a cut does: each layer runs on leaves, and gradients handed over by hand equal those of the whole model."""
    torch.manual_seed(0)
    model = build(auxiliary_head=True, dropout=0.0).double()
    images = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    torch.stack([each.square().sum() for each in model(images)]).sum().backward()
    whole = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)

    x: tuple[Tensor, ...] = (images,)
    borders = []
    for layer in model:
        leaves = tuple(each.detach().requires_grad_() for each in x)
        result = layer(leaves if len(leaves) > 1 else leaves[0])
        x = result if isinstance(result, tuple) else (result,)
        borders.append((leaves, x))
    gradients: tuple[Tensor | None, ...] = tuple(2 * each.detach() for each in x)
    for leaves, results in reversed(borders):
        used = [index for index, gradient in enumerate(gradients) if gradient is not None]
        torch.autograd.backward([results[index] for index in used], [gradients[index] for index in used])
        gradients = tuple(leaf.grad for leaf in leaves)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, whole[name])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"normal_cells": 2}, "model.normal_cells=2: .* 3 or more"),
        ({"filters": 18}, "model.filters=18: .* multiple of 4; use 16 or 20"),
        ({"filters": 72, "image_size": 224}, "model.filters=72: .* multiple of 16; use 64 or 80"),
        ({"filters": 2}, "model.filters=2: .* use 4 or 8"),
        ({"image_size": 8, "auxiliary_head": True}, "dataset.image_size=8: .* 4x4 .* model.auxiliary_head=false"),
        ({"image_size": 128, "auxiliary_head": True, "num_classes": 0}, "num_classes=0"),
        ({"image_size": 2}, "dataset.image_size=2: .* 3 or more"),
        ({"variant": "c"}, "model.variant=c: use b .* or d"),
        ({"dropout": 1.0}, "model.dropout=1.0"),
        ({"drop_path": -0.1}, "model.drop_path=-0.1"),
    ],
)
def test_wrong_settings(settings: dict[str, object], message: str) -> None:
    with torch.device("meta"), pytest.raises(ValueError, match=message) as error:
        build(**settings)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("image_size", [6, 7, 15, 65, 66, 97])
def test_odd_sizes(image_size: int) -> None:
    model = build(image_size=image_size)
    assert model(torch.randn(2, 3, image_size, image_size)).shape == (2, 10)
    assert isinstance(model[1], Cell)
