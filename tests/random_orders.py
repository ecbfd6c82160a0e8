"""Random legal schedules on random placements, for the tests of what holds for every schedule there can be.

Forwards are in one order on all stages, backwards and the halves that sum gradients run from micro-batch 0 to M - 1.
Everything else is chosen: which device has which stages, what is recomputed and when, which backwards are split, how
long their second halves wait, and how the actions of a device's stages are mixed.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from gpipe_cli.schedule.schedule import Action, Kind, Row, Schedule


@dataclass(frozen=True)
class RandomOrder:
    schedule: Schedule  # a row for each device or, as of schedules that any placement has, for each stage
    device_of_stage: tuple[int, ...]


def random_orders(number: int, seed: int, max_stages: int = 8) -> Iterator[RandomOrder]:
    """`number` of them, on 1 to 4 devices, each of which has a stage."""
    chance = random.Random(seed)
    for _ in range(number):
        stages = chance.randint(1, max_stages)
        devices = chance.randint(1, min(4, stages))
        device_of_stage = [*range(devices), *(chance.randrange(devices) for _ in range(stages - devices))]
        chance.shuffle(device_of_stage)
        in_order = _in_one_order(chance, stages, chance.randint(1, 4))
        row_of_stage = chance.choice((device_of_stage, range(stages)))
        rows: list[list[Action]] = [[] for _ in range(1 + max(row_of_stage))]
        for action in in_order:
            rows[row_of_stage[action.stage]].append(action)
        yield RandomOrder(Schedule(map(tuple, rows)), tuple(device_of_stage))


def mixed_anew(order: RandomOrder, chance: random.Random) -> Schedule:
    """A row for each device, in which every stage keeps the order of its actions but actions of different stages are
    mixed at random: it may deadlock."""
    rows: list[Row] = []
    for device in range(1 + max(order.device_of_stage)):
        of_stages = {k: list(row) for k, row in enumerate(order.schedule.stages) if order.device_of_stage[k] == device}
        turns = [k for k, row in of_stages.items() for _ in row]
        if chance.random() < 0.5:
            chance.shuffle(turns)
        else:  # the order of this device as it was except for two actions
            turns = [a.stage for row in order.schedule for a in row if a.stage in of_stages]
            one, other = chance.choices(range(len(turns)), k=2)
            turns[one], turns[other] = turns[other], turns[one]
        rows.append(tuple(of_stages[k].pop(0) for k in turns))
    return Schedule(rows)


def _in_one_order(chance: random.Random, stages: int, micro_batches: int) -> Iterator[Action]:
    """All actions of a step, each after those that it needs."""
    forwards = chance.choice((list(range(micro_batches)), chance.sample(range(micro_batches), micro_batches)))
    split, again = chance.choice((0, 0.5, 1)), chance.choice((0, 0.5, 1))  # the shares
    plans: list[dict[int, tuple[Kind, ...]]] = []  # of each stage and micro-batch: the actions after its forward
    for _ in range(stages):
        plans.append({})
        for m in range(micro_batches):
            backward = (Kind.I, Kind.W) if chance.random() < split else (Kind.B,)
            plans[-1][m] = (Kind.R, *backward) if chance.random() < again else backward
    forwarded, returned, summed = [0] * stages, [0] * stages, [0] * stages  # how many micro-batches
    done: set[Action] = set()
    haste = chance.choice((0.1, 1, 10))  # how much likelier backwards are than forwards

    def ready() -> Iterator[Action]:
        for k in range(stages):
            if forwarded[k] < micro_batches and (k == 0 or forwarded[k] < forwarded[k - 1]):
                yield Action(Kind.F, k, forwards[forwarded[k]])
            for m in forwards[: forwarded[k]]:
                kind = next((kind for kind in plans[k][m] if Action(kind, k, m) not in done), None)
                if kind is Kind.R:
                    yield Action(kind, k, m)
                elif kind in (Kind.B, Kind.I) and m == returned[k] and (k == stages - 1 or m < returned[k + 1]):
                    if kind is Kind.I or m == summed[k]:
                        yield Action(kind, k, m)
                elif kind is Kind.W and m == summed[k]:
                    yield Action(kind, k, m)

    while choice := list(ready()):
        weights = [1 if action.kind is Kind.F else haste for action in choice]
        (action,) = chance.choices(choice, weights)
        done.add(action)
        forwarded[action.stage] += action.kind is Kind.F
        returned[action.stage] += action.kind in (Kind.B, Kind.I)
        summed[action.stage] += action.kind in (Kind.B, Kind.W)
        yield action
    assert min(summed) == micro_batches
