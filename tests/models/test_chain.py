"""A chain computes what timm's own model computes, bit for bit, with timm's names."""

import copy
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from gpipe_cli.models.chain import chain, timm_state_dict
from gpipe_cli.pipeline.profile.tracing import trace_layers
from gpipe_cli.pipeline.runtime.boundary import as_boundary

ONE_BLOCK = {"layers": (1, 1, 1, 1), "channels": (16, 32, 32, 32)}
SHORT = {"depths": (1, 2, 1, 1), "dims": (16, 16, 24, 24)}
TOKENS = {"depth": 2, "embed_dim": 24, "num_heads": 2, "img_size": 32}
MIXED = {"img_size": 32}

# Members of every family, made small where the name alone stands for millions of parameters.
MEMBERS: list[tuple[str, dict[str, Any]]] = [
    ("resnet18", ONE_BLOCK),
    ("resnet26t", ONE_BLOCK),  # three convolutions in the stem, averages before the shortcuts
    ("resnet50", {"layers": (2, 1, 1, 2), "channels": (8, 16, 16, 16)}),
    ("resnext50_32x4d", {"layers": (1, 1, 1, 1), "channels": (16, 32, 32, 64)}),
    ("seresnet50", ONE_BLOCK),
    ("wide_resnet50_2", ONE_BLOCK),
    ("resnetblur50", ONE_BLOCK),
    ("resnetrs50", ONE_BLOCK),
    ("skresnet18", {"layers": (1, 1, 1, 1)}),
    ("convnext_atto", SHORT),
    ("convnext_atto_ols", SHORT),  # overlapping patches
    ("convnext_atto", {**SHORT, "head_norm_first": True}),
    ("convnextv2_atto", SHORT),
    ("vit_tiny_patch16_224", TOKENS),
    ("vit_base_patch16_clip_224", TOKENS),  # a normalisation before the blocks
    ("vit_medium_patch16_reg4_gap_256", TOKENS),  # registers, no class token, the average of all patches
    ("deit3_small_patch16_224", TOKENS),  # no position for the class token
    ("vit_tiny_r_s16_p8_224", {**TOKENS, "img_size": 64}),  # convolutions in the stem
    ("test_efficientnet", {}),
    ("test_efficientnet_gn", {}),
    ("efficientnet_lite0", {}),
    ("mobilenetv2_035", {}),
    ("mobilenetv3_small_050", {}),
    ("mobilenetv4_conv_small_035", {}),  # a normalisation in the head
    ("lcnet_035", {}),
    ("regnetx_002", {}),
    ("regnety_002", {}),
    ("regnetz_005", {}),
    ("vgg11", {"mlp_ratio": 0.01}),
    ("vgg11_bn", {"mlp_ratio": 0.01}),
    ("mixer_s32_224", MIXED),
    ("resmlp_12_224", MIXED),
]
IDS = [f"{index}_{name}" for index, (name, _) in enumerate(MEMBERS)]


def build(name: str, settings: dict[str, Any], *, regular: bool) -> nn.Module:
    """timm's model for seven classes; `regular` puts dropout and, where there are branches to drop, drop-path on."""
    torch.manual_seed(1)
    rates = {"drop_rate": 0.3} | ({} if name.startswith("vgg") else {"drop_path_rate": 0.3})
    model = timm.create_model(name, num_classes=7, **settings, **(rates if regular else dict.fromkeys(rates, 0.0)))
    # Zeros at the end of branches and scales of one would hide a mistake.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def images(settings: dict[str, Any]) -> Tensor:
    torch.manual_seed(2)
    size = settings.get("img_size", 40)
    return torch.randn(4, 3, size, size)


@pytest.mark.parametrize(("name", "settings"), MEMBERS, ids=IDS)
def test_same_bits_as_timm(name: str, settings: dict[str, Any]) -> None:
    """Evaluation, then training with and without random parts: outputs, gradients and running statistics."""
    for regular in (False, True):
        model = build(name, settings, regular=regular)
        sequence = chain(copy.deepcopy(model))
        x = images(settings)
        for training in (False, True):
            model.train(training)
            sequence.train(training)
            torch.manual_seed(3)
            expected = model(x)
            torch.manual_seed(3)
            assert torch.equal(sequence(x), expected), (regular, training)
        assert expected.shape == (4, 7)
        weights = torch.linspace(-1, 1, expected.numel()).view_as(expected)
        for each in (model, sequence):
            torch.manual_seed(4)
            each(x).backward(weights)
        gradients = {path.partition(".")[2]: value.grad for path, value in sequence.named_parameters()}
        for path, parameter in model.named_parameters():
            assert parameter.grad is not None, path
            assert torch.equal(parameter.grad, gradients[path]), path
        ours = timm_state_dict(sequence)
        assert all(torch.equal(tensor, ours[path]) for path, tensor in model.state_dict().items())


