"""`gpipe bench` and its peers at the same settings, side by side in one run, on CPU cores.

AmoebaNet-D (6, 64), 128 pixels, batch 32, float32, K = 2, two cores, one thread for each process. No table of the
paper, which compares GPipe with itself. Samples/s belong to one machine on one day; only ratios of one run count.

All train the same model from the same initial weights on the same mini-batches, which they load themselves, with the
same optimizer and learning rates. A step is loading, forward, backward and update. The program fails where losses or
norms of gradients of two with the same M differ.

* plain-*: the `nn.Sequential` as it is, the whole mini-batch at once, with one and with two threads.
* torchgpipe*: version 0.0.7 with `devices=["cpu", "cpu"]`, deferred batch norm off (its default), `except_last` (its
  default) and `never`. It is written for GPUs: it has one worker thread per *device*, and here both partitions are on
  the same one, so that they take turns and one core is idle. `torchgpipe-2` therefore has two threads for each
  operation, as plain-2 has. To be installed by hand, without the torch of 2020 it would ask for:
  pip install --no-deps torchgpipe==0.0.7
* ScheduleGPipe*, Schedule1F1B*: `torch.distributed.pipelining` with a `PipelineStage` per process over Gloo, our cut,
  no recomputation (it has none). Its loss is a sum divided by the batch size, so that it need not rescale gradients.
  It sends contiguous tensors only, so that with channels_last layers images are converted at both ends of a boundary.
* bench-*: the command `gpipe bench`, in processes of its own. bench-default has the pipeline of `gpipe train`'s
  defaults, the others `recompute=never`. What has no counterpart elsewhere is switched off by settings: ema_decay=0,
  label_smoothing=0, model.dropout=0. Its metrics (loss, top-1, top-5, norms of gradients), its recording of every
  action and its clearing of old gradients are part of its steps.

What helps everyone is given to everyone: the model's fast 1x1 convolutions (`models/operations.py`), and that glibc
keeps freed memory, which gpipe asks it for (`launch/worker.py`).

Rounds are in turns, A B C A B C ..., each with new processes every time, so that a slow minute of the machine hits all.
Ratios are taken within a round; reported is their median, with the least and the greatest. Ctrl-C shows what there
is.

Usage: python recipes/measurements/side_by_side.py [--micro-batches 4 8] [--rounds 5] [setting=value ...]
       on two idle cores 8 minutes a round, 3 GB
       python recipes/measurements/side_by_side.py --only ScheduleGPipe bench-gpipe --micro-batches 4 --rounds 9
"""

import argparse
import importlib.metadata
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from functools import partial
from itertools import islice, pairwise, product
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from hydra import compose, initialize_config_module
from rich import box
from rich.console import Console
from rich.table import Table
from runs import AMOEBANET, command_line
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from gpipe_cli.assembly.build import MEMORY_FORMATS, build_model, open_data
from gpipe_cli.assembly.optimizer import build_optimizer, gradients_of, learning_rate, set_learning_rate
from gpipe_cli.config.settings import TrainConfig, from_tree
from gpipe_cli.data.loading import LoadedBatches
from gpipe_cli.launch.worker import keep_freed_memory
from gpipe_cli.pipeline.runtime.boundary import as_value
from gpipe_cli.pipeline.runtime.randomness import materialize
from gpipe_cli.pipeline.runtime.saved_activations import ByteRange, byte_range, storage_of
from gpipe_cli.planner.placement import make_placement
from gpipe_cli.reporting.compare.run_record import read_curves
from gpipe_cli.reporting.run.measurement import hardware, versions
from gpipe_cli.results.files import read_result
from gpipe_cli.system.forked_call import Fork
from gpipe_cli.training.data_feed import MiniBatch, Reading, mini_batches

CPU = torch.device("cpu")
WARM_UP, TIMEOUT_SECONDS = 3, 900
# Of all. The cut is that of hardware=cpu, and every peer is given it; costs are measured for the prediction alone.
SETTINGS = [
    *AMOEBANET[:-1], "hardware=cpu", "threads=1", "ema_decay=0", "label_smoothing=0", "model.dropout=0",
    "cost=measured_anew",
]  # fmt: skip
# A ratio of speeds is at least what is aimed at; one of memory at most.
Ratio = tuple[str, str, int, list[float], float, bool]  # against, ours, M, of each round, aim, whether it is a speed


