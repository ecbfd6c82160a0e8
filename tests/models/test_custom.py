"""A user's own function: found from the current directory, called with its arguments, refused in one line."""

import sys
from pathlib import Path

import pytest
import torch

from gpipe_cli.errors import InputError
from gpipe_cli.models.custom import build_custom

SOURCE = """
from collections import OrderedDict
import torch
from torch import nn

MEANS = torch.ones(2)

def build(width, depth=2):
    return nn.Sequential(OrderedDict((f"layer_{i}", nn.Linear(width, width)) for i in range(depth)))

def unnamed():
    return nn.Sequential(nn.Linear(2, 3), nn.ReLU())

def faulty():
    return len(3)

class Own(nn.Sequential):
    def __init__(self, width):
        super().__init__(nn.Linear(width, width))

class Doubles(Own):
    def forward(self, x):
        return 2 * super().forward(x)

class Scales(Own):
    def __init__(self, width):
        super().__init__(width)
        self.scale = nn.Parameter(torch.ones(width))

def hooked():
    model = unnamed()
    model.register_forward_hook(lambda module, inputs, output: 2 * output)
    return model

def lazy():
    return nn.Sequential(nn.Flatten(), nn.Sequential(nn.ReLU(), nn.LazyLinear(3)))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Modules whose names nothing else has."""
    folder = tmp_path_factory.mktemp("zoo")
    (folder / "zoo_for_tests").mkdir()
    (folder / "zoo_for_tests" / "nets.py").write_text(SOURCE)
    (folder / "lacking_for_tests.py").write_text("import a_module_that_nobody_has\n")
    (folder / "leaving_for_tests.py").write_text("raise SystemExit(7)\n")
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


def test_the_own_directory_comes_first(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path), *(place for place in sys.path if place != str(folder))])
    (tmp_path / "twice_for_tests.py").write_text("def build(): return None\n")
    (folder / "twice_for_tests.py").write_text("from torch import nn\ndef build(): return nn.Sequential(nn.PReLU())\n")
    assert len(build_custom("twice_for_tests:build", {})) == 1


@pytest.mark.parametrize(
    ("target", "arguments", "message"),
    [
        ("zoo_for_tests.nets.build", {}, "not of the form package.module:function"),
        ("absent_for_tests:build", {}, "there is no module absent_for_tests, neither in .* nor installed"),
        ("lacking_for_tests:build", {}, "there is no module a_module_that_nobody_has, "),
        ("leaving_for_tests:build", {}, r"cannot be imported \(SystemExit: 7\)"),
        ("zoo_for_tests.nets:bild", {}, r"zoo_for_tests\.nets \(.*nets\.py\) has no function bild"),
        ("zoo_for_tests.nets:MEANS", {}, "has no function MEANS; name one that returns"),
        ("zoo_for_tests.nets:build", {}, r"missing a required argument: 'width'; it takes \(width, depth=2\)"),
        ("zoo_for_tests.nets:build", {"width": 3, "dept": 1}, "unexpected keyword argument 'dept'; it takes"),
        ("torch.nn:ReLU", {}, "is an object of type ReLU, and no nn.Sequential"),
        # only the layers of what is returned are run: once these were trained without the rest, and nothing said so
        ("zoo_for_tests.nets:Doubles", {"width": 3}, "the Doubles has a forward of its own"),
        ("zoo_for_tests.nets:Scales", {"width": 3}, "the Scales has scale of its own"),
        ("zoo_for_tests.nets:hooked", {}, "has hooks of its own, .*; put that into one of the layers"),
        ("zoo_for_tests.nets:lazy", {}, r"layer 1\.1 \(LazyLinear\) has no shapes before its first forward"),
        ("torch.nn:Sequential", {}, "its layers have no parameters, there is nothing to train"),
    ],
)
def test_refused(target: str, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        build_custom(target, arguments)
    assert str(caught.value).startswith(f"model.target={target}: ")
    assert "\n" not in str(caught.value)


def test_errors_of_the_function_itself_are_not_disguised() -> None:
    with pytest.raises(TypeError, match="has no len"):
        build_custom("zoo_for_tests.nets:faulty", {})
