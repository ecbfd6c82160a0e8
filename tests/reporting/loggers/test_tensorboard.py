"""The events of runs, read back from their files as TensorBoard reads them."""

import math
import resource
import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from reporting_runs import (
    LANGUAGE_MODEL,
    MIB,
    description,
    evaluation,
    events,
    plan,
    reporter_in,
    shares,
    step,
    timeline,
)
from tensorboard.plugins.hparams import api_pb2, metadata
from torch.utils.tensorboard.summary import scalar

from gpipe_cli.reporting.loggers import tensorboard
from gpipe_cli.reporting.loggers.logger import hyperparameters
from gpipe_cli.reporting.loggers.tensorboard import EventFile
from gpipe_cli.reporting.plots.timeline_values import StepPicture
from gpipe_cli.results.files import read_result
from gpipe_cli.units import GIB

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what TensorBoard brings along


def curve(folder: Path, tag: str) -> list[tuple[int, Any]]:
    return [(event.step, pytest.approx(event.value)) for event in events(folder).Scalars(tag)]


def words(folder: Path, tag: str) -> str:
    """The newest text of a tag."""
    return str(events(folder).Tensors(f"{tag}/text_summary")[-1].tensor_proto.string_val[0], "utf-8")


def charts(folder: Path) -> set[str]:
    """The tags that Custom Scalars shows."""
    from tensorboard.plugins.custom_scalar.layout_pb2 import Layout

    (event,) = events(folder).Tensors("custom_scalars__config__")
    shown = [chart for part in Layout.FromString(event.tensor_proto.string_val[0]).category for chart in part.chart]
    return {tag for chart in shown for tag in (*chart.multiline.tag, *(one.value for one in chart.margin.series))}


def of_hparams(folder: Path) -> tuple[dict[str, Any], Any, Any]:
    """The settings of the run in ``folder``, the columns of its table, and its status, None if it has not ended."""
    content = events(folder).PluginTagToContent(metadata.PLUGIN_NAME)
    start = metadata.parse_session_start_info_plugin_data(content[metadata.SESSION_START_INFO_TAG])
    values = {key: getattr(value, value.WhichOneof("kind")) for key, value in start.hparams.items()}
    end = content.get(metadata.SESSION_END_INFO_TAG)
    status = None if end is None else metadata.parse_session_end_info_plugin_data(end).status
    return values, metadata.parse_experiment_plugin_data(content[metadata.EXPERIMENT_TAG]), status


def test_every_curve_of_a_run_and_how_it_ended(tmp_path: Path) -> None:
    reporter, _ = reporter_in(tmp_path, plan=plan())
    for number in (1, 2):
        reporter.on_message(step(number))
        reporter.add_breakdown(number, shares(0.1))
    reporter.on_message(evaluation(2))
    reporter.finish("completed")
    both = {  # the values of steps 1 and 2
        "train/loss": (2.9, 2.8), "train/cross_entropy": (1.9, 1.8), "train/top1": (0.25, 0.25),
        "train/top5": (0.75, 0.75), "train/learning_rate": (0.04, 0.04), "train/gradient_norm": (1.5, 1.5),
        "speed/samples_per_second": (512, 512), "speed/step_seconds": (0.0625, 0.0625),
        "speed/step_over_predicted": (0.0625 / 0.06, 0.0625 / 0.06),
        "memory/fullest_gib": (0.5, 0.5), "memory/stage_0_gib": (3 / 1024, 3 / 1024), "memory/stage_1_gib": (0.5, 0.5),
        "idle/measured": (0.18, 0.18), "idle/predicted": (0.2, 0.2), "bubble/measured": (0.1, 0.1),
        "bubble/ideal": (0.2, 0.2), "bubble/predicted": (0.12, 0.12),
        **{f"step/{share}": (value, value) for share, value in shares(0.1).items()},
    }  # fmt: skip
    last = {
        "test/loss": 1.25, "test/top1": 0.875, "test/top5": 1, "final/top1": 0.875, "final/top5": 1, "final/loss": 1.25,
        "final/samples_per_second": 512, "final/step_seconds": 0.0625, "final/bubble": 0.1, "final/memory_gib": 0.5,
    }  # fmt: skip
    expected = {tag: list(enumerate(values, start=1)) for tag, values in both.items()}
    expected |= {tag: [(2, value)] for tag, value in last.items()}
    assert sorted(events(tmp_path).Tags()["scalars"]) == sorted(expected)
    for tag, points in expected.items():
        assert curve(tmp_path, tag) == points
    _, experiment, status = of_hparams(tmp_path)
    assert status == api_pb2.STATUS_SUCCESS
    metrics = [info.name.tag for info in experiment.metric_infos]
    assert (metrics[0], len(metrics)) == ("final/top1", 10), "also of text"
    assert {path.parent for path in tmp_path.glob("**/*tfevents*")} == {tmp_path}, "no second run"
    assert {"train/loss", "bubble/measured"} <= charts(tmp_path) <= set(expected)


