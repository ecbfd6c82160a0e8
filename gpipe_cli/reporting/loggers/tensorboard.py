"""A run in TensorBoard: its event files, and the content of the tabs HParams and Custom Scalars. Tags are those of
`results/metrics.py` and `reporting/run/dashboard.py`.
"""

import io
import os
import re
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from decimal import Decimal
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpipe_cli.config.settings import TrainConfig
from gpipe_cli.reporting.loggers.logger import Value, all_settings
from gpipe_cli.reporting.plots.timeline_values import SHARES
from gpipe_cli.reporting.run.description import RunContext
from gpipe_cli.results.metrics import METRICS, hparam_metrics
from gpipe_cli.system.files import errors_name_path, open_to_append, write_atomic

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

INITIAL_COLUMNS = 5  # columns of settings in HParams; TensorBoard has checkboxes for the others
# The settings that fill the columns left after those that a sweep varies.
_DEFAULT_COLUMNS = ("model.name", "partitions", "micro_batches", "dataset.name", "batch_size")
_TYPES = {bool: "DATA_TYPE_BOOL", str: "DATA_TYPE_STRING"}  # TensorBoard's names for the type of a column
_FIELDS = {bool: "bool_value", str: "string_value"}  # type -> the field of a cell
_WHOLE = 10  # the most digits of a setting before the decimal point

# TensorBoard reads the event files of a folder in the order of their names, and keeps the first settings and the first
# final status that it reads. So both have separate files, which a run resumed in its own folder replaces.
_PREFIX = "events.out.tfevents"
_SETTINGS, _END = f"{_PREFIX}.0000000000.settings", f"{_PREFIX}.9999999999.end"
_file_numbers = count()  # order of the event files that this process creates in one second


class Logger:
    remote = False
    needs = ("tensorboard", "tensorboard")

    def __init__(self, folder: Path, run: RunContext, facts: Mapping[str, str]) -> None:
        from torch.utils.tensorboard import summary  # this imports torch

        self._folder, self._run, self._summary = folder, run, summary
        self._file = EventFile(folder, run.ready.first_step + 1)

    def settings(self, values: Mapping[str, Value]) -> None:
        """Writes the settings for HParams, now so that a killed run has them, and the charts of Custom Scalars."""
        folder, run = self._folder, self._run
        (folder / _END).unlink(missing_ok=True)
        summaries = [
            columns_summary(
                varied_settings(folder, values),
                [f"final/{metric.hparam}" for metric in hparam_metrics(run.config.task)],
            ),
            settings_summary(values),
            self._summary.custom_scalars(custom_scalars_layout(run.config, predicted=run.prediction is not None)),
        ]
        write_atomic(folder / _SETTINGS, event_file(summaries))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        points = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._file.add(Summary(value=points), step)

    def text(self, name: str, step: int, text: str, markdown: bool) -> None:
        # Markdown shows lines that begin with four blanks verbatim.
        shown = text if markdown else "\n".join(f"    {line}" for line in text.splitlines())
        self._file.add(self._summary.text(name, shown), step)

    def picture(self, name: str, step: int, picture: "NDArray[np.uint8]") -> None:
        """All pictures share a group of tags, as TensorBoard expands only the first two groups."""
        self._file.add(self._summary.image(f"pictures/{name}", picture, dataformats="HWC"), step)

    def flush(self) -> None:
        self._file.flush()

    def end(self, status: str, files: Sequence[Path]) -> None:
        self._file.flush()
        write_atomic(self._folder / _END, event_file([end_summary(status)]))


