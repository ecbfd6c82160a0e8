"""The programs behind the figures of recipes/README.md: each runs, at its smallest size, and prints its table."""

import importlib
import importlib.util
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from training_runs import configure

from gpipe_cli.benchmark import machine_timing
from gpipe_cli.results.files import write_result
from gpipe_cli.system.gpus import usable_gpus

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
    "gpu_acceptance": (  # without a GPU this part dies, and keeps what it has found
        ["--device=cuda", "--parts=versions"],
        r"\| versions \| torch, CUDA, cuDNN \|  \| \d.*\n(.*\n)*\| versions \| the part \| NO \| .*; code 1: ",
    ),
    "link_order": (
        ["--partitions=4", "--micro-batches=2"],
        r"(\| [12] \| in order \| .* \| 0 of [46] \|  \|\n){46}(.*\n)+"
        r"\| 1 \| early \| idle \| 1f1b never \| 6 of 6 \| K=2, M=1 \|",
    ),
    "random_kills": (
        ["--runs=1", "--seed=309", *NOISE, "dataset=synthetic_images", "epochs=1", "partitions=1",
         "checkpoint.every_steps=1"],  # with this seed one kill, right after the first checkpoint
        r"run_1: \d+ tensors and \d+ points of curves .*, all the same bits\n[0-2] kills, .* no bit that differs$",
    ),
    "malformed_command_lines": (["--lines=2", "--seed=21"], r"all +2 lines +0 failed"),
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
    name: str, load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments, table = PROGRAMS[name]
    if name == "gpu_acceptance" and usable_gpus():
        pytest.skip("the part would not die")
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

        def work(self, name: str, task: object, *settings: str, processes: int = 1) -> Path:
            asked["work"] += 1
            configure(*settings)
            folder: Path = self.new_folder(name)
            folder.mkdir()
            (folder / "watched.json").write_text("{}")
            return folder

    monkeypatch.setattr(acceptance, "last_tensors", lambda run: {})
    setting = AsOnGpu("cpu", tmp_path)
    for part in (acceptance.check, acceptance.links, acceptance.synchronisations, acceptance.memory,
                 acceptance.resumption, acceptance.prediction):  # fmt: skip
        assert list(part(setting))
    assert asked == {"check": 8, "train": 4 + 1 + 4 * 3 + 4, "work": 3 * 2 + 2}

    def bench(*given: str) -> list[dict[str, Any]]:
        rows = []
        for values in product(*(one.partition("=")[2].split(",") for one in given)):
            configure(*(f"{one.partition('=')[0]}={value}" for one, value in zip(given, values, strict=True)))
            rows.append({"settings": {}, "status": "impossible", "reason": ""})
        return rows

    monkeypatch.setattr(speed, "config_of", lambda settings: configure(*settings))
    monkeypatch.setattr(speed, "figures_of_peer", lambda *what: "")
    assert len(list(speed.factors("cuda", bench))) == 6 + 4 + 4 + 6 + 2
    assert len(list(speed.peers("cuda", bench))) == 3 * 2 * 3


def test_workers_share_a_device_and_their_waits_are_counted(load: Callable[[str], Any], tmp_path: Path) -> None:
    acceptance = load("gpu_acceptance")
    setting = acceptance.Setting("cpu", tmp_path)
    ((_, held, shown),) = acceptance.links(setting)
    assert held
    assert re.search(r"(\d+) of \1 tensors the same bits", shown)
    assert [(what, figures) for what, _, figures in acceptance.synchronisations(setting)] == [
        (f"{model}: calls that wait, in 4 steps", "0: none") for model in ("amoebanet", "transformer_lm")
    ]


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
