"""Law 3 at the defaults, and law 7: runs that lose processes, as recipes/measurements/random_kills.py has them."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent.parent / "recipes" / "measurements" / "random_kills.py"
SETTINGS = [
    "model.normal_cells=3", "model.filters=4", "dataset=synthetic_images", "dataset.image_size=16",
    "dataset.num_classes=4", "dataset.train_samples=96", "dataset.test_samples=8", "checkpoint.every_steps=1",
    "hardware=cpu",
]  # fmt: skip


@pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
def test_a_run_that_loses_processes_ends_with_the_same_bits() -> None:
    line = [sys.executable, PROGRAM, "--kills=2", *SETTINGS]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("nothing left behind, no bit that differs\n")
