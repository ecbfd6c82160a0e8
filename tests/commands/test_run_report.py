"""The parent's side of a training: which of its steps is shown."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from reporting_runs import events, page_data
from training_runs import SMALL, configure, train_here

from gpipe_cli.commands.prepare_run import prepare
from gpipe_cli.commands.run_report import run_report
from gpipe_cli.config.settings import TrainConfig
from gpipe_cli.training.events import StepDone

# five steps an epoch, the last one of 6 samples; in all three epochs but for the last two steps
SETTINGS = (*SMALL, "dataset.train_samples=38", "epochs=3", "max_steps=13", "executor=in_process", "partitions=2",
            "hardware=v100", "logger=[tensorboard]", "ema_decay=0")  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainConfig, list[object]]:
    """A training in this process, and all that its worker has told."""
    config = configure(*SETTINGS)
    return config, train_here(config, tmp_path_factory.mktemp("trained"))


def told(
    trained: tuple[TrainConfig, list[object]], folder: Path, seconds: Mapping[int, float], steps: int
) -> dict[str, Any]:
    """The page's data, after the report of so many steps, of which these took so long, and others 5 s."""
    config, messages = trained
    folder.mkdir(exist_ok=True)
    report = run_report(prepare(config, (), lambda line: None), folder, None)
    done = 0
    for message in messages:
        if isinstance(message, StepDone):
            done = message.step
            message = replace(message, seconds=seconds.get(done, 5.0))
        if done <= steps:
            report.on_message(message)
    report.finish("completed", None)
    return page_data(folder)


def test_the_step_that_is_shown_is_the_median_of_the_last_whole_epoch(
    trained: tuple[TrainConfig, list[object]], tmp_path: Path
) -> None:
    """It was the fifth of the first epoch, in which memory is still being allocated: 17 % longer than the others."""
    second = {6: 3.0, 7: 2.0, 8: 2.2, 9: 1.0, 10: 2.1}  # step 10 has fewer samples, of the others 2.0 is the median
    data = told(trained, tmp_path, second | {4: 4.0}, steps=13)
    shown = [(step["epoch"], step["step"], step["step_seconds"], step["median_of"]) for step in data["steps"]]
    assert shown == [(1, 4, 4.0, 1), (2, 7, 2.0, 4)]  # the first three steps are warm-up
    assert [image.step for image in events(tmp_path).Images("pictures/timeline")] == [4, 7]


def test_a_run_shorter_than_an_epoch_shows_the_median_behind_its_warm_up(
    trained: tuple[TrainConfig, list[object]], tmp_path: Path
) -> None:
    (step,) = told(trained, tmp_path / "four", {1: 9.0, 2: 8.0, 3: 7.0, 4: 4.0}, steps=4)["steps"]
    assert (step["step"], step["median_of"]) == (4, 1)
    (step,) = told(trained, tmp_path / "three", {1: 9.0, 2: 8.0, 3: 7.0}, steps=3)["steps"]
    assert (step["step"], step["median_of"]) == (2, 3), "there is nothing but warm-up"
