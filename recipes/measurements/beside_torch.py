"""gpipe beside torch.distributed.pipelining and plain PyTorch: the same gradients, and the speed of each, on CPU cores.

**Schedules as files.** `gpipe plan write_schedule=FILE` writes a schedule that torch's `_PipelineScheduleRuntime`
reads, and torch's own schedules write files that `gpipe train schedule=FILE` reads. Either way the same layers with the
same weights take one step on the same mini-batch in two processes. The gradients of all parameters are compared:
torch's `.grad`, and the momentum that one step of SGD leaves in gpipe's checkpoint. The program fails if they differ by
more than the order of sums can explain (relative 1e-4).

**Speed** of AmoebaNet-D (6, 64), 128 pixels, batch 32, float32, K = 2, one thread for each process. All contestants
train the same model from the same initial weights on the same mini-batches, which they load themselves, with gpipe's
cut. They take turns, with new processes in every round, so that a slow minute of the machine hits all of them; ratios
are taken within a round. gpipe runs as `gpipe bench`, whose steps, unlike the others', include metrics and recordings.
torch's stages send contiguous tensors only: with memory_format=channels_last both ends of a boundary convert images.

Usage: python recipes/measurements/beside_torch.py [setting=value ...] [--schedules NAME ...] [--against NAME ...]
       on 2 idle cores half a minute for each file, 4 minutes for each round
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from runs import AMOEBANET, command_line, config_of, gpipe, same_tensors
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules
from torch.nn import functional as F

from gpipe_cli.assembly.build import MEMORY_FORMATS, build_model, open_data
from gpipe_cli.assembly.learning_rate import learning_rate
from gpipe_cli.assembly.optimizer import build_optimizer, set_learning_rate
from gpipe_cli.data.loading import LoadedBatches
from gpipe_cli.launch.worker import keep_freed_memory
from gpipe_cli.pipeline.runtime.boundary import as_value
from gpipe_cli.pipeline.runtime.initial_weights import materialize
from gpipe_cli.planner.pipeline_spec import make_pipeline_spec
from gpipe_cli.reproduction.consistency import last_tensors
from gpipe_cli.system.forked_call import Fork
from gpipe_cli.training.data_feed import MiniBatch, Reading, mini_batches

CPU, PROCESSES, WARM_UP, TOLERANCE = torch.device("cpu"), 2, 3, 1e-4
# Schedules whose files gpipe (OURS) or torch (THEIRS) writes, and their numbers of partitions.
OURS = {"gpipe": 2, "1f1b": 2, "zero_bubble": 2, "interleaved": 4, "auto": 4}
THEIRS = {"ScheduleInterleaved1F1B": 4, "ScheduleLoopedBFS": 4, "ScheduleInterleavedZeroBubble": 4}
COUNTERPART = {"ScheduleGPipe": "gpipe", "Schedule1F1B": "1f1b"}
PEERS = ("plain", *COUNTERPART)
# Settings that switch off what has no counterpart in torch.
COMMON = ["recompute=never", "threads=1", "hardware=cpu", "model.dropout=0", "label_smoothing=0", "ema_decay=0",
          "data_workers=0"]  # fmt: skip
ONE_STEP = ["micro_batches=4", "memory_format=contiguous", "optimizer=sgd", "optimizer.weight_decay=0", "max_steps=1"]


class Converted(torch.autograd.Function):
    """The tensor in one memory format, and its gradient in another."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, layout: torch.memory_format, back: torch.memory_format) -> torch.Tensor:
        ctx.back = back
        return tensor.contiguous(memory_format=layout)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0].contiguous(memory_format=ctx.back), None, None


class Positional(nn.Module):
    """Adapts our layers, which take a tensor or a tuple, to torch's stages, which pass separate contiguous tensors."""

    def __init__(self, layers: nn.Module, layout: torch.memory_format, last: bool) -> None:
        super().__init__()
        self.layers, self.layout, self.last = layers, layout, last

    def forward(self, *tensors: torch.Tensor) -> Any:
        sent = torch.contiguous_format
        if self.layout is sent:
            return self.layers(as_value(tensors))
        outputs = self.layers(as_value(tuple(Converted.apply(tensor, self.layout, sent) for tensor in tensors)))
        return outputs if self.last else tuple(Converted.apply(tensor, sent, self.layout) for tensor in outputs)


Trained = tuple[list[float], dict[str, Any]]  # the seconds of each step, the gradients of the last one in NumPy


