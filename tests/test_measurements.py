"""The programs behind the README's figures: each says what it does without doing it, and runs, at its smallest size."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "recipes" / "measurements"
SMALL = [
    "model.normal_cells=3",
    "model.filters=4",
    "dataset.image_size=16",
    "dataset.num_classes=4",
    "batch_size=4",
    "hardware=cpu",
]
NOISE = [*SMALL, "dataset.train_samples=16", "dataset.test_samples=4", "micro_batches=2"]
PROGRAMS = {
    "all_cuts": ["--rounds", "1", "--steps", "1", "--cuts", "1", *NOISE],
    "predicted_and_measured": ["--rounds", "1", "--jobs", "1", "--steps", "3", "--no-memory", "model.filters=4"],
    "recording_overhead": ["--steps", "1", *SMALL, "dataset.num_classes=10"],
    "side_by_side": [
        "--rounds=1", "--steps=1", "--only", "gpipe-never", "plain-1", "--normal-cells=3", "--filters=4",
        "--image-size=16", "--batch-size=4", "--micro-batches=2",
    ],
    "simulated_table2": ["--cells", "1", *SMALL[:3], "partition.balance=null"],
}  # fmt: skip


RUN_ELSEWHERE = {"random_kills", "malformed_command_lines"}  # tests of these names


def test_every_program_is_tried() -> None:
    programs = {file.stem for file in FOLDER.glob("*.py") if "__main__" in file.read_text(encoding="utf-8")}
    assert programs == PROGRAMS.keys() | RUN_ELSEWHERE


@pytest.mark.parametrize("name", sorted(PROGRAMS.keys() | RUN_ELSEWHERE))
def test_the_help_of_a_measurement_starts_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """That of one of them started two minutes of work."""
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    monkeypatch.syspath_prepend(str(FOLDER))
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("usage: ")


@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_a_measurement_runs(name: str) -> None:
    """One of them could not even be imported."""
    file = FOLDER / f"{name}.py"
    done = subprocess.run([sys.executable, file, *PROGRAMS[name]], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) > 2