@dataclass(frozen=True)
class Contestant:
    """Who trains, and how."""

    name: str
    engine: str  # plain, torchgpipe, the name of a schedule of torch's, or bench
    micro_batches: int = 1
    partitions: int = 2
    threads: int = 1
    layout: str = "contiguous"
    recompute: str = "never"
    schedule: str = ""  # of bench

    @property
    def processes(self) -> int:
        return self.partitions if self.engine.startswith("Schedule") else 1

    @property
    def settings(self) -> list[str]:
        """What the planner, or `gpipe bench`, is told of it."""
        given = [f"partitions={self.partitions}", f"micro_batches={self.micro_batches}", f"recompute={self.recompute}"]
        return [*given, f"memory_format={self.layout}", *([f"schedule={self.schedule}"] if self.schedule else [])]

    def __str__(self) -> str:
        return f"{self.name}, M={self.micro_batches}"


def contestants(micro_batches: Sequence[int], schedules: Sequence[str]) -> list[Contestant]:
    layouts = (("", "contiguous"), ("-channels_last", "channels_last"))
    found = [
        Contestant(f"plain-{threads}{suffix}", "plain", 1, 1, threads, layout)
        for threads, (suffix, layout) in product((1, 2), layouts)
    ]
    found.append(Contestant("bench-K1", "bench", 1, 1, 1, "channels_last", "never"))
    for m in micro_batches:
        found += [
            Contestant("torchgpipe", "torchgpipe", m, recompute="except_last"),
            Contestant("torchgpipe-2", "torchgpipe", m, threads=2, recompute="except_last"),
            Contestant("torchgpipe-never", "torchgpipe", m),
        ]
        for theirs, ours in (("ScheduleGPipe", "gpipe"), ("Schedule1F1B", "1f1b")):
            for suffix, layout in layouts:
                found.append(Contestant(theirs + suffix, theirs, m, layout=layout))
                found.append(Contestant(f"bench-{ours}{suffix}", "bench", m, layout=layout, schedule=ours))
        found += [
            Contestant(f"bench-{other}-channels_last", "bench", m, layout="channels_last", schedule=other)
            for other in schedules
            if other not in ("gpipe", "1f1b")
        ]
        found.append(Contestant("bench-default", "bench", m, layout="auto", recompute="except_last"))
    return found


# --- what a peer does, in a fork of this program


@dataclass
class Measured:
    """One contestant in one round."""

    ends: list[float]  # of the steps, by the monotonic clock
    losses: list[float]  # of the warm-up steps
    norms: list[float]  # of the gradients of this process, in the warm-up steps
    saved_bytes: list[int]  # the most at once of each partition, where it was counted
    step_seconds: float = 0.0
    predicted_seconds: float = 0.0  # of bench: with costs measured anew


def config_of(settings: Sequence[str]) -> TrainConfig:
    """Of settings that are given twice the later ones count."""
    given = {setting.partition("=")[0]: setting for setting in settings}
    with initialize_config_module("gpipe_cli.conf", version_base="1.3"):
        return from_tree(TrainConfig, compose("train", list(given.values())))


def balance_of(settings: Sequence[str]) -> list[int]:
    """The layers of each partition, as gpipe cuts."""
    return [len(names) for names in make_placement(config_of(settings)).layer_names]


