import math
import re
from dataclasses import astuple
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from reporting_runs import (
    LANGUAGE_MODEL,
    TRANSLATIONS,
    age,
    description,
    evaluation,
    plan,
    recorded,
    shares,
    step,
    text_evaluation,
    text_step,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gpipe_cli.reporting.run import tensorboard as dashboard
from gpipe_cli.reporting.run.tensorboard import Dashboard
from gpipe_cli.training.events import Translation


def events(folder: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return accumulator


def curve(folder: Path, tag: str) -> list[tuple[int, Any]]:
    return [(event.step, pytest.approx(event.value)) for event in events(folder).Scalars(tag)]


def charts(folder: Path) -> dict[str, dict[str, list[str]]]:
    """The tags of every chart in Custom Scalars, by category and title."""
    from tensorboard.plugins.custom_scalar.layout_pb2 import Layout

    (event,) = events(folder).Tensors("custom_scalars__config__")
    categories = Layout.FromString(event.tensor_proto.string_val[0]).category
    return {category.title: {c.title: list(c.multiline.tag) for c in category.chart} for category in categories}


def test_every_curve_can_be_read_back(tmp_path: Path) -> None:
    board = Dashboard(tmp_path)
    board.step(step(1))
    board.step(step(2))
    board.evaluated(evaluation(2))
    board.flush()
    board.flush()
    expected = {
        "train/loss": [(1, 2.9), (2, 2.8)],
        "train/cross_entropy": [(1, 1.9), (2, 1.8)],
        "train/top1": [(1, 0.25), (2, 0.25)],
        "train/top5": [(1, 0.75), (2, 0.75)],
        "learning_rate": [(1, 0.04), (2, 0.04)],
        "gradient_norm": [(1, 1.5), (2, 1.5)],
        "speed/samples_per_second": [(1, 512.0), (2, 512.0)],
        "speed/step_seconds": [(1, 0.0625), (2, 0.0625)],
        "memory/stage_0_gib": [(1, 3 / 1024), (2, 3 / 1024)],
        "memory/stage_1_gib": [(1, 0.5), (2, 0.5)],
        "test/loss": [(2, 1.25)],
        "test/top1": [(2, 0.875)],
        "test/top5": [(2, 1.0)],
    }
    assert sorted(events(tmp_path).Tags()["scalars"]) == sorted(expected)
    for tag, points in expected.items():
        assert curve(tmp_path, tag) == points


def test_the_curves_of_text_can_be_read_back(tmp_path: Path) -> None:
    board = Dashboard(tmp_path, task="translation")
    board.step(text_step(1, cross_entropy=math.log(64), loss=5.0))
    board.evaluated(text_evaluation(1))
    board.flush()
    expected = {
        "train/perplexity": 64.0,
        "train/token_accuracy": 0.25,
        "speed/tokens_per_second": 16_000.0,
        "test/perplexity": 41.3,
        "test/token_accuracy": 0.312,
    }
    assert not [tag for tag in events(tmp_path).Tags()["scalars"] if "top" in tag]
    for tag, value in expected.items():
        assert curve(tmp_path, tag) == [(1, value)]
    assert not events(tmp_path).Tags()["tensors"]  # nothing was translated


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what TensorBoard brings along
def test_translations_are_a_table_that_shows_them_as_they_are(tmp_path: Path) -> None:
    from tensorboard.plugin_util import markdown_to_safe_html

    lines = Translation("fr-en", "a\nb\tc", "& &amp; \\", "")
    board = Dashboard(tmp_path, task="translation")
    board.evaluated(text_evaluation(4, translations=(*TRANSLATIONS, lines)))
    board.flush()
    (event,) = events(tmp_path).Tensors("translations/text_summary")
    assert event.step == 4
    shown = markdown_to_safe_html(event.tensor_proto.string_val[0])  # what TensorBoard itself makes of it
    rows = [
        re.findall(r"<t[hd]>(.*?)</t[hd]>", row, re.DOTALL) for row in re.findall(r"<tr>(.*?)</tr>", shown, re.DOTALL)
    ]
    assert rows[0] == ["pair", "source", "reference", "translation"]
    expected = [[*astuple(shown)] for shown in TRANSLATIONS] + [["fr-en", "a b c", "& &amp; \\", ""]]
    assert [[unescape(cell) for cell in row] for row in rows[1:]] == expected


def test_what_is_no_number_is_no_error_and_what_there_is_not_has_no_curve(tmp_path: Path) -> None:
    board = Dashboard(tmp_path, task="language_model")
    board.step(text_step(1, loss=math.nan, cross_entropy=1e4, gradient_norm=None, memory_bytes=()))
    board.step(text_step(2, loss=math.nan, cross_entropy=200.0))  # fits Python's floats, not those of an event
    board.flush()
    assert [event.value for event in events(tmp_path).Scalars("train/perplexity")] == [math.inf, math.inf]
    assert all(math.isnan(event.value) for event in events(tmp_path).Scalars(dashboard.TRAIN_LOSS))
    assert [step for step, _ in curve(tmp_path, dashboard.GRADIENT_NORM)] == [2]
    assert [step for step, _ in curve(tmp_path, dashboard.memory_tag(0))] == [2]


def test_a_resumed_run_replaces_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    first = Dashboard(tmp_path)
    first.describe("partitions: 2", "banner")
    for number in range(1, 7):
        first.step(step(number, loss=1.0))
    first.evaluated(evaluation(4))
    first.flush()
    age(tmp_path)
    second = Dashboard(tmp_path, first_step=4)
    for number in range(5, 8):
        second.step(step(number, loss=2.0))
    second.flush()
    assert curve(tmp_path, dashboard.TRAIN_LOSS) == [(n, 1.0 if n <= 4 else 2.0) for n in range(1, 8)]
    assert curve(tmp_path, dashboard.TEST_LOSS) == [(4, 1.25)]


def test_what_was_recorded_has_curves_beside_what_was_predicted(tmp_path: Path) -> None:
    board = Dashboard(tmp_path)
    board.begin(description(plan=plan()))
    board.recorded(*recorded(1))
    board.step(step(2))  # nothing was recorded of it
    board.recorded(*recorded(3, bubble=0.14))
    board.flush()
    assert curve(tmp_path, "idle/measured") == [(1, 0.18), (3, 0.22)]
    assert curve(tmp_path, "idle/predicted") == [(1, 0.2), (3, 0.2)]
    assert curve(tmp_path, "bubble/measured") == [(1, 0.1), (3, 0.14)]
    assert curve(tmp_path, "bubble/predicted") == [(1, 0.12), (3, 0.12)]
    assert curve(tmp_path, "bubble/ideal") == [(1, 0.2), (3, 0.2)]
    assert curve(tmp_path, "speed/predicted_step_seconds") == [(1, 0.06), (3, 0.06)]
    for share, value in shares(0.14).items():
        assert curve(tmp_path, f"step/{share}")[1] == (3, value)
    chart = charts(tmp_path)["measured and predicted"]["bubble"]
    assert chart == ["bubble/measured", "bubble/predicted", "bubble/ideal"]
    (words,) = events(tmp_path).Tensors("prediction/text_summary")
    table = words.tensor_proto.string_val[0].decode()
    assert "Predicted from measured layers: 60.0 ms a step" in table
    assert "| idle | 20.0 % |" in table
    assert "| of it set-up | 4.0 % |" in table
    assert "| 1 | 512.0 MiB | 3.0 MiB |" in table


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what TensorBoard brings along
def test_runs_stand_side_by_side_in_charts(tmp_path: Path) -> None:
    board = Dashboard(tmp_path, task="language_model")
    board.begin(description(*LANGUAGE_MODEL))
    board.recorded(*recorded(1))
    board.step(text_step(1, memory_bytes=[2**30] * 12))
    board.flush()
    (memory,) = charts(tmp_path)["runs side by side"].pop("memory of every stage, GiB")
    assert charts(tmp_path) == {  # and nothing predicted
        "runs side by side": {
            "perplexity": ["train/perplexity", "test/perplexity"],
            "tokens per second": ["speed/tokens_per_second"],
            "idle": ["idle/measured"],
            "memory of every stage, GiB": [memory],
        }
    }
    tags = events(tmp_path).Tags()["scalars"]
    assert {tag for tag in tags if tag.startswith(("bubble", "speed/predicted"))} == {"bubble/measured", "bubble/ideal"}
    shown = {tag for tag in tags if re.match(memory, tag)}  # as TensorBoard does
    assert shown == {dashboard.memory_tag(stage) for stage in range(12)}
