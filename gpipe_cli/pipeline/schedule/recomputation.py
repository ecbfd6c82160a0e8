"""Chooses the fewest micro-batches that each stage has to recompute to fit its memory.

The paper (section 2.3) recomputes everything, at the price of a forward for each micro-batch. But memory is short only
at the peak: a stage may keep the activations of the micro-batches for which there is room.

A stage that recomputes everything holds the input of each micro-batch from its forward to its backward, and during a
backward the graph of that one micro-batch. Keeping a micro-batch adds the rest of its graph from its forward until
its backward begins. So the number of intervals that may overlap at each action is limited, and the solution is greedy:
where there is one too many, drop the one that ends last, as it takes room for longest.
"""

from collections.abc import Sequence
from heapq import heappop, heappush

from gpipe_cli.errors import InputError
from gpipe_cli.pipeline.schedule.held import Held, changed_bytes
from gpipe_cli.pipeline.schedule.schedule import (
    RETURNS,
    Action,
    Kind,
    Retain,
    Schedule,
    backward_follows_forward,
    stage_retained,
)


class DoesNotFitError(InputError):
    """A stage's activations exceed its memory whatever it recomputes."""

    def __init__(self, stage: int, missing_bytes: int) -> None:
        # Pass both on, as an exception is unpickled from its arguments.
        super().__init__(stage, missing_bytes)
        self.stage, self.missing_bytes = stage, missing_bytes

    def __str__(self) -> str:
        return f"stage {self.stage} lacks {self.missing_bytes} bytes for activations even if it recomputes all it can"


def fewest_recomputations(
    order: Schedule, sizes: Sequence[Held], limit_bytes: Sequence[int]
) -> tuple[frozenset[int], ...]:
    """For each stage, the fewest micro-batches to recompute such that its activations stay within a limit.

    The result is for :func:`with_recomputation`; ``peak_bytes`` of that schedule is at most ``limit_bytes`` per stage.
    `order` has no recomputations; `sizes` are, per stage, the bytes of a micro-batch in each way to hold it, with the
    input no larger than the graph. A micro-batch whose backward directly follows its forward is never recomputed, as
    nothing would be gained. ``gpipe`` recomputes the first micro-batches, ``1f1b`` the last ones before memory is full.

    Raises DoesNotFitError for the stage that lacks most.
    """
    found = [_on_stage(*of_stage) for of_stage in zip(order.stages, sizes, limit_bytes, strict=True)]
    missing, stage = max((missing, -stage) for stage, (_, missing) in enumerate(found))
    if missing > 0:
        raise DoesNotFitError(-stage, missing)
    return tuple(recomputed for recomputed, _ in found)


def _on_stage(actions: Sequence[Action], size: Held, limit_bytes: int) -> tuple[frozenset[int], int]:
    """The micro-batches to recompute, and how many bytes are missing even so (0 if the stage fits).

    Recomputations in `actions` are ignored, as each holds only what its backward holds.
    """
    assert 0 <= size.input <= size.graph, "a graph holds its input"
    actions = [a for a in actions if a.kind is not Kind.R]
    changes = changed_bytes(size)
    again, _ = changes[Kind.R, Retain.GRAPH]  # bytes that a recomputation adds, and that dropping a graph saves
    ends = {a.micro_batch: at for at, a in enumerate(actions) if a.kind in RETURNS}
    free = backward_follows_forward(actions)
    recomputed: set[int] = set()
    kept: list[tuple[int, int]] = []  # heap: micro-batches that may be dropped, the one that ends last on top
    held = missing = 0  # bytes held now, and the most bytes over the limit
    for at, (a, retain) in enumerate(stage_retained(actions)):
        begin, end = changes[a.kind, retain]
        held += begin
        if a.kind is Kind.F and a.micro_batch not in free:
            heappush(kept, (-ends[a.micro_batch], a.micro_batch))
        elif a.kind in RETURNS and a.micro_batch in recomputed:
            held += again
        # If the top of `kept` has ended, all of them have.
        while held > limit_bytes and kept and -kept[0][0] > at and again > 0:
            recomputed.add(heappop(kept)[1])
            held -= again
        missing = max(missing, held - limit_bytes)
        held += end
    return frozenset(recomputed), missing
