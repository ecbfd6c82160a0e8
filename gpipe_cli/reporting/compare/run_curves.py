"""The curves of several runs: which may stand beside each other, and which are the same.

That an update does not depend on the number of partitions (the paper's sections 1 and 7) is seen where the losses of
K = 1, 2, 4 and 8 lie on one line. Whether they do is decided here by their bits, not by the eye.
"""

from collections.abc import Sequence

from gpipe_cli.reporting.compare.run_record import Curve, RunRecord
from gpipe_cli.reporting.run.tensorboard import (
    SAMPLES_PER_SECOND,
    TEST_PERPLEXITY,
    TEST_TOP1,
    TOKENS_PER_SECOND,
    TRAIN_LOSS,
)

# Curves whose single steps wait for data, disks and other programs; they are drawn as running medians.
SPEEDS = (SAMPLES_PER_SECOND, TOKENS_PER_SECOND)


def compared_curve(run: RunRecord, tag: str) -> Curve | None:
    """The curve of a run as it may stand beside those of others; None if it has no points there.

    A speed in samples is none of text: it would be sentences, which differ in length, beside images.
    """
    curve = run.curves.get(tag)
    sentences = tag == SAMPLES_PER_SECOND and TOKENS_PER_SECOND in run.curves
    return None if curve is None or not curve.steps or sentences else curve


def same_curves(runs: Sequence[RunRecord], tag: str) -> tuple[tuple[int, ...], ...]:
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


def compared_tags(runs: Sequence[RunRecord]) -> list[str]:
    """The curves that a comparison shows, as far as a run has them: train loss, test scores, speed."""
    tags = (TRAIN_LOSS, TEST_TOP1, TEST_PERPLEXITY, *SPEEDS)
    return [tag for tag in tags if any(compared_curve(run, tag) is not None for run in runs)]
