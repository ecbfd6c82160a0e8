"""Predicted against measured: the step time, and the activations that stages save.

For AmoebaNet-D (6, 64) at 128 px and a small Transformer, K = 1, 2 and M = 1, 4, 8. One command does both,

    gpipe train ... cost=measured_anew max_steps=14

it times the layers, predicts, and trains: all within seconds, because the speed of a shared machine changes within
minutes. Of each cell the median of the differences over all rounds counts. Then, for every way to recompute, the bytes
that were predicted to be saved per stage against those that were counted in a step.

Usage: python recipes/measurements/predicted_and_measured.py [--rounds 5]   2 minutes, and 4 for each round, on 2 cores
"""

import argparse
from statistics import median

from runs import AMOEBANET, gpipe

MODELS = {
    "AmoebaNet-D (6, 64), 128 px": AMOEBANET,
    "Transformer, 4 layers of width 128": [
        "model=transformer_lm", "model.layers=4", "model.width=128", "model.hidden=512", "model.heads=4",
        "model.length=64", "dataset=synthetic_text", "dataset.vocabulary=1000", "dataset.train_samples=512",
        "dataset.test_samples=8", "batch_tokens=null", "batch_size=32", "data_workers=0", "epochs=9",
    ],
}  # fmt: skip
CELLS = [(k, m) for k in (1, 2) for m in (1, 4, 8)]


def show_times(rounds: int) -> None:
    taken: dict[tuple[str, int, int], list[tuple[float, float]]] = {}
    for _ in range(rounds):
        for name, settings in MODELS.items():
            for k, m in CELLS:
                cell = f"partitions={k}", f"micro_batches={m}"
                result = gpipe("train", *settings, *cell, "cost=measured_anew", "max_steps=14")
                pair = result["prediction"]["step_seconds"], result["step_seconds"]
                taken.setdefault((name, k, m), []).append(pair)
    print(f"step time in ms, medians over {rounds} rounds; difference: median of predicted / measured - 1")
    print(f"{'model':<36}{'K':>3}{'M':>3}{'predicted':>11}{'measured':>10}{'difference':>12}  rounds, %")
    worst = 0.0
    for (name, k, m), pairs in taken.items():
        predicted, measured = (median(pair[i] for pair in pairs) for i in (0, 1))
        each = [100 * (p / q - 1) for p, q in pairs]
        worst = max(worst, abs(median(each)))
        cells = f"{name:<36}{k:>3}{m:>3}{1e3 * predicted:>11.1f}{1e3 * measured:>10.1f}{median(each):>10.1f} %"
        print(f"{cells}  {' '.join(f'{off:+.0f}' for off in each)}")
    print(f"worst difference {worst:.1f} %\n")


def show_memory() -> None:
    print("most activations saved at once per stage in MiB, M = 4; difference of the predicted from the counted")
    print(f"{'model':<36}{'K':>3}  {'recompute':<12}{'predicted':>16}{'counted':>16}{'difference':>12}")
    worst = 0.0
    for name, settings in MODELS.items():
        for k in (1, 2):
            for mode in ("always", "except_last", "never"):
                cell = f"partitions={k}", "micro_batches=4", f"recompute={mode}", "max_steps=2"
                result = gpipe("train", *settings, *cell)
                predicted, counted = result["prediction"]["activation_bytes"], result["activation_bytes"]
                off = max((p / q - 1 for p, q in zip(predicted, counted, strict=True)), key=abs)
                worst = max(worst, abs(off))
                cells = (" ".join(f"{value / 2**20:.1f}" for value in values) for values in (predicted, counted))
                print(f"{name:<36}{k:>3}  {mode:<12}{next(cells):>16}{next(cells):>16}{100 * off:>10.1f} %")
    print(f"worst difference {100 * worst:.1f} %")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    show_memory()
    show_times(rounds)