class EventFile:
    """A new event file in ``folder``, created by the first `flush`.

    torch's SummaryWriter passes events to a thread, which dies if the disk is full for a moment. Here, an event that
    cannot be written is kept for the next `flush`.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        """``first_step``: the next step; from it on, readers drop older events, which a resumed run repeats."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        name = f"{_PREFIX}.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{next(_file_numbers):04}"
        self._path = folder / name
        start = Event(session_log=SessionLog(status=SessionLog.START), step=first_step)
        self._waiting = bytearray(encode_event(_version()) + encode_event(start))

    def add(self, summary: "Summary", step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._waiting += encode_event(Event(summary=summary, step=step))

    def flush(self) -> None:
        """Writes the pending events. Raises OSError; events not yet written then stay pending."""
        with errors_name_path(self._path), open_to_append(self._path) as file:
            while self._waiting:
                del self._waiting[: file.write(self._waiting)]


def event_file(summaries: Sequence["Summary"]) -> bytes:
    """The content of a complete event file."""
    from tensorboard.compat.proto.event_pb2 import Event

    return b"".join(map(encode_event, [_version(), *(Event(summary=summary) for summary in summaries)]))


def _version() -> "Event":
    """The first event of every event file."""
    from tensorboard.compat.proto.event_pb2 import Event

    return Event(file_version="brain.Event:2")


def encode_event(event: "Event") -> bytes:
    """The event, stamped with the current time, in the file's format: with length and checksums."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    event.wall_time = time.time()
    file = io.BytesIO()
    RecordWriter(file).write(event.SerializeToString())
    return file.getvalue()


def custom_scalars_layout(config: TrainConfig, *, predicted: bool) -> dict[str, dict[str, list[Any]]]:
    """The layout of the tab Custom Scalars. TensorBoard colours by run, so a chart has one line per run, and related
    values are a band around it. It merges the layouts of all runs by the titles of categories and drops equal charts:
    so charts must not depend on K, and runs on images and on text complement each other."""
    score, speed = ("perplexity", "tokens_per_second") if config.text else ("top1", "samples_per_second")
    of_test, trained = METRICS[f"test_{score}"], METRICS[f"train_{score}"]
    runs = {}
    if config.dataset.validation is not None:
        runs[f"{of_test.heading} of the validation set"] = METRICS[f"validation_{score}"].tag
    runs |= {
        f"{of_test.heading} of the test set": of_test.tag,
        f"{of_test.heading} in training": trained.tag,
        "loss in training": METRICS["train_loss"].tag,
        speed.replace("_", " "): METRICS[speed].tag,
        "peak memory of the fullest process, GiB": METRICS["memory_bytes_fullest"].tag,
    }
    shares = {share.replace("_", "-"): f"step/{share}" for share in SHARES}
    layout: dict[str, dict[str, list[Any]]] = {
        "runs side by side": {title: ["Multiline", [tag]] for title, tag in runs.items()},
        "where the time of a step goes, in shares": {title: ["Multiline", [tag]] for title, tag in shares.items()},
    }
    if predicted:  # a margin has three tags: the line, the band's lower and its upper edge
        layout["measured and predicted"] = {
            "idle; band: to predicted": ["Margin", ["idle/measured", "idle/predicted", "idle/measured"]],
            "bubble; band: ideal to predicted": ["Margin", ["bubble/measured", "bubble/ideal", "bubble/predicted"]],
            "step: how many times as long as predicted": ["Multiline", ["speed/step_over_predicted"]],
        }
    return layout


# The tab HParams shows sweeps over K and M, as in the paper's tables 2, 3 and 5. A run writes three summaries itself
# (`SummaryWriter.add_hparams` would create a second run): the columns of the table and the settings at its start, and
# its status at its end. TensorBoard takes the columns from the run that it reads first, so every run lists the columns
# of all models and tasks; without them, every curve would be a metric.


def varied_settings(folder: Path, keys: Collection[str]) -> tuple[str, ...]:
    """The settings that a sweep varies, from the name it gives a run's folder: `micro_batches=4,model=resnet`."""
    named = re.findall(r"(?:^|,)[+~]*([\w.]+)=", folder.name)
    return tuple(key for name in named for key in (name, f"{name}.name") if key in keys)


def columns_summary(varied: Sequence[str], metrics: Sequence[str]) -> "Summary":
    """The columns of the table: all settings, and the tags ``metrics``."""
    from tensorboard.plugins.hparams import api_pb2, metadata

    first = list(dict.fromkeys((*varied, *_DEFAULT_COLUMNS)))[:INITIAL_COLUMNS]
    experiment = api_pb2.Experiment()
    for key, switch in all_settings().items():
        info = experiment.hparam_infos.add(name=key, type=_TYPES[bool if switch else str], differs=key in first)
        info.domain_discrete.extend((False, True) if switch else ())
    for tag in metrics:
        experiment.metric_infos.add(name=api_pb2.MetricName(tag=tag))
    return _hparams(metadata.EXPERIMENT_TAG, experiment=experiment)


def settings_summary(values: Mapping[str, Value]) -> "Summary":
    from tensorboard.plugins.hparams import metadata, plugin_data_pb2

    start = plugin_data_pb2.SessionStartInfo(start_time_secs=time.time())
    for key, value in values.items():
        shown = to_hparam(value)
        setattr(start.hparams[key], _FIELDS[type(shown)], shown)
    return _hparams(metadata.SESSION_START_INFO_TAG, session_start_info=start)


def end_summary(status: str) -> "Summary":
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

    # TensorBoard has no status for an interrupted run, which can be resumed: it is UNKNOWN.
    words = {"completed": "SUCCESS", "dry_run": "SUCCESS", "failed": "FAILURE", "running": "RUNNING"}
    number = api_pb2.Status.Value(f"STATUS_{words.get(status, 'UNKNOWN')}")
    end = plugin_data_pb2.SessionEndInfo(status=number, end_time_secs=time.time())
    return _hparams(metadata.SESSION_END_INFO_TAG, session_end_info=end)


def _hparams(tag: str, **data: Any) -> "Summary":
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import metadata, plugin_data_pb2

    described = metadata.create_summary_metadata(plugin_data_pb2.HParamsPluginData(**data))
    return Summary(value=[Summary.Value(tag=tag, metadata=described, tensor=metadata.NULL_TENSOR)])


def to_hparam(value: Value) -> bool | str:
    """A setting as text; switches stay bool. TensorBoard would show the number K = 4 as 4.0000. It sorts texts by
    character and hides leading blanks: so numbers are padded to align their decimal points, and have no exponents."""
    if isinstance(value, str | bool):
        return value
    whole, point, fraction = f"{Decimal(repr(value)):f}".removesuffix(".0").partition(".")
    return f"{whole:>{_WHOLE}}{point}{fraction}"
