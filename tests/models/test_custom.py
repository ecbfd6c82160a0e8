"""A user's function: found from the current directory, called with its arguments, refused in one line."""

import sys
from pathlib import Path

import pytest
import torch
from training_runs import TINY, configure, pipeline_of, state_of

from gpipe_cli.config.groups import CustomConfig
from gpipe_cli.errors import InputError
from gpipe_cli.models.custom import build_custom

SOURCE = """
from collections import OrderedDict
import torch
from torch import nn

MEANS = torch.ones(2)

def build(width, depth=2):
    return nn.Sequential(OrderedDict((f"layer_{i}", nn.Linear(width, width)) for i in range(depth)))

class Own(nn.Sequential):
    def __init__(self, width):
        super().__init__(nn.Linear(width, width))

class Doubles(Own):
    def forward(self, x):
        return 2 * super().forward(x)

def repeated():
    activation = nn.ReLU()
    return nn.Sequential(nn.Linear(3, 3), activation, nn.Linear(3, 3), activation)

def lazy():
    return nn.Sequential(nn.Flatten(), nn.Sequential(nn.ReLU(), nn.LazyLinear(3)))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Modules whose names nothing else has."""
    folder = tmp_path_factory.mktemp("zoo")
    (folder / "zoo_for_tests").mkdir()
    (folder / "zoo_for_tests" / "nets.py").write_text(SOURCE)
    return folder


@pytest.fixture(autouse=True)
def own_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))


def test_a_function_of_the_current_directory() -> None:
    with torch.device("meta"):
        model = build_custom("zoo_for_tests.nets:build", {"width": 4, "depth": 3})
    assert [name for name, _ in model.named_children()] == ["layer_0", "layer_1", "layer_2"]
    assert all(parameter.is_meta for parameter in model.parameters())
    # what the module makes as it is imported has values
    assert sys.modules["zoo_for_tests.nets"].MEANS.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("target", "arguments", "message"),
    [
        ("absent_for_tests:build", {}, "there is no module absent_for_tests, neither in .* nor installed"),
        ("zoo_for_tests.nets:bild", {}, r"zoo_for_tests\.nets \(.*nets\.py\) has no function bild"),
        ("zoo_for_tests.nets:build", {}, r"missing a required argument: 'width'; it takes \(width, depth=2\)"),
        ("torch.nn:ReLU", {}, "is an object of type ReLU, not an nn.Sequential"),
        # only the layers of what is returned are run: once these were trained without the rest, and nothing said so
        ("zoo_for_tests.nets:Doubles", {"width": 3}, "the Doubles has a forward, and"),
        ("zoo_for_tests.nets:repeated", {}, "layers 1 and 3 are the same module.*; make a module for each place"),
        ("zoo_for_tests.nets:lazy", {}, r"layer 1\.1 \(LazyLinear\) has no shapes before its first forward"),
    ],
)
def test_refused(target: str, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        build_custom(target, arguments)
    assert str(caught.value).startswith(f"model.target={target}: ")
    assert "\n" not in str(caught.value)


def test_a_target_names_a_module_and_a_function() -> None:
    with pytest.raises(InputError, match=r"^model\.target=nets\.build: not of the form package\.module:function"):
        CustomConfig("custom", "nets.build", None, None)


def test_the_seed_decides_a_custom_models_initial_values() -> None:
    model = ["model=custom", "model.target=custom_models:small", "model.arguments={width: 5}"]
    settings = [*TINY[2:], *model, "executor=in_process"]
    one, same, other = (
        state_of(pipeline_of(configure(*settings, f"seed={seed}")))["model/1.shift"] for seed in (3, 3, 4)
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
