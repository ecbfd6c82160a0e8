"""When a run evaluates, saves and ends."""

from dataclasses import replace

from training_runs import TINY, configure

from gpipe_cli.assembly.loss import Totals
from gpipe_cli.training.milestones import Milestones, is_best, score_of, starting_point

STEPS = range(1, 13)


def test_what_is_due_after_which_step() -> None:
    settings = [*TINY, "epochs=4", "max_steps=11", "evaluate_every_epochs=2", "checkpoint.every_steps=4"]
    found = Milestones(configure(*settings, "checkpoint.every_epochs=1"), 3)
    assert (found.total_steps, found.end_step) == (12, 11)
    assert [step for step in STEPS if found.evaluates_after(step)] == [6, 11, 12]
    assert [step for step in STEPS if found.saves_after(step)] == [3, 4, 6, 8, 9, 11, 12]
    never = Milestones(configure(*settings, "checkpoint.every_epochs=0"), 3, only_steps=True)
    assert not any(never.evaluates_after(step) or never.saves_after(step) for step in STEPS)


def test_more_is_better_and_what_is_no_number_is_never_the_best() -> None:
    begin = starting_point(configure(*TINY), None)
    assert is_best(0.1, begin)
    assert [is_best(score, replace(begin, best_score=0.5)) for score in (0.4, 0.5, 0.6)] == [False, False, True]
    assert not is_best(float("nan"), begin)
    totals = Totals(4, 12.0, 8.0, 2.0, 3.0)
    assert (score_of(totals, text=False), score_of(totals, text=True)) == (0.5, -3.0)
