"""The programs behind the figures of recipes/README.md: each runs, at its smallest size, and prints its table."""

import importlib
import importlib.util
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from training_runs import composed, configure

from gpipe_cli.benchmark import machine_timing
from gpipe_cli.config.settings import TrainConfig, from_tree
from gpipe_cli.results.files import write_result

FOLDER = Path(__file__).parent.parent / "recipes" / "measurements"
SMALL = ["model.normal_cells=3", "dataset.image_size=16", "hardware=cpu", "threads=1"]
NOISE = [
    *SMALL, "model.filters=4", "dataset.num_classes=4", "dataset.train_samples=16", "dataset.test_samples=4",
    "batch_size=4", "micro_batches=2", "data_workers=0",
]  # fmt: skip
PEERS = ["Schedule1F1B-channels_last", *(["torchgpipe"] if importlib.util.find_spec("torchgpipe") else [])]
# What makes it small, and the rows of its table.
PROGRAMS = {
    "beside_torch": (
        [*NOISE, "cost=figures", "dataset=synthetic_images", "--rounds=1", "--steps=1", "--micro-batches", "2",
         "--schedules", "interleaved", "--against", "Schedule1F1B"],
        r"\ngpipe +interleaved +4 +16 +(\d+) +\1 +0\.0e\+00  yes\n(.*\n)+gpipe, 1f1b +\d.* of Schedule1F1B",
    ),
    "paper_choices": (
        ["--only=AmoebaNet-D (18, 128)", "--sets=1", "model.normal_cells=4",
         "model.filters=16", "dataset.image_size=16"],
        r"1620 sets (.*\n)+AmoebaNet-D \(18, 128\), P100 +8 +32 +2\.70 +\d",
    ),
    "gpu_acceptance": (
        ["--device=cpu", "--parts=links,speeds"],
        r"3 of 3 held\.\n(.*\n)+\| links \| 1f1b, K=2 .* \| yes \| (\d+) of \2 tensors",
    ),
    "link_order": (
        ["--partitions=4", "--micro-batches=5"],
        r"(\| [12] \| in order \| .* \| 0 of 1[05] \|  \|\n){46}(.*\n)+"
        r"\| 1 \| early \| idle \| 1f1b never \| 15 of 15 \| K=2, M=1 \|",
    ),
    "random_kills": (
        ["--runs=1", "--seed=309", *NOISE, "dataset=synthetic_images", "epochs=1", "partitions=1",
         "checkpoint.every_steps=1"],  # with this seed one kill, right after the first checkpoint
        r"run_1: \d+ tensors and \d+ points of curves .*, all the same bits\n[0-2] kills, .* no bit that differs$",
    ),
    "malformed_command_lines": (["--lines=4", "--seed=21"], r"all +4 lines +0 failed"),
}  # fmt: skip


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


