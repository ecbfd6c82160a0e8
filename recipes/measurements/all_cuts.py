"""Is the chosen cut the best one? Trains AmoebaNet-D (6, 64) at 128 px with K = 2 at every cut that there is.

Each cut is run beside the one that `gpipe plan cost=measured_anew` chooses, one right after the other, because the
speed of a shared machine changes within minutes; what counts is the ratio of the two. All cuts have one round, those
that come within 15 % of the chosen one have more, and their median counts.

Usage: python recipes/measurements/all_cuts.py [--rounds 5] [setting=value ...]      3 minutes for the first round on 2
CPU cores
"""

from collections.abc import Sequence
from statistics import median

from runs import AMOEBANET, command_line, gpipe

SETTINGS = [*AMOEBANET, "partitions=2", "micro_batches=4"]
NEAR = 1.15


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--cuts", type=int, help="the first so many of the other cuts; all, if not given")
    options = parser.parse_args(arguments)
    settings = options.settings
    plans = {cost: gpipe("plan", *SETTINGS, *settings, f"cost={cost}") for cost in ("measured_anew", "figures")}
    picked = {cost: len(plan["stages"][0]["layers"]) for cost, plan in plans.items()}
    layers, best = len(plans["figures"]["layers"]), picked["measured_anew"]

    def step_seconds(first: int) -> float:
        cut = f"partition.balance=[{first},{layers - first}]"
        seconds: float = gpipe("train", *SETTINGS, *settings, cut, f"max_steps={options.steps}")["step_seconds"]
        return seconds

    ratios: dict[int, list[float]] = {best: [1.0]}
    others = [first for first in range(1, layers) if first != best][: options.cuts]
    for turn in range(options.rounds):
        for first in others:
            if turn == 0 or median(ratios[first]) < NEAR:
                pair = (first, best) if turn % 2 else (best, first)  # who goes first changes
                seconds = {cut: step_seconds(cut) for cut in pair}
                ratios.setdefault(first, []).append(seconds[first] / seconds[best])
    print("step time over that of the cut which cost=measured_anew chooses")
    for first, found in sorted(ratios.items()):
        marks = ", ".join(f"chosen by cost={cost}" for cost, cut in picked.items() if cut == first)
        each = "" if first == best else " ".join(f"{ratio:.3f}" for ratio in found)
        print(f"{f'[{first},{layers - first}]':<10}{median(found):>7.3f}  {marks or each}")
    print(f"the chosen cut is {100 * (1 / min(median(found) for found in ratios.values()) - 1):.1f} % behind the best")


if __name__ == "__main__":
    main()