def train_by_torch(
    name: str, file: Path | None, settings: Sequence[str], steps: int, threads: int, meeting: Path, process: int
) -> Trained:
    """Train as one process of a schedule of torch, of gpipe's in ``file``, or alone (`plain`: whole mini-batches).

    Process p runs the stages of row p of the schedule. A schedule of torch is first written to ``file``, if given.
    """
    config = config_of(settings)
    balance, samples, layout = config.partition.balance, config.batch_size, MEMORY_FORMATS[config.memory_format]
    assert isinstance(balance, tuple)
    assert samples is not None
    torch.set_num_threads(threads)
    keep_freed_memory()
    partitions = len(balance)
    here = range(process, partitions, PROCESSES) if name != "plain" else range(partitions)
    parts = {
        k: materialize(build_model(config), sum(balance[:k]), balance[k], run_seed=config.seed, device=CPU)
        .to(memory_format=layout).train()
        for k in here
    }  # fmt: skip
    named = {name: parameter for part in parts.values() for name, parameter in part.named_parameters()}

    def loss_of(logits: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits, classes, reduction="sum") / samples

    if name != "plain":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform.startswith("linux") else "lo0"
        dist.init_process_group("gloo", f"file://{meeting}", world_size=PROCESSES, rank=process)
        stages = [
            pipelining.PipelineStage(Positional(part, layout, k == partitions - 1), k, partitions, CPU)
            for k, part in parts.items()
        ]
        # the default reads its order from a file; torch's own schedules bring one
        kind: Any = getattr(schedules, name, schedules._PipelineScheduleRuntime)
        of_one = name in COUNTERPART  # a schedule of one stage for each process
        runner = kind(stages[0] if of_one else stages, config.micro_batches, loss_fn=loss_of, scale_grads=False)
        if name in OURS:
            runner._load_csv(str(file))
        elif file is not None and process == 0:
            runner._dump_csv(str(file), format="compute_only")
    optimizer = build_optimizer(config.optimizer, named)
    assert optimizer is not None

    split, _ = open_data(config)
    batches = mini_batches(config, split.catalogue, training=True)
    reading = Reading(split, batches, LoadedBatches(split, batches, 0, 0, steps, workers=0))
    ends = [time.perf_counter()]
    for step, (epoch, position) in enumerate(islice(batches.stream(0, 0, steps), steps)):
        mini_batch = MiniBatch(reading, epoch, position)
        (images,), targets = mini_batch.inputs() or (), mini_batch.targets()
        assert targets is not None
        if name == "plain":
            loss_of(parts[0](images.contiguous(memory_format=layout)), targets[0]).backward()
        else:
            last = {"target": targets[0]} if partitions - 1 in parts else {}
            runner.step(*((images,) if 0 in parts else ()), **last)
        # cloned, as the update may change them in place
        gradients = {name: one.grad.clone() for name, one in named.items() if one.grad is not None}
        set_learning_rate(optimizer, learning_rate(config.learning_rate, step, batches.steps_per_epoch, samples))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        ends.append(time.perf_counter())
    if name != "plain":
        dist.barrier()  # what the last step sent has arrived before this process ends
    return [after - before for before, after in pairwise(ends)], {n: g.numpy() for n, g in gradients.items()}


def balance_of(settings: Sequence[str]) -> str:
    layers = [len(names) for names in make_pipeline_spec(config_of(settings)).layer_names]
    return f"partition.balance={layers}".replace(" ", "")


def by_torch(
    name: str, file: Path | None, settings: Sequence[str], steps: int, folder: Path, threads: int = 1
) -> list[Trained]:
    work = partial(train_by_torch, name, file, settings, steps, threads, folder / f"{name}_{time.monotonic_ns()}")
    forks = [Fork(partial(work, process)) for process in range(1 if name == "plain" else PROCESSES)]
    parts = [fork.wait()[0] for fork in forks]
    if None in parts:
        raise SystemExit(f"{name} has failed")
    return [part for part in parts if part is not None]


