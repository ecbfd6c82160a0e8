"""Pretrained weights bring the scaling of images that they were trained with; settings win over it."""

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from image_files import write_image
from PIL import Image
from safetensors.torch import save_file
from timm.data import create_transform, resolve_model_data_config
from torch import Tensor
from torch.nn.functional import cross_entropy
from training_runs import command, composed, configure

from gpipe_cli.assembly.build import open_data
from gpipe_cli.commands.compose_config import apply_overrides
from gpipe_cli.config.settings import load_run_config
from gpipe_cli.errors import InputError
from gpipe_cli.results.files import read_result

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet's
USUAL = (0.5,) * 3
NETWORK = "mobilenetv3_small_050"  # its weights want those, and the same centre of an image as ours
# A step that changes nothing, so that the test set is run through the weights as they were.
STILL = [
    "batch_size=4", "micro_batches=2", "partitions=2", "executor=in_process", "threads=1", "device=cpu",
    "data_workers=0", "logger=[]", "max_steps=1", "ema_decay=0", "check_layers=false", "optimizer=sgd",
    "learning_rate=constant", "learning_rate.peak=1e-30",
]  # fmt: skip
TARGETS = torch.tensor([0, 0, 1, 1])


def write_photos(root: Path, size: tuple[int, int]) -> list[Path]:
    """Two classes; returns the files of the test set in order."""
    files = [root / part / name / f"{number}.png" for part in ("train", "test") for name in "ab" for number in range(2)]
    for seed, file in enumerate(files):
        write_image(file, size, seed=seed)
    return files[4:]


def of_timm(root: Path, *settings: str) -> list[str]:
    return ["dataset=image_folder", f"dataset.root={root}", "model=timm", f"model.name={NETWORK}", *settings]


def scaling(*settings: str) -> tuple[Any, ...]:
    """What the command would make of these settings."""
    dataset: Any = configure(*settings).dataset
    return dataset.image_size, dataset.mean, dataset.std, dataset.interpolation


def loss_of(run: Path) -> float:
    return float(read_result(run)["test"]["loss"])


