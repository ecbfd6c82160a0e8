"""The programs of recipes/measurements: each runs, at its smallest size, and prints its table."""

import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tape import TapeMaker
from training_runs import configure

from gpipe_cli.system.gpus import usable_gpus
from gpipe_cli.training import pipeline_part

FOLDER = Path(__file__).parent.parent / "recipes" / "measurements"
NOISE = [
    "model=custom", "model.target=custom_models:small", "check_layers=false", "dataset=synthetic_images",
    "dataset.image_size=16", "hardware=cpu", "dataset.num_classes=4", "dataset.train_samples=16",
    "dataset.test_samples=4", "batch_size=4", "micro_batches=2", "data_workers=0", "threads=1", "epochs=1",
    "partitions=1", "checkpoint.every_steps=1",
]  # fmt: skip
# What makes it small, and the rows of its table.
PROGRAMS = {
    "gpu_kit": (["--device=cpu", "--parts=tests"], r"pytest -q -m gpu .*  yes  \d+ skipped"),
    "random_kills": (  # with this seed one kill, right after the first checkpoint
        ["--runs=1", "--seed=309", *NOISE],
        r"run_1: \d+ tensors and \d+ points of curves .*, all the same bits\n[0-2] kills, .* no bit that differs$",
    ),
    "malformed_command_lines": (["--lines=1", "--seed=21"], r"all +1 lines +0 failed"),
    "waiting_times": (
        ["--cells=6", *NOISE],
        r"\ntrain max_steps=3 .*( +\d+\.\d){5}\n(.*\n)+plan .*=6 partitions=8 .*\n",
    ),
}


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


def test_every_program_is_run() -> None:
    assert {file.stem for file in FOLDER.glob("*.py")} == PROGRAMS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_measurement_runs(
    name: str, load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if name == "gpu_kit" and usable_gpus():
        pytest.skip("the tests that need a GPU would run")
    arguments, table = PROGRAMS[name]
    monkeypatch.setattr(sys, "argv", [name])  # Hydra reads it
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))  # where custom_models.py is
    program = load(name)
    if name == "waiting_times":  # of several lines that are alike, the last
        monkeypatch.setattr(program, "REFUSED", program.REFUSED[-1:])
    code = program.main(arguments)
    printed = capfd.readouterr()
    assert not code, printed.out + printed.err
    assert re.search(table, printed.out.rstrip()), printed.out


def test_what_a_gpu_is_asked_to_do_are_settings(load: Callable[[str], Any]) -> None:
    """Two rows always failed there, as settings of theirs do not exist."""
    kit = load("gpu_kit")
    for part in ("peers", "layers", "memory", "check"):
        for line in kit.lines(part, "cuda"):
            configure(*(setting for setting in line[3:] if not setting.startswith(("against=", "device="))))


def test_the_programs_for_a_gpu_run_on_an_imitated_one(
    load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each fails, or says what it has found; without graphs those that need them fail."""
    kit = load("gpu_kit")
    monkeypatch.setattr(pipeline_part, "graph_maker", lambda device: TapeMaker())
    found = {name: program("cpu") for name, program in kit.ENGINE.items()}
    assert found["later_shapes"] == "the same bits, [8, 8] recordings"
    assert found["no_memory"].endswith("later the same bits, [2, 2] recordings")
    monkeypatch.setattr(pipeline_part, "graph_maker", lambda device: None)
    with pytest.raises(AssertionError, match="nothing was recorded"):
        kit.ENGINE["later_shapes"]("cpu")