def test_every_program_is_run() -> None:
    programs = {file.stem for file in FOLDER.glob("*.py") if "__main__" in file.read_text(encoding="utf-8")}
    assert programs == PROGRAMS.keys()


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_measurement_runs(
    name: str,
    load: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    arguments, table = PROGRAMS[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(machine_timing, "_LAYER_SECONDS", 0.1)
    monkeypatch.setattr(sys, "argv", [name])  # Hydra reads it
    code = load(name).main(arguments)
    printed = capfd.readouterr()
    assert not code, printed.out + printed.err
    assert re.search(table, printed.out.rstrip()), printed.out


def test_what_a_gpu_is_asked_to_do_are_settings(
    load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Every cell of the parts, and every factor, is composed as on a GPU, and nothing runs: two rows always failed
    there, as settings of theirs do not exist."""
    acceptance, speed = load("gpu_acceptance"), load("gpu_speed")
    for program in (acceptance, speed):  # each choice of groups is composed once
        monkeypatch.setattr(program, "config_of", lambda settings: from_tree(TrainConfig, composed(*settings)))
    one, asked = threading.Lock(), Counter[str]()
    result = {
        "predicted_activation_bytes": [1], "activation_bytes": [1], "step_seconds": 1.0,
        "prediction": {"step_seconds": 1.0},
        "memory": [dict.fromkeys(("weights", "gradients", "optimizer", "other", "peak"), 1)],
    }  # fmt: skip

    class AsOnGpu(acceptance.Setting):  # type: ignore[misc]
        gpu = True

        def gpipe(self, command: str, *settings: str) -> "subprocess.CompletedProcess[str]":
            with one:  # Hydra has no threads
                config = configure(*settings)
            asked[command] += 1
            if config.run_folder is not None:
                folder = Path(config.run_folder)
                folder.mkdir(exist_ok=True)
                write_result(folder, result)
            return subprocess.CompletedProcess([], 0, "", "")

    def not_run(task: Any, *rest: object) -> None:
        asked["work"] += 1
        (task.args[2] / "watched.json").write_text("{}")

    monkeypatch.setattr(acceptance, "run_task", not_run)
    monkeypatch.setattr(acceptance, "last_tensors", lambda run: {})
    setting = AsOnGpu("cpu", tmp_path)
    for part in (acceptance.check, acceptance.links, acceptance.synchronisations, acceptance.memory,
                 acceptance.resumption, acceptance.prediction):  # fmt: skip
        assert list(part(setting))
    assert asked == {"check": 8, "train": 4 + 1 + 4 * 3 + 4, "work": 3 * 2 + 2}

    def not_started(command: Sequence[str], **how: object) -> None:
        setting.gpipe(*command[command.index("gpipe_cli") + 1 :])
        raise InterruptedError

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", not_started)
        with pytest.raises(InterruptedError):
            list(acceptance.nodes(acceptance.Setting("cpu", tmp_path)))

    def bench(*given: str) -> list[dict[str, Any]]:
        rows = []
        for values in product(*(one.partition("=")[2].split(",") for one in given)):
            chosen = {one.partition("=")[0]: value for one, value in zip(given, values, strict=True)}
            configure(*(f"{key}={value}" for key, value in chosen.items()))
            rows.append({"settings": {}, "status": "impossible", "reason": ""})
        return rows

    monkeypatch.setattr(speed, "plain", lambda *what: lambda: None)
    monkeypatch.setattr(speed, "seconds_of", lambda *what: 1.0)
    assert len(list(speed.factors("cuda", bench))) == 6 + 4 + 4 + 6 + 2
    assert len(list(speed.peers("cuda", bench))) == 3 * 2 * 3


def test_each_call_on_a_gpu_ends_within_its_time(load: Callable[[str], Any]) -> None:
    """The limits of all parts added up to more than the ten minutes for which a GPU is lent."""
    acceptance = load("gpu_acceptance")
    assert sorted(name for call in acceptance.CALLS for group in call for name in group) == sorted(acceptance.PARTS)
    for call in acceptance.CALLS:
        assert sum(max(acceptance.PARTS[name][1] for name in group) for group in call) <= acceptance.CALL_SECONDS
    # NCCL's kernels spin while they wait, and would hold up all that runs beside them
    assert acceptance.groups_of(acceptance.CALLS, ["check", "links", "tests"], gpu=True) == [
        ["tests", "check"],
        ["links"],
    ]


def test_a_checkout_that_is_not_installed_is_one_line(tmp_path: Path) -> None:
    """On PYTHONPATH it has no conf/: every part of the acceptance failed with a traceback."""
    paths = [str(FOLDER.parents[1]), *(path for path in sys.path if path.endswith("-packages"))]
    ended = subprocess.run(
        [sys.executable, "-S", FOLDER / "gpu_acceptance.py", "--device=cpu"],  # -S: without editable installs
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, cwd=tmp_path, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert ended.returncode == 2
    assert "not installed; pip install --no-deps --no-build-isolation -e" in ended.stderr.splitlines()[-1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would not fail")
def test_a_part_that_dies_keeps_what_it_has_found(load: Callable[[str], Any], tmp_path: Path) -> None:
    acceptance = load("gpu_acceptance")
    *found, last = acceptance.perform("versions", acceptance.Setting("cuda", tmp_path), time.monotonic() + 60)
    assert "torch, CUDA, cuDNN" in [row.what for row in found]
    assert last.held is False
    assert "code 1" in last.figures
