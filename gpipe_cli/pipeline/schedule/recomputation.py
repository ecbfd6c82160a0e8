"""Which micro-batches each stage recomputes if it recomputes as few as its memory allows.

The paper (section 2.3) recomputes everything and pays a forward for each micro-batch. Memory is needed at the fullest
moment only, though: a stage may keep the activations of the micro-batches for which there is room, and the schedule
says for each of them, on each stage, what happens.

A stage that recomputes everything holds the input of each micro-batch from its forward to its backward, and during a
backward the graph of that one micro-batch. Keeping a micro-batch adds the rest of its graph from its forward until
its backward begins. So the question is how many intervals may overlap at each action, and the answer is greedy: where
there is one too many, drop the one that ends last: it takes room for longest.
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
        # Both as arguments, so that a pickled error is made again as it was.
        super().__init__(stage, missing_bytes)
        self.stage, self.missing_bytes = stage, missing_bytes

    def __str__(self) -> str:
        return f"stage {self.stage} lacks {self.missing_bytes} bytes for activations even if it recomputes all it can"


def fewest_recomputations(
    order: Schedule, sizes: Sequence[Held], limit_bytes: Sequence[int]
) -> tuple[frozenset[int], ...]:
    """For each stage, the fewest micro-batches to recompute such that its activations stay within a limit.

    What :func:`with_recomputation` takes; ``peak_bytes`` of that schedule is at most ``limit_bytes``, which each stage
    has room for. `order` is without recomputations; `sizes` are the bytes of one micro-batch in each way to hold it, an
    input no more than its graph. A micro-batch whose backward directly follows its forward is never recomputed: nothing
    would be gained. Which ones are: under ``gpipe`` those that came first, under ``1f1b`` those that came last before
    the memory was full.

    Raises DoesNotFitError, which names the stage that lacks most.
    """
    found = [_on_stage(*of_stage) for of_stage in zip(order.stages, sizes, limit_bytes, strict=True)]
    missing, stage = max((missing, -stage) for stage, (_, missing) in enumerate(found))
    if missing > 0:
        raise DoesNotFitError(-stage, missing)
    return tuple(recomputed for recomputed, _ in found)


def _on_stage(actions: Sequence[Action], size: Held, limit_bytes: int) -> tuple[frozenset[int], int]:
    """The micro-batches to recompute, and how many bytes are missing even so (0 if it fits).

    A recomputation holds what its backward holds, so it is left out.
    """
    assert 0 <= size.input <= size.graph, "a graph holds its input"
    actions = [a for a in actions if a.kind is not Kind.R]
    changes = changed_bytes(size)
    again, _ = changes[Kind.R, Retain.GRAPH]  # bytes that a recomputation adds, and that dropping a graph saves
    ends = {a.micro_batch: at for at, a in enumerate(actions) if a.kind in RETURNS}
    free = backward_follows_forward(actions)
    recomputed: set[int] = set()
    kept: list[tuple[int, int]] = []  # heap: those that may be dropped, the one that ends last on top
    held = missing = 0  # bytes now, and at most over the limit
    for at, (a, retain) in enumerate(stage_retained(actions)):
        begin, end = changes[a.kind, retain]
        held += begin
        if a.kind is Kind.F and a.micro_batch not in free:
            heappush(kept, (-ends[a.micro_batch], a.micro_batch))
        elif a.kind in RETURNS and a.micro_batch in recomputed:
            held += again
        # Of those in `kept` that have ended none is on top while there is one that has not.
        while held > limit_bytes and kept and -kept[0][0] > at and again > 0:
            recomputed.add(heappop(kept)[1])
            held -= again
        missing = max(missing, held - limit_bytes)
        held += end
    return frozenset(recomputed), missing
