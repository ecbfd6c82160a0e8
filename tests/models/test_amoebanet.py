"""The whole network: the paper's sizes, the reference's layout, and its ends."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from networks import small_amoebanet
from torch import Tensor, nn

from gpipe_cli.models.amoebanet import AuxiliaryHead, Classifier
from gpipe_cli.models.drop_path import set_progress


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


@pytest.mark.parametrize(
    ("image_size", "sizes", "kernel"),
    [(224, [111, 56, 28, 14, 7], 4), (331, [165, 83, 42, 21, 11], 6)],
)
def test_sizes_of_maps(image_size: int, sizes: list[int], kernel: int) -> None:
    """The auxiliary head ends in a convolution as large as what is left of the map, and is there in training only."""
    model = shapes(normal_cells=6, filters=64, image_size=image_size, num_classes=1000, auxiliary_head=True)
    weights = [tuple(p.shape) for p in model.get_submodule("auxiliary_head").parameters() if p.ndim > 1]
    assert weights == [(51, 512, 1, 1), (307, 51, kernel, kernel), (1000, 307)]
    images = torch.empty(2, 3, image_size, image_size, device="meta")
    assert [each.shape for each in model(images)] == [(2, 1000), (2, 1000)]
    maps = outputs(model.eval(), images)
    assert [maps[name].shape[-1] for name in ("stem", "stem_reduction_0", "cell_01", "cell_03", "cell_05")] == sizes
    channels = {name: each.shape[1] for name, each in maps.items()}
    assert [channels[name] for name in ("stem", "stem_reduction_0", "stem_reduction_1")] == [32, 3 * 16, 3 * 32]
    assert [channels[name] for name in ("cell_01", "reduction_0", "cell_02")] == [4 * 64, 3 * 128, 4 * 128]
    assert [channels[name] for name in ("reduction_1", "cell_05", "classifier")] == [3 * 256, 4 * 256, 1000]


def test_small_images_keep_their_resolution_in_a_stem_without_relu() -> None:
    model = small_amoebanet()
    maps = outputs(model, torch.randn(2, 3, 32, 32))
    assert {name: each.shape[-1] for name, each in maps.items()} == {
        "stem": 32, "cell_00": 32, "reduction_0": 16, "cell_01": 16, "reduction_1": 8, "cell_02": 8, "classifier": 10
    }  # fmt: skip
    assert (maps["stem"] < 0).any()
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert {(module.eps, module.momentum) for module in norms} == {(1e-3, 0.0003)}


@pytest.mark.parametrize(("normal_cells", "first", "second"), [(3, 1, 2), (4, 1, 2), (8, 2, 5), (18, 6, 12)])
def test_layout(normal_cells: int, first: int, second: int) -> None:
    cells = [f"cell_{index:02d}" for index in range(normal_cells)]
    stem = ["stem", "stem_reduction_0", "stem_reduction_1"]
    head = ["auxiliary_head", "reduction_1"]
    model = shapes(normal_cells=normal_cells, image_size=224, auxiliary_head=True)
    assert [name for name, _ in model.named_children()] == [
        *stem, *cells[:first], "reduction_0", *cells[first:second], *head, *cells[second:], "classifier"
    ]  # fmt: skip


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


def test_auxiliary_head_rectifies_before_it_pools() -> None:
    head = small_amoebanet(auxiliary_head=True).get_submodule("auxiliary_head")
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
    classifier.train()
    assert not torch.equal(classifier((x, x)), classifier((x, x))), "features are dropped in training"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"filters": 18}, "^model.filters=18: .* multiple of 4; use 16 or 20$"),
        ({"filters": 72, "image_size": 224}, "^model.filters=72: .* multiple of 16; use 64 or 80$"),
        ({"image_size": 8, "auxiliary_head": True}, "^dataset.image_size=8: .* 4x4 .* model.auxiliary_head=false$"),
    ],
)
def test_what_does_not_fit(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shapes(**settings)
