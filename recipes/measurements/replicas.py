"""Replicas: whether they hold the laws, how fast they are, and whether a long run grows.

laws   A training of the default job with K in {1, 2, 3}, R in {1, 2}, both schedules and both executors, and four
       micro-batches over all replicas: everything in the last checkpoint is the same bits for every K at the same R
       (law 1), also if the run is repeated, and if it is stopped and resumed with another K (law 3). Batch norm's
       statistics are those of one pipeline with as many micro-batches (laws 4 and 7), but for the order of sums.
speed  K=1 R=2, K=2 R=1 and plain PyTorch with two threads, in turns, on AmoebaNet-D (6, 64) at 128 px.
grows  1,000 steps with K=2, R=2: memory, threads and open files of every process, at a tenth of the run and at nine.

Usage: python recipes/measurements/replicas.py [--parts laws speed grows] [--steps 1000] [setting=value ...]
       Linux; 15 minutes on 2 cores
"""

import contextlib
import io
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import median

import torch
from hydra import compose, initialize_config_module
from runs import AMOEBANET, command_line, gpipe
from torch.nn import functional as F

from gpipe_cli.assembly.build import build_model
from gpipe_cli.cli import main as program
from gpipe_cli.config.groups import ImagesConfig
from gpipe_cli.config.settings import TrainConfig, from_tree
from gpipe_cli.pipeline.runtime.randomness import materialize
from gpipe_cli.training.checkpoint.store import find_checkpoint, read_index, read_tensors

PARTS = ("laws", "speed", "grows")
JOB = ["hardware=cpu", "threads=1", "epochs=2"]
ALL_MICRO_BATCHES = 4
ROW = "{:>2}{:>3}  {:<7}{:<13}{:>9}  {}"


def main(arguments: Sequence[str]) -> int:
    parser = command_line(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--ways", type=int, default=99, help="of running, at most, for each R")
    parser.add_argument("--steps", type=int, default=1000, help="of the long run")
    parser.add_argument("--rounds", type=int, default=3, help="of the speeds")
    given = parser.parse_intermixed_args(arguments)
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        for part in given.parts:
            if part == "laws":
                wrong += laws(Path(folder), given.settings, given.ways)
            elif part == "speed":
                speeds(given.settings, given.rounds)
            else:
                grows(Path(folder), given.settings, given.steps)
    return 1 if wrong else 0


def laws(base: Path, settings: Sequence[str], ways: int) -> int:
    """Prints a line for each way to run; returns how many have other bits."""
    wrong, first_step = 0, []
    for replicas in (1, 2):
        each = [f"replicas={replicas}", f"micro_batches={ALL_MICRO_BATCHES // replicas}", *JOB, *settings]
        reference = train(base / f"{replicas}", *each, "partitions=1", "schedule=gpipe")
        print(ROW.format("K", "R", "", "", "tensors", "other bits than K = 1, gpipe"))
        kinds = list(product(("gpipe", "1f1b"), ("distributed", "in_process"), (1, 2, 3)))[:ways]
        for schedule, executor, k in kinds:
            way = [f"partitions={k}", f"executor={executor}"]
            other = train(base / f"{replicas}{schedule}{executor}{k}", *each, *way, f"schedule={schedule}")
            if schedule == "1f1b" and (k, executor) == (1, "distributed"):
                reference = other  # gradients are summed in another order
            apart = [name for name in reference if not torch.equal(reference[name], other[name])]
            wrong += bool(apart)
            print(ROW.format(k, replicas, schedule, executor, len(other), f"{len(apart)}"), flush=True)
        begun = base / f"{replicas}begun"
        train(begun, *each, "partitions=2", "schedule=1f1b", f"max_steps={3}")
        gone_on = resume(begun, base / f"{replicas}gone_on", "partitions=3")
        again = train(base / f"{replicas}again", *each, "partitions=3", "schedule=1f1b")
        apart = [name for name in again if not torch.equal(again[name], gone_on[name])]
        wrong += bool(apart)
        words = f"{len(apart)}, stopped after step 3 and resumed, K = 2, then 3, against one that was repeated"
        print(ROW.format("", replicas, "1f1b", "distributed", len(again), words))
        first_step.append(train(base / f"{replicas}one", *each, "partitions=2", "max_steps=1"))
    one, two = first_step
    for kind in ("running_mean", "running_var"):
        difference = max(apart_by(one[name], two[name]) for name in one if kind in name and "model/" in name)
        print(f"batch norm's {kind} after one step, R = 2 against R = 1: {difference:.1e} at most of its norm")
    return wrong


def apart_by(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).double().norm() / one.double().norm().clamp_min(1e-30))


