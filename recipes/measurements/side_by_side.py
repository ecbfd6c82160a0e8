"""This engine and its peers at the same settings, side by side in one run, on CPU cores.

AmoebaNet-D (6, 64), 128 pixels, batch 32, float32, K=2, two cores, one thread per process: the settings at which the
field was once measured for this repository. No table of the paper, which compares GPipe with itself. Samples/s belong
to one machine on one day; only ratios of one run count.

All contestants train the same model from the same initial weights on the same fixed random batch; a step is forward,
backward and the step of timm's RMSpropTF. Dropout is off, so that losses and gradients must agree: the program fails
if they do not.

* plain-1, plain-2: the `nn.Sequential` as it is, the whole batch at once, with one and with two threads.
* torchgpipe-*: version 0.0.7 with `devices=["cpu", "cpu"]`, deferred batch norm off (its default), `except_last` (its
  default) and `never`. It is written for GPUs: it has one worker thread per *device*, and here both partitions are on
  the same one, so that they take turns and one core is idle. `torchgpipe-except_last-2` therefore has two threads for
  each operation, as plain-2 has. To be installed by hand, without the torch of 2020 it would ask for:
  pip install --no-deps torchgpipe==0.0.7
* ScheduleGPipe: `torch.distributed.pipelining` with a `PipelineStage` per process over Gloo, our cut, no recomputation
  (it has none). Its loss is a sum divided by the batch size, so that it need not rescale gradients.
* gpipe-*: `gpipe_cli.pipeline`, one process per stage over Gloo; gpipe-K1: one partition in one process.

What helps everyone is given to everyone: the model's fast 1x1 convolutions (`models/operations.py`), and that glibc
keeps freed memory, which `gpipe train` asks it for (`launch/worker.py`). With `--allocator shipped` only gpipe-* do
the latter, as each program comes.

Rounds are interleaved, A B C A B C ..., each contestant with new processes every time, so that a slow minute of the
machine hits all. Ratios are taken within a round; reported is their median, with the least and the greatest.

Usage: python recipes/measurements/side_by_side.py                      5 rounds of 5 minutes on two idle cores, 3 GB
       python recipes/measurements/side_by_side.py --micro-batches 4 --only ScheduleGPipe gpipe-never --rounds 9
"""

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import math
import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from itertools import accumulate, product
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional as F

from gpipe_cli.assembly.loss import CrossEntropy
from gpipe_cli.assembly.optimizer import build_optimizer, set_learning_rate
from gpipe_cli.config.groups import RMSPropConfig
from gpipe_cli.config.settings import load_hardware
from gpipe_cli.data.micro_batches import micro_batch_sizes
from gpipe_cli.distributed.process_groups import edge_links
from gpipe_cli.launch.worker import keep_freed_memory
from gpipe_cli.models.amoebanet import amoebanet
from gpipe_cli.pipeline.profile.tracing import trace_layers
from gpipe_cli.pipeline.runtime.boundary import Boundary, as_boundary, as_value
from gpipe_cli.pipeline.runtime.executor import Executor
from gpipe_cli.pipeline.runtime.p2p_transport import Boundaries, P2PTransport
from gpipe_cli.pipeline.runtime.randomness import materialize
from gpipe_cli.pipeline.runtime.stage import Stage
from gpipe_cli.pipeline.runtime.transport import LocalTransport, Transport
from gpipe_cli.pipeline.schedule import schedules
from gpipe_cli.pipeline.schedule.partitioner import check_balance, partition
from gpipe_cli.planner.device_rates import rates_of_sheet
from gpipe_cli.reporting.run.measurement import hardware, versions

CPU = torch.device("cpu")
CLASSES, SEED, LEARNING_RATE, WARM_UP, TIMEOUT_SECONDS = 10, 0, 1e-4, 2, 600
OPTIMIZER = RMSPropConfig(name="rmsprop", decay=0.9, momentum=0.9, epsilon=1.0, weight_decay=4e-5)


