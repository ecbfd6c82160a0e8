"""Schedules on a V: each device has one stage of the way down and one of the way back up (Qi et al. 2024, "Pipeline
Parallelism with Controllable Memory"; `zbv` is also in section 6 of Qi et al. 2023).

They differ in one number, the most graphs that a device holds at once, each from its F to its W. A building block says
in which ticks the devices perform F and I of micro-batch 0; every further micro-batch repeats it six ticks later, as
each device has six actions for it. The longer a forward waits for the next device, the more graphs the devices hold,
and the better later forwards fill the waits of the first one. Devices perform their forwards and backwards in the order
of these ticks, each as soon as it can, and a W wherever they would wait or have no room for another graph; without a W,
a forward ahead of its turn if there is room for it. `zbv` on two devices, which hold at most four graphs:

    device 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 0I0 ...
    device 1 | .   1F0 2F0 1F1 2F1 2I0 1I0 1F2 2F2 ...

A step of P >= 3 devices takes this many ticks, where F, I and W take one each; 1f1b takes 6 M + 6 (P - 1):

    zbv      6 M + P - 1     if M >= P; if M >= 2 P, no device waits between its first and its last action
    v_half   6 M + 3 P - 4   two less where P is even
    v_min    6 M + 4 P - 5   two more where P is a multiple of 3; as v_half where that holds no more graphs

With so few micro-batches that all their graphs may be held, the three are the same.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from gpipe_cli.pipeline.schedule.schedule import Action, Kind, whole_backwards

_PERIOD = 6  # ticks from a micro-batch to the next: F, I and W on each of a device's two stages


def zbv_graphs(devices: int) -> int:
    """As many as on the first device of 1f1b, whose stages, half as many, have graphs of twice the size."""
    return 2 * devices


def v_half_graphs(devices: int) -> int:
    return 2 * ((devices + 2) // 2)


def v_min_graphs(devices: int) -> int:
    return 2 * ((devices + 4) // 3)


def zbv(partitions: int, micro_batches: int, devices: int) -> list[list[Action]]:
    return _rows(partitions, micro_batches, zbv_graphs)


def v_half(partitions: int, micro_batches: int, devices: int) -> list[list[Action]]:
    return _rows(partitions, micro_batches, v_half_graphs)


def v_min(partitions: int, micro_batches: int, devices: int) -> list[list[Action]]:
    return _rows(partitions, micro_batches, v_min_graphs)


def _rows(partitions: int, micro_batches: int, graphs: Callable[[int], int]) -> list[list[Action]]:
    """The row of each device, which holds at most `graphs` of the number of devices; of an odd number of partitions the
    last device has one."""
    devices = -(-partitions // 2)
    most = graphs(devices) if partitions > 1 else 1  # a single stage gains nothing from a delayed W
    if most >= min(zbv_graphs(devices), 2 * micro_batches):
        down, up = 2, 4
    elif most >= v_half_graphs(devices):
        down, up = 1, 2
    else:
        down, up = 1, 1
    orders = []
    for block in _blocks(devices, down, up):
        if partitions % 2:  # the last device does nothing where its second stage would have its turn
            block = [(tick, kind, stage - (stage > devices)) for tick, kind, stage in block if stage != devices]
        repeated = (
            (tick + _PERIOD * m, Action(kind, stage, m)) for tick, kind, stage in block for m in range(micro_batches)
        )
        orders.append(deque(action for _, action in sorted(repeated)))
    return [whole_backwards(row) for row in _clocked(orders, partitions, most, ahead=up > 1)]


def _blocks(devices: int, down: int, up: int) -> list[list[tuple[int, Kind, int]]]:
    """For each device, the ticks of micro-batch 0's forwards and backwards, with kind and stage. From device to device
    a forward takes `down` or `up` ticks, everything else takes one, and longer until no repetition collides."""
    last = 2 * devices - 1
    blocks: list[list[tuple[int, Kind, int]]] = [[] for _ in range(devices)]
    tick = 0
    for kind, stage in [*((Kind.F, k) for k in range(last + 1)), *((Kind.I, last - k) for k in range(last + 1))]:
        block = blocks[min(stage, last - stage)]
        while any((tick - other) % _PERIOD == 0 for other, _, _ in block):
            tick += 1
        block.append((tick, kind, stage))
        if kind is Kind.I or stage in (devices - 1, last):
            tick += 1
        else:
            tick += down if stage < devices else up
    return blocks


def _clocked(orders: Sequence[deque[Action]], partitions: int, most: int, *, ahead: bool) -> list[list[Action]]:
    """The rows of devices that perform these forwards and backwards in order, on a clock where every action takes one
    tick, with their W in between; `ahead`: and with forwards ahead of their turn."""
    rows: list[list[Action]] = [[] for _ in orders]
    delayed: list[deque[Action]] = [deque() for _ in orders]  # the W that each device has not yet performed
    held = [0 for _ in orders]  # graphs of each device
    ended = {kind: [0] * partitions for kind in Kind}  # number of actions of each stage
    while any(orders) or any(delayed):
        begun: list[tuple[int, Action]] = []
        for device, left in enumerate(orders):
            if left and _ready(left[0], ended) and (left[0].kind is not Kind.F or held[device] < most):
                begun.append((device, left.popleft()))
            elif delayed[device]:
                begun.append((device, delayed[device].popleft()))
            elif ahead and (early := _forward_ahead(device, left, most - held[device])) and _ready(early, ended):
                left.remove(early)
                begun.append((device, early))
        assert begun, "the block alone holds more graphs than there may be"
        for device, action in begun:
            rows[device].append(action)
            ended[action.kind][action.stage] += 1
            if action.kind is Kind.I:
                delayed[device].append(action._replace(kind=Kind.W))
            else:
                held[device] += 1 if action.kind is Kind.F else -1
    return rows


def _forward_ahead(device: int, left: Iterable[Action], room: int) -> Action | None:
    """The device's next forward of the way down, if there is room for it all the time from now until its turn."""
    for action in left:
        if room == 0:
            break
        if action.kind is Kind.F and action.stage == device:
            return action
        room += -1 if action.kind is Kind.F else 1
    return None


def _ready(action: Action, ended: dict[Kind, list[int]]) -> bool:
    """Whether the results that a forward or backward needs are there; every stage begins with micro-batch 0."""
    kind, stage, m = action
    if kind is Kind.F:
        return stage == 0 or ended[Kind.F][stage - 1] > m
    last = stage == len(ended[kind]) - 1
    return ended[Kind.F][stage] > m and (last or ended[kind][stage + 1] > m)
