"""The named schedules, GPipe's and its successors; each is an entry of `ORDERS`.

Stage 1 under `1f1b` and under `zero_bubble`, with K = 4 stages and M = 6 micro-batches, where F, I and W take one tick
and B takes two (a dot is an idle tick; `gpipe plan` draws any schedule):

    stage 1 | .  F0 F1 F2 .  .  .  .  B0 B0 F3 B1 B1 F4 B2 B2 F5 B3 B3 .  B4 B4 .  B5 B5
    stage 1 | .  F0 F1 F2 .  .  I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 I4 W3 I5 W4 W5
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from itertools import chain, pairwise, repeat

from gpipe_cli.schedule.placement import PlacementName, place
from gpipe_cli.schedule.schedule import Action, Kind, RecomputePlan, Schedule, actions, with_recomputation

Rows = Iterable[list[Action]]
PlaceActions = Callable[[int, int, int], Rows]  # (K partitions, M micro-batches, P devices) -> rows


def build(
    name: str, partitions: int, micro_batches: int, recompute: RecomputePlan, devices: int | None = None
) -> Schedule:
    """`order` with recomputation added. Raises what `order` and `with_recomputation` raise."""
    return with_recomputation(order(name, partitions, micro_batches, devices), recompute)


def order(name: str, partitions: int, micro_batches: int, devices: int | None = None) -> Schedule:
    """The training schedule called ``name``, without recomputation.

    ``gpipe``: all forwards, then all backwards from the last micro-batch to the first, as in Figure 2(c).

    The others are not in the paper. Their backwards run from micro-batch 0 to M - 1 on every stage, which fixes the
    order in which gradients are summed: all of them give bitwise equal gradients.

    ``1f1b``: each backward as early as possible, so that stage k has at most K - k micro-batches in flight. This is
    the synchronous form of PipeDream's schedule (Harlap et al. 2018): the step time of ``gpipe`` on stages of equal
    cost (with ``always`` or ``never``), with less memory.

    ``interleaved``: 1f1b with several stages on each of the P ``devices``, stage k on device k mod P (Megatron-LM,
    Narayanan et al. 2021, section 2.2): fills and drains faster, with more transfers and micro-batches in flight.

    ``zero_bubble``: ZB-H1 (Qi et al. 2023, section 2.2): 1f1b with the gradients of weights delayed to fill the
    bubble; at most K micro-batches in flight on every stage, as on the first stage of 1f1b.

    ``zbv``, ``v_half``, ``v_min``: split backwards on P = K / 2 devices in a V, the first of which has the first and
    the last stage (Qi et al. 2024); with the activations of 1f1b, half, and a third of them: `v_schedules.py`.

    Raises ValueError for an unknown name, and if `partitions` or `micro_batches` is below 1.
    """
    for setting, value in (("partitions", partitions), ("micro_batches", micro_batches)):
        if value < 1:
            raise ValueError(f"{setting}={value}: must be at least 1; use {setting}=1 to do without")
    if name not in ORDERS:
        raise ValueError(f"schedule={name}: unknown; use one of {', '.join(ORDERS)}")
    place_actions: PlaceActions = ORDERS[name].rows or import_module(f"gpipe_cli.schedule.{name}").rows
    return Schedule(map(tuple, place_actions(partitions, micro_batches, devices or ORDERS[name].devices(partitions))))


@lru_cache
def forward_only(partitions: int, micro_batches: int) -> Schedule:
    """The schedule of evaluation, which retains nothing. A replica without samples has no micro-batches."""
    return Schedule((tuple(_pass(Kind.F, k, micro_batches)) for k in range(partitions)), range(partitions))


def _pass(kind: Kind, stage: int, micro_batches: int) -> list[Action]:
    """One action of each micro-batch, from 0 to M - 1."""
    return actions(repeat(kind), repeat(stage), range(micro_batches))


def _gpipe(partitions: int, micro_batches: int, devices: int) -> Rows:
    return (_pass(Kind.F, k, micro_batches) + _pass(Kind.B, k, micro_batches)[::-1] for k in range(partitions))


def _1f1b(partitions: int, micro_batches: int, devices: int) -> Rows:
    return (
        _alternate(_pass(Kind.F, k, micro_batches), _pass(Kind.B, k, micro_batches), partitions - 1 - k)
        for k in range(partitions)
    )


def _alternate(forwards: Sequence[Action], backwards: Sequence[Action], warm_up: int) -> list[Action]:
    """`warm_up` forwards, then forwards and backwards alternately, then the remaining backwards."""
    warm_up = min(warm_up, len(forwards))
    pairs = zip(forwards[warm_up:], backwards, strict=False)
    return [*forwards[:warm_up], *chain(*pairs), *backwards[len(forwards) - warm_up :]]


def _interleaved_order(partitions: int, micro_batches: int, devices: int) -> Rows:
    """1f1b on every device, with groups of P micro-batches that pass through one of its stages, then the next."""
    assert partitions % devices == 0, "as many stages on each device"
    stages_per_device = partitions // devices
    group_count = max(1, micro_batches // devices)  # groups of P micro-batches or slightly more fill P devices
    firsts = [-(-group * micro_batches // group_count) for group in range(group_count + 1)]  # larger groups first
    groups = [range(*ends) for ends in pairwise(firsts)]
    for device in range(devices):
        stages = range(device, partitions, devices)
        forwards = [Action(Kind.F, k, m) for group in groups for k in stages for m in group]
        backwards = [Action(Kind.B, k, m) for group in groups for k in reversed(stages) for m in group]
        # ticks until the first gradient can have returned: none on a single device, two for each of P devices
        first_warm_up = 2 * (devices - 1 - device) if stages_per_device > 1 else devices - 1 - device
        yield _alternate(forwards, backwards, first_warm_up + (stages_per_device - 1) * len(groups[0]))


def _zero_bubble(partitions: int, micro_batches: int, devices: int) -> Rows:
    return (list(_zero_bubble_stage(k, partitions, micro_batches)) for k in range(partitions))


def _zero_bubble_stage(stage: int, partitions: int, micro_batches: int) -> Iterator[Action]:
    """1f1b with split backwards, where stage k delays each W by k micro-batches, to have a W for every later wait.
    Stage 0 would delay none: its backwards stay whole."""
    forwards = _pass(Kind.F, stage, micro_batches)
    backwards = _pass(Kind.I if stage else Kind.B, stage, micro_batches)
    next_w = 0  # the first micro-batch whose W is to come
    for a in _alternate(forwards, backwards, partitions - 1 - stage):
        yield a
        if a.kind is Kind.I and a.micro_batch >= stage:
            yield Action(Kind.W, stage, next_w)
            next_w += 1
    if stage:
        yield from (Action(Kind.W, stage, m) for m in range(next_w, micro_batches))


def _v_schedule(name: str) -> PlaceActions:
    """A schedule of v_schedules.py, which is imported when it is first called: numpy comes with it."""
    return lambda k, m, _: import_module("gpipe_cli.schedule.v_schedules").v_schedule(name, k, m)


@dataclass(frozen=True)
class Order:
    """How a named schedule places the actions of a step, and its properties."""

    rows: PlaceActions | None = None  # places the actions; None for the function `rows` of NAME.py in this folder
    placement: PlacementName | None = None  # the placement whose devices have a row each; None if each stage has a row
    splits: bool = False  # whether backwards are split into I and W

    def devices(self, partitions: int, stages_per_device: int | None = None) -> int:
        """P, on how many devices the order places K = `partitions` stages: two on each if it is made for several."""
        default = 1 if self.placement is None else 2
        return -(-partitions // (stages_per_device or default))

    def matches_placement(self, device_of_stage: Sequence[int]) -> bool:
        """Whether the order has its rows where the stages are."""
        stages, devices = len(device_of_stage), 1 + max(device_of_stage)
        if self.placement is None:
            return True
        if not 1 < devices < stages or tuple(device_of_stage) != place(self.placement, stages, devices):
            return False
        return devices == self.devices(stages) if self.placement == "v" else stages % devices == 0


ORDERS = {
    "gpipe": Order(_gpipe),
    "1f1b": Order(_1f1b),
    "interleaved": Order(_interleaved_order, placement="looped"),
    "zero_bubble": Order(_zero_bubble, splits=True),
    "zbv": Order(_v_schedule("zbv"), placement="v", splits=True),
    "v_half": Order(_v_schedule("v_half"), placement="v", splits=True),
    "v_min": Order(_v_schedule("v_min"), placement="v", splits=True),
}
AUTO_SCHEDULE = "auto"  # an order made for the costs of the layers and the memory: `search.py`
SCHEDULES = tuple(ORDERS)
SCHEDULES_THAT_SPLIT = (*(name for name, named_order in ORDERS.items() if named_order.splits), AUTO_SCHEDULE)
