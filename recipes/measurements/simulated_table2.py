"""The shape of Table 2, simulated: AmoebaNet-D (18, 256) over K and M, by the figures of torchgpipe's machine.

torchgpipe measured the same table on eight Tesla P40 with partitions, batch sizes and recomputation that it published
(docs/benchmarks.rst; layers per partition as below). The simulation takes these and the figures in
conf/hardware/p40.yaml. All columns are relative to their own K = 2, M = 1; simulated and measured are never mixed.

Usage: python recipes/measurements/simulated_table2.py [--cells 9] [setting=value ...]      2 minutes, no GPU
"""

from collections.abc import Sequence
from statistics import mean

from runs import command_line, gpipe

# K, M: batch size, layers per partition, recomputation, torchgpipe's relative throughput, the paper's (TPU)
CELLS = {
    (2, 1): (96, (7, 17), "always", 1.0, 1.0),
    (2, 4): (256, (9, 15), "except_last", 1.546, 1.07),
    (2, 32): (1280, (9, 15), "except_last", 1.780, 1.21),
    (4, 1): (160, (3, 4, 5, 12), "always", 1.006, 1.13),
    (4, 4): (360, (3, 6, 7, 8), "except_last", 1.680, 1.26),
    (4, 32): (1152, (3, 6, 7, 8), "except_last", 2.711, 1.84),
    (8, 1): (196, (2, 2, 2, 2, 2, 3, 4, 7), "always", 0.932, 1.38),
    (8, 4): (480, (2, 2, 2, 3, 3, 4, 4, 4), "except_last", 2.625, 1.72),
    (8, 32): (1280, (2, 2, 2, 3, 3, 4, 4, 4), "except_last", 4.966, 3.48),
}
SETTINGS = [
    "model.normal_cells=18",
    "model.filters=256",
    "dataset=synthetic_images",
    "dataset.image_size=224",
    "dataset.num_classes=1000",
    "optimizer=sgd",
    "ema_decay=0",
    "label_smoothing=0",
    "hardware=p40",
    "hardware.memory_gib=1000",
]


def simulated(
    k: int, m: int, batch: int, balance: tuple[int, ...] | None, recompute: str, settings: Sequence[str]
) -> float:
    """Samples a second."""
    cut = "null" if balance is None else f"[{','.join(map(str, balance))}]"
    cell = f"partitions={k}", f"micro_batches={m}", f"batch_size={batch}", f"recompute={recompute}"
    plan = gpipe("plan", *SETTINGS, *cell, f"partition.balance={cut}", *settings)
    speed: float = plan["samples_per_second"]
    return speed


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__)
    parser.add_argument("--cells", type=int, default=len(CELLS), help="the first so many of them")
    options = parser.parse_args(arguments)
    cells = dict(list(CELLS.items())[: options.cells])
    speeds = {
        (k, m): [simulated(k, m, batch, cut, mode, options.settings) for cut in (balance, None)]
        for (k, m), (batch, balance, mode, _, _) in cells.items()
    }
    print("throughput of AmoebaNet-D (18, 256) relative to K = 2, M = 1 of the same column")
    print(f"{'K':>3}{'M':>4}{'simulated':>11}{'torchgpipe':>12}{'paper':>8}   simulated with our cut")
    off: dict[str, list[float]] = {"torchgpipe": [], "paper": []}
    for (k, m), (_, _, _, torchgpipe, paper) in cells.items():
        theirs, ours = (speeds[k, m][i] / speeds[2, 1][i] for i in (0, 1))
        if (k, m) != (2, 1):
            off["torchgpipe"].append(abs(theirs - torchgpipe))
            off["paper"].append(abs(theirs - paper))
        faster = speeds[k, m][1] / speeds[k, m][0]
        print(f"{k:>3}{m:>4}{theirs:>11.2f}{torchgpipe:>12.2f}{paper:>8.2f}   {ours:.2f}, {faster:.2f} times as fast")
    for whose, differences in off.items():
        if differences:  # the first cell is 1 by definition
            print(f"mean absolute difference of the simulated from {whose}: {mean(differences):.2f}, without the first")


if __name__ == "__main__":
    main()
