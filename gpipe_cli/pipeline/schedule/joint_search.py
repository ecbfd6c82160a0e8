"""`schedule=auto` where devices have several stages, or where stages differ: placement, cut and order together.

The best order depends on the cut, and the best cut on the order: what a device does in a step is the work of all its
stages, and what the others wait for is the work of one. So orders are searched for every placement with the
partitioner's cut, and the best of them are tried with cuts that make the work of devices even. For the best of these,
orders are searched again, and layers move over boundaries as long as the simulated step gets shorter, in turn until
nothing improves.
AdaPtis (2509.23722, section 4) adjusts cut, placement and order in turn, too.

Nothing depends on how long the search itself takes, so that all processes find the same.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate, combinations, pairwise

from gpipe_cli.pipeline.schedule.schedule import Schedule
from gpipe_cli.pipeline.schedule.search import AS_GOOD, IN_WAITS, MOST_TRIED, Problem, Tried, find, tried_order

Balance = tuple[int, ...]  # number of layers of each stage
_ORDERS = 3  # orders of each placement that are tried with other cuts
_CUTS = 24  # cuts that they are tried with
_ADJUSTED = 4  # of the best placements and cuts
_MANY_STAGES = 24  # with more stages, only single layers move


@dataclass(frozen=True)
class Placed:
    """A placement of the stages, for which orders are searched."""

    name: str  # `looped`
    device_of_stage: Sequence[int]
    cuts: Sequence[Balance]  # to begin with; the first is the partitioner's
    problem: Callable[[Balance], Problem]  # what an order is made for, with a cut


@dataclass(frozen=True)
class Found:
    """An order with its placement and cut."""

    placed: Placed
    balance: Balance
    tried: Tried

    @property
    def seconds(self) -> float:
        return self.tried.seconds


def search(
    places: Sequence[Placed], work: Sequence[float], ends: Sequence[int], most_tried: int = MOST_TRIED
) -> tuple[Found | None, tuple[Found, ...]]:
    """The fastest that fits, None if nothing does; and all that was tried, the fastest first.

    `work`: seconds of each layer for a micro-batch; `ends`: the numbers of layers after which a cut may be, none if the
    cut is given. About `most_tried` actions are simulated with the cuts to begin with, and half as many with others.
    """
    every: list[Found] = []
    starts = [(placed, cut) for placed in places for cut in placed.cuts]
    for placed, cut in starts:
        every += _found(placed, cut, most_tried // len(starts))
    if ends:
        every += _other_cuts(every, places, [0.0, *accumulate(work)], ends, most_tried)
    ranked = sorted(every, key=lambda found: found.seconds)
    limit = ranked[0].seconds * AS_GOOD
    return next((found for found in every if found.tried.fits and found.seconds <= limit), None), tuple(ranked)


def _found(placed: Placed, cut: Balance, most_tried: int) -> list[Found]:
    """The orders for a cut, first the best, the simplest of those that are as fast."""
    best, tried = find(placed.problem(cut), most_tried)
    return [Found(placed, cut, one) for one in sorted(tried, key=lambda one: one is not best)]


def _other_cuts(
    every: Sequence[Found], places: Sequence[Placed], before: Sequence[float], ends: Sequence[int], most_tried: int
) -> Iterator[Found]:
    """What is found with cuts other than those of `every`: first the best orders with cuts that make the work of
    devices most even, then the best of these adjusted. ``before[i]`` is the work of all layers before layer i."""
    found, quarter, rest = [*every], _Budget(most_tried // 4), _Budget(most_tried // 4)
    for placed in places:
        own = sorted((one for one in every if one.placed is placed and one.tried.fits), key=lambda one: one.seconds)
        for cut in _level(placed.cuts[0], placed.device_of_stage, before, ends) if own else ():
            tried = [_with_cut(one, cut) for one in own[:_ORDERS] if quarter.take(one.tried.order)]
            found += tried
            yield from tried
    firsts: dict[tuple[str, Balance], Found] = {}
    for one in sorted((one for one in found if one.tried.fits), key=lambda one: one.seconds):
        firsts.setdefault((one.placed.name, one.balance), one)
    for one in [*firsts.values()][:_ADJUSTED]:
        yield from _adjusted(one, before, ends, rest)


def _with_cut(found: Found, cut: Balance) -> Found:
    """The same order with another cut."""
    name, order = found.tried.name.removesuffix(IN_WAITS), found.tried.order
    return Found(found.placed, cut, tried_order(found.placed.problem(cut), name, order))


@dataclass
class _Budget:
    left: int  # actions that may still be simulated

    def take(self, order: Schedule) -> bool:
        """Whether an order may be simulated."""
        self.left -= sum(map(len, order))
        return self.left >= 0


def _adjusted(now: Found, before: Sequence[float], ends: Sequence[int], budget: _Budget) -> Iterator[Found]:
    """Every improvement, until neither another order nor another cut is one."""
    device_of_stage = now.placed.device_of_stage
    while budget.left > 0:
        began = now
        orders = _found(now.placed, now.balance, budget.left)
        for one in orders:
            budget.take(one.tried.order)
        if orders[0].seconds * AS_GOOD < now.seconds:
            now = orders[0]
            yield now
        moved = True
        while moved:
            moved = False
            for cut in _moves(now.balance, device_of_stage, before, ends):
                if not budget.take(now.tried.order):
                    return
                if (other := _with_cut(now, cut)).seconds * AS_GOOD < now.seconds:
                    now, moved = other, True
                    yield now
                    break
        if now is began:
            return


def _moves(
    balance: Balance, device_of_stage: Sequence[int], before: Sequence[float], ends: Sequence[int]
) -> list[Balance]:
    """Cuts with one boundary moved to the next place, or two, those first whose fullest device has least to do."""
    cuts = list(accumulate(balance))[:-1]
    places = {end: at for at, end in enumerate(ends)}
    steps = [
        (boundary, ends[at])
        for boundary, end in enumerate(cuts)
        for at in (places[end] - 1, places[end] + 1)
        if 0 <= at < len(ends)
    ]
    changes: list[tuple[tuple[int, int], ...]] = [(step,) for step in steps]
    if len(balance) <= _MANY_STAGES:
        changes += [(one, other) for one, other in combinations(steps, 2) if one[0] != other[0]]
    found = []
    for change in changes:
        moved = cuts.copy()
        for boundary, end in change:
            moved[boundary] = end
        sizes = tuple(end - first for first, end in pairwise([0, *moved, sum(balance)]))
        if min(sizes) > 0:
            found.append(sizes)
    return sorted(found, key=lambda sizes: _unevenness(sizes, device_of_stage, before))


def _unevenness(balance: Balance, device_of_stage: Sequence[int], before: Sequence[float]) -> tuple[float, float]:
    """The work of the fullest device, and the sum of squares of all."""
    of_devices = [0.0] * (1 + max(device_of_stage))
    for device, end, size in zip(device_of_stage, accumulate(balance), balance, strict=True):
        of_devices[device] += before[end] - before[end - size]
    return max(of_devices), sum(seconds * seconds for seconds in of_devices)


def _level(
    balance: Balance, device_of_stage: Sequence[int], before: Sequence[float], ends: Sequence[int]
) -> Iterator[Balance]:
    """Cuts that make the work of devices even: the most even first, as far as single moves from `balance` lead there,
    then those beside it."""
    queue = [(_unevenness(balance, device_of_stage, before), balance)]
    known, given = {balance}, 0
    while queue and given < _CUTS:
        unevenness, cut = heappop(queue)
        beside = [other for other in _moves(cut, device_of_stage, before, ends) if other not in known]
        known.update(beside)
        for other in beside:
            heappush(queue, (_unevenness(other, device_of_stage, before), other))
        if given or not queue or queue[0][0] >= unevenness:  # none beside it is more even
            given += 1
            yield cut