@dataclass(frozen=True)
class Contestant:
    """Who trains, and how. `micro_batches` is 1 for plain PyTorch, which knows none."""

    name: str
    recompute: str = "never"
    partitions: int = 2
    threads: int = 1
    channels_last: bool = False
    micro_batches: int = 1

    @property
    def engine(self) -> str:
        return self.name.split("-")[0]

    @property
    def processes(self) -> int:
        return 1 if self.engine == "torchgpipe" else self.partitions

    @property
    def memory_format(self) -> torch.memory_format:
        return torch.channels_last if self.channels_last else torch.contiguous_format

    def __str__(self) -> str:
        return f"{self.name}, M={self.micro_batches}"


PLAIN = (Contestant("plain-1", partitions=1), Contestant("plain-2", partitions=1, threads=2))
PIPELINES = (
    Contestant("torchgpipe-except_last", "except_last"),
    Contestant("torchgpipe-except_last-2", "except_last", threads=2),
    Contestant("torchgpipe-never"),
    Contestant("ScheduleGPipe"),
    Contestant("gpipe-never"),
    Contestant("gpipe-except_last", "except_last"),
    Contestant("gpipe-never-channels_last", channels_last=True),
    Contestant("gpipe-except_last-channels_last", "except_last", channels_last=True),
    Contestant("gpipe-K1", partitions=1),
)
# ours, the peer, and the least ratio aimed at; the last two compare what each does unless told otherwise
RATIOS = (
    ("gpipe-never", "ScheduleGPipe", 1.0),
    ("gpipe-except_last", "torchgpipe-except_last", 1.3),
    ("gpipe-never", "torchgpipe-never", 1.0),
    ("gpipe-never", "plain-1", 1.0),
    ("gpipe-never", "plain-2", 1.0),
    ("gpipe-except_last", "torchgpipe-except_last-2", None),
    ("gpipe-K1", "plain-1", None),
    ("gpipe-except_last-channels_last", "torchgpipe-except_last", None),
    ("gpipe-never-channels_last", "ScheduleGPipe", None),
)


@dataclass(frozen=True)
class Settings:
    """The same for all contestants. `balances` and `boundaries` by number of partitions."""

    normal_cells: int
    filters: int
    image_size: int
    batch_size: int
    steps: int
    allocator: str
    balances: dict[int, tuple[int, ...]] = field(default_factory=dict)
    boundaries: dict[int, tuple[Boundary, ...]] = field(default_factory=dict)

    def model(self) -> nn.Sequential:
        """On the meta device; without dropout, which every engine seeds in its own way."""
        with torch.device("meta"):
            return amoebanet(
                variant="d", normal_cells=self.normal_cells, filters=self.filters, image_size=self.image_size,
                num_classes=CLASSES, auxiliary_head=False, batch_norm_momentum=0.1, dropout=0.0,
            )  # fmt: skip

    def part(self, contestant: Contestant, process: int) -> nn.Sequential:
        """The real layers that live in this process: all of them if there is only one."""
        sizes = self.balances[contestant.processes]
        module = materialize(self.model(), sum(sizes[:process]), sizes[process], run_seed=SEED, device=CPU)
        return module.to(memory_format=contestant.memory_format).train()

    def data(self, contestant: Contestant) -> tuple[torch.Tensor, torch.Tensor]:
        """Images (N, 3, S, S) and classes (N,)."""
        generator = torch.Generator().manual_seed(SEED)
        images = torch.randn(self.batch_size, 3, self.image_size, self.image_size, generator=generator)
        targets = torch.randint(CLASSES, (self.batch_size,), generator=generator)
        return images.contiguous(memory_format=contestant.memory_format), targets


# --- the engines: each returns its layers and a step: forward and backward, which returns the loss where it is known

Step = Callable[[], float | None]


