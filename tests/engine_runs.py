"""Small pipelined trainings, in this process or in one process per stage, for the tests of the laws.

One pool of processes serves every case: a case of K stages uses the first K of them.
"""

import datetime
import itertools
import multiprocessing
import random
import tempfile
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tape import TapeMaker
from torch import nn
from torch.nn import functional as F

from gpipe_cli.data.micro_batches import micro_batch_sizes
from gpipe_cli.distributed.process_groups import edge_links, new_group
from gpipe_cli.models.skips import Pop, SkipSequential, Stash
from gpipe_cli.pipeline.profile.layer_cost import LayerCost
from gpipe_cli.pipeline.profile.tracing import trace_layers
from gpipe_cli.pipeline.runtime.boundary import Tensors, as_boundary
from gpipe_cli.pipeline.runtime.executor import Executor
from gpipe_cli.pipeline.runtime.frozen import Frozen, freeze
from gpipe_cli.pipeline.runtime.initial_weights import materialize
from gpipe_cli.pipeline.runtime.link import Edge, GroupLink, Links
from gpipe_cli.pipeline.runtime.p2p_transport import P2PTransport
from gpipe_cli.pipeline.runtime.routes import Boundaries, inputs_of, routes
from gpipe_cli.pipeline.runtime.stage import Stage
from gpipe_cli.pipeline.runtime.tied_weights import (
    Group,
    TiedWeights,
    canonical_names,
    find_ties,
    share_memory,
    stages_of,
    trained_parameters,
)
from gpipe_cli.pipeline.runtime.transport import LocalTransport
from gpipe_cli.schedule.named_schedules import build, forward_only
from gpipe_cli.schedule.schedule import Schedule
from gpipe_cli.system.cuda_graphs import CudaGraphCapturer

CLASSES, SIZE = 5, 8
CPU = torch.device("cpu")
NOTHING_FROZEN = Frozen()


class Spread(nn.Module):
    """Images to (features, the very same features, a mask of integers): a tensor handed over twice, and one without
    gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)

    def forward(self, images: torch.Tensor) -> Tensors:
        x = self.norm(self.convolution(images))
        return x, x, (images.sum(dim=(1, 2, 3)) > 0).long()


class Mix(nn.Module):
    """Uses both feature maps several times, drops some, hands its input on untouched, as an AmoebaNet cell does."""

    def __init__(self, first: int, second: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.left = nn.Conv2d(first, out, 1, bias=False)
        self.right = nn.Conv2d(second, out, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(out, momentum=0.3)
        self.dropout = nn.Dropout(0.3)

    def forward(self, inputs: Tensors) -> Tensors:
        x, skip, mask = inputs
        y = self.norm(self.left(F.relu(x))) + self.right(skip) + self.right(F.relu(skip)) + self.left(x)
        return self.dropout(torch.cat([y, y.relu()], dim=1)), x, mask


class Head(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.logits = nn.Linear(channels, CLASSES)

    def forward(self, inputs: Tensors) -> torch.Tensor:
        x, _, mask = inputs
        return self.logits(x.mean(dim=(2, 3))) * (1.0 + mask[:, None])


def tricky_model() -> nn.Sequential:
    """Six layers on the meta device with all that makes partitions visible in a naive engine."""
    with torch.device("meta"):
        return nn.Sequential(
            OrderedDict(
                spread=Spread(), a=Mix(8, 8, 6), b=Mix(12, 8, 8), c=Mix(16, 12, 4), d=Mix(8, 16, 4), head=Head(8)
            )
        )


def plain_model() -> nn.Sequential:
    """Without batch norm and dropout: the number of micro-batches may change only the order of sums."""
    with torch.device("meta"):
        return nn.Sequential(
            nn.Conv2d(3, 6, 3), nn.Tanh(), nn.Conv2d(6, 6, 3), nn.Flatten(), nn.Linear(96, CLASSES)
        )  # fmt: skip


class Turn(nn.Module):
    """Adds a convolution of its input, and drops some."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, channels, 1, bias=False)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.convolution(x.relu()))


def tied_model() -> nn.Sequential:
    """Six layers, of which three have the same weight."""
    with torch.device("meta"):
        layers = [Turn(3) for _ in range(4)]
        for layer in (layers[2], layers[3]):
            layer.convolution.weight = layers[0].convolution.weight
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(3 * SIZE * SIZE, CLASSES))


