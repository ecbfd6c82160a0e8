"""Is the chosen cut the best one? Trains AmoebaNet-D (6, 64) at 128 px with K = 2 at every cut that there is.

The cut that `gpipe plan` chooses, by figures and by measured layers, is compared with the best of all that were tried
for real. The cuts take turns, round by round, because machines are shared; of each the median over the rounds counts.

Usage: python recipes/all_cuts.py [--rounds 3]      about 6 minutes on 2 CPU cores
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

SETTINGS = [
    "model.normal_cells=6",
    "model.filters=64",
    "dataset=synthetic_images",
    "dataset.image_size=128",
    "dataset.num_classes=1000",
    "dataset.train_samples=512",
    "dataset.test_samples=8",
    "batch_size=32",
    "micro_batches=4",
    "partitions=2",
    "data_workers=0",
]
LAYERS = 12
STEPS = 10


def gpipe(folder: Path, command: str, *settings: str) -> Path:
    output = Path(tempfile.mkdtemp(dir=folder))
    line = [sys.executable, "-m", "gpipe_cli", command, f"output={output}", *SETTINGS, *settings]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(line)}\n{done.stdout}{done.stderr}")
    return next(output.iterdir())


def chosen(folder: Path, cost: str) -> int:
    plan = json.loads((gpipe(folder, "plan", f"cost={cost}") / "plan.json").read_text(encoding="utf-8"))
    return len(plan["stages"][0]["layers"])


def main(rounds: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        picked = {cost: chosen(folder, cost) for cost in ("figures", "measured_anew")}
        seconds: dict[int, list[float]] = {first: [] for first in range(1, LAYERS)}
        for _ in range(rounds):
            for first, taken in seconds.items():
                run = gpipe(folder, "train", f"partition.balance=[{first},{LAYERS - first}]", f"max_steps={STEPS}")
                taken.append(json.loads((run / "result.json").read_text(encoding="utf-8"))["step_seconds"])
    best = min(median(taken) for taken in seconds.values())
    print(f"{'cut':<10}{'step, ms':>10}{'over best':>11}")
    for first, taken in seconds.items():
        marks = ", ".join(f"chosen by cost={cost}" for cost, cut in picked.items() if cut == first)
        over = median(taken) / best - 1
        print(f"{f'[{first},{LAYERS - first}]':<10}{1e3 * median(taken):>10.1f}{100 * over:>9.1f} %  {marks}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    main(parser.parse_args().rounds)
