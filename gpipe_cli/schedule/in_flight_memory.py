"""The memory that a stage holds for micro-batches in flight, by action (paper section 2.3: O(N + L/K * N/M)).

`MEMORY_EFFECTS` has the effect of each action. Times do not matter, as a stage's actions have a fixed order.
"""

from collections.abc import Iterator, Mapping, Sequence
from operator import add, mul
from typing import NamedTuple

from gpipe_cli.schedule.dependencies import in_device_order, topological_order
from gpipe_cli.schedule.schedule import SENDS_GRADIENT, Action, Kind, Retain, Schedule, with_saved_state


class SavedAmounts(NamedTuple):
    """Number of micro-batches that a stage saves in each of four ways, or the bytes of a micro-batch in each."""

    graph: int = 0  # with every activation of the stage saved, its input included
    input: int = 0  # with only the stage's input saved
    gradients: int = 0  # during an I, in addition to the graph: the gradients of outputs that its W needs
    weights: int = 0  # between I and W: what the W needs, those gradients included


_SAME = SavedAmounts()
# how the counts change when an action begins and ends
MEMORY_EFFECTS: Mapping[tuple[Kind, Retain], tuple[SavedAmounts, SavedAmounts]] = {
    (Kind.F, Retain.NOTHING): (_SAME, _SAME),
    (Kind.F, Retain.INPUT): (SavedAmounts(input=1), _SAME),
    (Kind.F, Retain.ACTIVATIONS): (SavedAmounts(graph=1), _SAME),
    (Kind.R, Retain.ACTIVATIONS): (SavedAmounts(graph=1, input=-1), _SAME),
    (Kind.B, Retain.NOTHING): (_SAME, SavedAmounts(graph=-1)),
    (Kind.I, Retain.WEIGHTS): (SavedAmounts(gradients=1), SavedAmounts(graph=-1, gradients=-1, weights=1)),
    (Kind.W, Retain.NOTHING): (_SAME, SavedAmounts(weights=-1)),
}
MemoryChanges = Mapping[tuple[Kind, Retain], tuple[int, int]]


def changed_bytes(size: SavedAmounts) -> MemoryChanges:
    """The bytes by which a stage's memory changes when an action of a micro-batch of this size begins and ends."""
    return {key: (sum(map(mul, begin, size)), sum(map(mul, end, size))) for key, (begin, end) in MEMORY_EFFECTS.items()}


def in_flight_counts(actions: Sequence[Action]) -> Iterator[SavedAmounts]:
    """How many micro-batches a stage saves in each way while each of its actions runs."""
    counts = _SAME
    for action, retain in with_saved_state(actions):
        begin, end = MEMORY_EFFECTS[action.kind, retain]
        if begin is not _SAME:
            counts = SavedAmounts(*map(add, counts, begin))
        yield counts
        if end is not _SAME:
            counts = SavedAmounts(*map(add, counts, end))


def peak_bytes(schedule: Schedule, sizes: Sequence[Sequence[SavedAmounts]]) -> tuple[int, ...]:
    """For each stage, the peak bytes saved for micro-batches in flight. ``sizes[stage][micro_batch]`` are the bytes of
    each way to save the micro-batch."""
    assert len(sizes) == len(schedule.stages), "sizes for each stage"
    return tuple(max(stage_bytes, default=0) for stage_bytes in map(bytes_per_action, schedule.stages, sizes))


def peaks_of_devices(
    schedule: Schedule, sizes: Sequence[Sequence[SavedAmounts]], device_of_stage: Sequence[int]
) -> tuple[int, ...]:
    """For each device, the peak bytes that its stages together save for micro-batches in flight, in the order of its
    actions; ``sizes`` as in `peak_bytes`. It is at most the sum of the stages' peaks, which need not coincide. Raises
    ScheduleError on a deadlock."""
    changes = [{size: changed_bytes(size) for size in set(stage_sizes)} for stage_sizes in sizes]
    saved_bytes = [0] * (1 + max(device_of_stage))
    peaks = saved_bytes.copy()
    for (kind, stage, m), retain in in_device_order(schedule, device_of_stage):
        begin, end = changes[stage][sizes[stage][m]][kind, retain]
        device = device_of_stage[stage]
        peaks[device] = max(peaks[device], saved_bytes[device] + begin)
        saved_bytes[device] += begin + end
    return tuple(peaks)


SkipBytes = Mapping[tuple[int, int], Sequence[tuple[int, int]]]
"""For stages (s, r) and each micro-batch, the bytes of the skips from stage s to r, and of their gradients back."""


def peak_skip_bytes(schedule: Schedule, skips: SkipBytes, device_of_stage: Sequence[int] = ()) -> tuple[int, ...]:
    """For each stage, the peak bytes of skips that wait there to be popped, and of gradients that wait for the
    backward, in the order of `topological_order`: a skip arrives before the outputs of the stages between."""
    skip_bytes = [0] * len(schedule.stages)
    peaks = skip_bytes.copy()
    for kind, stage, m in topological_order(schedule, device_of_stage) if skips else ():
        forward = kind is Kind.F
        for (sender, receiver), sizes in skips.items() if forward or kind in SENDS_GRADIENT else ():
            size = sizes[m][0 if forward else 1]
            first, second = (sender, receiver) if forward else (receiver, sender)
            if stage == second:
                skip_bytes[second] -= size
            elif stage == first:
                skip_bytes[second] += size
                peaks[second] = max(peaks[second], skip_bytes[second])
    return tuple(peaks)


def bytes_per_action(stage_actions: Sequence[Action], sizes: Sequence[SavedAmounts]) -> Iterator[int]:
    """The bytes that a stage saves for micro-batches in flight while each of its actions runs. ``sizes[micro_batch]``
    are the bytes of each way to save the micro-batch."""
    changes = {size: changed_bytes(size) for size in set(sizes)}
    saved_bytes = 0
    for action, retain in with_saved_state(stage_actions):
        begin, end = changes[sizes[action.micro_batch]][action.kind, retain]
        yield saved_bytes + begin
        saved_bytes += begin + end