def in_one_process(contestant: Contestant, settings: Settings) -> tuple[nn.Module, Step]:
    """Plain PyTorch and torchgpipe."""
    model: nn.Module = settings.part(contestant, 0)
    if contestant.engine == "torchgpipe":
        from torchgpipe import GPipe

        model = GPipe(
            model, balance=list(settings.balances[contestant.partitions]), devices=["cpu"] * contestant.partitions,
            chunks=contestant.micro_batches, checkpoint=contestant.recompute,
        )  # fmt: skip
    images, targets = settings.data(contestant)

    def step() -> float:
        loss = F.cross_entropy(model(images), targets)
        loss.backward()
        return loss.item()

    return model, step


class Positional(nn.Module):
    """torch's stages pass tensors as separate arguments; our layers take one tensor or one tuple."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.layers(as_value(tensors))


def schedule_gpipe(contestant: Contestant, settings: Settings, process: int) -> tuple[nn.Module, Step]:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    module = settings.part(contestant, process)
    images, targets = settings.data(contestant)
    stage = PipelineStage(Positional(module), process, contestant.partitions, CPU)

    def loss_of(logits: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits, classes, reduction="sum") / settings.batch_size

    runner = ScheduleGPipe(stage, contestant.micro_batches, loss_fn=loss_of, scale_grads=False)

    def step() -> float | None:
        losses: list[torch.Tensor] = []
        inputs = (images,) if process == 0 else ()
        if process < contestant.partitions - 1:
            runner.step(*inputs)
            return None
        runner.step(*inputs, target=targets, losses=losses)
        return float(sum(loss.item() for loss in losses))

    return module, step


def ours(contestant: Contestant, settings: Settings, process: int) -> tuple[nn.Module, Step]:
    """As `training/engine.py` and `training/step.py` put it together."""
    partitions, memory_format = contestant.partitions, contestant.memory_format
    boundaries = settings.boundaries[partitions]
    module = settings.part(contestant, process)
    transport: Transport = LocalTransport([CPU])
    if partitions > 1:
        links = edge_links(process, range(partitions), CPU, timedelta(seconds=TIMEOUT_SECONDS))
        transport = P2PTransport(
            process, range(partitions), links, Boundaries(boundaries, boundaries), device=CPU,
            memory_format=memory_format, early=True, timeout_seconds=TIMEOUT_SECONDS,
            connect_seconds=TIMEOUT_SECONDS,
        )  # fmt: skip
    stage = Stage(
        process, module, first_layer=sum(settings.balances[partitions][:process]),
        inputs=boundaries[process - 1] if process else (), device=CPU, run_seed=SEED, memory_format=memory_format,
    )  # fmt: skip
    executor = Executor({process: stage}, range(partitions), transport)
    schedule = schedules.build("gpipe", partitions, contestant.micro_batches, contestant.recompute)
    sizes = micro_batch_sizes(settings.batch_size, contestant.micro_batches)
    images, targets = settings.data(contestant)
    numbers = iter(range(10**9))

    def step() -> float | None:
        objective = None
        if process == partitions - 1:
            objective = CrossEntropy(targets, sizes, label_smoothing=0.0, auxiliary_weight=0.0)
        executor.run(schedule, next(numbers), sizes, (images,) if process == 0 else None, objective)
        return None if objective is None else objective.totals().means[0]

    return module, step


# --- a round


@dataclass
class Measured:
    """What one process of one contestant reports of one round."""

    seconds: float
    losses: list[float]
    gradient_squares: list[float]  # of the warm-up steps: the sum over this process's parameters
    memory_bytes: int


def compete(contestant: Contestant, settings: Settings, process: int, meeting: str, connection: Connection) -> None:
    """All that one process of one contestant does in one round."""
    try:
        connection.send(measure(contestant, settings, process, meeting))
    except Exception as error:
        connection.send(f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
    connection.close()
    os._exit(0)  # threads of a process group or a worker pool may never end


def measure(contestant: Contestant, settings: Settings, process: int, meeting: str) -> Measured:
    torch.set_num_threads(contestant.threads)
    if settings.allocator == "same" or contestant.engine == "gpipe":
        keep_freed_memory()
    if contestant.processes > 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform.startswith("linux") else "lo0"
        limit = datetime.timedelta(seconds=TIMEOUT_SECONDS)
        dist.init_process_group(
            "gloo", init_method=f"file://{meeting}", rank=process, world_size=contestant.processes, timeout=limit
        )
    match contestant.engine:
        case "gpipe":
            module, step = ours(contestant, settings, process)
        case "ScheduleGPipe":
            module, step = schedule_gpipe(contestant, settings, process)
        case _:
            module, step = in_one_process(contestant, settings)
    optimizer = build_optimizer(OPTIMIZER, dict(module.named_parameters()))
    assert optimizer is not None
    set_learning_rate(optimizer, LEARNING_RATE)

    def train() -> float | None:
        loss = step()
        if len(squares) < WARM_UP:
            gradients = [p.grad.double() for p in module.parameters() if p.grad is not None]
            squares.append(float(sum(gradient.square().sum() for gradient in gradients)))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    squares: list[float] = []
    losses = [train() for _ in range(WARM_UP)]
    if contestant.processes > 1:
        dist.barrier()
    start = time.perf_counter()
    losses += [train() for _ in range(settings.steps)]
    seconds = time.perf_counter() - start
    if contestant.processes > 1:
        dist.barrier()  # what the last step sent has arrived before this process ends
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return Measured(seconds, [loss for loss in losses if loss is not None], squares, memory)


def hold(contestant: Contestant, settings: Settings) -> list[Measured]:
    """One round of one contestant, in processes that end with it. Raises RuntimeError with what went wrong there."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.pipelining", "gpipe_cli.launch.worker"])
    workers, connections = [], list[Connection]()
    answers: dict[int, Measured] = {}
    with tempfile.TemporaryDirectory(prefix="side_by_side_") as folder:
        try:
            for process in range(contestant.processes):
                here, there = context.Pipe()
                arguments = (contestant, settings, process, f"{folder}/meeting", there)
                workers.append(context.Process(target=compete, args=arguments, daemon=True))
                workers[-1].start()
                there.close()
                connections.append(here)
            while len(answers) < len(connections):
                silent = [connection for number, connection in enumerate(connections) if number not in answers]
                ready = [
                    connection for connection in wait(silent, TIMEOUT_SECONDS) if isinstance(connection, Connection)
                ]
                if not ready:
                    raise RuntimeError(f"no answer in {TIMEOUT_SECONDS} seconds")
                for connection in ready:
                    answer = connection.recv()
                    if isinstance(answer, str):
                        raise RuntimeError(answer)
                    answers[connections.index(connection)] = answer
        except EOFError as error:
            raise RuntimeError("a process was killed; is there enough memory?") from error
        finally:
            for worker in workers:
                worker.kill()
                worker.join()
    return [answers[process] for process in range(contestant.processes)]