def test_timm_s_weights_see_what_timm_shows_them(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Every model got (x - 0.5) / 0.5, without a word: the loss of weights trained on ImageNet was another than timm's.
    The run keeps the scaling: its weights' file may go. Its export also has it, and brings it to other runs."""
    torch.manual_seed(0)
    model = timm.create_model(NETWORK, num_classes=2).eval()
    model.classifier.weight.data.mul_(30)
    file, run = tmp_path / "weights.safetensors", tmp_path / "run"
    save_file(model.state_dict(), file)
    photos = write_photos(tmp_path / "photos", (256, 256))  # which timm also scales to 256 before it crops
    settings = of_timm(tmp_path / "photos", f"model.weights={file}", "freeze=[stem,'blocks_*']")
    assert command("train", *settings, *STILL, f"run_folder={run}") == 0
    scaled = "224 pixels, mean [0.485,0.456,0.406], deviation [0.229,0.224,0.225], bicubic"
    assert f"{scaled}: as {NETWORK}.lamb_in1k was trained" in " ".join(capfd.readouterr().out.split())
    transform = create_transform(**resolve_model_data_config(model), is_training=False)
    images = torch.stack([transform(Image.open(photo).convert("RGB")) for photo in photos])
    expected = cross_entropy(model(images), TARGETS).item()
    assert loss_of(run) == pytest.approx(expected, rel=1e-5)
    assert expected != pytest.approx(cross_entropy(model((images * 0.22 + 0.45) * 2 - 1), TARGETS).item(), rel=1e-2)
    file.unlink()
    exported = run / "model.pth"
    assert command("export", f"run={run}", "format=torch", f"file={exported}", "evaluate=false") == 0
    assert f"mean {list(MEAN)}, deviation {list(DEVIATION)}" in " ".join(capfd.readouterr().out.split())
    assert scaling(*of_timm(tmp_path / "photos", f"model.weights={exported}")) == (224, MEAN, DEVIATION, "bicubic")
    assert scaling("dataset=synthetic_images", f"init_from={run}") == (224, MEAN, DEVIATION, "bicubic")
    other = composed("dataset=synthetic_images").dataset
    for given in ({"dataset.mean": None}, {"dataset": other}):  # as a resumed run may have it
        assert apply_overrides(load_run_config(run), given).dataset.mean == MEAN  # type: ignore[union-attr]


def test_images_are_scaled_by_the_interpolation_of_the_weights(tmp_path: Path) -> None:
    """Between integers, torchvision's kernels and Pillow's, which timm uses, round differently."""
    photos = write_photos(tmp_path, (400, 320))
    transform = create_transform(224, interpolation="bicubic", crop_pct=0.875, mean=(0, 0, 0), std=(1, 1, 1))
    expected = torch.stack([transform(Image.open(photo).convert("RGB")) for photo in photos])
    off = {}
    for interpolation in ("bicubic", "bilinear"):
        config = configure(*of_timm(tmp_path, f"dataset.interpolation={interpolation}"))
        (images,) = open_data(config)[1].inputs(0, range(4), ())
        assert isinstance(images, Tensor)
        off[interpolation] = float((images - expected * 255).abs().max())
    assert off["bicubic"] <= 1.01 < 10 < off["bilinear"]


def test_settings_win_over_the_weights_and_files_of_the_user_s(tmp_path: Path) -> None:
    write_photos(tmp_path, (20, 20))
    weights = of_timm(tmp_path, "model.pretrained=true")
    assert scaling(*weights) == (224, MEAN, DEVIATION, "bicubic")
    typed = ["dataset.mean=[0.1,0.2,0.3]", "dataset.interpolation=bilinear", "dataset.image_size=64"]
    assert scaling(*weights, *typed) == (64, (0.1, 0.2, 0.3), DEVIATION, "bilinear")
    assert scaling(*of_timm(tmp_path)) == (224, USUAL, USUAL, "bilinear"), "there are no weights"
    assert scaling("dataset=imagenet", "model=timm", f"model.name={NETWORK}", "model.pretrained=true")[0] == 224
    for wrong, remedy in (("mean=[124,1,1]", "dataset.mean=[0.5,0.5,0.5]"), ("interpolation=box", "bicubic")):
        with pytest.raises(InputError) as refused:
            configure(f"dataset.{wrong}")
        assert remedy in str(refused.value)


def test_a_folder_of_hugging_face_has_a_preprocessor(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The loss equals that with transformers' preprocessor and model; an export contains one that does the same."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    settings = transformers.ViTConfig(image_size=16, patch_size=8, initializer_range=0.5, **sizes)
    folder, photos, run = tmp_path / "vit", write_photos(tmp_path / "photos", (20, 20)), tmp_path / "run"
    transformers.ViTForImageClassification(settings).save_pretrained(folder)
    written = {"image_mean": MEAN, "image_std": DEVIATION, "resample": 3, "size": 16}
    (folder / "preprocessor_config.json").write_text(json.dumps(written))
    # a data set whose images lose no border, as transformers cuts none off
    data = ["dataset=birdsnap", "dataset.num_classes=2", "dataset.partial=true", f"dataset.root={tmp_path / 'photos'}"]
    data += ["dataset.augmentation.cutout=0"]
    model = ["model=hf", f"model.name={folder}", "model.pretrained=true"]
    assert command("train", *model, *data, *STILL, f"run_folder={run}") == 0
    assert f"bicubic: as {folder} was trained" in "".join(capfd.readouterr().out.split("\n"))
    assert command("export", f"run={run}", "format=hf", "evaluate=false") == 0

    def loss_by(place: Path) -> float:
        reader = transformers.AutoImageProcessor.from_pretrained(place)
        pixels = reader([Image.open(photo).convert("RGB") for photo in photos], return_tensors="pt")
        theirs = transformers.ViTForImageClassification.from_pretrained(place)
        return cross_entropy(theirs(**pixels).logits, TARGETS).item()

    assert loss_of(run) == pytest.approx(loss_by(folder), rel=1e-5)
    assert loss_of(run) == pytest.approx(loss_by(run / "hf"), rel=1e-5)
    assert load_run_config(run).dataset.mean == MEAN  # type: ignore[union-attr]
    for changed, expected in (
        ({"do_normalize": False}, (16, (0, 0, 0), (1, 1, 1), "bicubic")),
        ({"do_rescale": False, "image_mean": [51] * 3, "image_std": [255] * 3}, (16, (0.2,) * 3, (1,) * 3, "bicubic")),
        ({"rescale_factor": 2 / 255, "image_mean": [1] * 3, "image_std": [1] * 3}, (16, USUAL, USUAL, "bicubic")),
        ({"do_center_crop": True, "crop_size": 16, "size": {"shortest_edge": 20}}, (16, MEAN, DEVIATION, "bicubic")),
    ):
        (folder / "preprocessor_config.json").write_text(json.dumps(written | changed))
        assert scaling(*data, *model) == expected, changed
    for content, line in (
        (
            json.dumps(written | {"resample": 1}),
            "dataset.interpolation=Pillow's number 1: must be one of bilinear, bicubic",
        ),
        ("{", "preprocessor_config.json cannot be used"),
    ):
        (folder / "preprocessor_config.json").write_text(content)
        with pytest.raises(InputError) as refused:
            configure(*data, *model)
        assert line in str(refused.value)
        assert "\n" not in str(refused.value)
    (folder / "preprocessor_config.json").unlink()
    assert scaling(*data, *model, "dataset.image_size=16") == (16, USUAL, USUAL, "bilinear")
