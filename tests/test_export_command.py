"""`gpipe export`: what other programs read out of the file, and what it computes there."""

import json
import re
import shutil
from pathlib import Path

import custom_models
import pytest
import timm
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.nn.modules.batchnorm import _BatchNorm
from training_runs import NAMED, TINY, assert_same_tensors, command, configure, final_tensors, train_here

from gpipe_cli import load
from gpipe_cli.commands.command_runner import run_command
from gpipe_cli.commands.export_run import _ExportReport
from gpipe_cli.errors import InputError
from gpipe_cli.training.checkpoint.files import list_checkpoints, select
from gpipe_cli.training.checkpoint.whole_model import whole_model
from gpipe_cli.training.events import EvaluationDone, FileEvaluated, ModelWritten, Scores

SHORT = [*TINY[2:], "max_steps=2", "executor=in_process", "checkpoint.every_steps=1"]
IMAGES = torch.rand(3, 3, 16, 16, generator=torch.Generator().manual_seed(0)) * 2 - 1


@pytest.fixture(scope="module")
def resnet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of a small ResNet of timm in two partitions, with averages of its weights."""
    folder = tmp_path_factory.mktemp("resnet")
    train_here(configure(*SHORT, "model=timm", "model.name=test_resnet", "partitions=2", "ema_decay=0.5"), folder)
    return folder


def export(run: Path, *settings: str) -> int:
    return command("export", f"run={run}", "checkpoint=last", *settings)


def test_timm_reads_a_resnet(resnet: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """By its own names, averages or weights; the test set gives the bits of the pipeline. What the numbers mean is said
    in built-in types, whatever the format."""
    saved = final_tensors(resnet)
    weights, averages = select(saved, "model"), select(saved, "ema")
    safe, plain = resnet / "model.safetensors", tmp_path / "raw.pth"
    assert not torch.equal(averages["head.fc.weight"], weights["head.fc.weight"])
    for wanted, file, settings in (
        (weights | averages, safe, []),
        (weights, plain, [f"file={plain}", "format=torch", "averages=false", "evaluate=false"]),
    ):
        assert export(resnet, *settings) == 0
        printed = capfd.readouterr().out
        assert f"timm.create_model('test_resnet', num_classes=4, checkpoint_path='{file}')" in printed
        assert ("the same loss, bit for bit" in printed) == (file == safe)
        model = timm.create_model("test_resnet", num_classes=4, checkpoint_path=str(file))
        ours = {name.partition(".")[2]: tensor for name, tensor in wanted.items()}
        assert_same_tensors(dict(model.state_dict()), ours)
    with safe_open(safe, "pt") as opened:
        texts = opened.metadata()
    assert texts.pop("format") == "pt"
    facts = torch.load(plain, weights_only=True)["metadata"] | {"averaged": True}
    assert {key: value if isinstance(facts[key], str) else json.loads(value) for key, value in texts.items()} == facts
    assert (facts["model"], facts["outputs"], facts["step"]) == ("test_resnet", 4, 2)
    assert (facts["image_size"], facts["mean"], facts["std"]) == (16, [0.5] * 3, [0.5] * 3)
    assert "classes" not in facts, "synthetic images name none"


def test_python_loads_the_model_of_a_run(resnet: Path) -> None:
    """From a folder of any K: averages if there are some, weights if they are asked for; in evaluation mode, and with
    plain batch norm, which tracks what it sees in training, as torch's does."""
    saved = final_tensors(resnet)
    weights, averages = select(saved, "model"), select(saved, "ema")
    model = load(resnet, checkpoint="last")
    assert not any(module.training for module in model.modules())
    assert_same_tensors(dict(model.state_dict()), weights | averages)
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    assert not any("forward" in vars(norm) for norm in norms)
    before = norms[0].running_mean.clone()
    assert model.train()(IMAGES).shape == (3, 4)
    assert not torch.equal(norms[0].running_mean, before)
    assert_same_tensors(dict(load(resnet, averaged=False, checkpoint="last").state_dict()), weights)
    with pytest.raises(InputError, match="run_folder=damage: no run there"):
        load("damage")