@pytest.mark.parametrize(("name", "settings"), MEMBERS, ids=IDS)
def test_a_chain_of_separate_layers(name: str, settings: dict[str, Any]) -> None:
    """One tensor passes from layer to layer, no layer changes what it gets, and costs follow from shapes."""
    sequence = chain(build(name, settings, regular=True))
    names = [path for path, _ in sequence.named_children()]
    assert (names[0], names[-1]) == (("features_0" if name.startswith("vgg") else "stem"), "head")
    assert not any("." in path for path in names)
    x = images(settings)
    for path, layer in sequence.named_children():
        before = x.clone()
        result = layer(x)
        assert isinstance(result, Tensor), path
        assert torch.equal(x, before), path
        x = result.detach()
    owners = [{id(tensor) for tensor in layer.parameters()} for layer in sequence]
    assert len(set().union(*owners)) == sum(map(len, owners)), "no parameter belongs to two layers"
    costs = trace_layers(sequence.to("meta"), as_boundary((images(settings)[:1],)), training=True)
    assert [cost.name for cost in costs] == names
    assert all(len(cost.outputs) == 1 for cost in costs)


@pytest.mark.parametrize(("name", "settings"), MEMBERS, ids=IDS)
def test_same_names_as_timm(name: str, settings: dict[str, Any]) -> None:
    with torch.device("meta"):
        model = timm.create_model(name, num_classes=7, **settings)
    own = model.state_dict()
    sequence = chain(model)
    assert {path.partition(".")[2] for path in sequence.state_dict()} == own.keys()
    assert timm_state_dict(sequence).keys() == own.keys()
    assert len(sequence.state_dict()) == len(own)


def test_files_fit_in_both_directions() -> None:
    model, other = (timm.create_model("vit_tiny_patch16_224", num_classes=7, **TOKENS) for _ in range(2))
    sequence = chain(copy.deepcopy(model))
    other.load_state_dict(timm_state_dict(sequence), strict=True)
    assert all(torch.equal(tensor, other.state_dict()[path]) for path, tensor in model.state_dict().items())


def test_names_of_layers() -> None:
    with torch.device("meta"):
        chains = {
            name: [path for path, _ in chain(timm.create_model(name)).named_children()]
            for name in ("resnet18", "convnext_atto", "vit_tiny_patch16_224", "mobilenetv2_100", "regnetx_002", "vgg11")
        }
    blocks = [f"layer{stage}_{block}" for stage in range(1, 5) for block in range(2)]
    assert chains["resnet18"] == ["stem", *blocks, "head"]
    blocks = [f"stages_{stage}_blocks_{block}" for stage, depth in enumerate((2, 2, 6, 2)) for block in range(depth)]
    assert chains["convnext_atto"] == ["stem", *blocks, "head"]
    assert chains["vit_tiny_patch16_224"] == ["stem", *[f"blocks_{block}" for block in range(12)], "head"]
    assert chains["mobilenetv2_100"][:3] == ["stem", "blocks_0_0", "blocks_1_0"]
    assert chains["regnetx_002"][:4] == ["stem", "s1_b1", "s2_b1", "s3_b1"]
    assert chains["vgg11"] == [*[f"features_{index}" for index in (0, 3, 6, 8, 11, 13, 16, 18)], "head"]


def test_modules_are_shared() -> None:
    model = timm.create_model("test_resnet", num_classes=7).eval()
    sequence = chain(model)
    assert {id(tensor) for tensor in model.parameters()} == {id(tensor) for tensor in sequence.parameters()}
    assert not any(module.training for module in sequence.modules())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("densenet121", r"model\.name: timm's class DenseNet has no chain of layers; use one of ResNet, .*MlpMixer"),
        ("deit_tiny_distilled_patch16_224", r"class VisionTransformerDistilled has no chain"),
        ("test_vit3", r"VisionTransformer pools by attention"),
        ("test_vit", r"VisionTransformer takes images of any size"),
    ],
)
def test_refused(name: str, message: str) -> None:
    with torch.device("meta"):
        model = timm.create_model(name)
    with pytest.raises(ValueError, match=message) as caught:
        chain(model)
    assert "\n" not in str(caught.value)


def test_a_tensor_that_no_layer_has_is_noticed() -> None:
    model = timm.create_model("test_resnet")
    model.register_buffer("extra", torch.zeros(1), persistent=False)
    with pytest.raises(ValueError, match="has tensors that its chain of layers does not know, such as extra"):
        chain(model)
