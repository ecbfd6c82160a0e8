"""Predicted against measured: the step time, and the activations that stages save.

Step times of the default job, a model of one's own, ResNet-18 at 64 px and a small Transformer, and of AmoebaNet-D
(6, 64) at 128 px for several K and M. One command predicts, from what this machine was timed at (hardware=auto), and
trains; another one, with cost=measured_anew, times the layers first. All within seconds, because the speed of a shared
machine changes within minutes. Of each job the median of the differences over all rounds counts. Then, for every way to
recompute, the bytes that were predicted to be saved per stage against those that were counted in a step.

Usage: python recipes/measurements/predicted_and_measured.py [--rounds 5] [--jobs 10] [setting=value ...]
       on 2 cores 5 minutes for each round, and 2 for the bytes
"""

import contextlib
import tempfile
from collections.abc import Sequence
from itertools import islice, product
from pathlib import Path
from statistics import median

from runs import AMOEBANET, command_line, gpipe

README = Path(__file__).parents[2] / "README.md"
TRANSFORMER = [
    "model=transformer_lm", "model.layers=4", "model.width=128", "model.hidden=512", "model.heads=4",
    "model.length=64", "dataset=synthetic_text", "dataset.vocabulary=1000", "dataset.train_samples=512",
    "dataset.test_samples=8", "batch_tokens=null", "batch_size=32", "data_workers=0", "epochs=9",
]  # fmt: skip
CELLS = list(product((1, 2), (1, 4, 8)))
JOBS = {
    "default": [],
    "a model of one's own": ["model=custom", "model.target=mymodel:digits"],
    "ResNet-18, 64 px": ["model=resnet", "model.depth=18", "dataset=synthetic_images", "dataset.image_size=64"],
    "Transformer, 4 layers of width 128": TRANSFORMER,
} | {
    f"AmoebaNet-D (6, 64), 128 px, K={k} M={m}": [*AMOEBANET, f"partitions={k}", f"micro_batches={m}"]
    for k, m in CELLS
}  # fmt: skip


def show_times(rounds: int, jobs: int, steps: int, settings: Sequence[str]) -> None:
    print(f"step time, medians over {rounds} rounds; difference: median of predicted / measured - 1")
    print(f"{'job':<36}{'cost':<15}{'predicted':>12}{'measured':>12}{'difference':>12}  rounds, %")
    taken: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for turn in range(rounds):
        for name, cost in product(list(JOBS)[:jobs], ("figures", "measured_anew")):
            result = gpipe("train", *JOBS[name], *settings, f"cost={cost}", f"max_steps={steps}")
            pair = result["prediction"]["step_seconds"], result["step_seconds"]
            taken.setdefault((name, cost), []).append(pair)
            if turn < rounds - 1:
                continue
            pairs = taken[name, cost]
            predicted, measured = (1e3 * median(pair[i] for pair in pairs) for i in (0, 1))
            each = [100 * (p / q - 1) for p, q in pairs]
            cells = f"{name:<36}{cost:<15}{predicted:>9.1f} ms{measured:>9.1f} ms{median(each):>10.1f} %"
            print(f"{cells}  {' '.join(f'{off:+.0f}' for off in each)}", flush=True)


def show_memory(cells: int, settings: Sequence[str]) -> None:
    models = {"AmoebaNet-D (6, 64), 128 px": AMOEBANET, "Transformer, 4 layers of width 128": TRANSFORMER}
    print("\nmost activations saved at once per stage in MiB, M = 4; difference of the predicted from the counted")
    print(f"{'model':<36}{'K':>3}  {'recompute':<12}{'predicted':>16}{'counted':>16}{'difference':>12}")
    worst = 0.0
    for (name, model), k, mode in islice(product(models.items(), (1, 2), ("always", "except_last", "never")), cells):
        cell = f"partitions={k}", "micro_batches=4", f"recompute={mode}", "max_steps=2", "hardware=cpu"
        result = gpipe("train", *model, *settings, *cell)
        predicted, counted = result["predicted_activation_bytes"], result["activation_bytes"]
        off = max((p / q - 1 for p, q in zip(predicted, counted, strict=True)), key=abs)
        worst = max(worst, abs(off))
        shown = [" ".join(f"{value / 2**20:.1f}" for value in values) for values in (predicted, counted)]
        print(f"{name:<36}{k:>3}  {mode:<12}{shown[0]:>16}{shown[1]:>16}{100 * off:>10.1f} %", flush=True)
    print(f"worst difference {100 * worst:.1f} %")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=len(JOBS), help="the first so many of them")
    parser.add_argument("--steps", type=int, default=24, help="of each training")
    parser.add_argument("--memory", type=int, default=12, help="the first so many rows of saved activations; 0: none")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        own_model = README.read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0]
        Path("mymodel.py").write_text(own_model, encoding="utf-8")
        show_times(options.rounds, options.jobs, options.steps, options.settings)
    if options.memory:
        show_memory(options.memory, options.settings)


if __name__ == "__main__":
    main()
