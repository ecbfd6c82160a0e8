"""Where the model is cut into stages: before a step is simulated, as what stages hold does not depend on times."""

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from gpipe_cli.config.settings import TrainConfig
from gpipe_cli.data.micro_batches import shard_of
from gpipe_cli.models.transformer import SelfAttentionLayer
from gpipe_cli.planner.cost_model import StepCosts
from gpipe_cli.planner.model_profile import ModelProfile
from gpipe_cli.planner.process_layout import Layout
from gpipe_cli.planner.shared_layers import Shared, check_cut, ends_with_shared_layers_together
from gpipe_cli.planner.stage_memory import MemoryModel
from gpipe_cli.planner.step_schedule import mini_batch_samples, schedule_of_file
from gpipe_cli.schedule.lingvo_partitioner import cut_by_share, cut_stack
from gpipe_cli.schedule.named_schedules import AUTO_SCHEDULE, order
from gpipe_cli.schedule.partitioner import NoCutFitsError, check_balance, imbalance, partition
from gpipe_cli.schedule.schedule import Schedule, is_recomputing_mode


@dataclass(frozen=True)
class Cut:
    """The stages of a plan before a step is simulated: what they hold does not depend on how long they take. Sequences
    have an entry per stage."""

    config: TrainConfig
    profile: ModelProfile
    costs: StepCosts
    layout: Layout
    balance: tuple[int, ...]
    imbalance: float  # cost of the slowest stage over the mean, minus 1
    order: Schedule  # the actions of all M micro-batches, without recomputation
    sizes: tuple[int, ...]  # samples of the micro-batches, the largest first
    memory_model: MemoryModel

    @property
    def samples(self) -> int:
        """The number of samples in the largest micro-batch."""
        return self.sizes[0]

    @property
    def micro_batches(self) -> int:
        """M, the number of micro-batches of a step."""
        return len(self.sizes)

    @property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """The first layer of each stage and its end (exclusive)."""
        return bounds_of(self.balance)

    @property
    def device_of_stage(self) -> tuple[int, ...]:
        """The number of the device that each stage computes on."""
        return self.layout.device_of_stage

    def stages_with(self, layers: Collection[int]) -> tuple[int, ...]:
        """The stages that have any of these layers."""
        return tuple(k for k, (first, end) in enumerate(self.bounds) if any(first <= at < end for at in layers))


def bounds_of(balance: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The first layer of each stage and its end (exclusive)."""
    return tuple((end - size, end) for size, end in zip(balance, accumulate(balance), strict=True))


def best_cut(config: TrainConfig, profile: ModelProfile, costs: StepCosts, layout: Layout) -> Cut:
    """The best cut whose stages all stay below the layout's limit, or the best of all if there is none: it may still
    fit where stages share a device. No step is simulated.

    Raises InputError if the user's balance or file does not fit the model and the other settings, or if Lingvo's rule
    leaves a stage without layers.
    """
    sizes = shard_of(mini_batch_samples(config, profile.lengths), config.micro_batches, config.replicas).sizes
    memory = MemoryModel(config, profile, sizes)
    if config.schedule_is_file:
        schedule = schedule_of_file(config)
    else:  # auto: 1f1b until there are costs
        name = "1f1b" if config.schedule == AUTO_SCHEDULE else config.schedule
        schedule = order(name, config.partitions, config.micro_batches, 1 + max(layout.row_of_stage))
    work = work_of(costs, with_recompute=is_recomputing_mode(config.recompute))
    sends = sends_of(costs)
    balance = config.partition.balance
    if balance is None and config.partition.method == "lingvo":
        balance = _lingvo_cut(config, profile)
    elif balance is None:
        limits = [memory.furthest(schedule, limit) for limit in dict.fromkeys((layout.limit_bytes, None))]
        balance = balance_layers(work, config.partitions, profile.shared, limits, **sends)
    check_balance(balance, len(profile.costs), config.partitions)
    check_cut(profile.shared, balance)
    return Cut(
        config, profile, costs, layout, tuple(balance), imbalance(work, balance, **sends), schedule, sizes, memory
    )


def balance_layers(
    work: Sequence[float],
    partitions: int,
    shared: Sequence[Shared],
    limits: Iterable[Sequence[Sequence[int]] | None] = (None,),
    **sends: Any,
) -> tuple[int, ...]:
    """The numbers of layers with which the slowest partition is as fast as possible, where layers that share something
    stay together. `limits`: the first `furthest` of :func:`partition` that allows a cut counts; `sends` are its
    arguments of that name. If none allows one, shared layers are split, for which `check_cut` raises."""
    for furthest in limits:
        furthest = ends_with_shared_layers_together(shared, len(work), partitions, furthest)
        with suppress(NoCutFitsError):
            return partition(work, partitions, **sends, furthest=furthest)
    return partition(work, partitions, **sends)


def work_of(costs: StepCosts, *, with_recompute: bool) -> list[float]:
    """The seconds of each layer for a micro-batch; `with_recompute`: with recomputation."""
    return [
        cost.graph_seconds + cost.backward_seconds + (cost.forward_seconds if with_recompute else 0.0)
        for cost in costs.layers
    ]


def sends_of(costs: StepCosts) -> dict[str, Any]:
    """The arguments of `partition` for what is sent."""
    return {
        "forward_sends": [edge.forward_seconds for edge in costs.edges],
        "backward_sends": [edge.backward_seconds for edge in costs.edges],
        "skips": costs.skips,
    }


def _lingvo_cut(config: TrainConfig, profile: ModelProfile) -> tuple[int, ...]:
    """The cut by Lingvo's rule: by forward FLOPs or the user's costs; for Transformers by the number of layers.

    Raises InputError if a stage would have no layers.
    """
    blocks = [isinstance(layer, SelfAttentionLayer) for layer in profile.model]
    if any(blocks):
        return cut_stack(blocks, config.partitions)
    given = config.partition.costs or profile.custom_costs
    return cut_by_share(given or [cost.forward.flops for cost in profile.costs], config.partitions)
