"""The programs behind the figures of recipes/README.md: each runs, at its smallest size, and prints its table."""

import importlib
import importlib.util
import re
import subprocess
import sys
import threading
import time
import venv
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from training_runs import configure

from gpipe_cli.benchmark import machine_timing
from gpipe_cli.results.files import write_result
from gpipe_cli.system.gpus import Gpu, usable_gpus

FOLDER = Path(__file__).parent.parent / "recipes" / "measurements"
SMALL = ["model.normal_cells=3", "dataset.image_size=16", "hardware=cpu", "threads=1"]
NOISE = [
    *SMALL, "model.filters=4", "dataset.num_classes=4", "dataset.train_samples=16", "dataset.test_samples=4",
    "batch_size=4", "micro_batches=2", "data_workers=0",
]  # fmt: skip
PEERS = ["Schedule1F1B-channels_last", *(["torchgpipe"] if importlib.util.find_spec("torchgpipe") else [])]
# What makes it small, and the rows of its table.
PROGRAMS = {
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
    "own_layers": (
        ["--width=64", "--blocks=4", "--vocabulary=500", "--planned-width=64", "--planned-blocks=8"],
        r"(\| [0-3] \| \d+ \(\d\d%\) .*\n){4}\ngpipe plan of 0\.00 billion parameters, partitions=8: \d",
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
    if name == "own_layers":
        pytest.importorskip("transformers")
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
    acceptance, speed, replaced = load("gpu_acceptance"), load("gpu_speed"), load("gpu_report").replaced
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

    class Failing(AsOnGpu):
        def run(self, command: str, name: str, *settings: str, hardware: str = "auto") -> dict[str, Any]:
            raise RuntimeError("no kernel")

        def work(self, name: str, task: object, *settings: str, processes: int = 1) -> Path:
            raise RuntimeError("no kernel")

    monkeypatch.setattr(acceptance, "last_tensors", lambda run: {})
    parts = "check", "links", "synchronisations", "memory", "resumption", "prediction"
    setting = AsOnGpu("cpu", tmp_path)
    rows = {name: list(getattr(acceptance, name)(setting)) for name in parts}
    assert asked == {"check": 8, "train": 4 + 1 + 4 * 3 + 4, "work": 3 * 2 + 2}
    for name in parts[1:]:  # what fails is one row, and the others follow
        failed = {what: shown for what, _, shown in getattr(acceptance, name)(Failing("cpu", tmp_path))}
        assert failed.keys() >= {what for what, *_ in rows[name]}
        assert "RuntimeError: no kernel" in failed.values()

    def bench(*given: str) -> list[dict[str, Any]]:
        rows = []
        for values in product(*(one.partition("=")[2].split(",") for one in given)):
            chosen = [f"{one.partition('=')[0]}={value}" for one, value in zip(given, values, strict=True)]
            configure(*chosen)
            swept = dict(one.split("=") for one, of in zip(chosen, given, strict=True) if "," in of)
            rows.append({"settings": swept, "status": "impossible", "reason": ""})
        return rows

    monkeypatch.setattr(speed, "config_of", lambda settings: configure(*settings))
    monkeypatch.setattr(speed, "figures_of_peer", lambda *what: "")
    monkeypatch.setattr(acceptance, "usable_gpus", lambda: (Gpu("NVIDIA H100 80GB HBM3", 80 * 10**9),))
    monkeypatch.setattr(acceptance, "machine_rates", lambda *what: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    rows["versions"] = list(acceptance.versions(setting))
    assert [what for what, held, _ in rows["versions"] if held] == [
        "dependencies", "gpipe is that of the checkout", "GPUs by NVML as by torch",
        "data sheet of NVIDIA H100 80GB HBM3",
    ]  # fmt: skip
    rows["nodes"] = [(f"the other one names a machine that is {how}",) for how in ("killed", "stopped")]
    rows |= {"speeds": list(speed.factors("cuda", bench)), "peers": list(speed.peers("cuda", bench))}
    assert [len(rows[name]) for name in ("speeds", "peers")] == [6 + 4 + 4 + 6 + 2, 3 * 2 * 3]
    assert [what for name, of in rows.items() for what, *_ in of if not replaced(name, what)] == []


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
    acceptance, kit = load("gpu_acceptance"), load("gpu_kit")
    assert sorted(name for call in acceptance.CALLS for group in call for name in group) == sorted(acceptance.PARTS)
    for call in acceptance.CALLS:
        limits = [max(acceptance.PARTS[name][1] for name in group) for group in call]
        assert sum(limits) <= kit.COMMAND_SECONDS - kit.INSTALLATION_SECONDS
        assert min(limits) >= 90
    # NCCL's kernels spin while they wait, and would hold up all that runs beside them
    assert acceptance.groups_of(acceptance.CALLS, ["check", "links", "tests"], gpu=True) == [
        ["tests", "check"],
        ["links"],
    ]


def test_figures_that_a_gpu_replaces_are_where_the_table_says(load: Callable[[str], Any]) -> None:
    report = load("gpu_report")
    assert report.FIGURES.keys() == load("gpu_acceptance").PARTS.keys()
    places = [place for part in report.FIGURES.values() for of in part.values() for place in of]
    for file in ("README.md", "recipes/README.md", "recipes/gpus.md", "recipes/contributing.md"):
        text = (FOLDER.parent.parent / file).read_text(encoding="utf-8")
        quoted = [place.removeprefix(f"{file}: ") for place in places if place.startswith(f"{file}: ")]
        assert quoted
        assert [place for place in quoted if place not in text] == []
    assert all(
        place.startswith((report.README, report.RECIPES, report.GPUS, report.LAWS, report.PREDICTION))
        for place in places
    )


def test_parts_that_hang_are_killed_and_the_calls_are_joined(
    load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Three calls, one of them twice, of parts that only sleep: the first of each group for ever."""
    acceptance, report = load("gpu_acceptance"), load("gpu_report")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    limit = 390 * 0.005
    for call, parts in ((1, "tests"), (2, "links,nodes"), (1, "tests,check")):
        began = time.monotonic()
        acceptance.main([f"--call={call}", f"--parts={parts}", "--sleep=0.005", f"--folder={tmp_path / str(call)}"])
        assert time.monotonic() - began < limit + 3
    files = [str(tmp_path / call / "gpu_acceptance.json") for call in "21"]
    assert acceptance.main(["--join", *files, f"--folder={tmp_path}"]) == 0
    rows = [row for call in report.read(tmp_path / "gpu_acceptance.json") for row in call.rows]
    assert sorted((row.part, row.what, row.held) for row in rows) == [
        (part, what, held)
        for part, ended in (("check", True), ("links", False), ("nodes", True), ("tests", False))
        for what, held in (("slept", None), ("the part", ended))
    ]
    table = (tmp_path / "gpu_acceptance.md").read_text()
    assert re.findall(r"^\| (\w+) \| slept", table, re.M) == ["tests", "check", "links", "nodes"]
    assert len(re.findall(r"^\* .*torch \d", table, re.M)) == 2  # a line for each machine
    assert re.search(r"the part \| NO \| \d s; not done after [12] s", table)


def test_a_requirement_of_a_requirement_is_missed(
    load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Wheels packed without regard to each other: hydra-core does not work with this OmegaConf."""
    acceptance = load("gpu_acceptance")
    needed, unmet = acceptance.dependencies("gpipe-cli")
    assert {"antlr4-python3-runtime", "torch", "babel"} <= set(needed)
    assert unmet == []
    (tmp_path / "omegaconf-2.4.0.dist-info").mkdir()
    (tmp_path / "omegaconf-2.4.0.dist-info" / "METADATA").write_text("Name: omegaconf\nVersion: 2.4.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert [one.partition(" of ")[2] for one in acceptance.dependencies("gpipe-cli")[1]] == ["hydra-core"]


def test_torchgpipe_computes_in_the_precision_that_is_asked_for(load: Callable[[str], Any]) -> None:
    """Its threads do not inherit autocast: its speed in bfloat16 was that in float32."""
    layer = load("gpu_speed").InPrecision(torch.nn.Linear(2, 2), torch.device("cpu"), torch.bfloat16)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(layer, torch.ones(1, 2)).result().dtype == torch.bfloat16


@pytest.mark.skipif(bool(usable_gpus()), reason="the tests that need a GPU would run")
@pytest.mark.skipif(not (FOLDER.parent.parent / ".git").exists(), reason="the files of the checkout are listed by git")
def test_the_kit_is_all_that_a_machine_needs(
    load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command line of a kit runs on a copy of the checkout, in which gpipe is not installed."""
    acceptance, kit = load("gpu_acceptance"), load("gpu_kit")
    folder = str(tmp_path / "kit")
    assert acceptance.main(["--pack", folder, "--missing=", "--folder=$OUT"]) == 0
    size, *lines = [line for line in capsys.readouterr().out.splitlines() if line]
    assert re.search(r"kit: \d\.\d MiB in 1 wheels", size)
    assert [line[line.index(" --call=") :] for line in lines] == [f' --call={n} --folder="$OUT"' for n in (1, 2, 3)]
    assert all(line.startswith("site=") and " kit/*.whl " in line and len(line) < 2000 for line in lines)
    venv.create(tmp_path / "bare", symlinks=True)  # with all packages but those that are installed as links
    (site,) = (tmp_path / "bare" / "lib").glob("*/site-packages")
    (site / "packages.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    python = tmp_path / "bare" / "bin" / "python"
    arguments = ["--rehearse", folder, f"--python={python}", "--parts=tests", "--scale=0", "--folder=table"]
    assert acceptance.main(arguments) == 0
    assert re.search(
        r"\| tests \| pytest -m gpu \| yes \| \d+ skipped", Path("table/cpu/gpu_acceptance.md").read_text()
    )
    monkeypatch.setattr(kit, "CARRIED_MIB", 1)
    with pytest.raises(SystemExit, match="2"):
        acceptance.main(["--pack", folder, "--missing="])
    assert "more than the 1 MiB that may be carried" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--rehearse", "nothing", "--python=python3"], "--rehearse=nothing: has no wheels"),
        (["--rehearse", "nothing"], "--rehearse: needs --python"),
        (["--pack=."], "--pack=.: has other files than wheels"),
        (["--parts=tests,speed"], "--parts=speed: must be among versions, tests"),
        (["--join", "a.json"], "a.json"),
        (["--join", "no_table.json"], "no_table.json: is no table"),
    ],
)
def test_a_wrong_call_is_refused(
    arguments: list[str], line: str, load: Callable[[str], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("no_table.json").write_text("[3]")
    with pytest.raises(SystemExit, match="2"):
        load("gpu_acceptance").main(arguments)
    assert line in capsys.readouterr().err.splitlines()[-1]