def measure(who: Contestant, settings: Sequence[str], steps: int, meeting: str, process: int) -> Measured:
    config = config_of(settings)
    torch.set_num_threads(who.threads)
    keep_freed_memory()
    if who.processes > 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform.startswith("linux") else "lo0"
        limit = timedelta(seconds=TIMEOUT_SECONDS)
        dist.init_process_group("gloo", f"file://{meeting}", limit, who.processes, process)
    balance, whole = config.partition.balance, build_model(config)
    assert balance is not None
    first, last = process == 0, process == who.processes - 1
    start, layers = (0, len(whole)) if who.processes == 1 else (sum(balance[:process]), balance[process])
    part = materialize(whole, start, layers, run_seed=config.seed, device=CPU)
    part = part.to(memory_format=MEMORY_FORMATS[who.layout]).train()
    made = {"plain": plain, "torchgpipe": torchgpipe}.get(who.engine, torch_schedule)
    module, loss_of = made(who, part, balance, process)
    optimizer = build_optimizer(config.optimizer, dict(module.named_parameters()))
    assert optimizer is not None
    assert config.batch_size is not None

    # the data and its order are those of gpipe, and so is who loads what: nothing but the layers differs
    split, _ = open_data(config)
    batches = mini_batches(config, split.catalogue, training=True)
    loaded = LoadedBatches(split, batches, 0, 0, WARM_UP + steps + 1, workers=0) if first else None
    reading = Reading(split, batches, loaded)
    done = Measured([], [], [], [])
    stream = batches.stream(0, 0, WARM_UP + steps + 1)
    for number, (epoch, position) in enumerate(islice(stream, WARM_UP + steps + (who.engine == "torchgpipe"))):
        if number == WARM_UP + steps:
            done.saved_bytes = count_saved(module)
        mini_batch = MiniBatch(reading, epoch, position)
        given, targets = mini_batch.inputs(), mini_batch.targets() if last else None
        images = None if given is None else given[0].contiguous(memory_format=MEMORY_FORMATS[who.layout])
        loss = loss_of(images, None if targets is None else targets[0])
        if number < WARM_UP:
            done.losses.append(math.nan if loss is None else loss)
            norms = torch._foreach_norm(gradients_of(module.parameters()))
            done.norms.append(float(torch.stack(list(norms)).norm()))
        rate = learning_rate(config.learning_rate, number, batches.steps_per_epoch, config.batch_size)
        set_learning_rate(optimizer, rate)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        done.ends.append(time.perf_counter())
    done.ends = done.ends[WARM_UP - 1 : WARM_UP + steps]
    if who.processes > 1:
        dist.barrier()  # what the last step sent has arrived before this process ends
    return done


LossOf = Callable[[torch.Tensor | None, torch.Tensor | None], float | None]  # of images and targets, where they are


def plain(who: Contestant, module: nn.Module, balance: Sequence[int], process: int) -> tuple[nn.Module, LossOf]:
    def loss_of(images: torch.Tensor | None, targets: torch.Tensor | None) -> float:
        assert targets is not None
        loss = F.cross_entropy(module(images), targets)
        loss.backward()
        return loss.item()

    return module, loss_of


def torchgpipe(
    who: Contestant, module: nn.Sequential, balance: Sequence[int], process: int
) -> tuple[nn.Module, LossOf]:
    from torchgpipe import GPipe

    devices = ["cpu"] * who.partitions
    pipeline = GPipe(module, list(balance), devices=devices, chunks=who.micro_batches, checkpoint=who.recompute)
    return plain(who, pipeline, balance, process)


