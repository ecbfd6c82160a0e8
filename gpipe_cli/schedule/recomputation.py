"""Chooses the fewest micro-batches that each stage has to recompute to fit its memory.

The paper (section 2.3) recomputes everything, at the price of a forward for each micro-batch. But memory is short only
at the peak: a stage may keep the activations of the micro-batches for which there is room.

A stage that recomputes everything saves the input of each micro-batch from its forward to its backward, and during a
backward the graph of that micro-batch. Saving a micro-batch adds the rest of its graph from its forward until its
backward begins. So the number of intervals that may overlap at each action is limited, and the solution is greedy:
where too many overlap, drop the interval that ends last, as it takes room for longest.
"""

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import pairwise

from gpipe_cli.errors import InputError
from gpipe_cli.schedule.dependencies import in_device_order
from gpipe_cli.schedule.in_flight_memory import SavedAmounts, changed_bytes
from gpipe_cli.schedule.placement import stages_of_devices
from gpipe_cli.schedule.schedule import (
    SENDS_GRADIENT,
    Action,
    Kind,
    Retain,
    Schedule,
    with_saved_state,
)


class DoesNotFitError(InputError):
    """A stage's activations exceed its memory whatever it recomputes."""

    def __init__(self, stage: int, missing_bytes: int) -> None:
        # An exception is unpickled from its arguments, so both are passed on.
        super().__init__(stage, missing_bytes)
        self.stage, self.missing_bytes = stage, missing_bytes

    def __str__(self) -> str:
        return f"stage {self.stage} needs {self.missing_bytes} more bytes for activations, even with full recomputation"


def find_fewest_recomputations(
    order: Schedule, sizes: Sequence[SavedAmounts], limit_bytes: Sequence[int], device_of_stage: Sequence[int] = ()
) -> tuple[frozenset[int], ...]:
    """For each stage, the fewest micro-batches to recompute such that its activations stay within a limit.

    The result is for :func:`with_recomputation`; ``peak_bytes`` of that schedule is at most ``limit_bytes`` per stage.
    `order` has no recomputations; `sizes` are, per stage, the bytes of a micro-batch in each way to save it, with the
    input no larger than the graph. A micro-batch whose backward directly follows its forward is never recomputed, as
    nothing would be gained. ``gpipe`` recomputes the first micro-batches, ``1f1b`` the last ones before memory is full.

    With a device for each stage, the limits are for the stages of each device together, and fewer recomputations may be
    enough where these stages differ.

    Raises DoesNotFitError for the stage that lacks most, or the first stage of the device that does.
    """
    order = Schedule((tuple(a for a in row if a.kind is not Kind.R) for row in order), order.row_of_stage)
    rows = [list(with_saved_state(actions)) for actions in order.stages]
    firsts: Sequence[int] = range(len(rows))
    if device_of_stage:
        firsts = [stages[0] for stages in stages_of_devices(device_of_stage)]
        rows = [[] for _ in firsts]
        for action, retain in in_device_order(order, device_of_stage):
            rows[device_of_stage[action.stage]].append((action, retain))
    recomputed_of_stage: list[set[int]] = [set() for _ in sizes]
    lacking = []
    for first, row, limit in zip(firsts, rows, limit_bytes, strict=True):
        recomputed, missing = _recompute_on_device(row, sizes, limit)
        lacking.append((missing, -first))
        for stage, micro_batch in recomputed:
            recomputed_of_stage[stage].add(micro_batch)
    missing, stage = max(lacking)
    if missing > 0:
        raise DoesNotFitError(-stage, missing)
    return tuple(map(frozenset, recomputed_of_stage))


def _recompute_on_device(
    row: Sequence[tuple[Action, Retain]], sizes: Sequence[SavedAmounts], limit_bytes: int
) -> tuple[set[tuple[int, int]], int]:
    """The recomputations that are needed (stage, micro-batch), and how many bytes are still missing (0 if none)."""
    changes = [changed_bytes(size) for size in sizes]
    # bytes that a recomputation adds, and that dropping a graph saves
    graph_bytes = [stage_changes[Kind.R, Retain.ACTIVATIONS][0] for stage_changes in changes]
    assert all(0 <= size.input <= size.graph for size in sizes), "a graph includes its input"
    ends = {(a.stage, a.micro_batch): at for at, (a, _) in enumerate(row) if a.kind in SENDS_GRADIENT}
    pairs = pairwise(a for a, _ in row)
    never_recomputed = {b[1:] for a, b in pairs if b.kind in SENDS_GRADIENT and a == (Kind.F, *b[1:])}
    recomputed: set[tuple[int, int]] = set()
    droppable: list[tuple[int, tuple[int, int]]] = []  # heap: graphs that may be dropped, the last to end on top
    saved_bytes = missing = 0  # bytes saved now, and the most bytes over the limit
    for at, ((kind, stage, micro_batch), retain) in enumerate(row):
        graph = stage, micro_batch
        begin, end = changes[stage][kind, retain]
        saved_bytes += begin
        if kind is Kind.F and graph not in never_recomputed and graph_bytes[stage] > 0:
            heappush(droppable, (-ends[graph], graph))
        elif kind in SENDS_GRADIENT and graph in recomputed:
            saved_bytes += graph_bytes[stage]
        # If the top of `droppable` has ended, all of them have.
        while saved_bytes > limit_bytes and droppable and -droppable[0][0] > at:
            dropped = heappop(droppable)[1]
            recomputed.add(dropped)
            saved_bytes -= graph_bytes[dropped[0]]
        missing = max(missing, saved_bytes - limit_bytes)
        saved_bytes += end
    return recomputed, missing
