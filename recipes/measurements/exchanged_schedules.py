"""Schedules exchanged with torch.distributed.pipelining as CSV files: each file is run by its runtime and by ours.

The same layers with the same weights take one step on the same mini-batch, K stages in two processes over Gloo: torch's
`_PipelineScheduleRuntime`, which has read the file with `_load_csv`, and `gpipe train schedule=FILE`. Files are written
by `gpipe plan write_schedule=FILE`, and by torch's own schedules (`_dump_csv`). Compared are the gradients of all
parameters: torch's `.grad`, and the momentum that one step of SGD leaves in gpipe's checkpoint. The program fails where
they differ by more than summation order makes (relative 1e-4).

Usage: python recipes/measurements/exchanged_schedules.py [--only NAME ...] [setting=value ...]
       half a minute for each schedule on 2 cores
"""

import os
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from replicas import train
from runs import command_line, gpipe
from side_by_side import CPU, Positional, balance_of, config_of
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules
from torch.nn import functional as F

from gpipe_cli.assembly.build import build_model, open_data
from gpipe_cli.data.loading import LoadedBatches
from gpipe_cli.pipeline.runtime.randomness import materialize
from gpipe_cli.system.forked_call import Fork
from gpipe_cli.training.data_feed import MiniBatch, Reading, mini_batches

PROCESSES = 2
# Who makes the file, and partitions.
OURS = {"gpipe": 2, "1f1b": 2, "zero_bubble": 2, "interleaved": 4, "auto": 4}
THEIRS = {"ScheduleInterleaved1F1B": 4, "ScheduleLoopedBFS": 4, "ScheduleInterleavedZeroBubble": 4}
SETTINGS = [
    "micro_batches=4", "recompute=never", "memory_format=contiguous", "threads=1", "hardware=cpu", "model.dropout=0",
    "label_smoothing=0", "ema_decay=0", "optimizer=sgd", "optimizer.weight_decay=0", "max_steps=1", "data_workers=0",
]  # fmt: skip
TOLERANCE = 1e-4


def run_by_torch(name: str, file: str, settings: Sequence[str], meeting: str, process: int) -> dict[str, Any]:
    """The gradients of this process's parameters, as NumPy has them. A schedule of torch's is written to `file` first.

    The stages of process p are those of row p of the file.
    """
    config = config_of(settings)
    balance, samples = config.partition.balance, config.batch_size
    assert balance is not None
    assert samples is not None
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform.startswith("linux") else "lo0"
    dist.init_process_group("gloo", f"file://{meeting}", world_size=PROCESSES, rank=process)
    here = range(process, len(balance), PROCESSES)  # what torch's own schedules have, and ours that deal stages out
    layers = {
        k: materialize(build_model(config), sum(balance[:k]), balance[k], run_seed=config.seed, device=CPU).train()
        for k in here
    }
    stages = [
        pipelining.PipelineStage(Positional(of, torch.contiguous_format, k == len(balance) - 1), k, len(balance), CPU)
        for k, of in layers.items()
    ]

    def loss_of(logits: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits, classes, reduction="sum") / samples

    # its own schedules are that runtime with an order of their own
    kind: Any = getattr(schedules, name, schedules._PipelineScheduleRuntime)
    runner = kind(stages, config.micro_batches, loss_fn=loss_of, scale_grads=False)
    if name in OURS:
        runner._load_csv(file)
    elif process == 0:
        runner._dump_csv(file, format="compute_only")

    split, _ = open_data(config)
    batches = mini_batches(config, split.catalogue, training=True)
    reading = Reading(split, batches, LoadedBatches(split, batches, 0, 0, 1, workers=0))
    mini_batch = MiniBatch(reading, 0, 0)
    (images,), targets = mini_batch.inputs() or (), mini_batch.targets()
    assert targets is not None
    runner.step(*((images,) if 0 in layers else ()), **({"target": targets[0]} if len(balance) - 1 in layers else {}))
    dist.barrier()
    named = [pair for of in layers.values() for pair in of.named_parameters()]
    return {name: parameter.grad.numpy() for name, parameter in named if parameter.grad is not None}


def exchange(name: str, partitions: int, settings: Sequence[str], folder: Path) -> bool:
    """Prints a line; returns whether the gradients are the same but for summation order."""
    file = folder / f"{name}.csv"
    given, each = [*SETTINGS, *settings, f"partitions={partitions}"], f"stages_per_process={partitions // PROCESSES}"
    balance, _ = Fork(partial(balance_of, given)).wait()  # in a fork: who has run a backward cannot be forked
    given.append(f"partition.balance={balance}".replace(" ", ""))
    if name in OURS:
        planned = [setting for setting in given if not setting.startswith("max_steps")]
        gpipe("plan", *planned, each, f"schedule={name}", f"write_schedule={file}")
    work = partial(run_by_torch, name, str(file), given, str(folder / f"{name}.meeting"))
    forks = [Fork(partial(work, process)) for process in range(PROCESSES)]
    parts = [fork.wait()[0] for fork in forks]
    saved = train(folder / name, *given, f"schedule={file}")
    theirs = {key: torch.from_numpy(value) for part in parts for key, value in (part or {}).items()}
    before, after = "optimizer/", "/momentum_buffer"
    ours = {key[len(before) : -len(after)]: value for key, value in saved.items() if key.endswith(after)}
    same = worst = 0.0
    for key, gradient in theirs.items():
        same += torch.equal(gradient, ours[key])
        worst = max(worst, float((gradient - ours[key]).norm() / ours[key].norm()))
    actions = sum(bool(cell) for line in file.read_text(encoding="utf-8").split() for cell in line.split(","))
    agrees = len(theirs) == len(ours) > 0 and worst < TOLERANCE
    maker = "gpipe" if name in OURS else "torch"
    print(
        f"{maker:<8}{name:<31}{partitions:>3}{actions:>9}{len(ours):>12}{int(same):>11}{worst:>22.1e}  "
        f"{'yes' if agrees else 'NO'}",
        flush=True,
    )
    return agrees


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line(__doc__)
    every = {**OURS, **THEIRS}
    parser.add_argument("--only", nargs="+", choices=every, default=list(every), metavar="NAME", help=", ".join(every))
    options = parser.parse_intermixed_args(arguments)
    print(f"torch {torch.__version__}; {PROCESSES} processes, {SETTINGS[0]}; load {os.getloadavg()[0]:.2f}")
    print("file of schedule                         K  actions   gradients  same bits   greatest difference  agree")
    with tempfile.TemporaryDirectory() as folder:
        agree = [exchange(name, every[name], options.settings, Path(folder)) for name in options.only]
    return 0 if all(agree) else 1


if __name__ == "__main__":
    sys.exit(main())
