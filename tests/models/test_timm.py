"""timm's networks by name: a chain's results are timm's model's, bit for bit, from timm's initial values and files of
weights; and what is refused."""

import copy
import runpy
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from training_runs import assert_same_tensors

from gpipe_cli.errors import InputError
from gpipe_cli.models import timm_list
from gpipe_cli.models.timm_models import as_sequential, build_timm
from gpipe_cli.pipeline.profile.tracing import trace_layers
from gpipe_cli.pipeline.runtime.boundary import as_boundary

ONE_BLOCK = {"layers": (1, 1, 1, 1), "channels": (16, 32, 32, 32)}
SHORT = {"depths": (1, 2, 1, 1), "dims": (16, 16, 24, 24)}
TOKENS = {"depth": 2, "embed_dim": 24, "num_heads": 2, "img_size": 32}

# Members of every family, made small where the name alone stands for millions of parameters.
MEMBERS: list[tuple[str, dict[str, Any]]] = [
    ("resnet18", ONE_BLOCK),
    ("resnet26t", ONE_BLOCK),  # three convolutions in the stem, averages before the shortcuts
    ("convnext_atto", SHORT),
    ("convnext_atto", {**SHORT, "head_norm_first": True}),
    ("vit_tiny_patch16_224", TOKENS),
    ("vit_base_patch16_clip_224", TOKENS),  # a normalisation before the blocks
    ("vit_medium_patch16_reg4_gap_256", TOKENS),  # registers, no class token, the average of all patches
    ("deit3_small_patch16_224", TOKENS),  # no position for the class token
    ("test_efficientnet", {}),
    ("mobilenetv3_small_050", {}),
    ("mobilenetv4_conv_small_035", {}),  # a normalisation in the head
    ("regnetz_005", {}),
    ("vgg11_bn", {"mlp_ratio": 0.01}),
    ("mixer_s32_224", {"img_size": 32}),
]
SMALL = "test_resnet"


def timm_state(sequence: nn.Sequential) -> dict[str, Tensor]:
    """The tensors of a chain by timm's names."""
    return {name.partition(".")[2]: tensor for name, tensor in sequence.state_dict().items()}


def test_the_list_in_the_package_is_as_the_program_writes_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [SMALL, "vit_tiny_patch16_224", "regnetz_005", "test_byobnet"]
    monkeypatch.setattr(timm, "list_models", lambda: names)
    runpy.run_path(str(Path(__file__).parents[2] / ".ci/list_timm_models.py"), run_name="__main__")
    written = capsys.readouterr().out.splitlines()
    shipped = Path(timm_list.__file__).with_name("timm_models.csv").read_text("utf-8").splitlines()
    assert [line.partition(",")[0] for line in written] == names
    assert set(written) <= set(shipped)


@pytest.mark.parametrize(("name", "settings"), MEMBERS)
def test_same_bits_as_timm(name: str, settings: dict[str, Any]) -> None:
    """Evaluation, then training with random parts: outputs, gradients and running statistics. No layer changes what it
    gets, and costs follow from shapes."""
    rates = {"drop_rate": 0.3} | ({} if name.startswith("vgg") else {"drop_path_rate": 0.3})
    model = timm.create_model(name, num_classes=7, **settings, **rates)
    # Zeros at the end of branches and scales of one would hide a mistake.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    sequence = as_sequential(copy.deepcopy(model))
    size = settings.get("img_size", 40)
    images = x = torch.randn(4, 3, size, size)
    for training in (False, True):
        results = []
        for each in (model.train(training), sequence.train(training)):
            torch.manual_seed(3)
            results.append(each(x))
        assert torch.equal(*results), training
    for result in results:
        result.backward(torch.linspace(-1, 1, result.numel()).view_as(result))
    gradients = {path.partition(".")[2]: value.grad for path, value in sequence.named_parameters()}
    assert_same_tensors({path: value.grad for path, value in model.named_parameters()}, gradients)
    assert_same_tensors(timm_state(sequence), model.state_dict())
    for path, layer in sequence.named_children():
        before = x.clone()
        result = layer(x)
        assert torch.equal(x, before), path
        x = result.detach()
    costs = trace_layers(sequence.to("meta"), as_boundary((images[:1],)), training=True)
    assert all(len(cost.outputs) == 1 for cost in costs)