def train(folder: Path, *settings: str) -> dict[str, torch.Tensor]:
    """Everything in the last checkpoint of a training."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = program(["train", f"run_folder={folder}", *settings])
    if code:
        raise SystemExit(f"gpipe train {' '.join(settings)}\n{printed.getvalue()}")
    checkpoint = find_checkpoint(folder, "last", "run")
    return read_tensors(checkpoint, read_index(checkpoint).layers, ("model", "optimizer", "ema"))


def resume(begun: Path, folder: Path, *settings: str) -> dict[str, torch.Tensor]:
    return train(folder, f"resume={begun}", *settings)


def speeds(settings: Sequence[str], rounds: int) -> None:
    """Prints samples/s and memory of each, and their ratios to plain PyTorch, medians over rounds."""
    job = [*AMOEBANET[:-1], "recompute=never", "threads=1", "hardware=cpu", *settings]
    bench = ["bench", "steps=10", "warm_up_steps=3"]
    found: dict[str, list[tuple[float, float]]] = {}
    for _ in range(rounds):
        for name, way in (("K=1 R=2, M=2", (1, 2, 2)), ("K=2 R=1, M=4", (2, 1, 4))):
            k, r, m = way
            result = gpipe(*bench, *job, f"partitions={k}", f"replicas={r}", f"micro_batches={m}")
            peak = r * sum(stage["peak"] for stage in result["memory"])
            found.setdefault(name, []).append((result["samples_per_second"], peak / 2**20))
        text = subprocess.run(
            [sys.executable, __file__, "--plain", *job], capture_output=True, text=True, check=True
        ).stdout.split()
        found.setdefault("plain PyTorch", []).append((float(text[0]), float(text[1])))
    plain = [speed for speed, _ in found["plain PyTorch"]]
    print("way              samples/s   MiB of all processes   of plain PyTorch's speed")
    for name, values in found.items():
        ratio = median(speed / other for (speed, _), other in zip(values, plain, strict=True))
        speed, memory = (median(column) for column in zip(*values, strict=True))
        print(f"{name:<16}{speed:>10.1f}{memory:>23,.0f}{ratio:>27.2f}")


def plain(settings: Sequence[str]) -> None:
    """Prints samples/s and peak MiB of a loop in plain PyTorch, two threads, channels last."""
    torch.set_num_threads(2)
    with initialize_config_module("gpipe_cli.conf", version_base="1.3"):
        config = from_tree(TrainConfig, compose("train", list(settings)))
    assert isinstance(config.dataset, ImagesConfig)
    assert config.batch_size is not None
    model = build_model(config)
    model = materialize(model, 0, len(model), run_seed=0, device=torch.device("cpu"))
    model = model.to(memory_format=torch.channels_last).train()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-4, momentum=0.9)
    size = config.dataset.image_size
    images = torch.randn(config.batch_size, 3, size, size).contiguous(memory_format=torch.channels_last)
    targets = torch.randint(config.dataset.num_classes, (config.batch_size,))
    seconds = []
    for _ in range(8):
        began = time.perf_counter()
        logits = model(images)
        loss = F.cross_entropy(logits[0] if isinstance(logits, tuple) else logits, targets, label_smoothing=0.1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(time.perf_counter() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(config.batch_size / median(seconds[2:]), peak)


def grows(base: Path, settings: Sequence[str], steps: int) -> None:
    """Prints what each process of a long run has at a tenth of it, and at its end."""
    folder = base / "long"
    arguments = [
        sys.executable, "-m", "gpipe_cli", "train", *JOB[:2], "partitions=2", "replicas=2", "micro_batches=2",
        "epochs=999", f"max_steps={steps}", f"run_folder={folder}", "evaluate_every_epochs=1", *settings,
    ]  # fmt: skip
    first: dict[int, tuple[int, ...]] = {}
    last: dict[int, tuple[int, ...]] = {}
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        while run.poll() is None:
            time.sleep(0.2)
            done = steps_done(folder)
            now = dict(of_processes(run.pid))
            if done >= steps // 10 and not first:
                first = now
            if done >= steps * 9 // 10 and not last:
                last = now
        assert run.stdout is not None
        if run.returncode:
            raise SystemExit(run.stdout.read())
    print(f"process   MiB, threads, files at step {steps // 10}   at step {steps * 9 // 10}")
    for number, (process, begun) in enumerate(sorted(first.items())):
        columns = ["".join(f"{value:>6}" for value in values) for values in (begun, last.get(process, ()))]
        print(f"{number:<9}{columns[0]:<32}{columns[1]}")


def steps_done(folder: Path) -> int:
    """By the newest checkpoint."""
    found = [int(path.name.removeprefix("step_")) for path in folder.glob("checkpoints/step_*")]
    return max(found, default=0)


def of_processes(parent: int) -> Iterator[tuple[int, tuple[int, int, int]]]:
    """Of a process and all below it: MiB in memory, threads, open files."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = entry.read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(entry.parent.name))
    waiting = [parent]
    while waiting:
        process = waiting.pop()
        waiting += children.get(process, [])
        with contextlib.suppress(OSError):
            status = dict(line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines())
            memory = int(status.get("VmRSS", "0 kB").split()[0]) // 1024
            yield process, (memory, int(status["Threads"]), len(os.listdir(f"/proc/{process}/fd")))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--plain"]:
        plain(sys.argv[2:])
    else:
        sys.exit(main(sys.argv[1:]))