class Converted(torch.autograd.Function):
    """The tensor in one layout, and its gradient in another."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, layout: torch.memory_format, back: torch.memory_format) -> torch.Tensor:
        ctx.back = back
        return tensor.contiguous(memory_format=layout)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0].contiguous(memory_format=ctx.back), None, None


class Positional(nn.Module):
    """torch's stages pass tensors as separate arguments, and contiguous ones only, as are their gradients; our layers
    take one tensor or one tuple, of any layout."""

    def __init__(self, layers: nn.Module, layout: torch.memory_format, last: bool) -> None:
        super().__init__()
        self.layers, self.layout, self.last = layers, layout, last

    def forward(self, *tensors: torch.Tensor) -> Any:
        sent = torch.contiguous_format
        if self.layout is sent:
            return self.layers(as_value(tensors))
        outputs = self.layers(as_value(tuple(Converted.apply(tensor, self.layout, sent) for tensor in tensors)))
        return outputs if self.last else tuple(Converted.apply(tensor, sent, self.layout) for tensor in outputs)


def torch_schedule(
    who: Contestant, module: nn.Module, balance: Sequence[int], process: int
) -> tuple[nn.Module, LossOf]:
    from torch.distributed import pipelining

    last = process == who.partitions - 1
    stage = pipelining.PipelineStage(Positional(module, MEMORY_FORMATS[who.layout], last), process, who.partitions, CPU)
    samples = 0

    def sum_of(logits: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits, classes, reduction="sum") / samples

    runner = getattr(pipelining, who.engine)(stage, who.micro_batches, loss_fn=sum_of, scale_grads=False)

    def loss_of(images: torch.Tensor | None, targets: torch.Tensor | None) -> float | None:
        nonlocal samples
        losses: list[torch.Tensor] = []
        inputs = () if images is None else (images,)
        if targets is None:
            runner.step(*inputs)
            return None
        samples = len(targets)
        runner.step(*inputs, target=targets, losses=losses)
        return float(sum(loss.item() for loss in losses))

    return module, loss_of


def count_saved(module: nn.Module) -> list[int]:
    """What torchgpipe keeps for backwards, as gpipe counts it: the memory behind what autograd saves, once, while any
    of it is held. Returns the most bytes of each partition so far, which change while it trains.

    Each thread that runs layers gets hooks when it does, and keeps them: what is saved after a partition has run, in
    place of its activations, is its input.
    """
    here = threading.local()
    partitions = list(module.partitions)  # type: ignore[arg-type]
    static = {storage_of(tensor) for tensor in (*module.parameters(), *module.buffers())}
    held: list[Counter[ByteRange]] = [Counter() for _ in partitions]
    now, most = [0] * len(partitions), [0] * len(partitions)

    class Kept:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor, self.partition, self.span = tensor.detach(), here.partition, byte_range(tensor)
            held[self.partition][self.span] += 1
            if held[self.partition][self.span] == 1 and self.span.storage not in static:
                now[self.partition] += self.span.bytes
                most[self.partition] = max(most[self.partition], now[self.partition])

        def __del__(self) -> None:
            held[self.partition][self.span] -= 1
            if not held[self.partition][self.span] and self.span.storage not in static:
                now[self.partition] -= self.span.bytes

    def enter(partition: int, *given: object) -> None:
        here.partition = partition
        if not hasattr(here, "hooks"):
            here.hooks = saved_tensors_hooks(Kept, lambda kept: kept.tensor)
            here.hooks.__enter__()

    for k, layers in enumerate(partitions):
        layers.register_forward_pre_hook(partial(enter, k))
    return most


# --- a round


def hold(who: Contestant, settings: Sequence[str], steps: int) -> Measured:
    """One contestant in one round, in processes that end with it. Raises RuntimeError with what went wrong there."""
    with tempfile.TemporaryDirectory(prefix="side_by_side_") as folder:
        if who.engine == "bench":
            return hold_bench(who, settings, steps, Path(folder))
        work = partial(measure, who, settings, steps, f"{folder}/meeting")
        forks = [Fork(partial(work, process)) for process in range(who.processes)]
        parts = [fork.wait() for fork in forks]
    if codes := [code for _, code in parts if code]:
        raise RuntimeError(f"ended with code {codes[0]}")
    done = [part for part, _ in parts if part is not None]
    ends = [max(of_step) for of_step in zip(*(part.ends for part in done), strict=True)]
    norms = [math.hypot(*of_step) for of_step in zip(*(part.norms for part in done), strict=True)]
    seconds = median(later - earlier for earlier, later in pairwise(ends))
    return replace(done[-1], ends=ends, norms=norms, step_seconds=seconds)


def hold_bench(who: Contestant, settings: Sequence[str], steps: int, folder: Path) -> Measured:
    measured = [f"steps={steps}", f"warm_up_steps={WARM_UP}", f"run_folder={folder / 'run'}"]
    command = [sys.executable, "-m", "gpipe_cli", "bench", *settings, *measured]
    run = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
    if run.returncode:
        raise RuntimeError(f"{who} ended with code {run.returncode}: {(run.stdout + run.stderr).strip()[-2000:]}")
    result, curves = read_result(folder / "run"), read_curves(folder / "run")
    losses, norms = (list(curves[tag].values[:WARM_UP]) for tag in ("train/loss", "train/gradient_norm"))
    predicted = result["prediction"]["step_seconds"]
    return Measured([], losses, norms, result["activation_bytes"], result["step_seconds"], predicted)


@dataclass
class Row:
    """One contestant over all rounds; a round that failed has no speed."""

    contestant: Contestant
    settings: list[str]
    rounds: list[Measured | None] = field(default_factory=list)
    failure: str = ""

    def hold(self, steps: int) -> None:
        try:
            self.rounds.append(hold(self.contestant, self.settings, steps))
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            self.failure = str(error)
            self.rounds.append(None)

    @property
    def done(self) -> list[Measured]:
        return [one for one in self.rounds if one is not None]

    @property
    def seconds(self) -> float:
        return median(one.step_seconds for one in self.done) if self.done else math.inf


# --- what came out


def compare(rows: Sequence[Row]) -> Iterator[Ratio]:
    """The ratios aimed at, round by round, wherever both sides ran: of speeds, ours to the peer's, but for the peak
    activations; and of a simulated step to the measured one."""
    by_name = {(row.contestant.name, row.contestant.micro_batches): row for row in rows}

    def ratios(ours: Row, peer: Row, of: Callable[[Measured, Measured], float]) -> list[float]:
        return [of(a, b) for a, b in zip(ours.rounds, peer.rounds, strict=False) if a is not None and b is not None]

    def speed(ours: Measured, peer: Measured) -> float:
        return peer.step_seconds / ours.step_seconds

    def memory(ours: Measured, peer: Measured) -> float:
        return max(a / b for a, b in zip(ours.saved_bytes, peer.saved_bytes, strict=True))

    pipelines = [row for row in rows if row.contestant.engine == "bench" and row.contestant.partitions > 1 and row.done]
    if pipelines and (whole := by_name.get(("plain-2-channels_last", 1))):
        best = min(pipelines, key=lambda row: row.seconds).contestant
        row = by_name[best.name, best.micro_batches]
        yield whole.contestant.name, best.name, best.micro_batches, ratios(row, whole, speed), 1.0, True
    aims = [(f"Schedule{theirs}{layout}", f"bench-{ours}{layout}", speed, 1.1, True)
            for theirs, ours in (("GPipe", "gpipe"), ("1F1B", "1f1b"))
            for layout in ("", "-channels_last")]  # fmt: skip
    aims.append(("torchgpipe", "bench-default", speed, 2.5, True))
    aims.append(("plain-1-channels_last", "bench-K1", speed, 0.98, True))
    aims.append(("torchgpipe", "bench-default", memory, 1.0, False))
    for (peer, ours, of, aim, fast), m in product(aims, sorted({row.contestant.micro_batches for row in rows})):
        if (peer, m) in by_name and (ours, m) in by_name:
            named = peer if fast else f"{peer}, peak activations"
            yield named, ours, m, ratios(by_name[ours, m], by_name[peer, m], of), aim, fast
    for row in pipelines:
        who, predicted = row.contestant, [one.predicted_seconds / one.step_seconds for one in row.done]
        yield "itself, simulated", who.name, who.micro_batches, predicted, 0.95, True


def disagreements(rows: Sequence[Row], tolerance: float = 5e-3) -> list[str]:
    """Contestants with the same M must do the same work: the losses and gradient norms of the warm-up agree.

    The second step shows that the optimizers stepped alike and that old gradients were cleared. It is compared within a
    memory format only: the other one sums in another order (in float64 the gradients agree to 4e-14), and a
    network that has just begun to learn soon makes per cents of that.
    """
    first: dict[tuple[int, str], Row] = {}
    wrong = []
    for row in (row for row in rows if row.done):
        who = row.contestant
        layout = "channels_last" if who.layout == "auto" else who.layout
        for group, steps in (("", 1), (layout, 2)):
            other = first.setdefault((who.micro_batches, group), row)
            mine, theirs = ([*of.done[0].losses[:steps], *of.done[0].norms[:steps]] for of in (row, other))
            if not all(math.isclose(a, b, rel_tol=tolerance) for a, b in zip(mine, theirs, strict=True)):
                wrong.append(f"losses and gradient norms of {who}: {mine}, of {other.contestant.name}: {theirs}")
    return wrong


def show(console: Console, rows: Sequence[Row], samples: int, found: Sequence[Ratio]) -> None:
    speeds = Table("contestant", "M", "recompute", "layout", "processes x threads", box=box.MARKDOWN)
    for column in ("samples/s, median", "least", "greatest", "peak activations, MiB"):
        speeds.add_column(column, justify="right")
    for row in rows:
        who = row.contestant
        processes = who.partitions if who.engine == "bench" else who.processes
        cells = [who.name, str(who.micro_batches), who.recompute, who.layout, f"{processes} x {who.threads}"]
        if row.done:
            each = [samples / one.step_seconds for one in row.done]
            cells += [f"{of(each):.2f}" for of in (median, min, max)]
            cells.append(" ".join(f"{most / 2**20:.1f}" for most in row.done[0].saved_bytes))
        speeds.add_row(*cells)
    console.print(speeds)
    for row in rows:
        if row.failure:
            console.print(f"{row.contestant}: {row.failure}", style="red", markup=False)
    table = Table("against", "ours", "M", "ratio, median", "least", "greatest", "aim", "holds", box=box.MARKDOWN)
    for against, ours, m, ratios, aim, fast in found:
        if ratios:
            middle = median(ratios)
            numbers = (f"{number:.3f}" for number in (middle, min(ratios), max(ratios)))
            holds = middle >= aim if fast else middle <= aim
            table.add_row(
                against, ours, str(m), *numbers, f"at {'least' if fast else 'most'} {aim}", "yes" if holds else "no"
            )
    console.print(table)


# --- the command line


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number}: must be 1 or more")
    return number


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=positive, default=5, help="how often every contestant runs (5)")
    parser.add_argument("--steps", type=positive, default=8, help=f"measured steps a round, after {WARM_UP} others (8)")
    parser.add_argument("--micro-batches", type=positive, nargs="+", default=[4, 8], metavar="M", help="(4 8)")
    parser.add_argument("--schedules", nargs="+", default=[], metavar="NAME", help="others than gpipe and 1f1b")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these contestants (all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured there")
    options = parser.parse_intermixed_args(arguments)
    base = [*SETTINGS, *options.settings]
    every = contestants(options.micro_batches, options.schedules)
    if unknown := set(options.only or ()) - {who.name for who in every}:
        parser.error(f"--only {' '.join(unknown)}: choose from {', '.join(dict.fromkeys(who.name for who in every))}")
    chosen = [who for who in every if options.only is None or who.name in options.only]
    with_torchgpipe = any(who.engine == "torchgpipe" for who in chosen)
    if with_torchgpipe and importlib.util.find_spec("torchgpipe") is None:
        remedy = "pip install --no-deps torchgpipe==0.0.7, or choose others with --only"
        print(f"side_by_side.py: torchgpipe is not installed; {remedy}", file=sys.stderr)
        return 2
    cuts: dict[tuple[int, int], str] = {}
    rows = []
    for who in chosen:
        key = who.partitions, who.micro_batches
        if key not in cuts:  # in a fork: who has run a backward cannot be forked
            balance, code = Fork(partial(balance_of, [*base, *who.settings[:2]])).wait()
            if balance is None:
                return code
            cuts[key] = f"partition.balance={balance}".replace(" ", "")
        rows.append(Row(who, [*base, *who.settings, cuts[key]]))
    console = Console(width=160)
    machine = {**hardware((), 1), **versions()}
    if with_torchgpipe:
        machine["torchgpipe"] = importlib.metadata.version("torchgpipe")
    console.print(", ".join(f"{key} {value}" for key, value in machine.items()))
    console.print(f"{options.rounds} rounds of {options.steps} steps; {', '.join(sorted(set(cuts.values())))}")
    loads = []
    with suppress(KeyboardInterrupt):  # what has been measured until then is shown
        for number, row in product(range(options.rounds), rows):
            if row is rows[0]:
                loads.append(os.getloadavg()[0])
            print(f"round {number + 1}: {row.contestant}", file=sys.stderr)
            row.hold(options.steps)
    samples = config_of(base).batch_size
    assert samples is not None
    found, wrong = list(compare(rows)), disagreements(rows)
    show(console, rows, samples, found)
    console.print(f"load of the machine before each round: {' '.join(f'{load:.2f}' for load in loads)}")
    for line in wrong:
        console.print(f"not the same work: {line}", style="red")
    if options.json:
        measured = {"machine": machine, "loads": loads, "rows": [asdict(row) for row in rows], "ratios": found}
        options.json.write_text(json.dumps(measured, indent=2) + "\n", encoding="utf-8")
    return 1 if wrong or any(row.failure for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
