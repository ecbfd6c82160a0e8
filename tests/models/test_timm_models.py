"""timm's networks by name: initial values, weights from files, and what is refused."""

import logging
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from gpipe_cli.models.chain import timm_state_dict
from gpipe_cli.models.timm_models import build_timm, resnet

SMALL = "test_resnet"


def build(name: str = SMALL, **settings: Any) -> nn.Sequential:
    return build_timm(name, **{"num_classes": 7, "image_size": 32, "dropout": 0.0, "drop_path": 0.0, **settings})


def save(tensors: dict[str, Tensor], file: Path) -> str:
    """In the format of the file's ending."""
    if file.suffix == ".safetensors":
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    else:
        torch.save(tensors, file)
    return str(file)


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor], but: str = "-") -> bool:
    return all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items() if not name.startswith(but))


@pytest.mark.parametrize("name", [SMALL, "vit_tiny_patch16_224", "mobilenetv2_035"])
def test_initial_values_are_those_of_timm(name: str) -> None:
    torch.manual_seed(5)
    ours = timm_state_dict(build(name))
    torch.manual_seed(5)
    size = {"img_size": 32} if name.startswith("vit") else {}
    theirs = timm.create_model(name, num_classes=7, **size).state_dict()
    assert ours.keys() == theirs.keys()
    assert same(ours, theirs)


def test_without_memory() -> None:
    with torch.device("meta"):
        model = build("resnet50", num_classes=1000)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert sum(parameter.numel() for parameter in model.parameters()) == 25_557_032
    assert len(model) == 1 + 16 + 1


def test_settings_arrive() -> None:
    model = build("vit_tiny_patch16_224", dropout=0.25, drop_path=0.5, image_size=48)
    probabilities = [getattr(module, "drop_prob", None) for module in model.modules()]
    assert max(value for value in probabilities if value) == 0.5
    assert model.get_submodule("head.head_drop").p == 0.25
    assert model.get_submodule("stem").pos_embed.shape == (1, 10, 192)
    assert model.get_submodule("head.head").out_features == 7
    assert build(dropout=0.25).get_submodule("head.dropout").p == 0.25


@pytest.mark.parametrize(("depth", "blocks"), [(18, 8), (34, 16), (50, 16), (101, 33), (152, 50)])
def test_resnet(depth: int, blocks: int) -> None:
    with torch.device("meta"):
        model = resnet(depth, num_classes=7, image_size=32, dropout=0.0, drop_path=0.0)
        expected = timm.create_model(f"resnet{depth}", num_classes=7).state_dict()
    assert len(model) == blocks + 2
    assert {name: tensor.shape for name, tensor in timm_state_dict(model).items()} == {
        name: tensor.shape for name, tensor in expected.items()
    }


# Weights.


@pytest.mark.parametrize("ending", ["safetensors", "pth"])
def test_weights_from_a_file(ending: str, tmp_path: Path) -> None:
    other = timm.create_model(SMALL, num_classes=7).state_dict()
    file = save(other, tmp_path / f"weights.{ending}")
    assert same(timm_state_dict(build(weights=file)), other)
    # The file comes first: nothing is asked from the network.
    assert same(timm_state_dict(build(weights=file, pretrained=True)), other)


@pytest.mark.parametrize(("name", "head"), [(SMALL, "fc."), ("test_convnext", "head.fc."), ("test_efficientnet", "cl")])
def test_a_classifier_for_other_classes_is_left_out(name: str, head: str, tmp_path: Path) -> None:
    other = timm.create_model(name, num_classes=11).state_dict()
    file = save(other, tmp_path / "weights.safetensors")
    torch.manual_seed(6)
    ours = timm_state_dict(build(name, weights=file))
    torch.manual_seed(6)
    fresh = timm_state_dict(build(name))
    left_out = [path for path in ours if path.startswith(head)]
    assert len(left_out) == 2
    assert same(ours, other, but=head)
    assert all(torch.equal(ours[path], fresh[path]) for path in left_out)


def test_positions_are_stretched_to_another_image_size(tmp_path: Path) -> None:
    other = timm.create_model("vit_tiny_patch16_224", num_classes=7, img_size=64).state_dict()
    # A slope from left to right in every channel stays one.
    slope = torch.arange(4.0).expand(4, 4).reshape(1, 16, 1).expand(1, 16, 192)
    other["pos_embed"] = torch.cat([torch.full((1, 1, 192), 9.0), slope], 1)
    model = build("vit_tiny_patch16_224", image_size=128, weights=save(other, tmp_path / "weights.safetensors"))
    ours = timm_state_dict(model)
    assert same(ours, other, but="pos_embed")
    assert ours["pos_embed"].shape == (1, 65, 192)
    assert torch.equal(ours["pos_embed"][0, 0], torch.full((192,), 9.0))
    rows = ours["pos_embed"][0, 1:, 0].reshape(8, 8)
    assert torch.allclose(rows, rows[:1].expand(8, 8), atol=1e-5)
    assert (rows[0, 1:] > rows[0, :-1]).all()


