"""The settings of runs, read back from event files as TensorBoard reads them."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from reporting_runs import LANGUAGE_MODEL, age, description, evaluation, log, recorded, step, text_evaluation
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import api_pb2, metadata

from gpipe_cli.config.settings import TrainConfig
from gpipe_cli.config.typed import settings as all_keys
from gpipe_cli.reporting.run.reporter import Reporter
from gpipe_cli.reporting.run.tensorboard import Dashboard
from gpipe_cli.reporting.run.tensorboard_hparams import hyperparameters, varied_by

CONFIG: dict[str, Any] = {
    "partitions": 2,
    "dry_run": False,
    "max_steps": None,
    "partition": {"balance": (4, 6)},
    "gradient_clipping": float("inf"),
    "model": {"name": "custom", "arguments": {"width": 64, "bias": True}, "weights": None},
}
# All that the final metrics are taken from.
RESULT: dict[str, Any] = {
    "test": None,
    "samples_per_second": 512.0,
    "step_seconds": 0.0625,
    "bubble": {"measured": None},
    "memory_bytes": [],
}


def stored(folder: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(folder), purge_orphaned_data=True)
    accumulator.Reload()
    return accumulator


def of_hparams(folder: Path) -> tuple[dict[str, Any], Any, Any]:
    """The settings of the run in ``folder``, the columns of its table, and its status, None if it has not ended."""
    content = stored(folder).PluginTagToContent(metadata.PLUGIN_NAME)
    start = metadata.parse_session_start_info_plugin_data(content[metadata.SESSION_START_INFO_TAG])
    values = {key: getattr(value, value.WhichOneof("kind")) for key, value in start.hparams.items()}
    end = content.get(metadata.SESSION_END_INFO_TAG)
    status = None if end is None else metadata.parse_session_end_info_plugin_data(end).status
    return values, metadata.parse_experiment_plugin_data(content[metadata.EXPERIMENT_TAG]), status


def test_numbers_and_switches_stay_what_they_are_all_else_is_text_and_null_is_left_out() -> None:
    assert hyperparameters(CONFIG) == {
        "partitions": 2.0,
        "dry_run": False,
        "partition.balance": "[4,6]",
        "gradient_clipping": "inf",  # no number for JSON
        "model.name": "custom",
        "model.arguments": "{width:64,bias:true}",
    }


def test_the_name_of_a_folder_tells_what_a_sweep_varies() -> None:
    keys = ["partitions", "micro_batches", "model.name", "model.filters"]
    assert varied_by(Path("outputs/micro_batches=4,model=resnet"), keys) == ("micro_batches", "model.name")
    assert varied_by(Path("outputs/+model.filters=8-2"), keys) == ("model.filters",)
    assert varied_by(Path("outputs/2026-11-21_13-45-08_amoebanet_K2,unknown=3"), keys) == ()


def test_a_run_that_is_killed_is_there_with_its_settings_and_what_a_sweep_varies_is_shown_first(tmp_path: Path) -> None:
    folder = tmp_path / "seed=3,max_steps=20"
    run = description("seed=3", "max_steps=20")
    Reporter(folder, run, log()[0])  # and nothing after that
    values, experiment, status = of_hparams(folder)
    assert status is None
    assert values == hyperparameters(asdict(run.config))
    columns = {info.name: info for info in experiment.hparam_infos}
    keys = all_keys(TrainConfig)  # of other models too
    assert set(columns) == {key for key in keys if not any(other.startswith(f"{key}.") for other in keys)}
    assert {name for name, info in columns.items() if info.differs} == {
        *("seed", "max_steps", "model.name", "partitions", "micro_batches")
    }
    number, switch, text = api_pb2.DATA_TYPE_FLOAT64, api_pb2.DATA_TYPE_BOOL, api_pb2.DATA_TYPE_STRING
    types = {"partitions": number, "dry_run": switch, "model.name": text, "batch_size": text}  # or null
    types["max_steps"] = number  # though it may be null: its values are numbers
    assert {name: columns[name].type for name in types} == types
    assert list(columns["schedule"].domain_discrete) == ["gpipe", "1f1b"]
    assert list(columns["dataset.direction"].domain_discrete) == ["to_english", "from_english", "both", "null"]
    assert list(columns["model.name"].domain_discrete) == []  # timm's may be any


def test_a_run_ends_with_its_status_and_final_metrics(tmp_path: Path) -> None:
    reporter = Reporter(tmp_path, description())
    for number in range(1, 5):
        reporter.step(step(number))
        reporter.recorded(*recorded(number))
    reporter.evaluated(evaluation(4))
    reporter.finish("completed")
    _, experiment, status = of_hparams(tmp_path)
    assert status == api_pb2.STATUS_SUCCESS
    events = stored(tmp_path)
    final = {tag: events.Scalars(tag)[0].value for tag in events.Tags()["scalars"] if tag.startswith("final/")}
    assert final == pytest.approx(
        {
            "final/top1": 0.875,
            "final/top5": 1.0,
            "final/loss": 1.25,
            "final/samples_per_second": 512.0,
            "final/step_seconds": 0.0625,
            "final/bubble": 0.1,
            "final/memory_gib": 0.5,
        }
    )
    metrics = [info.name.tag for info in experiment.metric_infos]
    assert metrics[:5] == ["final/top1", "final/samples_per_second", *metrics[2:5]]
    assert {*final, "final/perplexity", "final/tokens_per_second", "final/token_accuracy"} == set(metrics)
    assert len(list(tmp_path.glob("**/*tfevents*"))) == 1  # no run beside the run


def test_text_has_final_metrics_of_its_own_first(tmp_path: Path) -> None:
    reporter = Reporter(tmp_path, description(*LANGUAGE_MODEL))
    reporter.evaluated(text_evaluation(1))
    reporter.finish("failed", "a stage died")
    assert stored(tmp_path).Scalars("final/perplexity")[0].value == pytest.approx(41.3)
    _, experiment, status = of_hparams(tmp_path)
    assert status == api_pb2.STATUS_FAILURE
    assert experiment.metric_infos[0].name.tag == "final/perplexity"


def test_a_run_resumed_into_its_folder_shows_what_it_is_now(tmp_path: Path) -> None:
    """TensorBoard would keep the first settings and the first end of it."""
    first = Dashboard(tmp_path)
    first.begin(description())
    first.describe("partitions: 2", "banner")
    for number in range(1, 5):
        first.step(step(number))
    first.end("interrupted", 4, RESULT)
    with age(tmp_path).open("ab") as events:
        events.write(b"\x40\0\0\0\0\0\0\0\0\0")  # a record that was cut short when the process was killed
    before = stored(tmp_path)
    assert of_hparams(tmp_path)[2] == api_pb2.STATUS_UNKNOWN

    second = Dashboard(tmp_path, first_step=4)
    second.begin(description("partitions=4"))
    second.flush()
    values, _, status = of_hparams(tmp_path)
    assert (values["partitions"], status) == (4.0, None)
    after = stored(tmp_path)
    assert after.Tags()["scalars"] == before.Tags()["scalars"]
    assert after.Scalars("train/loss") == before.Scalars("train/loss")
    assert after.Tensors("config/text_summary") == before.Tensors("config/text_summary")
    assert not list(tmp_path.glob("*.partial"))