def build(name: str = SMALL, **settings: Any) -> nn.Sequential:
    return build_timm(name, **{"num_classes": 7, "image_size": 32, "dropout": 0.0, "drop_path": 0.0, **settings})


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "mobilenetv2_035"])
def test_initial_values_are_those_of_timm(name: str) -> None:
    torch.manual_seed(5)
    ours = timm_state(build(name))
    torch.manual_seed(5)
    size = {"img_size": 32} if name.startswith("vit") else {}
    assert_same_tensors(ours, timm.create_model(name, num_classes=7, **size).state_dict())


@pytest.mark.parametrize(("name", "head"), [(SMALL, "fc."), ("test_convnext", "head.fc.")])
def test_weights_from_a_file(name: str, head: str, tmp_path: Path) -> None:
    """A classifier for other classes is left out. The file comes first: nothing is asked from the network."""
    same_classes, other = (timm.create_model(name, num_classes=classes).state_dict() for classes in (7, 11))
    torch.save(same_classes, tmp_path / "same.pth")
    assert_same_tensors(timm_state(build(name, weights=f"{tmp_path}/same.pth", pretrained=True)), same_classes)
    save_file(other, tmp_path / "other.safetensors")
    torch.manual_seed(6)
    ours = timm_state(build(name, weights=f"{tmp_path}/other.safetensors"))
    torch.manual_seed(6)
    fresh = timm_state(build(name))
    left_out = [path for path in ours if path.startswith(head)]
    assert len(left_out) == 2
    assert_same_tensors(ours, other | {path: fresh[path] for path in left_out})


def test_positions_are_stretched_to_another_image_size(tmp_path: Path) -> None:
    other = timm.create_model("vit_tiny_patch16_224", num_classes=7, img_size=64).state_dict()
    slope = torch.arange(4.0).repeat(4)  # from left to right in every row: it stays one
    other["pos_embed"] = torch.cat([torch.tensor([9.0]), slope]).expand(192, 17).T[None]
    torch.save(other, tmp_path / "weights.pth")
    ours = timm_state(build("vit_tiny_patch16_224", image_size=128, weights=f"{tmp_path}/weights.pth"))
    assert_same_tensors(ours, other | {"pos_embed": ours["pos_embed"]})
    token, rows = ours["pos_embed"][0, 0], ours["pos_embed"][0, 1:, 0].reshape(8, 8)
    assert (token == 9).all()
    torch.testing.assert_close(rows, rows[:1].expand(8, 8))
    assert (rows[0, 1:] > rows[0, :-1]).all()


class Evil:
    """Unpickling it would fail the test."""

    def __reduce__(self) -> tuple[Any, ...]:
        return pytest.fail, ("code of a file was run",)


def test_files_that_are_not_the_models_weights(tmp_path: Path) -> None:
    own = timm.create_model(SMALL, num_classes=7).state_dict()
    for name, content, message in (
        ("evil.pth", {"fc.weight": Evil()}, "cannot be read as weights"),
        ("less.pth", {name: own[name] for name in own if "layer1.0.conv" not in name}, r"file lacks layer1.* \d more"),
        ("shape.pth", {**own, "conv1.0.weight": torch.zeros(1, 2, 3, 3)}, r"the file has in another shape conv1"),
    ):
        torch.save(content, tmp_path / name)
        with pytest.raises(InputError, match=message) as caught:
            build(weights=str(tmp_path / name))
        assert str(caught.value).startswith(f"model.weights={tmp_path / name}: ")


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("resnet51", {}, r"model\.name=resnet51: timm has no model of this name; did you mean .*resnet50"),
        ("densenet121", {}, r"model\.name=densenet121: timm's class DenseNet has no .*; use one of ResNet, .*MlpMixer"),
        ("vit_tiny_patch16_224", {"image_size": 40}, r"dataset\.image_size=40: .* patches of 16 pixels; use 32 or 48"),
    ],
)
def test_refused(name: str, settings: dict[str, Any], message: str) -> None:
    with torch.device("meta"), pytest.raises(InputError, match=message) as caught:
        build(name, **settings)
    assert "\n" not in str(caught.value)
