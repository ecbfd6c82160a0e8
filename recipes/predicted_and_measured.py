"""Predicted against measured: the step time, and the activations that stages save.

For AmoebaNet-D (6, 64) at 128 px and a small Transformer, K = 1, 2 and M = 1, 4, 8. Every cell is planned and
trained in turn, as often as there are rounds, by the commands that anybody would use:

    gpipe plan ... cost=measured_anew
    gpipe train ... max_steps=12

and the medians over the rounds are compared. Then, for every way to recompute, the bytes that are predicted to be saved
per stage against those that were counted in a step.

Usage: python recipes/predicted_and_measured.py [--rounds 3]      about 12 minutes on 2 CPU cores
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

MODELS = {
    "AmoebaNet-D (6, 64), 128 px": [
        "model.normal_cells=6",
        "model.filters=64",
        "dataset=synthetic_images",
        "dataset.image_size=128",
        "dataset.num_classes=1000",
        "dataset.train_samples=512",
        "dataset.test_samples=8",
        "batch_size=32",
        "data_workers=0",
    ],
    "Transformer, 4 layers of width 128": [
        "model=transformer_lm",
        "model.layers=4",
        "model.width=128",
        "model.hidden=512",
        "model.heads=4",
        "model.length=64",
        "dataset=synthetic_text",
        "dataset.vocabulary=1000",
        "dataset.train_samples=512",
        "dataset.test_samples=8",
        "batch_tokens=null",
        "batch_size=32",
        "data_workers=0",
    ],
}
STEPS = 12


def gpipe(command: str, *settings: str) -> Path:
    """Runs `gpipe`; returns the folder that it wrote."""
    output = Path(tempfile.mkdtemp(dir=FOLDER))
    line = [sys.executable, "-m", "gpipe_cli", command, f"output={output}", *settings]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(line)}\n{done.stdout}{done.stderr}")
    return next(output.iterdir())


def read(file: Path) -> dict:
    return json.loads(file.read_text(encoding="utf-8"))


def train(*settings: str) -> dict:
    return read(gpipe("train", *settings, f"max_steps={STEPS}", "epochs=9") / "result.json")


def show_times(rounds: int) -> None:
    print(f"step time in ms, medians over {rounds} rounds; difference of the predicted from the measured")
    print(f"{'model':<36}{'K':>3}{'M':>3}{'predicted':>11}{'measured':>10}{'difference':>12}  rounds")
    worst = 0.0
    for name, settings in MODELS.items():
        cells = [(k, m) for k in (1, 2) for m in (1, 4, 8)]
        taken: dict[tuple[int, int], list[tuple[float, float]]] = {cell: [] for cell in cells}
        for _ in range(rounds):
            for k, m in cells:
                here = [*settings, f"partitions={k}", f"micro_batches={m}"]
                plan = read(gpipe("plan", *here, "cost=measured_anew") / "plan.json")
                result = train(*here, "cost=measured")
                taken[k, m].append((plan["step_seconds"], result["step_seconds"]))
        for (k, m), pairs in taken.items():
            predicted, measured = (median(pair[i] for pair in pairs) for i in (0, 1))
            each = ", ".join(f"{100 * (p / q - 1):+.0f} %" for p, q in pairs)
            off = predicted / measured - 1
            worst = max(worst, abs(off))
            print(f"{name:<36}{k:>3}{m:>3}{1e3 * predicted:>11.1f}{1e3 * measured:>10.1f}{100 * off:>10.1f} %  {each}")
    print(f"worst difference {100 * worst:.1f} %\n")


def show_memory() -> None:
    print("most activations saved at once per stage in MiB, M = 4; difference of the predicted from the counted")
    print(f"{'model':<36}{'K':>3}  {'recompute':<12}{'predicted':>16}{'counted':>16}{'difference':>12}")
    worst = 0.0
    for name, settings in MODELS.items():
        for k in (1, 2):
            for mode in ("always", "except_last", "never"):
                result = train(*settings, f"partitions={k}", "micro_batches=4", f"recompute={mode}")
                predicted, counted = result["prediction"]["activation_bytes"], result["activation_bytes"]
                off = max((p / q - 1 for p, q in zip(predicted, counted, strict=True)), key=abs)
                worst = max(worst, abs(off))
                cells = (" ".join(f"{value / 2**20:.1f}" for value in values) for values in (predicted, counted))
                print(f"{name:<36}{k:>3}  {mode:<12}{next(cells):>16}{next(cells):>16}{100 * off:>10.1f} %")
    print(f"worst difference {100 * worst:.1f} %")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        FOLDER = Path(folder)
        show_times(arguments.rounds)
        show_memory()
