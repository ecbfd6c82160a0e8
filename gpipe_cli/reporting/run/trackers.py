"""Loggers beside TensorBoard's event file: MLflow and Weights & Biases, which get what stands in the events.

The dashboard makes each summary once and adds it to all loggers of the run. Those here take scalars, pictures and texts
out of it, and learn from it that the run has begun or ended. What the run is called there stands in loggers.json of its
folder: resumed, it goes on there.

A logger that fails, such as a server that does not answer, gets nothing more: no training waits for it again and again.
"""

import importlib.util
import json
import netrc
import os
import re
import tempfile
import textwrap
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

from gpipe_cli.config.settings import CONFIG, Logger
from gpipe_cli.config.typed import RefusedError, with_type
from gpipe_cli.reporting.page.page import PAGE
from gpipe_cli.reporting.run.description import RunDescription, Value, hyperparameters
from gpipe_cli.reporting.run.lines import LOG
from gpipe_cli.results.files import RESULT, read_result
from gpipe_cli.system.files import read_json, write_whole

if TYPE_CHECKING:
    from tensorboard.compat.proto.summary_pb2 import Summary

PROJECT = "gpipe"  # where MLFLOW_EXPERIMENT_NAME or WANDB_PROJECT says nothing else
IDS = "loggers.json"  # in the run folder: logger -> what the run is called there
LOCAL = "mlruns"  # in `output`: MLflow's files, where MLFLOW_TRACKING_URI names no server
_PACKAGES: dict[Logger, tuple[str, str]] = {"mlflow": ("mlflow", "mlflow-skinny"), "wandb": ("wandb", "wandb")}
_FILES = (CONFIG, RESULT, LOG, PAGE, "failure.txt")  # of the run folder, that are kept with a run
_SECONDS = 10.0  # points are sent together, so often
_SERVER_SECONDS = 10  # that a server may take to answer
_LAST_SECONDS = 60.0  # that the upload of what is left may take when a run ends
_MOST_POINTS, _MOST_SETTINGS = 1000, 100  # of one request to MLflow

Ended = Literal["FINISHED", "FAILED", "KILLED"]


def refuse_missing(loggers: Sequence[Logger]) -> None:
    """Raises RefusedError for a logger whose package is not installed."""
    for logger in loggers:
        module, package = _PACKAGES.get(logger, ("tensorboard", "tensorboard"))
        if importlib.util.find_spec(module) is None:
            why = f"{logger} needs {package}, which is not installed; pip install {package}, or leave {logger} out"
            raise RefusedError("logger", loggers, why)


class Events(Protocol):
    """What a dashboard adds its summaries to. Each method raises OSError where they cannot be written."""

    def add(self, summary: "Summary", step: int | None = None) -> None: ...

    def flush(self) -> None: ...


class AllEvents:
    """Several of them as one: where one fails the others get the summary all the same."""

    def __init__(self, each: Sequence[Events]) -> None:
        self._each = each

    def add(self, summary: "Summary", step: int | None = None) -> None:
        self._call(lambda one: one.add(summary, step))

    def flush(self) -> None:
        self._call(lambda one: one.flush())

    def _call(self, method: Callable[[Events], None]) -> None:
        failed: OSError | None = None
        for one in self._each:
            try:
                method(one)
            except OSError as error:
                failed = failed or error
        if failed is not None:
            raise failed


def trackers(folder: Path, run: RunDescription) -> list[Events]:
    """The loggers of a run, without TensorBoard; none of a dry run. Nothing is imported or opened yet."""
    if run.config.dry_run:
        return []
    return [_Tracker(name, folder, run) for name in dict.fromkeys(run.config.logger) if name in _PACKAGES]


@dataclass(frozen=True)
class _Point:
    tag: str
    step: int
    value: float
    seconds: float  # time.time()


class _Service(Protocol):
    """What a tracker says to MLflow or W&B. Raises whatever their libraries raise."""

    id: str  # of the run, there

    def settings(self, values: Mapping[str, Value]) -> None: ...

    def points(self, points: Sequence[_Point]) -> None: ...

    def file(self, name: str, content: bytes) -> None: ...

    def picture(self, tag: str, step: int, png: bytes) -> None: ...

    def end(self, ended: Ended) -> None: ...


