"""The curves of a run, read back from its events, and which of them are the same.

That an update does not depend on the number of partitions (the paper's sections 1 and 7) is seen where the losses of
K = 1, 2, 4 and 8 lie on one line. Whether they do is decided here by their bits, not by the eye.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

MOST_POINTS = 100_000  # of a curve; of longer ones TensorBoard's reader keeps a sample, always the same


@dataclass(frozen=True)
class Curve:
    """One scalar over the steps of a run."""

    steps: tuple[int, ...]
    values: tuple[float, ...]  # what 32-bit floats hold: so the events have them
    complete: bool = True  # False: a sample of more than MOST_POINTS

    @property
    def bits(self) -> bytes:
        """Steps and values bit for bit: NaN is like NaN here, and 0 unlike -0."""
        return struct.pack(f"{len(self.steps)}q{len(self.values)}f", *self.steps, *self.values)


class HasCurves(Protocol):
    """A run, as far as its curves go."""

    @property
    def curves(self) -> Mapping[str, Curve]: ...


def read_curves(folder: Path) -> dict[str, Curve]:
    """Every scalar in the events of ``folder`` by tag; none where there are no events.

    What a resumed run repeated counts once, as in TensorBoard: its own points take the place of the older ones.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # Here 0 would mean all of them: one picture is the fewest that the reader can be told to keep.
    few = {"images": 1, "audio": 1, "histograms": 1, "compressedHistograms": 1, "tensors": 1}
    accumulator = EventAccumulator(str(folder), size_guidance={**few, "scalars": MOST_POINTS})
    accumulator.Reload()
    found = {}
    for tag in accumulator.Tags()["scalars"]:
        events = accumulator.Scalars(tag)
        steps = tuple(event.step for event in events)
        found[tag] = Curve(steps, tuple(event.value for event in events), len(events) < MOST_POINTS)
    return found


def compared_curve(run: HasCurves, tag: str) -> Curve | None:
    """The curve of a run as it may stand beside those of others; None if it has no points there.

    A speed in samples is none of text: it would be sentences, which differ in length, beside images.
    """
    from gpipe_cli.reporting.run import tensorboard as dashboard  # torch comes with it

    curve = run.curves.get(tag)
    sentences = tag == dashboard.SAMPLES_PER_SECOND and dashboard.TOKENS_PER_SECOND in run.curves
    return None if curve is None or not curve.steps or sentences else curve


def same_curves(runs: Sequence[HasCurves], tag: str) -> tuple[tuple[int, ...], ...]:
    """Groups of runs whose points of ``tag`` are the same bits at the same steps, each of two runs or more.

    Returns:
        positions in ``runs``. A run without points is in no group, and neither is one of which only a sample is known.
    """
    groups: dict[bytes, list[int]] = {}
    for position, run in enumerate(runs):
        curve = compared_curve(run, tag)
        if curve is not None and curve.complete:
            groups.setdefault(curve.bits, []).append(position)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)


def compared_tags(runs: Sequence[HasCurves]) -> list[str]:
    """The curves that a comparison shows, as far as a run has them: train loss, test scores, speed."""
    from gpipe_cli.reporting.run import tensorboard as dashboard  # torch comes with it

    tags = (dashboard.TRAIN_LOSS, dashboard.TEST_TOP1, dashboard.TEST_PERPLEXITY, *speed_tags())
    return [tag for tag in tags if any(compared_curve(run, tag) is not None for run in runs)]


def speed_tags() -> tuple[str, ...]:
    """Curves whose single steps wait for data, disks and other programs; they are drawn as running medians."""
    from gpipe_cli.reporting.run import tensorboard as dashboard

    return dashboard.SAMPLES_PER_SECOND, dashboard.TOKENS_PER_SECOND
