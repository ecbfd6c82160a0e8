"""How short a step on P devices can be at best, whatever the cut, the placement, the order and the recomputation."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import accumulate, pairwise

from gpipe_cli.pipeline.schedule.simulator import StageCost


@dataclass(frozen=True, slots=True)
class LowerBound:
    """A step takes at least `seconds`; without any wait for a first or after a last micro-batch `work_seconds`."""

    seconds: float
    work_seconds: float


def lower_bound(
    layers: Sequence[StageCost],
    devices: int,
    micro_batches: int,
    slowdown: Sequence[float] = (),
    *,
    split: bool = False,
) -> LowerBound:
    """The bound for a model of these layers, each as the cost of a stage of its own; transfers are taken to be free.

    `split`: whether backwards may be split into I and W. `slowdown` is that of `simulate`, with factors of at least 1.

    Let f, b and u be the seconds of a layer's forward, whole backward and update, and F(j) the sum of f over the first
    j layers. Number the devices by the first layer that each of them has, from 0 on. The first layer of device j has at
    least j layers before it, so no work of device j can begin before F(j): that is the unavoidable fill. Therefore

    (a) the device-time from F(j) to the end of the step, summed over all devices, has room for all the work, which is
        M (f + b) + u of every layer (`_by_area`; with a slowdown n devices do less work than n times that of one);
    (b) with n_j of the k most expensive layers, the cheapest of which works for s, device j is not done before
        F(j) + n_j s, and the n_j add up to k. The least that the latest of the devices can achieve is the k-th smallest
        of all numbers F(j) + n s with n = 1, 2, ... (`_by_pieces`);
    (c) the device of a layer either waits for all layers before it, or has the work of one of them, too (`_by_layer`);
    (d) the M forwards of a layer run one after the other on its device. The first waits for the layers before it; after
        the last one its micro-batch has to go on to the end and all the way back. The same holds of its M backwards.

    If backwards are not split, what follows the last action of device j is the backward of the layers before its first
    one, at least those of the first j: F(j) in (a) to (c) becomes the sum of f + b, in place of the updates, of which
    only that of the first layer is certain to come later. A split backward has no such drain, as W waits for nothing
    and nobody waits for it.

    `zbv` of Qi et al. 2024 attains (b) for equal stages: 6 M + P - 1 with F = I = W = 1.
    """
    assert 0 < devices <= len(layers), "a layer for each device"
    assert min(slowdown, default=1.0) >= 1.0, "more devices slow each other down"
    split = split and any(layer.weights_seconds for layer in layers)
    forward = [min(layer.forward_seconds, layer.graph_seconds) for layer in layers]
    backward = returning = [layer.backward_seconds for layer in layers]
    if split:
        backward = [min(layer.backward_seconds, layer.inputs_seconds + layer.weights_seconds) for layer in layers]
        returning = [min(layer.backward_seconds, layer.inputs_seconds) for layer in layers]
    update = layers[0].update_seconds
    work = [micro_batches * (f + b) for f, b in zip(forward, backward, strict=True)]
    updated = [seconds + layer.update_seconds for seconds, layer in zip(work, layers, strict=True)]
    first = list(accumulate(forward, initial=0.0))[:-1]
    around = list(accumulate(map(sum, zip(forward, backward, strict=True)), initial=0.0))[:-1]

    def at_least(work: Sequence[float], fill: Sequence[float]) -> float:
        of_devices = fill[:devices]
        return max(_by_area(sum(work), of_devices, slowdown), _by_pieces(work, of_devices), _by_layer(work, fill))

    longest = max(map(max, zip(forward, returning, strict=True)))
    through = sum(forward) + sum(returning[1:]) + backward[0] + (micro_batches - 1) * longest + update
    bounds = [at_least(updated, first), through]
    if not split:
        bounds.append(at_least(work, around) + update)
    return LowerBound(max(bounds), at_least(updated, [0.0] * len(layers)))


def _by_area(work: float, fill: Sequence[float], slowdown: Sequence[float]) -> float:
    """The least T at which `work` fits between `fill[j]` and T on the devices j, of which those with the longest fill
    may have none. n devices that compute do n / slowdown[n - 1] seconds of work in a second."""
    reached = [n / slowdown[min(n, len(slowdown)) - 1] if slowdown else float(n) for n in range(1, len(fill) + 1)]
    speeds = list(accumulate(reached, max))  # the most work per second of up to n devices
    gained = [after - before for before, after in pairwise([0.0, *speeds])]
    lost = accumulate(more * seconds for more, seconds in zip(gained, fill, strict=True))
    return min((work + of) / speed for of, speed in zip(lost, speeds, strict=True))


def _by_pieces(work: Sequence[float], fill: Sequence[float]) -> float:
    """The least T at which, for every k, the k largest pieces of work fit whole, if all were as small as their
    smallest."""
    pieces = sorted(work, reverse=True)
    longest = 0.0
    for k, (piece, following) in enumerate(pairwise([*pieces, -1.0]), 1):
        if following < piece:  # of equal pieces all count together
            ends = [seconds + piece for seconds in fill]
            heapify(ends)
            for _ in range(k - 1):
                heapreplace(ends, ends[0] + piece)
            longest = max(longest, ends[0])
    return longest


def _by_layer(work: Sequence[float], fill: Sequence[float]) -> float:
    """The least T at which each layer's device is done with it; `fill` is that of a device that begins with it."""
    longest, earlier = 0.0, math.inf
    for seconds, wait in zip(work, fill, strict=True):
        longest = max(longest, seconds + min(wait, earlier))
        earlier = min(earlier, wait + seconds)
    return longest
