"""The orders of a step's actions that have a name, GPipe's and what came after it; each is a line of `ORDERS`.

With K = 4 stages, M = 6 micro-batches and F = I = W = 1, B = 2 on the clock, `1f1b` and `zero_bubble` (an idle tick is
a dot; `gpipe plan` draws any of them):

    stage 1 | .  F0 F1 F2 .  .  .  .  B0 B0 F3 B1 B1 F4 B2 B2 F5 B3 B3 .  B4 B4 .  B5 B5
    stage 1 | .  F0 F1 F2 .  .  I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 I4 W3 I5 W4 W5
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from itertools import chain, pairwise

from gpipe_cli.pipeline.schedule.schedule import Action, Kind, Recompute, Schedule, with_recomputation

Rows = list[list[Action]]
PlaceActions = Callable[[int, int, int], Rows]  # (K partitions, M micro-batches, P devices) -> rows


def build(name: str, partitions: int, micro_batches: int, recompute: Recompute, devices: int | None = None) -> Schedule:
    """`order` with recomputation; raises as that and `with_recomputation` do."""
    return with_recomputation(order(name, partitions, micro_batches, devices), recompute)


def order(name: str, partitions: int, micro_batches: int, devices: int | None = None) -> Schedule:
    """The training schedule called ``name``, without recomputation.

    ``gpipe``: all forwards, then all backwards from the last micro-batch to the first, as Figure 2(c) draws them.

    The others depart from the paper, which knows only ``gpipe``. All of their backwards run from micro-batch 0 to
    M - 1 on every stage, which fixes the order in which gradients are summed: all have the same bits.

    ``1f1b``: backward as soon as possible, so that stage k never has more than K - k micro-batches in flight. This is
    the synchronous form of the order of PipeDream (Harlap et al. 2018): the same step time on stages of equal cost
    (with ``always`` or ``never``), less memory.

    ``interleaved``: 1f1b where each of ``devices`` has several stages that are not neighbours (stage k is on device
    k mod P), after Megatron-LM (Narayanan et al. 2021, section 2.2): fills and drains in smaller steps, at the price
    of more transfers and of more micro-batches in flight.

    ``zero_bubble``: ZB-H1 (Qi et al. 2023, section 2.2): as 1f1b, with the gradients of weights held back to fill the
    waits; at most K micro-batches in flight on every stage, as on the first one of 1f1b.

    Raises ValueError for an unknown name, and for fewer than one partition or micro-batch.
    """
    for setting, value in (("partitions", partitions), ("micro_batches", micro_batches)):
        if value < 1:
            raise ValueError(f"{setting}={value}: must be at least 1; use {setting}=1 to do without")
    if name not in ORDERS:
        raise ValueError(f"schedule={name}: unknown; use one of {', '.join(ORDERS)}")
    rows: PlaceActions = ORDERS[name].rows or import_module(f"gpipe_cli.pipeline.schedule.{name}").rows
    return Schedule(map(tuple, rows(partitions, micro_batches, partitions if devices is None else devices)))


@lru_cache
def forward_only(partitions: int, micro_batches: int) -> Schedule:
    """The forwards alone, for evaluation; nothing is kept. A replica without samples has no micro-batch."""
    return Schedule((tuple(_pass(Kind.F, k, micro_batches)) for k in range(partitions)), range(partitions))


def _pass(kind: Kind, stage: int, micro_batches: int) -> list[Action]:
    """One action of each micro-batch, from 0 to M - 1."""
    return [Action(kind, stage, m) for m in range(micro_batches)]


def _gpipe(partitions: int, micro_batches: int, devices: int) -> Rows:
    return [_pass(Kind.F, k, micro_batches) + _pass(Kind.B, k, micro_batches)[::-1] for k in range(partitions)]


def _1f1b(partitions: int, micro_batches: int, devices: int) -> Rows:
    return [
        _in_turns(_pass(Kind.F, k, micro_batches), _pass(Kind.B, k, micro_batches), partitions - 1 - k)
        for k in range(partitions)
    ]


def _in_turns(forwards: Sequence[Action], backwards: Sequence[Action], warm_up: int) -> list[Action]:
    """Some forwards, until the first gradient can have come back, then one forward and one backward in turns."""
    warm_up = min(warm_up, len(forwards))
    pairs = zip(forwards[warm_up:], backwards, strict=False)
    return [*forwards[:warm_up], *chain(*pairs), *backwards[len(forwards) - warm_up :]]


def _interleaved(partitions: int, micro_batches: int, devices: int) -> Rows:
    """For each device its stages' forwards, P micro-batches at a time through one stage, then through the next."""
    assert partitions % devices == 0, "as many stages on each device"
    of_device = partitions // devices
    many = max(1, micro_batches // devices)  # groups, of P micro-batches or just more: fewer would not reach the end
    firsts = [-(-group * micro_batches // many) for group in range(many + 1)]  # the larger ones first
    groups = [range(*ends) for ends in pairwise(firsts)]
    rows = []
    for device in range(devices):
        stages = range(device, partitions, devices)
        forwards = [Action(Kind.F, k, m) for group in groups for k in stages for m in group]
        backwards = [Action(Kind.B, k, m) for group in groups for k in reversed(stages) for m in group]
        # ticks until the first gradient can have come back: none on one device, two for each of P devices
        ahead = 2 * (devices - 1 - device) if of_device > 1 else devices - 1 - device
        rows.append(_in_turns(forwards, backwards, ahead + (of_device - 1) * len(groups[0])))
    return rows


def _zero_bubble(partitions: int, micro_batches: int, devices: int) -> Rows:
    return [list(_zero_bubble_stage(k, partitions, micro_batches)) for k in range(partitions)]


def _zero_bubble_stage(stage: int, partitions: int, micro_batches: int) -> Iterator[Action]:
    """1f1b's F and I; stage k holds back the W of k micro-batches, and has one in every later wait. Stage 0 holds back
    none: its backwards stay whole."""
    forwards = _pass(Kind.F, stage, micro_batches)
    backwards = _pass(Kind.I if stage else Kind.B, stage, micro_batches)
    held = 0  # the first micro-batch whose W is to come
    for a in _in_turns(forwards, backwards, partitions - 1 - stage):
        yield a
        if a.kind is Kind.I and a.micro_batch >= stage:
            yield Action(Kind.W, stage, held)
            held += 1
    if stage:
        yield from (Action(Kind.W, stage, m) for m in range(held, micro_batches))


@dataclass(frozen=True)
class Order:
    """How a schedule that has a name places the actions of a step, and what else depends on the name."""

    rows: PlaceActions | None = None  # None: `rows` of a file of its own in this folder, NAME.py
    looped: bool = False  # whether a device with several stages has stages d, d + P, ... and not neighbours
    splits: bool = False  # whether it cuts backwards in two


ORDERS = {
    "gpipe": Order(_gpipe),
    "1f1b": Order(_1f1b),
    "interleaved": Order(_interleaved, looped=True),
    "zero_bubble": Order(_zero_bubble, splits=True),
}
AUTO_SCHEDULE = "auto"  # an order that is made for the costs of the layers and the memory: `search.py`
SCHEDULES = tuple(ORDERS)
LOOPED = (*(name for name, one in ORDERS.items() if one.looped), AUTO_SCHEDULE)
SPLITTING = (*(name for name, one in ORDERS.items() if one.splits), AUTO_SCHEDULE)
