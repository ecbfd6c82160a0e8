"""The same training with several numbers of partitions, and with several seeds."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from statistics import stdev

from gpipe_cli.reporting.compare.run_record import read_run, same_curves
from gpipe_cli.reporting.tables.table import NONE, Column, Table
from gpipe_cli.reproduction.comparison import Shown, format_cell, make_table
from gpipe_cli.reproduction.last_tensors import DIGITS, compare_tensors, digest, last_tensors
from gpipe_cli.reproduction.runner import Findings, Note, Runner
from gpipe_cli.results.metrics import METRICS, TRAIN_LOSS
from gpipe_cli.units import plural


def reproduce(runner: Runner, partitions: Sequence[int], seeds: Sequence[int]) -> Findings:
    """The first seed with every number of partitions, the others with the first only."""
    if runner.scale == "smoke":
        partitions, seeds = partitions[:2], seeds[:2]
    lists = {key: ", ".join(map(str, values)) for key, values in (("partitions", partitions), ("seed", seeds))}
    runner.check_not_given({key: f"this recipe compares {key}={values}" for key, values in lists.items()})
    cells = [*((k, seeds[0]) for k in partitions), *((partitions[0], seed) for seed in seeds[1:])]
    folders = [f"partitions_{k}_seed_{seed}" for k, seed in cells]
    for (k, seed), folder in zip(cells, folders, strict=True):
        runner.train(folder, f"partitions={k}", f"seed={seed}")
    return compare_runs(cells, [runner.folder / folder for folder in folders], runner.folder)


def compare_runs(cells: Sequence[tuple[int, int]], folders: Sequence[Path], curves_folder: Path) -> Findings:
    """Compare losses and last weights of the runs in ``folders`` bit by bit; deviations between numbers of partitions,
    and between seeds. ``cells``: K and seed of each run."""
    records = [read_run(folder) for folder in folders]
    tensors = [last_tensors(folder) for folder in folders]
    curves = [record.curves.get(TRAIN_LOSS) for record in records]
    alike = next((group for group in same_curves(curves) if 0 in group), [0])
    digests = [digest(each) for each in tensors]
    rows = [
        {
            "partitions": k,
            "seed": seed,
            "top1": METRICS["test_top1"].value(record.result),
            "loss": METRICS["test_loss"].value(record.result),  # None if the loss was not a number
            "losses": None if at == 0 else "as in row 1" if at in alike else "others",
            "digits": digests[at][:DIGITS],
        }
        for at, ((k, seed), record) in enumerate(zip(cells, records, strict=True))
    ]
    columns = (
        Shown("K", "partitions"),
        Shown("seed", "seed"),
        Shown("top-1", "top1", ".2%", "measured"),
        Shown("loss", "loss", ",.6f", "measured"),
        Shown("losses of all steps", "losses", "", "measured"),
        Shown("SHA-256 of weights", "digits", "", "measured"),
    )
    first, first_seed = cells[0]
    same = [at for at, (_, seed) in enumerate(cells) if seed == first_seed]
    repeated = [at for at, (k, _) in enumerate(cells) if k == first]
    same_partitions = ", ".join(str(cells[at][0]) for at in same)
    seeds = ", ".join(str(cells[at][1]) for at in repeated)
    points = [100 * stdev(rows[at]["top1"] for at in runs) for runs in (same, repeated)]
    losses = [[rows[at]["loss"] for at in runs] for runs in (same, repeated)]
    deviations = [None if None in runs else stdev(runs) for runs in losses]
    spread = [
        Column(
            "standard deviation of", cells=[f"K = {same_partitions}, seed {first_seed}", f"seeds {seeds}, K = {first}"]
        ),
        Column("", "paper", ["within the next row's", NONE]),
        Column("top-1", "measured", [f"{each:,.3f} points" for each in points]),
        Column("loss", "measured", [format_cell(each, ",.6f") for each in deviations], values=deviations),
    ]
    steps = plural(0 if curves[0] is None else len(curves[0].steps), "step")
    notes = list[Note]()
    if other := ", ".join(str(cells[at][0]) for at in same if rows[at]["losses"] == "others"):
        notes.append(("losses", f"K = {other}: of {steps}, some losses differ from those with K = {first}"))
    else:
        notes.append(("losses", f"those of all {steps} are the same bits with K = {same_partitions}"))
    if apart := [
        f"K = {cells[at][0]}: {compare_tensors(tensors[0], tensors[at])}" for at in same if digests[at] != digests[0]
    ]:
        notes.append(("weights", "; ".join(apart)))
    else:
        whole = f"all {len(tensors[0]):,} tensors of the last checkpoint"
        notes.append(("weights", f"{whole} are the same bits with K = {same_partitions}"))
    notes.append(("curves", f"tensorboard --logdir {shlex.quote(str(curves_folder))}"))
    title = f"The same training, test set of {records[0].result.dataset}"
    tables = make_table(title, columns, rows), Table("Between numbers of partitions, and between seeds", spread)
    return Findings(tables, notes)
