"""A run in MLflow, by its client: https://mlflow.org/docs/latest/api_reference/python_api/mlflow.client.html."""

import os
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from gpipe_cli.reporting.loggers.logger import PROJECT, Value, read_run_id, store_run_id
from gpipe_cli.reporting.run.description import RunContext

if TYPE_CHECKING:
    import numpy as np
    from mlflow.entities import Metric
    from numpy.typing import NDArray

_LOCAL_FOLDER = "mlruns"  # folder for MLflow's files in `output`, unless MLFLOW_TRACKING_URI is set
_MAX_POINTS, _MAX_SETTINGS = 1000, 100  # MLflow's limits for a request
_ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",  # seconds
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ALLOW_FILE_STORE": "true",  # without it, MLflow 3.13 and later refuse files in favour of a database
}


class Logger:
    remote = True
    needs = ("mlflow", "mlflow-skinny")

    def __init__(self, folder: Path, run: RunContext, facts: Mapping[str, str]) -> None:
        for key, value in _ENVIRONMENT.items():
            os.environ.setdefault(key, value)
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        local = (Path(run.config.output) / _LOCAL_FOLDER).absolute().as_uri()
        self._client = MlflowClient(tracking_uri=os.environ.get("MLFLOW_TRACKING_URI", local))
        self._waiting: list[Metric] = []
        stored = None
        if (run_id := read_run_id(folder, "mlflow")) is not None:
            with suppress(MlflowException):  # the run may be in another store
                stored = self._client.get_run(run_id)
                self._client.update_run(run_id, status="RUNNING")
        if stored is None:
            stored = self._client.create_run(self._experiment(), run_name=folder.name)
        self._id: str = stored.info.run_id
        self._settings = dict(stored.data.params)
        store_run_id(folder, "mlflow", self._id)
        for key, fact in facts.items():
            self._client.set_tag(self._id, key, fact)

    def _experiment(self) -> str:
        from mlflow.exceptions import MlflowException

        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        with suppress(MlflowException):  # the experiment exists, perhaps just created by another run
            return str(self._client.create_experiment(name))
        experiment = self._client.get_experiment_by_name(name)
        assert experiment is not None, name
        return str(experiment.experiment_id)

    def settings(self, values: Mapping[str, Value]) -> None:
        """MLflow's parameters are immutable: a value that a resumed run has changed becomes a tag."""
        from mlflow.entities import Param

        new = [Param(key, str(value)) for key, value in values.items() if key not in self._settings]
        for begin in range(0, len(new), _MAX_SETTINGS):
            self._client.log_batch(self._id, params=new[begin : begin + _MAX_SETTINGS])
        for key, value in values.items():
            if self._settings.get(key, str(value)) != str(value):
                self._client.set_tag(self._id, f"resumed.{key}", str(value))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        milliseconds = int(1000 * time.time())
        names = {re.sub(r"[^\w./ :-]", "_", tag): value for tag, value in values.items()}  # MLflow refuses other signs
        self._waiting += [Metric(name, value, milliseconds, step) for name, value in names.items()]

    def flush(self) -> None:
        for begin in range(0, len(self._waiting), _MAX_POINTS):
            self._client.log_batch(self._id, metrics=self._waiting[begin : begin + _MAX_POINTS])
        self._waiting = []

    def text(self, name: str, step: int, text: str, markdown: bool) -> None:
        self._client.log_text(self._id, text, f"{name}.txt")

    def picture(self, name: str, step: int, picture: "NDArray[np.uint8]") -> None:
        from gpipe_cli.reporting.plots.picture import write_picture

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, f"{name}_{step:08d}.png")
            write_picture(path, picture)
            self._client.log_artifact(self._id, str(path))

    def end(self, status: str, files: Sequence[Path]) -> None:
        self.flush()
        for path in files:
            self._client.log_artifact(self._id, str(path))
        ended = {"completed": "FINISHED", "failed": "FAILED"}.get(status, "KILLED")
        self._client.set_terminated(self._id, ended)