class _Tracker:
    """Takes the summaries of a dashboard apart."""

    def __init__(self, name: Logger, folder: Path, run: RunDescription) -> None:
        self._name, self._folder, self._run = name, folder, run
        self._service: _Service | None = None
        self._failed = False
        self._waiting: list[_Point] = []
        self._sent = time.monotonic()

    def add(self, summary: "Summary", step: int | None = None) -> None:
        self._use(lambda service: self._add(service, summary, step or 0))

    def flush(self) -> None:
        self._use(self._send)

    def _use(self, work: Callable[[_Service], None]) -> None:
        if self._failed:
            return
        try:
            if self._service is None:
                self._service = self._open()
            work(self._service)
        except Exception as error:  # whatever the libraries, and those below them, raise
            self._failed = True
            raise OSError(f"logger={self._name}: {with_type(error)}") from error

    def _open(self) -> _Service:
        ids: dict[str, str] = {}
        with suppress(OSError, ValueError):
            ids = read_json(self._folder / IDS)
        kind = _MLflow if self._name == "mlflow" else _WandB
        service: _Service = kind(self._folder, self._run, ids.get(self._name))
        with suppress(OSError):  # resumed, it would be another run there
            write_whole(self._folder / IDS, json.dumps(ids | {self._name: service.id}) + "\n")
        return service

    def _add(self, service: _Service, summary: "Summary", step: int) -> None:
        from tensorboard.plugins.hparams import metadata

        for value in summary.value:
            content = value.metadata.plugin_data.content
            match value.WhichOneof("value"):
                case "simple_value":
                    self._waiting.append(_Point(value.tag, step, _shortest(value.simple_value), time.time()))
                case "image":
                    service.picture(value.tag, step, value.image.encoded_image_string)
                case _ if value.metadata.plugin_data.plugin_name == "text":
                    text = textwrap.dedent(b"".join(value.tensor.string_val).decode())
                    service.file(f"{value.tag.removesuffix('/text_summary')}.txt", text.encode())
                case _ if value.tag == metadata.SESSION_START_INFO_TAG:
                    service.settings(hyperparameters(self._run.config))
                case _ if value.tag == metadata.SESSION_END_INFO_TAG:
                    self._end(service, metadata.parse_session_end_info_plugin_data(content).status)
        if time.monotonic() - self._sent >= _SECONDS:
            self._send(service)

    def _send(self, service: _Service) -> None:
        self._sent = time.monotonic()
        service.points(self._waiting)
        self._waiting = []

    def _end(self, service: _Service, status: int) -> None:
        from tensorboard.plugins.hparams import api_pb2

        self._send(service)
        for name in _FILES:
            with suppress(FileNotFoundError):
                service.file(name, (self._folder / name).read_bytes())
        words: dict[str, Ended] = {"STATUS_SUCCESS": "FINISHED", "STATUS_FAILURE": "FAILED"}
        service.end(words.get(api_pb2.Status.Name(status), "KILLED"))


class _MLflow:
    """A run of MLflow's, by its client; https://mlflow.org/docs/latest/api_reference/python_api/mlflow.client.html."""

    def __init__(self, folder: Path, run: RunDescription, known: str | None) -> None:
        defaults = {
            "MLFLOW_HTTP_REQUEST_TIMEOUT": str(_SERVER_SECONDS),
            "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "MLFLOW_ALLOW_FILE_STORE": "true",  # without it, from 3.13 on files are refused in favour of a database
        }
        for key, value in defaults.items():
            os.environ.setdefault(key, value)
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        local = (Path(run.config.output) / LOCAL).absolute().as_uri()
        self._client = MlflowClient(tracking_uri=os.environ.get("MLFLOW_TRACKING_URI", local))
        found = None
        if known is not None:
            with suppress(MlflowException):  # it was in another store
                found = self._client.get_run(known)
                self._client.update_run(known, status="RUNNING")
        if found is None:
            found = self._client.create_run(self._experiment(), run_name=folder.name)
        self.id: str = found.info.run_id
        self._settings = dict(found.data.params)
        for key, tag in _tags(folder).items():
            self._client.set_tag(self.id, key, tag)

    def _experiment(self) -> str:
        from mlflow.exceptions import MlflowException

        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        with suppress(MlflowException):  # it is there, perhaps made by another run a moment ago
            return str(self._client.create_experiment(name))
        found = self._client.get_experiment_by_name(name)
        assert found is not None, name
        return str(found.experiment_id)

    def settings(self, values: Mapping[str, Value]) -> None:
        """MLflow lets no setting change: what a resumed run has otherwise becomes a tag."""
        from mlflow.entities import Param

        new = [Param(key, str(value)) for key, value in values.items() if key not in self._settings]
        for begin in range(0, len(new), _MOST_SETTINGS):
            self._client.log_batch(self.id, params=new[begin : begin + _MOST_SETTINGS])
        for key, value in values.items():
            if self._settings.get(key, str(value)) != str(value):
                self._client.set_tag(self.id, f"resumed.{key}", str(value))

    def points(self, points: Sequence[_Point]) -> None:
        from mlflow.entities import Metric

        metrics = [Metric(_mlflow_name(one.tag), one.value, int(1000 * one.seconds), one.step) for one in points]
        for begin in range(0, len(metrics), _MOST_POINTS):
            self._client.log_batch(self.id, metrics=metrics[begin : begin + _MOST_POINTS])

    def file(self, name: str, content: bytes) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, name)
            path.write_bytes(content)
            self._client.log_artifact(self.id, str(path))

    def picture(self, tag: str, step: int, png: bytes) -> None:
        self.file(f"{tag.rpartition('/')[2]}_{step:08d}.png", png)  # files of one folder

    def end(self, ended: Ended) -> None:
        self._client.set_terminated(self.id, ended)


