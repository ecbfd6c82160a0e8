"""Schedules on a V: each device has a stage of the way down and one of the way back up (Qi et al. 2024, "Pipeline
Parallelism with Controllable Memory"; `zbv` is also in section 6 of Qi et al. 2023).

They differ in how many graphs a device has at the same time at most, each from its F to its W. A building block gives
the ticks in which the devices perform F and I of micro-batch 0; every further micro-batch repeats it six ticks later,
as each device has six actions for it. The longer a forward waits for the next device, the more graphs the devices have,
and the better later forwards fill the waits of the first device. Devices perform forwards and backwards in the order of
these ticks, each as soon as it can, and a W wherever they would wait or have no room for another graph; without a W, a
forward ahead of its turn if there is room for it. `zbv` on two devices, with at most four graphs:

    device 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 0I0 ...
    device 1 | .   1F0 2F0 1F1 2F1 2I0 1I0 1F2 2F2 ...

A step of P >= 3 devices takes this many ticks, where F, I and W take one each; 1f1b takes 6 M + 6 (P - 1):

    zbv      6 M + P - 1     if M >= P; if M >= 2 P, no device waits between its first and its last action
    v_half   6 M + 3 P - 4   two less where P is even
    v_min    6 M + 4 P - 5   two more where P is a multiple of 3; as v_half where that has no more graphs

With few enough micro-batches that a device may have all their graphs, the three are the same.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from gpipe_cli.schedule.schedule import Action, Kind, merge_split_backwards

_PERIOD = 6  # ticks from a micro-batch to the next: F, I and W on each of a device's two stages


# for P devices, how many graphs a device has at the same time at most; with zbv as on the first device of 1f1b, whose
# stages, half as many, have graphs of twice the size
MAX_IN_FLIGHT: Mapping[str, Callable[[int], int]] = {
    "zbv": lambda devices: 2 * devices,
    "v_half": lambda devices: 2 * ((devices + 2) // 2),
    "v_min": lambda devices: 2 * ((devices + 4) // 3),
}


def v_schedule(name: str, partitions: int, micro_batches: int) -> Iterator[list[Action]]:
    """The row of each device for the schedule `name`; of an odd number of partitions the last device has one."""
    devices = -(-partitions // 2)
    max_in_flight = MAX_IN_FLIGHT[name](devices) if partitions > 1 else 1  # a delayed W gains nothing in a single stage
    if max_in_flight >= min(MAX_IN_FLIGHT["zbv"](devices), 2 * micro_batches):
        down, up = 2, 4
    elif max_in_flight >= MAX_IN_FLIGHT["v_half"](devices):
        down, up = 1, 2
    else:
        down, up = 1, 1
    block = _block(devices, down, up)
    if partitions % 2:  # the last device does nothing where its second stage would have its turn
        block = np.delete(block, [devices, 3 * devices - 1])
    for device, places in enumerate(_run_on_clock(block, micro_batches, max_in_flight, early_forwards=up > 1).T):
        row = list(_to_actions(places.tolist(), partitions))
        yield row if device else merge_split_backwards(row)  # only device 0 has stage 0


def _to_actions(places: Iterable[int], partitions: int) -> Iterator[Action]:
    """The actions of a device that is at these places in each tick; each W in the order of the I."""
    visits = Counter[int]()  # number of micro-batches that have been at each place
    delayed = deque[Action]()  # a W for each I that has none yet
    for place in places:
        if place == 2 * partitions:
            yield delayed.popleft()
        elif place >= 0:
            stage, micro_batch = min(place, 2 * partitions - 1 - place), visits[place]
            visits[place] += 1
            yield Action(Kind.F if place < partitions else Kind.I, stage, micro_batch)
            if place >= partitions:
                delayed.append(Action(Kind.W, stage, micro_batch))


def _block(devices: int, down: int, up: int) -> NDArray[np.int32]:
    """When micro-batch 0 is at each place of its path: the F of stages 0 to 2 P - 1, then the I of these stages, last
    to first. From device to device a forward takes `down` or `up` ticks, everything else takes a single tick, and
    longer until no repetition collides."""
    stages = 2 * devices
    used_ticks: list[set[int]] = [set() for _ in range(devices)]  # ticks of each device, modulo the period
    tick = 0
    ticks = []
    for place in range(2 * stages):
        stage = min(place, 2 * stages - 1 - place)
        device_ticks = used_ticks[min(stage, stages - 1 - stage)]
        while tick % _PERIOD in device_ticks:
            tick += 1
        device_ticks.add(tick % _PERIOD)
        ticks.append(tick)
        if place >= stages or stage in (devices - 1, stages - 1):
            tick += 1
        else:
            tick += down if stage < devices else up
    return np.array(ticks, np.int32)


def _run_on_clock(
    block: NDArray[np.int32], micro_batches: int, max_in_flight: int, *, early_forwards: bool
) -> NDArray[np.int32]:
    """What each device does in each tick (ticks, P) of the unit clock: the place of its F or I on a micro-batch's path,
    whose 2 K turns `block` gives, 2 K for a W, -1 if it waits. `early_forwards`: allow forwards ahead of their turn."""
    stages = len(block) // 2
    device = np.arange(-(-stages // 2), dtype=np.int32)
    # F down and up, I up and down
    places = np.stack([device, stages - 1 - device, stages + device, 2 * stages - 1 - device])
    done = np.zeros(2 * stages + 1, np.int32)  # number of micro-batches that have been at each place
    done[-1] = micro_batches  # before the first place, which waits for nothing
    never = np.iinfo(np.int32).max
    in_flight, delayed = np.zeros((2, len(device)), np.int32)  # graphs of each device; those that a W will free
    ticks = []
    while (done < micro_batches).any() or delayed.any():
        # in turn: the F or I that the block has next, if its input has come and there is room for its graph
        turns = block[places] + _PERIOD * done[places]
        turns[done[places] == micro_batches] = never
        place = places[turns.argmin(axis=0), device]
        begins = (done[place - 1] > done[place]) & ((place >= stages) | (in_flight < max_in_flight))
        # else a W
        frees = ~begins & (delayed > 0)
        # else a forward of the way down ahead of its turn, if there is room until then: least before the next I
        if early_forwards:
            down, up, *back = turns
            forwards_up = np.maximum(-(-(np.minimum.reduce([down, *back]) - up) // _PERIOD), 0)  # before that turn
            has_room = in_flight + forwards_up < max_in_flight
            early = ~begins & ~frees & (done[places[0] - 1] > done[places[0]]) & has_room
            place = np.where(early, places[0], place)
            begins |= early
        assert begins.any() or frees.any(), "the block alone has more graphs than there may be"
        # the tick's end
        done[place[begins]] += 1
        in_flight += begins & (place < stages)
        delayed += begins & (place >= stages)
        in_flight -= frees
        delayed -= frees
        ticks.append(np.where(begins, place, np.where(frees, 2 * stages, -1)).astype(np.int32))
    return np.array(ticks)