@dataclass
class Row:
    """One contestant over all rounds; a round that failed has no speed."""

    contestant: Contestant
    rounds: list[float | None] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    gradient_norms: list[float] = field(default_factory=list)
    memory_bytes: int = 0
    failure: str = ""

    def hold(self, settings: Settings) -> None:
        if self.failure:
            return
        try:
            measured = hold(self.contestant, settings)
        except RuntimeError as error:
            self.failure = str(error)
            self.rounds.append(None)
            return
        seconds = max(one.seconds for one in measured)
        self.rounds.append(settings.steps * settings.batch_size / seconds)
        self.losses = measured[-1].losses
        squares = zip(*(one.gradient_squares for one in measured), strict=True)
        self.gradient_norms = [math.sqrt(sum(parts)) for parts in squares]
        self.memory_bytes = max(self.memory_bytes, *(one.memory_bytes for one in measured))

    @property
    def speeds(self) -> list[float]:
        return [speed for speed in self.rounds if speed is not None]


# --- what came out


def compare(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The ratios of `RATIOS`, round by round, wherever both sides ran."""
    found = []
    for (name, peer_name, target), one, other in product(RATIOS, rows, rows):
        mine, peer = one.contestant, other.contestant
        same_m = peer.engine == "plain" or peer.micro_batches == mine.micro_batches
        if (mine.name, peer.name) == (name, peer_name) and same_m:
            ratios = [a / b for a, b in zip(one.rounds, other.rounds, strict=False) if a and b]
            if ratios:
                row = {"ours": name, "peer": peer_name, "micro_batches": mine.micro_batches, "target": target}
                found.append(row | {"median": statistics.median(ratios), "rounds": ratios})
    return found


def disagreements(rows: Sequence[Row], tolerance: float = 5e-3) -> list[str]:
    """Contestants with the same M must do the same work: the losses and gradient norms of the warm-up agree.

    The second step shows that the optimizers stepped alike and that old gradients were cleared. It is compared within a
    memory format only: the other one sums in another order (in float64 the gradients agree to 4e-14), and a network
    that has just begun to learn soon makes per cents of that.
    """
    first: dict[int, Row] = {}
    same_format: dict[tuple[int, bool], Row] = {}
    wrong = []
    for row in (row for row in rows if row.losses):
        who = row.contestant
        for other, steps in (
            (first.setdefault(who.micro_batches, row), 1),
            (same_format.setdefault((who.micro_batches, who.channels_last), row), WARM_UP),
        ):
            mine = (*row.losses[:steps], *row.gradient_norms[:steps])
            theirs = (*other.losses[:steps], *other.gradient_norms[:steps])
            if not all(math.isclose(a, b, rel_tol=tolerance) for a, b in zip(mine, theirs, strict=True)):
                wrong.append(f"losses and gradient norms of {who}: {mine}, of {other.contestant.name}: {theirs}")
    return wrong


def show(console: Console, rows: Sequence[Row], ratios: Sequence[dict[str, Any]]) -> None:
    speeds = Table("contestant", "M", "recompute", "layout", "processes x threads", box=box.MARKDOWN)
    for column in ("samples/s, median", "least", "greatest", "memory of a process"):
        speeds.add_column(column, justify="right")
    for row in rows:
        who = row.contestant
        layout = "channels last" if who.channels_last else "contiguous"
        cells = [who.name, str(who.micro_batches), who.recompute, layout, f"{who.processes} x {who.threads}"]
        if row.failure:
            cells.append("failed")
        elif row.speeds:
            cells += [f"{f(row.speeds):.2f}" for f in (statistics.median, min, max)]
            cells.append(f"{row.memory_bytes / 2**20:,.0f} MiB")
        speeds.add_row(*cells)
    console.print(speeds)
    for row in rows:
        if row.failure:
            console.print(f"{row.contestant}: {row.failure}", style="red", markup=False)
    if ratios:
        table = Table("ours", "peer", "M", "ours / peer, median", "least", "greatest", "aim", box=box.MARKDOWN)
        for ratio in ratios:
            numbers = (f"{n:.3f}" for n in (ratio["median"], min(ratio["rounds"]), max(ratio["rounds"])))
            aim = "" if ratio["target"] is None else f">= {ratio['target']}"
            table.add_row(ratio["ours"], ratio["peer"], str(ratio["micro_batches"]), *numbers, aim)
        console.print(table)


# --- the command line


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number}: must be 1 or more")
    return number


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=positive, default=5, help="how often every contestant runs (5)")
    parser.add_argument("--steps", type=positive, default=8, help=f"measured steps a round, after {WARM_UP} others (8)")
    parser.add_argument("--micro-batches", type=positive, nargs="+", default=[4, 8], metavar="M", help="(4 8)")
    names = [contestant.name for contestant in (*PLAIN, *PIPELINES)]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", default=names, help=", ".join(names))
    parser.add_argument("--allocator", choices=["same", "shipped"], default="same",
                        help="same: all keep freed memory | shipped: only gpipe-* do, as they come")  # fmt: skip
    parser.add_argument("--balance", type=positive, nargs=2, metavar="LAYERS",
                        help="the cut for K=2 (the best by the figures of hardware=cpu)")  # fmt: skip
    for option, default in (("normal-cells", 6), ("filters", 64), ("image-size", 128), ("batch-size", 32)):
        parser.add_argument(f"--{option}", type=positive, default=default, help=f"({default})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured there")
    options = parser.parse_args(arguments)
    if options.batch_size < max(options.micro_batches):
        parser.error(f"--micro-batches {max(options.micro_batches)}: at most the batch size, {options.batch_size}")
    return options


def prepare(options: argparse.Namespace) -> Settings:
    """Traces the model once, for all processes. Raises ValueError for a cut that does not fit."""
    settings = Settings(
        options.normal_cells, options.filters, options.image_size, options.batch_size, options.steps, options.allocator
    )
    image = torch.empty(1, 3, options.image_size, options.image_size, device="meta")
    layers = trace_layers(settings.model(), as_boundary((image,)), training=True)
    # As gpipe cuts by default: seconds from FLOPs, and from bytes moved, those of the weights among them.
    rates, samples = rates_of_sheet(load_hardware("cpu"), threads=1), options.batch_size / options.micro_batches[0]
    seconds = [
        rates.graph.seconds(one.forward, samples) + rates.backward.seconds(one.backward, samples) for one in layers
    ]
    balance = tuple(options.balance or partition(seconds, 2))
    check_balance(balance, len(layers), 2)
    inner = tuple(layers[end - 1].outputs for end in list(accumulate(balance))[:-1])
    return replace(settings, balances={1: (len(layers),), 2: balance}, boundaries={1: (), 2: inner})


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    console = Console(width=160)
    rows = [
        Row(replace(contestant, micro_batches=m))
        for m, group in [(1, PLAIN), *((m, PIPELINES) for m in options.micro_batches)]
        for contestant in group
        if contestant.name in options.only
    ]
    with_peer = any(row.contestant.engine == "torchgpipe" for row in rows)
    try:
        if with_peer and importlib.util.find_spec("torchgpipe") is None:
            remedy = "pip install --no-deps torchgpipe==0.0.7, or choose others with --only"
            raise ValueError(f"torchgpipe is not installed; {remedy}")
        settings = prepare(options)
    except ValueError as error:
        print(f"side_by_side.py: {error}", file=sys.stderr)
        return 2
    machine = {**hardware((), 1), **versions(), "date": datetime.date.today().isoformat(), "load": os.getloadavg()[0]}
    if with_peer:
        machine["torchgpipe"] = importlib.metadata.version("torchgpipe")
    console.print(", ".join(f"{key} {value}" for key, value in machine.items()))
    console.print(
        f"AmoebaNet-D ({settings.normal_cells}, {settings.filters}), {settings.image_size} pixels, batch "
        f"{settings.batch_size}, cut {settings.balances[2]}, allocator {settings.allocator}, "
        f"{options.rounds} rounds of {settings.steps} steps"
    )
    with console.status("") as status:
        for number, row in product(range(options.rounds), rows):
            status.update(f"round {number + 1}: {row.contestant}")
            row.hold(settings)
    ratios, wrong = compare(rows), disagreements(rows)
    show(console, rows, ratios)
    for line in wrong:
        console.print(f"not the same work: {line}", style="red")
    if options.json:
        shown = {key: value for key, value in asdict(settings).items() if key != "boundaries"}
        measured = {"machine": machine, "settings": shown, "rows": [asdict(row) for row in rows], "ratios": ratios}
        options.json.write_text(json.dumps(measured, indent=2) + "\n", encoding="utf-8")
    return 1 if wrong or any(row.failure for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
