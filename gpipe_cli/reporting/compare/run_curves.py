"""The curves of several runs: what their events hold, and which of them are the same.

That an update does not depend on the number of partitions (the paper's sections 1 and 7) is seen where the losses of
K = 1, 2, 4 and 8 lie on one line. Whether they do is decided here by their bits, not by the eye.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpipe_cli.reporting.run.tensorboard import (
    SAMPLES_PER_SECOND,
    TEST_PERPLEXITY,
    TEST_TOP1,
    TOKENS_PER_SECOND,
    TRAIN_LOSS,
)

MOST_POINTS = 100_000  # of a curve; of longer ones TensorBoard's reader keeps a sample, always the same
# Curves whose single steps wait for data, disks and other programs; they are drawn as running medians.
SPEEDS = (SAMPLES_PER_SECOND, TOKENS_PER_SECOND)
COMPARED = (TRAIN_LOSS, TEST_TOP1, TEST_PERPLEXITY, *SPEEDS)


@dataclass(frozen=True)
class Curve:
    """One scalar over the steps of a run; it has one point or more."""

    steps: tuple[int, ...]
    values: tuple[float, ...]  # what 32-bit floats hold: so the events have them
    complete: bool = True  # False: a sample of more than MOST_POINTS


def read_curves(folder: Path) -> dict[str, Curve]:
    """Every scalar in the events of ``folder`` by tag; none where there are no events.

    What a resumed run repeated counts once, as in TensorBoard: its own points take the place of the older ones.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # 0 means all of them: 1 is the fewest that the reader can keep.
    few = {"images": 1, "audio": 1, "histograms": 1, "compressedHistograms": 1, "tensors": 1}
    accumulator = EventAccumulator(str(folder), size_guidance={**few, "scalars": MOST_POINTS})
    accumulator.Reload()
    found = {}
    for tag in accumulator.Tags()["scalars"]:
        events = accumulator.Scalars(tag)
        steps = tuple(event.step for event in events)
        found[tag] = Curve(steps, tuple(event.value for event in events), len(events) < MOST_POINTS)
    return found


def same_curves(curves: Sequence[Curve | None]) -> list[list[int]]:
    """Groups of two curves or more whose points are the same bits at the same steps: NaN is like NaN, 0 unlike -0.

    Returns:
        positions in ``curves``. Where there is no curve, or only a sample of it, it is in no group.
    """
    groups: dict[bytes, list[int]] = {}
    for position, curve in enumerate(curves):
        if curve is not None and curve.complete:
            points = len(curve.steps)
            bits = struct.pack(f"{points}q{points}f", *curve.steps, *curve.values)
            groups.setdefault(bits, []).append(position)
    return [group for group in groups.values() if len(group) > 1]