def test_weights_that_do_not_fit(tmp_path: Path) -> None:
    own = timm.create_model(SMALL, num_classes=7).state_dict()
    lacking = {name: tensor for name, tensor in own.items() if not name.startswith("layer1.0.conv")}
    besides = {**own, "extra": torch.zeros(1)}
    reshaped = {**own, "conv1.0.weight": torch.zeros(1, 2, 3, 3)}
    for tensors, message in (
        (lacking, r"the file lacks layer1\.0\.conv1\.weight and \d more"),
        (besides, r"the file has besides extra;"),
        (reshaped, r"the file has in another shape conv1\.0\.weight;"),
    ):
        file = save(tensors, tmp_path / "weights.pth")
        with pytest.raises(ValueError, match=message) as caught:
            build(weights=file)
        assert str(caught.value).startswith(f"model.weights={file}: ")
        assert "\n" not in str(caught.value)


class Evil:
    """Unpickling it would write a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


def test_files_that_are_no_weights(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    torch.save({"fc.weight": Evil(trace)}, tmp_path / "evil.pth")
    torch.save([1, 2], tmp_path / "list.pth")
    torch.save({"fc.weight": 3}, tmp_path / "numbers.pth")
    (tmp_path / "text.safetensors").write_text("no tensors")
    (tmp_path / "text.pth").write_text("no tensors")
    for name, message in (
        ("absent.pth", "there is no such file"),
        ("evil.pth", "cannot be read as weights"),
        ("text.safetensors", "cannot be read as weights"),
        ("text.pth", "cannot be read as weights"),
        ("list.pth", "cannot be read as weights|does not hold a dictionary of tensors"),
        ("numbers.pth", "does not hold a dictionary of tensors"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            build(weights=str(tmp_path / name))
        assert str(caught.value).startswith(f"model.weights={tmp_path / name}: ")
        assert "\n" not in str(caught.value)
    assert not trace.exists()


@pytest.mark.parametrize("name", ["resnet18", "seresnet18"])  # the second has no weights anywhere
def test_pretrained_weights_out_of_reach(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    caplog.set_level(logging.ERROR, logger="timm")
    with pytest.raises(ValueError, match=f"the weights of {name} cannot be had here .*model.weights=FILE") as caught:
        build(name, pretrained=True)
    assert str(caught.value).startswith("model.pretrained=true: ")
    assert "\n" not in str(caught.value)


# Refused.


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("resnet51", {}, r"model\.name=resnet51: timm has no model of this name; did you mean .*resnet50"),
        ("#", {}, r"model\.name=#: timm has no model of this name; timm\.list_models"),
        (
            "resnet50.a9_in1k",
            {},
            r"model\.name=resnet50\.a9_in1k: timm has no weights a9_in1k for resnet50; some .*in1k",
        ),
        ("densenet121", {}, r"model\.name=densenet121: timm's class DenseNet has no chain of layers; use one of"),
        ("vgg11", {"drop_path": 0.1}, r"model\.drop_path=0\.1: vgg11 has no branches to drop; use 0"),
        ("vit_tiny_patch16_224", {"image_size": 40}, r"dataset\.image_size=40: .* patches of 16 pixels; use 32 or 48"),
        ("vit_tiny_patch16_224", {"image_size": 5}, r"dataset\.image_size=5: .* use 16 or 32"),
        ("mixer_s32_224", {"image_size": 40}, r"dataset\.image_size=40: .* patches of 32 pixels"),
        (SMALL, {"num_classes": 0}, r"num_classes=0: use 1 or more"),
        (SMALL, {"dropout": 1.0}, r"model\.dropout=1\.0: a probability"),
        (SMALL, {"drop_path": -1.0}, r"model\.drop_path=-1\.0: a probability"),
    ],
)
def test_refused(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        build(name, **settings)
    assert "\n" not in str(caught.value)


def test_no_such_depth() -> None:
    with pytest.raises(ValueError, match=r"model\.depth=20: use 18, 34, 50, 101 or 152"):
        resnet(20, num_classes=7, image_size=32, dropout=0.0, drop_path=0.0)


def test_a_tag_may_be_given() -> None:
    with torch.device("meta"):
        assert len(build("resnet18.a1_in1k")) == 10