def _shortest(value: float) -> float:
    """Of a number that a summary holds in 32 bits: 0.01, and not 0.009999999776, which has the same 32 bits."""
    return float(str(np.float32(value)))


def _mlflow_name(tag: str) -> str:
    """Of a metric, which may have letters, digits and few other signs."""
    return re.sub(r"[^\w./ :-]", "_", tag)


def _tags(folder: Path) -> dict[str, str]:
    """What is known of the start of a run, as MLflow calls it."""
    found = {"gpipe.folder": str(folder.absolute()), "mlflow.source.type": "LOCAL"}
    starts = read_result(folder).get("starts", [])
    if starts:
        found["mlflow.source.name"] = starts[-1]["command"]
        codes = starts[-1]["code"]
        if (commit := codes.get("model") or codes["gpipe"]) is not None:
            found["mlflow.source.git.commit"] = commit["commit"]
    return found


class _WandB:
    """A run of Weights & Biases; https://docs.wandb.ai/ref/python/. Without a key it is offline, in the run folder."""

    def __init__(self, folder: Path, run: RunDescription, known: str | None) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        self._wandb = wandb
        # without it, and in versions that do not know it, a run without network never ends
        patience = {"finish_timeout": _LAST_SECONDS} if "finish_timeout" in wandb.Settings.model_fields else {}
        self.id = known or uuid.uuid4().hex[:8]
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=folder.name,
            id=self.id,
            resume="allow",
            dir=str(folder),
            mode=None if "WANDB_MODE" in os.environ or _has_key() else "offline",
            settings=wandb.Settings(
                silent=True, console="off", disable_git=True, disable_code=True, init_timeout=_SERVER_SECONDS,
                reinit="finish_previous", **patience,
            ),
        )  # fmt: skip
        # W&B's own steps never go back; a test comes after the next step has been logged
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        self._run.config.update(_tags(folder), allow_val_change=True)

    def settings(self, values: Mapping[str, Value]) -> None:
        self._run.config.update(dict(values), allow_val_change=True)

    def points(self, points: Sequence[_Point]) -> None:
        for step, same in groupby(points, key=lambda one: one.step):
            self._run.log({"step": step, **{one.tag: one.value for one in same}})

    def file(self, name: str, content: bytes) -> None:
        folder = Path(self._run.dir, "gpipe")  # W&B has a config.yaml of its own
        folder.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)

    def picture(self, tag: str, step: int, png: bytes) -> None:
        from PIL import Image

        self._run.log({"step": step, tag: self._wandb.Image(Image.open(BytesIO(png)))})

    def end(self, ended: Ended) -> None:
        self._run.finish(exit_code=0 if ended == "FINISHED" else 1)


def _has_key() -> bool:
    """Whether W&B would not ask for one."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    server = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").partition("//")[2].partition("/")[0]
    try:
        return netrc.netrc().authenticators(server) is not None
    except (OSError, netrc.NetrcParseError):
        return False
