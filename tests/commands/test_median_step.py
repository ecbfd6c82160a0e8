import random
from statistics import median_low

import pytest
from reporting_runs import step

from gpipe_cli.commands.median_step import KEPT, MedianStep
from gpipe_cli.training.events import StepRecorded


def added(*seconds: float, begin: int = 1, counts: bool = True, to: MedianStep | None = None) -> MedianStep:
    """Steps that took so long; each recording begins at the number of its step."""
    steps = to or MedianStep()
    for number, duration in enumerate(seconds, begin):
        steps.add(step(number, seconds=duration), StepRecorded([], number), counts=counts)
    return steps


def chosen(steps: MedianStep) -> float:
    """The duration of the step that is shown, whose recording is its own."""
    nearest = steps.nearest
    assert nearest is not None
    done, recorded = nearest
    assert recorded.began_seconds == done.step
    return done.seconds


def test_of_few_steps_it_is_the_median_itself() -> None:
    assert MedianStep().nearest is None
    chance = random.Random(0)
    for count in range(1, KEPT + 1):
        seconds = [chance.random() for _ in range(count)]
        assert chosen(added(*seconds)) == median_low(seconds)


@pytest.mark.parametrize("slower", [0, 1 / 500, -1 / 500])
def test_of_many_steps_a_handful_of_recordings_has_one_near_the_median(slower: float) -> None:
    """Also where steps get slower all the time, as beside a program that needs more and more."""
    chance = random.Random(0)
    seconds = [3 + chance.random() + slower * number for number in range(1000)]
    steps = added(*seconds)
    assert abs(sorted(seconds).index(chosen(steps)) - 500) < 50
    assert len(steps._kept) <= KEPT
    assert steps.steps == 1000


def test_warm_up_and_short_mini_batches_stand_in_only_as_long_as_there_is_nothing_else() -> None:
    steps = added(9.0, 8.0, 7.0, counts=False)
    assert (chosen(steps), steps.counted, steps.steps) == (8.0, 0, 3)
    added(2.0, 3.0, 1.0, begin=4, to=steps)
    added(0.1, begin=7, counts=False, to=steps)
    assert (chosen(steps), steps.counted, steps.steps) == (2.0, 3, 3)