def test_a_model_of_ones_own_has_ones_own_names(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """And is evaluated with any partitions. No average was kept: none is exported, and asked for it is refused."""
    run = tmp_path / "run"
    own = ["model=custom", "model.target=custom_models:small", "model.arguments={width:3}"]
    train_here(configure(*SHORT, *own, "ema_decay=0"), run)
    assert export(run, NAMED, "partitions=3") == 0
    assert "the same loss, bit for bit" in capfd.readouterr().out
    custom_models.small(3).load_state_dict(load_file(run / "model.safetensors"))
    assert export(run, NAMED, "averages=true", "overwrite=true") == 2
    assert "averages=true: the run kept no average" in capfd.readouterr().err
    with pytest.raises(InputError, match="averaged=true: the run kept no average"):
        load(run, averaged=True, target="custom_models:small")


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (["file=model.pt"], "ends with .safetensors; use file=model.safetensors, or format=torch"),
        (["file=there.safetensors"], "it is there already; give another file=..., or overwrite=true"),
        (["format=onnx"], "format=onnx: needs no_such_package, which is not installed; pip install no_such_package"),
    ],
)
def test_refused(resnet: Path, settings: list[str], line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpipe_cli.commands.export.ONNX_PACKAGES", ("no_such_package",))
    Path("there.safetensors").write_text("mine")
    with pytest.raises(InputError, match=re.escape(line)):
        run_command("export", [f"run={resnet}", *settings])
    assert [(path.name, path.read_text()) for path in Path().iterdir()] == [("there.safetensors", "mine")]


def test_what_the_data_is_needed_for(resnet: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Where it is gone, nothing is written but with evaluate=false; what was there may be replaced."""
    run = tmp_path / "run"
    shutil.copytree(resnet, run, symlinks=True)
    text = (run / "config.yaml").read_text()
    text = text.replace("name: synthetic_images", "name: image_folder").replace("root: null", "root: gone")
    text = text.replace("train_samples: 22", "train_samples: null").replace("test_samples: 10", "test_samples: null")
    (run / "config.yaml").write_text(text)
    file = run / "model.safetensors"
    file.write_text("mine")
    assert export(run, "overwrite=true") == 2
    assert "gpipe export: dataset.root=gone: " in capfd.readouterr().err
    assert file.read_text() == "mine"
    assert export(run, "overwrite=true", "evaluate=false") == 0
    with safe_open(file, "pt") as opened:
        assert "classes" not in opened.metadata()


# --- ONNX, whose packages are an extra


def test_onnx_computes_what_the_checkpoint_does(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    onnx, onnxruntime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    config = configure(*TINY, "max_steps=2", "executor=in_process", "partitions=2")
    train_here(config, tmp_path)
    assert export(tmp_path, "format=onnx") == 0
    printed = capfd.readouterr()
    assert "for batches of any size" in printed.out
    assert printed.err == ""
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    assert session.get_modelmeta().custom_metadata_map["model"] == "amoebanet"
    nodes = onnx.load(tmp_path / "model.onnx").graph.node
    dilations = {tuple(one.ints) for node in nodes for one in node.attribute if one.name == "dilations"}
    assert dilations == {(1, 1)}, "our way to a faster kernel of torch's is none of onnxruntime's"
    with torch.no_grad():
        logits = whole_model(config, list_checkpoints(tmp_path)[-1])(IMAGES)
    for samples in (1, 3):
        (found,) = session.run(["logits"], {"images": IMAGES[:samples].numpy()})
        torch.testing.assert_close(torch.from_numpy(found), logits[:samples], rtol=1e-3, atol=1e-3 * logits.abs().max())


def test_a_file_with_other_results_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    for loss, code in ((2.0001, 0), (2.1, 1)):
        report = _ExportReport(configure(*TINY), Path("step_1"), Path("model.pt"))
        report.on_message(ModelWritten(1, "1 tensor", "torch.load('model.pt')"))
        report.on_message(EvaluationDone(1, Scores(None, 2.0, 0.5, 1.0, True), 1.0, None, None))
        report.on_message(FileEvaluated(Scores(None, loss, 0.5, 1.0, True), "PyTorch"))
        assert report.compare() == code
    assert capsys.readouterr().err == "model.pt does not compute what the checkpoint does: its loss is 2.1, not 2\n"
