import math
from typing import get_args

import pytest

from gpipe_cli.reporting.run.task_words import Task, perplexity, scores_of, words_of
from gpipe_cli.training.events import Scores

TASKS: tuple[Task, ...] = get_args(Task)


@pytest.mark.parametrize("task", TASKS)
def test_headings_fit_their_columns_and_the_line_80_with_its_mark(task: Task) -> None:
    columns = words_of(task).columns
    begin = 0
    for number, (heading, end) in enumerate(columns):
        assert len(heading) + (number > 0) <= end - begin, heading
        begin = end
    assert begin + len(" best") <= 80


def test_images_and_text_are_judged_by_other_numbers() -> None:
    assert scores_of("classification", Scores(None, 1.25, 0.5, 0.75, averaged=False)) == {
        "loss": 1.25,
        "top1": 0.5,
        "top5": 0.75,
    }
    for task in ("language_model", "translation"):
        found = scores_of(task, Scores(9, math.log(50), 0.5, None, averaged=False))
        assert found == {"loss": math.log(50), "perplexity": pytest.approx(50), "token_accuracy": 0.5}


def test_the_perplexity_of_a_guess_is_the_number_of_choices() -> None:
    assert perplexity(-math.log(1 / 8000)) == pytest.approx(8000)
    assert perplexity(0.0) == 1.0


def test_a_loss_beyond_all_floats_is_no_error() -> None:
    assert perplexity(1e4) == perplexity(math.inf) == math.inf
    assert math.isnan(perplexity(math.nan))
