"""A program as a user writes it, for the tests of `Pipeline`: alone, or as one of the processes of torchrun.

    python library_runs.py FOLDER CASES

trains once for each of the cases, a list of arguments of `train` in JSON, and writes FOLDER/PROCESS.pt: for each, what
`train` returns, then what `refusals` does; and FOLDER/closed_PROCESS.json: what `after_closed` returns. Then process 0
fails in another training.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from gpipe_cli import Pipeline
from gpipe_cli.data.micro_batches import shard_of
from gpipe_cli.errors import InputError
from gpipe_cli.models.skips import Pop, Stash

SAMPLES = (13, 10, 7)  # of mini-batches: uneven micro-batches, and fewer than M


class Fork(nn.Module):
    """Tokens (N, T) to (features, the same features, a mask without gradient)."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        features = self.embedding(tokens)
        return features, features, tokens > 0


class Block(nn.Module):
    """Normalizes, draws dropout, and hands its input on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.2)

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        x, skip, mask = inputs
        y = self.norm(self.linear(x).transpose(1, 2)).transpose(1, 2)
        return self.dropout(y.tanh()) + skip, x, mask


class Head(nn.Module):
    """Logits (N, 3) from what the mask keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 3)

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        x, skip, mask = inputs
        logits: torch.Tensor = self.linear(((x + skip) * mask[..., None]).mean(dim=1))
        return logits


def lively_layers() -> nn.Sequential:
    """Six layers with what makes cuts visible: dropout, batch norm, tensors handed over twice, one without gradient."""
    torch.manual_seed(0)
    return nn.Sequential(Fork(), Block(), Block(), Block(), Block(), Head())


def linked_layers() -> nn.Sequential:
    """The same with a weight of three blocks, and a skip over all of them."""
    fork, *blocks, head = lively_layers()
    for block in (blocks[1], blocks[3]):
        block.linear.weight = blocks[0].linear.weight
    return nn.Sequential(fork, Stash("all"), *blocks, Pop("all", joined), head)


def joined(x: torch.Tensor, skip: torch.Tensor, mask: torch.Tensor, *kept: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x + kept[0], skip + kept[1], mask


def mini_batch(step: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    samples = SAMPLES[step]
    return torch.randint(11, (samples, length), generator=generator), torch.randint(3, (samples,), generator=generator)


def train(
    lengths: tuple[int, ...] = (5, 5, 5),
    ends_only: bool = False,
    linked: bool = False,
    autocast: bool = False,
    **arguments: Any,
) -> dict[str, torch.Tensor]:
    """Three steps with a pipeline of these arguments, on sentences of these lengths; returns all that a user sees.
    `ends_only`: give inputs in the first process alone, and targets in the last. `linked`: with ties and a skip. Each
    of several replicas is given its share of the samples. `autocast`: inside torch.autocast in bfloat16."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    example = None if "balance" in arguments else mini_batch(0, lengths[0])[0]
    pipeline = Pipeline(linked_layers() if linked else lively_layers(), example, **{"micro_batches": 4} | arguments)
    optimizer = torch.optim.Adam(pipeline.parameters(), lr=0.01)
    found: dict[str, torch.Tensor] = {}
    for step, length in enumerate(lengths):
        inputs, targets = mini_batch(step, length)
        if (replicas := arguments.get("replicas", 1)) > 1:
            samples = shard_of(len(targets), 4, replicas, rank * replicas // world).samples
            inputs, targets = inputs[samples], targets[samples]
        of_first = inputs if rank == 0 or not ends_only else None
        of_last = targets if rank == world - 1 or not ends_only else None
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found[f"loss {step}"] = pipeline.step(of_first, of_last, F.cross_entropy)
        for name, parameter in pipeline.named_parameters():
            assert parameter.grad is not None
            found[f"gradient {step} {name}"] = parameter.grad.clone()
        found[f"norm {step}"] = pipeline.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    found |= {f"final {name}": tensor for name, tensor in pipeline.state_dict().items()}
    pipeline.eval()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        outputs = pipeline(mini_batch(0, lengths[0])[0])
    if "replicas" in arguments:
        return found | {"outputs": outputs}
    assert (outputs is None) == (rank != (0 if arguments.get("schedule") == "zbv" else world - 1))  # of the last stage
    return found if outputs is None else found | {"outputs": outputs}


class HalvesAdded(nn.Module):
    """Of N samples, N / 2: of 3 it makes 2, as of 4."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2)
        return first + second


def refusals() -> list[str]:
    """What two replicas are told whose weights differ, or whose layers change buffers by their own samples."""
    rank = int(os.environ["RANK"])
    told = []
    for layer in (lambda: nn.Linear(4, 4), lambda: nn.InstanceNorm1d(4, affine=True, track_running_stats=True)):
        torch.manual_seed(rank)
        pipeline = Pipeline([layer()], torch.zeros(8, 4, 4), partitions=1, micro_batches=2, replicas=2)
        try:
            pipeline.step(torch.randn(8, 4, 4), torch.zeros(8), lambda x, _: x.sum())
        except InputError as error:
            told.append(str(error))
    return told


def after_closed() -> list[tuple[int, int, int]]:
    """The descriptors, threads and process groups of this process before several pipelines are made, and after each is
    closed."""

    def counted() -> tuple[int, int, int]:
        groups = len(dist.distributed_c10d._world.pg_map)
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), groups

    example, targets = mini_batch(0, 5)
    counts = [counted()]
    for _ in range(3):
        with Pipeline(linked_layers(), example, partitions=4, micro_batches=4, schedule="interleaved") as pipeline:
            pipeline.step(example, targets, F.cross_entropy)
        until = time.monotonic() + 10
        while counted() > counts[0] and time.monotonic() < until:
            time.sleep(0.01)  # threads take a moment to end
        counts.append(counted())
    return counts


def fail() -> None:
    """Process 1 once took what it was sent for another tensor."""
    layers = [nn.Linear(4, 4), HalvesAdded(), nn.Linear(4, 4)]
    pipeline = Pipeline(layers, torch.zeros(8, 4), partitions=2, micro_batches=2, balance=[2, 1])
    pipeline.step(torch.ones(8, 4), torch.ones(8), lambda x, _: x.sum())


if __name__ == "__main__":
    torch.set_num_threads(1)
    results = [train(**case) for case in json.loads(sys.argv[2])]
    torch.save([*results, refusals()], Path(sys.argv[1]) / f"{os.environ.get('RANK', '0')}.pt")
    (Path(sys.argv[1]) / f"closed_{os.environ['RANK']}.json").write_text(json.dumps(after_closed()))
    fail()