def test_the_curves_of_text(tmp_path: Path) -> None:
    reporter, _ = reporter_in(tmp_path, *LANGUAGE_MODEL)
    reporter.on_message(step(1, text=True, cross_entropy=math.log(64), loss=5.0))
    reporter.on_message(evaluation(1, text=True))
    reporter.finish("failed", "a stage died")
    expected = {
        "train/perplexity": 64.0, "train/token_accuracy": 0.25, "speed/tokens_per_second": 16_000.0,
        "test/perplexity": 41.3, "test/token_accuracy": 0.312, "final/perplexity": 41.3,
    }  # fmt: skip
    for tag, value in expected.items():
        assert curve(tmp_path, tag) == [(1, value)]
    stored = events(tmp_path).Tags()
    assert not [tag for tag in stored["scalars"] if "top" in tag or "predicted" in tag]
    assert "translations/text_summary" not in stored["tensors"]  # nothing was translated
    _, experiment, status = of_hparams(tmp_path)
    assert (status, experiment.metric_infos[0].name.tag) == (api_pb2.STATUS_FAILURE, "final/perplexity")


def test_a_step_that_is_drawn_has_a_picture_and_the_parts_of_the_memory(tmp_path: Path) -> None:
    """TensorBoard shows pictures about 350 pixels wide: letters can be read on narrow ones only."""
    reporter, _ = reporter_in(tmp_path, plan=plan())
    reporter.on_message(step(1, activation_bytes=(MIB, 2 * MIB), overhead_bytes=(0, MIB)))
    reporter.timeline(StepPicture(1, 1, (timeline(), timeline(kind="predicted"))))
    stored = events(tmp_path)
    assert stored.Images("pictures/timeline")[-1].width == 640
    for stage, peak in ((0, 3 * MIB), (1, 2**29)):
        start = f"memory_parts/stage_{stage}_"
        parts = {tag: stored.Scalars(tag)[0].value for tag in stored.Tags()["scalars"] if tag.startswith(start)}
        assert parts.pop(f"{start}peak_gib") == peak / GIB
        assert parts[f"{start}activations_gib"] == (stage + 1) * MIB / GIB
        assert sum(parts.values()) == pytest.approx(peak / GIB)
        assert len(parts) == 6


def test_a_run_that_is_killed_is_there_with_its_settings_and_what_a_sweep_varies_is_shown_first(tmp_path: Path) -> None:
    folder = tmp_path / "seed=3,max_steps=20,model=amoebanet,unknown=3"
    reporter_in(folder, "seed=3", "max_steps=20")  # and nothing after that
    values, experiment, status = of_hparams(folder)
    assert status is None
    typed = hyperparameters(description("seed=3", "max_steps=20").config)
    assert values.keys() == typed.keys()
    assert {key: values[key].strip() for key in ("seed", "max_steps")} == {"seed": "3", "max_steps": "20"}
    differing = {info.name for info in experiment.hparam_infos if info.differs}
    assert differing == {"seed", "max_steps", "model.name", "partitions", "micro_batches"}


def test_a_run_resumed_into_its_folder_replaces_what_came_after_its_checkpoint(tmp_path: Path) -> None:
    """TensorBoard would keep the first settings and the first end of it."""
    first, _ = reporter_in(tmp_path)
    for number in range(1, 9):
        first.on_message(step(number, loss=1.0))
    first.on_message(evaluation(4, top1=0.5))
    first.on_message(evaluation(8, top1=0.75, is_best=False))
    first.finish("interrupted")
    (path,) = tmp_path.glob("*tfevents.[1-8]*")
    path = path.rename(tmp_path / "events.out.tfevents.1.old")  # files of one second are in no order
    with path.open("ab") as torn:
        torn.write(b"\x40\0\0\0\0\0\0\0\0\0")  # a record that was cut short when the process was killed
    assert of_hparams(tmp_path)[2] == api_pb2.STATUS_UNKNOWN

    best = evaluation(4, top1=0.5)
    second, _ = reporter_in(tmp_path, f"resume={tmp_path}", "partitions=4", first_step=4, best=best)
    values, _, status = of_hparams(tmp_path)
    assert (values["partitions"].strip(), status) == ("4", None)
    result = read_result(tmp_path)
    assert (result["best"]["step"], result["test"], result["steps"], result["epochs"]) == (4, None, 4, 1)
    for number in range(5, 8):
        second.on_message(step(number, loss=2.0))
    second.finish("interrupted")
    assert curve(tmp_path, "train/loss") == [(n, 1.0 if n <= 4 else 2.0) for n in range(1, 8)]
    assert curve(tmp_path, "test/loss") == [(4, 1.25)]
    assert "partitions: 4" in words(tmp_path, "config")


def test_events_that_cannot_be_written_are_written_later(tmp_path: Path) -> None:
    """SummaryWriter's thread ended with the first error: a disk that was full for a moment cost all curves after it."""
    file = EventFile(tmp_path, 1)
    for number in range(1, 51):
        file.add(scalar("loss", 1.0), number)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))  # in the middle of an event
    try:
        with pytest.raises(OSError, match=r"events\.out\.tfevents"):
            file.flush()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    (path,) = tmp_path.iterdir()
    assert path.stat().st_size == 1000
    file.add(scalar("loss", 2.0), 51)
    file.flush()
    assert curve(tmp_path, "loss") == [*((n, 1.0) for n in range(1, 51)), (51, 2.0)]


def test_event_files_of_one_second_are_read_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader once found the tenth file of a process before the ninth, and dropped what the tenth had continued."""
    monkeypatch.setattr(time, "time", lambda: 1.0)
    monkeypatch.setattr(tensorboard, "_file_numbers", count(9))
    files = [EventFile(tmp_path, first_step)._path for first_step in (1, 5)]
    assert files == sorted(files)