class Twice(nn.Module):
    """A feature map, and twice the same with a mask of integers: skips of several tensors, one without gradient."""

    def forward(self, x: torch.Tensor) -> Tensors:
        return x, x, (x.sum(dim=(1, 2, 3)) > 0).long()


class Once(nn.Module):
    def forward(self, inputs: Tensors) -> torch.Tensor:
        x, y, mask = inputs
        return x + 2 * y * (1.0 + mask[:, None, None, None])


def joined(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x * (1.0 + mask[:, None, None, None]) + y - z


def skipping_layers() -> nn.Sequential:
    """Skips of all kinds: over each other, next to each other, of the images, of the same tensor, of several."""
    layers: dict[str, nn.Module] = {
        "images": Stash("images"), "stem": nn.Conv2d(3, 6, 3, padding=1), "norm": nn.BatchNorm2d(6, momentum=0.3),
        "first": Stash("first"), "same": Stash("same"), "a": Turn(6), "twice": Twice(), "several": Stash("several"),
        "once": Once(), "b": Turn(6), "cat": Pop("first"), "c": nn.Conv2d(12, 6, 1, bias=False),
        "near": Stash("near"), "d": Turn(6), "add": Pop("near", "add"), "join": Pop("several", joined),
        "plus": Pop("same", "add"), "e": nn.Conv2d(6, 3, 1), "end": Pop("images", "add"), "flat": nn.Flatten(),
        "head": nn.Linear(3 * SIZE * SIZE, CLASSES),
    }  # fmt: skip
    return SkipSequential(OrderedDict(layers))


def skipping_model() -> nn.Sequential:
    with torch.device("meta"):
        return skipping_layers()


MODELS = {"tricky": tricky_model, "plain": plain_model, "tied": tied_model, "skipping": skipping_model}


@dataclass(frozen=True)
class Case:
    """What to train: two steps of plain gradient descent on random images."""

    model: str = "tricky"
    partitions: int = 1
    micro_batches: int = 4
    schedule: str = "gpipe"
    recompute: str = "never"
    stages_per_process: int = 1  # where all processes can have as many
    samples: tuple[int, ...] = (10, 7)
    channels_last: bool = False
    balance: tuple[int, ...] | None = None
    frozen: Frozen = NOTHING_FROZEN
    device: str = "cpu"
    bfloat16: bool = False
    graphs: bool = False  # actions are replayed wherever they can be

    @property
    def processes(self) -> int:
        return self.partitions // (self.stages_per_process if self.partitions % self.stages_per_process == 0 else 1)

    @property
    def rank_of_stage(self) -> tuple[int, ...]:
        """The process of each stage; a process has stages that are not neighbours."""
        return tuple(stage % self.processes for stage in range(self.partitions))


@dataclass
class CrossEntropy:
    """Sum over the micro-batch's elements divided by the mini-batch's denominator."""

    targets: tuple[torch.Tensor, ...]
    denominator: int
    losses: dict[int, torch.Tensor] = field(default_factory=dict)

    def loss(self, micro_batch: int, outputs: Tensors) -> torch.Tensor:
        return F.cross_entropy(outputs[0], self.targets[micro_batch], reduction="sum") / self.denominator

    def observe(self, micro_batch: int, outputs: Tensors, loss: torch.Tensor) -> None:
        assert micro_batch not in self.losses, "observed twice"
        self.losses[micro_batch] = loss.clone()


class SumOfSquares:
    """An objective that needs no targets."""

    def loss(self, micro_batch: int, outputs: Tensors) -> torch.Tensor:
        return outputs[0].square().sum()

    def observe(self, micro_batch: int, outputs: Tensors, loss: torch.Tensor) -> None:
        pass


def data(case: Case, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    samples = case.samples[step]
    images = torch.randn(samples, 3, SIZE, SIZE, generator=generator)
    return images.to(case.device), torch.randint(CLASSES, (samples,), generator=generator).to(case.device)


def build_stages(
    model: nn.Sequential,
    costs: Sequence[LayerCost],
    balance: Sequence[int],
    *,
    here: Sequence[int],
    device: torch.device = CPU,
    frozen: Frozen = NOTHING_FROZEN,
    memory_format: torch.memory_format = torch.contiguous_format,
    **settings: Any,
) -> dict[int, Stage]:
    """The stages numbered `here` of a model on the meta device, in training mode, with weights from seed 7; `settings`
    are those of a stage."""
    starts, ties = [0, *accumulate(balance)], find_ties(model)
    stages = {}
    for k in here:
        module = materialize(model, starts[k], balance[k], run_seed=7, ties=ties)
        module.to(device).to(memory_format=memory_format)
        freeze(module, frozen)
        share_memory(module, ties)
        stages[k] = Stage(
            k, module, first_layer=starts[k], inputs=inputs_of([costs[at - 1].outputs for at in starts[1:-1]], k),
            device=device, run_seed=7, memory_format=memory_format, **settings,
        )  # fmt: skip
        stages[k].set_training(True)
    return stages


def local_transport(stages: Mapping[int, Stage]) -> LocalTransport:
    """Between all stages of a model without skips, in this process."""
    crossing = [stages[k].inputs for k in range(1, len(stages))]
    return LocalTransport([stages[k].device for k in range(len(stages))], Boundaries(crossing, crossing))


@cache
def costs_of(model: str, frozen: Frozen, bfloat16: bool = False) -> tuple[LayerCost, ...]:
    described = MODELS[model]()
    freeze(described, frozen)
    return trace_layers(
        described,
        as_boundary((torch.empty(1, 3, SIZE, SIZE),)),
        training=True,
        autocast_dtype=torch.bfloat16 if bfloat16 else None,
    )


def train(case: Case, here: Sequence[int], links: dict[Edge, GroupLink] | None) -> dict[str, torch.Tensor]:
    """Run the case on the stages `here`; returns losses, the gradients that there are, the final state by global name,
    and the losses of an evaluation."""
    model, costs = MODELS[case.model](), costs_of(case.model, case.frozen, case.bfloat16)
    balance = case.balance or micro_batch_sizes(len(model), case.partitions)  # as even as can be
    memory_format = torch.channels_last if case.channels_last else torch.contiguous_format
    device, ties = torch.device(case.device), find_ties(model)
    stages = build_stages(
        model, costs, balance, here=here, device=device, memory_format=memory_format, frozen=case.frozen,
        autocast_dtype=torch.bfloat16 if case.bfloat16 else None,
    )  # fmt: skip
    crossing = [costs[end - 1].outputs for end in accumulate(balance[:-1])]
    boundaries = Boundaries(crossing, crossing, memory_format)
    transport: Any = LocalTransport([device] * case.partitions, boundaries)
    if links is not None:
        ends = {(route.sender, route.receiver) for route in routes(crossing)}
        used = {edge: link for edge, link in links.items() if edge[1:] in ends or edge[:0:-1] in ends}
        transport = P2PTransport(
            case.rank_of_stage[here[0]], case.rank_of_stage, Links(used, 60, 60), boundaries, device
        )
    for stage in stages.values():  # the reference, which recomputes nothing, does not count
        stage.counter.on = case.recompute != "never"
        if case.graphs:
            stage.use_cuda_graphs(CudaGraphCapturer(device) if device.type == "cuda" else TapeMaker())
            assert stage.cuda_graphs is not None
            stage.cuda_graphs.capture_eagerly = True
    executor = Executor(stages, case.rank_of_stage, transport)
    layers = iter(dict(model.named_children()))
    tied = TiedWeights(
        ties,
        stages_of(ties, [[*itertools.islice(layers, size)] for size in balance]),
        stages,
        0 if links is None else case.rank_of_stage[here[0]],
        [0] * case.partitions if links is None else case.rank_of_stage,
        GROUPS,
    )
    results: dict[str, torch.Tensor] = {}

    def run(step: int, order: Schedule, sizes: Sequence[int], images: torch.Tensor, targets: Any) -> Any:
        objective = CrossEntropy(targets.split(sizes), len(targets))
        inputs = (images.contiguous(memory_format=memory_format),) if 0 in stages else None
        executor.run(order, step, sizes, inputs, objective if case.partitions - 1 in stages else None)
        return objective.losses.items()

    for step, samples in enumerate(case.samples):
        sizes = micro_batch_sizes(samples, case.micro_batches)
        order = build(case.schedule, case.partitions, len(sizes), case.recompute, case.processes)
        results |= {f"loss {step} {m}": loss.cpu() for m, loss in run(step, order, sizes, *data(case, step))}
        tied.sum_gradients()
        for stage in stages.values():
            for name, parameter in trained_parameters(stage.module, ties).items():
                assert (parameter.grad is not None) == parameter.requires_grad, name
                if parameter.grad is not None:
                    gradient = parameter.grad.clone().cpu()
                    assert torch.equal(results.setdefault(f"gradient {step} {name}", gradient), gradient), name
                    with torch.no_grad():
                        parameter -= 0.1 * parameter.grad
                    parameter.grad = None
    for stage in stages.values():
        stage.set_training(False)
        state = stage.module.state_dict().items()
        results |= {f"final {canonical_names(ties).get(name, name)}": value.clone().cpu() for name, value in state}
    sizes = micro_batch_sizes(case.samples[0], case.micro_batches)
    order = forward_only(case.partitions, len(sizes))
    results |= {f"evaluated {m}": loss.cpu() for m, loss in run(99, order, sizes, *data(case, 0))}
    executor.drain_sends()
    for stage in stages.values():
        if stage.cuda_graphs is not None:
            assert not stage.cuda_graphs._failures, stage.cuda_graphs.fallback_reason
            assert not stage.cuda_graphs.fallback_reason, stage.cuda_graphs.fallback_reason
            assert stage.cuda_graphs.captures, "nothing was replayed"
    return results


LINKS: dict[int, dict[Edge, GroupLink]] = {}  # of a process of the pool, by the number of processes that take part
GROUPS: dict[Group, dist.ProcessGroup] = {}  # of every few processes of the pool, for tied weights


def join(rank: int, processes: int, meet: str) -> None:
    """Makes this process number `rank` of the pool."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=processes)
    for used in range(2, processes + 1):  # with a stage each, or as many as there are with two in a process
        rank_of_stage = [stage % used for stage in range(processes)]
        pairs = [*itertools.combinations(range(processes), 2)]
        LINKS[used] = edge_links(rank, rank_of_stage, pairs, CPU, datetime.timedelta(seconds=60))
        for members in itertools.combinations(range(processes), used):
            if (group := new_group(rank, members, CPU, datetime.timedelta(seconds=60))) is not None:
                GROUPS[members] = group


def train_as(rank: int, case: Case) -> dict[str, np.ndarray[Any, Any]]:
    """What `train` returns on the stages of process `rank`, as numbers that need no shared memory."""
    here = [stage for stage, owner in enumerate(case.rank_of_stage) if owner == rank]
    links = {edge: link for edge, link in LINKS.get(case.processes, {}).items() if max(edge[1:]) < case.partitions}
    results = train(case, here, links)
    return {name: (value.float() if value.is_floating_point() else value).numpy() for name, value in results.items()}


class Pool:
    """Processes joined by Gloo on the loopback device."""

    def __init__(self, processes: int) -> None:
        context = multiprocessing.get_context("forkserver")
        # what takes long to import: the package, and what its first trace imports
        context.set_forkserver_preload(["torch._dynamo", *(one.__module__ for one in (P2PTransport, Executor, train))])
        self.folder = tempfile.TemporaryDirectory()
        meet = f"{self.folder.name}/meet"
        self.processes = [ProcessPoolExecutor(1, context, join, (rank, processes, meet)) for rank in range(processes)]
        for process in self.processes:
            process.submit(int)  # all of them meet now

    def run(self, case: Case) -> dict[str, torch.Tensor]:
        answers = [self.processes[rank].submit(train_as, rank, case) for rank in range(case.processes)]
        found: dict[str, torch.Tensor] = {}
        for answer in answers:
            for name, value in answer.result(60).items():
                tensor = torch.from_numpy(value)
                assert torch.equal(found.setdefault(name, tensor), tensor), f"processes have different {name}"
        return found

    def close(self) -> None:
        for process in self.processes:
            process.shutdown()
        self.folder.cleanup()


def run_in_process(case: Case) -> dict[str, torch.Tensor]:
    return train(case, range(case.partitions), None)


def covering(**factors: Sequence[Any]) -> list[dict[str, Any]]:
    """Few combinations, in which any two values of any two factors occur together: a covering array of strength two."""
    choose = random.Random(0)
    pairs = {
        ((one, a), (other, b))
        for one, other in itertools.combinations(factors, 2)
        for a, b in itertools.product(factors[one], factors[other])
    }

    def covered(row: Mapping[str, Any]) -> set[Any]:
        return pairs.intersection(itertools.combinations(row.items(), 2))

    rows = []
    while pairs:
        tried = [{name: choose.choice(values) for name, values in factors.items()} for _ in range(200)]
        rows.append(max(tried, key=lambda row: len(covered(row))))
        pairs -= covered(rows[-1])
    return rows
