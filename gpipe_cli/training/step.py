"""One training step and one pass over the test set, told once, for any number of processes.

Nothing here asks whether the run is distributed: what a process does not own it does not touch, and what it does not
know it gets from the team.
"""

import resource
import sys
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache

import torch

from gpipe_cli.config import TrainConfig
from gpipe_cli.pipeline.memory_layout import in_layout
from gpipe_cli.pipeline.micro_batch import Tensors, micro_batch_sizes
from gpipe_cli.pipeline.schedule import Schedule, build, check, forward_only
from gpipe_cli.training.engine import Engine
from gpipe_cli.training.inputs import Reading
from gpipe_cli.training.loss import CrossEntropy, Totals
from gpipe_cli.training.optimizer import gradients_of, set_learning_rate
from gpipe_cli.training.team import Gathered, Team, gradient_norm

# elements, loss, cross entropy, top-1, top-5; then the peak memory of each stage, and the norms of the parameters
_SUMS = 5


@lru_cache
def training_schedule(name: str, partitions: int, micro_batches: int, recompute: str) -> Schedule:
    """The checked schedule; a short last mini-batch may have fewer micro-batches, so there can be two in a run."""
    schedule = build(name, partitions, micro_batches, recompute)
    check(schedule)
    return schedule


@lru_cache
def evaluation_schedule(partitions: int, micro_batches: int) -> Schedule:
    return forward_only(partitions, micro_batches)


@dataclass(frozen=True)
class StepResult:
    """What is known of a step; the same in every process once `read` has been called."""

    partitions: int
    gathered: Gathered

    def read(self) -> tuple[Totals, float, list[int]]:
        """The sums over the mini-batch, the global gradient norm, and the peak memory of each stage in bytes."""
        parts = self.gathered.wait()
        # what a process does not know is zero in its vector: only the last stage has seen the loss
        known = torch.stack(parts)[:, : _SUMS + self.partitions].sum(dim=0).tolist()
        elements, loss, cross_entropy, top1, top5 = known[:_SUMS]
        norm = gradient_norm([part[_SUMS + self.partitions :] for part in parts])
        totals = Totals(int(elements), loss, cross_entropy, top1, top5)
        return totals, norm, [int(value) for value in known[_SUMS:]]


def train_step(
    config: TrainConfig,
    engine: Engine,
    team: Team,
    step: int,
    rate: float,
    data: Reading,
    epoch: int,
    position: int,
) -> StepResult:
    """Mini-batch `position` of `epoch`: forward and backward through the pipeline, then every stage's optimizer with
    learning rate `rate`."""
    sizes = micro_batch_sizes(data.batches.size(epoch, position), config.micro_batches)
    schedule = training_schedule(config.schedule, engine.layout.partitions, len(sizes), config.recompute)
    objective = _objective(config, engine, data, epoch, position, sizes, config.label_smoothing)
    lengths = data.batches.lengths(epoch, position)
    engine.executor.run(schedule, step, sizes, _placed(engine, data.inputs()), objective, lengths)

    partitions = engine.layout.partitions
    numbers = torch.zeros(_SUMS + partitions + engine.layout.most_parameter_tensors, dtype=torch.float64)
    if objective is not None:
        numbers[:_SUMS] = torch.tensor(astuple(objective.totals()), dtype=torch.float64)
    for k in engine.stages:
        numbers[_SUMS + k] = peak_memory_bytes(torch.device(engine.layout.devices[k]))
    gradients = [g for k in engine.stages for g in gradients_of(engine.parameters[k].values())]
    if gradients:
        norms = torch.cat(_stacked(torch._foreach_norm(gradients)))
        numbers[_SUMS + partitions : _SUMS + partitions + len(gradients)] = norms
    result = StepResult(partitions, team.gather(numbers))
    if config.gradient_clipping:
        _, norm, _ = result.read()
        if gradients and norm > config.gradient_clipping:
            torch._foreach_mul_(gradients, config.gradient_clipping / norm)
    for k, optimizer in engine.optimizers.items():
        if optimizer is not None:
            set_learning_rate(optimizer, rate)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if k in engine.averages:
            engine.averages[k].update()
    return result


def evaluate(config: TrainConfig, engine: Engine, team: Team, data: Reading) -> Totals:
    """Sums over the test set: forwards only, through the same executor. The loss is the plain cross entropy."""
    total = Totals(0, 0.0, 0.0, 0.0, 0.0)
    for position in range(data.batches.steps_per_epoch):
        sizes = micro_batch_sizes(data.batches.size(0, position), config.micro_batches)
        schedule = evaluation_schedule(engine.layout.partitions, len(sizes))
        objective = _objective(config, engine, data, 0, position, sizes, 0.0)
        lengths = data.batches.lengths(0, position)
        engine.executor.run(schedule, 0, sizes, _placed(engine, data.inputs()), objective, lengths)
        if objective is not None:
            total += objective.totals()
    numbers = torch.tensor(astuple(total), dtype=torch.float64)
    elements, *sums = torch.stack(team.gather(numbers).wait()).sum(dim=0).tolist()
    return Totals(int(elements), *sums)


def _objective(
    config: TrainConfig,
    engine: Engine,
    data: Reading,
    epoch: int,
    position: int,
    sizes: Sequence[int],
    label_smoothing: float,
) -> CrossEntropy | None:
    if not engine.has_last:
        return None
    targets = data.targets(epoch, position)
    assert targets is not None
    return CrossEntropy(
        targets,
        sizes,
        label_smoothing=label_smoothing,
        auxiliary_weight=getattr(config.model, "auxiliary_weight", 0.0),  # other models have no such head
        device=engine.last_device,
    )


def _placed(engine: Engine, inputs: Tensors | None) -> Tensors | None:
    if inputs is None:
        return None
    return tuple(
        in_layout(tensor.to(engine.first_device, non_blocking=True), engine.memory_format) for tensor in inputs
    )


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory a stage has needed so far: the allocator's peak on a GPU, the whole process's peak on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _stacked(norms: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Norms in float64 on the CPU, with one read per device instead of one per parameter."""
    by_device: list[list[torch.Tensor]] = []
    for norm in norms:
        if not by_device or by_device[-1][0].device != norm.device:
            by_device.append([])
        by_device[-1].append(norm)
    return [torch.stack(part).double().cpu() for part in by_device]
