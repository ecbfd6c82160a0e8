"""Where the time of a step goes, in shares, as the paper's authors charted it for AmoebaNet-D on 8 accelerators.

Section 3.1 of the NeurIPS version: computation 65.6 %, recomputation 22.5 %, bubble 4.1 %, load imbalance 3.2 %, set-up
2.9 %, weight update 1.7 %. Transfers, which that chart leaves out as negligible, are a separate share here.

Idle time has two causes. With c_k for a forward and a backward of one micro-batch on stage k, a step of ``gpipe``
without recomputation, with free transfers and the same slowest stage both ways, takes

    P = sum c + (M - 1) max c

so that K stages, which work M sum c together, are idle for

    K P - M sum c = (K - 1) sum c  +  (M - 1) sum (max c - c_k)

The first term is the bubble, which remains if all stages are equal: (K-1)/(M+K-1) of K P in that case. The second is
the load imbalance. For other schedules and for measured times, c_k is the time that stage k computes divided by M, and
idle time beyond the second term is the bubble. Stages that share a device count as a single stage: while any of them
computes the others are not idle.
"""

from dataclasses import dataclass
from typing import NamedTuple

from gpipe_cli.schedule.schedule import Kind
from gpipe_cli.schedule.timeline import EventKind, Timeline


class Breakdown(NamedTuple):
    """Shares of the time of all devices in a step, from 0 to 1; together 1 (0 if nothing took any time)."""

    compute: float  # forward and backward
    recompute: float
    bubble: float  # idle, as K equal stages would also be
    imbalance: float  # idle because stages differ in cost
    transfer: float  # exposed transfers, sums of gradients over replicas included
    update: float  # update of the weights
    set_up: float  # the rest of the step

    @property
    def idle(self) -> float:
        """The share of the time in which devices did nothing, whatever the cause."""
        return sum((self.bubble, self.imbalance, self.transfer, self.set_up))


@dataclass(slots=True)
class _DeviceTime:
    """Seconds of a device in a step. The window is from the beginning of the first action of all devices to the end of
    the last; updates and sums over replicas may be outside."""

    work: float = 0.0  # seconds of all actions
    recompute: float = 0.0  # the part of `work` that recomputations take
    transfer: float = 0.0  # exposed transfers and sums over replicas
    update: float = 0.0
    inside: float = 0.0  # transfers and updates within the window
    outside: float = 0.0  # transfers and updates outside the window


def breakdown(timeline: Timeline, micro_batches: int, step_seconds: float | None = None) -> Breakdown:
    """The breakdown of a measured or simulated step of M `micro_batches`.

    `step_seconds`: duration of the whole step; default: from the first action's start to the end of the last event.
    """
    assert timeline.stages
    assert micro_batches > 0
    begin, end, window = timeline.start_seconds, timeline.end_seconds, timeline.step_seconds
    if step_seconds is None:
        step_seconds = timeline.step_end_seconds - begin
    time_of_device: dict[int, _DeviceTime] = {}
    device_of_stage = timeline.device_of_stage or range(len(timeline.stages))
    for device, spans, events in zip(device_of_stage, timeline.stages, timeline.events, strict=True):
        device_time = time_of_device.setdefault(device, _DeviceTime())
        device_time.work += sum(span.seconds for span in spans)
        device_time.recompute += sum(span.seconds for span in spans if span.action.kind is Kind.R)
        for event in events:
            if event.what is EventKind.WAITING:
                continue
            within = max(0.0, min(event.end_seconds, end) - max(event.start_seconds, begin))
            outside = event.seconds - within if event.action is None else 0.0
            device_time.inside += within
            device_time.outside += outside
            if event.what is EventKind.UPDATE:
                device_time.update += within + outside
            else:
                device_time.transfer += within + outside
    devices = list(time_of_device.values())
    busy = [device.work for device in devices]
    recompute = sum(device.recompute for device in devices)
    transfer = sum(device.transfer for device in devices)
    update = sum(device.update for device in devices)
    idle = sum(max(0.0, window - device.work - device.inside) for device in devices)
    set_up = sum(max(0.0, step_seconds - window - device.outside) for device in devices)
    unequal_seconds = sum(max(busy) - seconds for seconds in busy) * (micro_batches - 1) / micro_batches
    imbalance = min(idle, unequal_seconds)

    # Shares of the sum, not of K times the step: the clocks of several machines may disagree a little.
    total = sum(busy) + transfer + update + idle + set_up
    scale = 1 / total if total > 0 else 0.0
    return Breakdown(
        compute=(sum(busy) - recompute) * scale,
        recompute=recompute * scale,
        bubble=(idle - imbalance) * scale,
        imbalance=imbalance * scale,
        transfer=transfer * scale,
        update=update * scale,
        set_up=set_up * scale,
    )