def exchange(name: str, settings: Sequence[str], folder: Path) -> bool:
    """Run one schedule file by torch and by gpipe, and print a row; returns whether the gradients agree."""
    file, partitions = folder / f"{name}.csv", {**OURS, **THEIRS}[name]
    given = [*COMMON, *ONE_STEP, *settings, f"partitions={partitions}"]
    balance, _ = Fork(partial(balance_of, given)).wait()  # a process that has run a backward cannot be forked
    given.append(str(balance))
    if name in OURS:
        planned = [setting for setting in given if not setting.startswith("max_steps")]
        each = f"stages_per_process={partitions // PROCESSES}"
        gpipe("plan", *planned, each, f"schedule={name}", f"write_schedule={file}")
    parts = [gradients for _, gradients in by_torch(name, file, given, 1, folder)]
    theirs = {key: torch.from_numpy(value) for part in parts for key, value in part.items()}
    run = folder / name
    gpipe("train", *given, f"schedule={file}", run_folder=run)
    before, after = "optimizer/", "/momentum_buffer"
    ours = {key[len(before) : -len(after)]: value for key, value in last_tensors(run).items() if key.endswith(after)}
    same = same_tensors(theirs, ours)
    worst = max(float((gradient - ours[key]).norm() / ours[key].norm()) for key, gradient in theirs.items())
    actions = sum(bool(cell) for line in file.read_text(encoding="utf-8").split() for cell in line.split(","))
    agrees = len(theirs) == len(ours) > 0 and worst < TOLERANCE
    print(
        f"{'gpipe' if name in OURS else 'torch':<8}{name:<31}{partitions:>3}{actions:>9}{len(ours):>12}{same:>11}"
        f"{worst:>22.1e}  {'yes' if agrees else 'NO'}",
        flush=True,
    )
    return agrees


def compare_speeds(
    rounds: int, steps: int, micro_batches: int, against: Sequence[str], settings: Sequence[str], folder: Path
) -> None:
    """Print the samples/s of each contestant, and gpipe's speed relative to its counterpart's in the same round."""
    common = [*AMOEBANET[:-1], *COMMON, "memory_format=contiguous", *settings]
    pipelined = [*common, "partitions=2", f"micro_batches={micro_batches}"]
    whole = [*common, "partitions=1", "micro_batches=1"]
    cut, samples = str(Fork(partial(balance_of, pipelined)).wait()[0]), config_of(common).batch_size
    one_cut = str(Fork(partial(balance_of, whole)).wait()[0])
    assert samples is not None

    def bench(job: Sequence[str]) -> float:
        kept = {setting.partition("=")[0]: setting for setting in job}.values()
        return float(gpipe("bench", *kept, f"steps={steps}", f"warm_up_steps={WARM_UP}")["step_seconds"])

    def torch_seconds(name: str, job: Sequence[str], threads: int = 1) -> float:
        parts = by_torch(name, None, job, WARM_UP + steps, folder, threads)
        return median(max(each) for each in list(zip(*(seconds for seconds, _ in parts), strict=True))[WARM_UP:])

    contestants: dict[str, tuple[str, Callable[[], float]]] = {}
    if "plain" in against:
        contestants["plain PyTorch, 1 thread"] = "", partial(torch_seconds, "plain", [*whole, one_cut])
        contestants["gpipe, K = 1, M = 1"] = "plain PyTorch, 1 thread", partial(bench, whole)
        contestants["plain PyTorch, 2 threads"] = "", partial(torch_seconds, "plain", [*whole, one_cut], 2)
    for theirs in (name for name in against if name != "plain"):
        ours = COUNTERPART[theirs]
        contestants[theirs] = "", partial(torch_seconds, theirs, [*pipelined, cut])
        contestants[f"gpipe, {ours}"] = theirs, partial(bench, [*pipelined, cut, f"schedule={ours}"])
    taken: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, (_, measure) in contestants.items():
            taken[name].append(measure())
    print(f"\n{'M = ' + str(micro_batches):<28}samples/s  relative to     (least, greatest of {rounds} rounds)")
    for name, (peer, _) in contestants.items():
        ratios = [other / own for own, other in zip(taken[name], taken.get(peer, ()), strict=False)]
        beside = f"  {median(ratios):.2f} of {peer} ({min(ratios):.2f}, {max(ratios):.2f})" if ratios else ""
        print(f"{name:<28}{samples / median(taken[name]):>9.1f}{beside}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line(__doc__)
    every = [*OURS, *THEIRS]
    parser.add_argument("--schedules", nargs="*", choices=every, default=every, metavar="NAME", help=", ".join(every))
    parser.add_argument("--against", nargs="*", choices=PEERS, default=PEERS, help="whose speed is measured (all)")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[4, 8], metavar="M", help="for the speed (4 8)")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8, help=f"measured in each round, after {WARM_UP} others (8)")
    options = parser.parse_intermixed_args(arguments)
    print(f"torch {torch.__version__}; {PROCESSES} processes; load of the machine {os.getloadavg()[0]:.2f}")
    with tempfile.TemporaryDirectory() as folder:
        print("file of schedule                         K  actions   gradients  same bits   greatest difference")
        agree = [exchange(name, options.settings, Path(folder)) for name in options.schedules]
        for micro_batches in options.micro_batches if options.against else ():
            job = micro_batches, options.against, options.settings, Path(folder)
            compare_speeds(options.rounds, options.steps, *job)
    return 0 if all(agree) else 1


if __name__ == "__main__":
    sys.exit(main())
