"""A run in Weights & Biases: https://docs.wandb.ai/ref/python/. Without an API key, it stays in the run folder."""

import netrc
import os
import shutil
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpipe_cli.reporting.loggers.logger import PROJECT, RunLogger, Value, read_run_id, store_run_id
from gpipe_cli.reporting.run.description import RunContext

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_SERVER_TIMEOUT_SECONDS = 10  # how long a server may take to answer
_FINISH_TIMEOUT_SECONDS = 60.0  # how long the upload of the rest may take when a run ends


class Logger(RunLogger):
    remote = True
    needs = ("wandb", "wandb")

    def __init__(self, folder: Path, run: RunContext, facts: Mapping[str, str]) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        self._image = wandb.Image
        # without `finish_timeout`, which some versions lack, a run without network never ends
        patience: dict[str, Any] = (
            {"finish_timeout": _FINISH_TIMEOUT_SECONDS} if "finish_timeout" in wandb.Settings.model_fields else {}
        )
        run_id = read_run_id(folder, "wandb") or uuid.uuid4().hex[:8]
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=folder.name,
            id=run_id,
            resume="allow",
            dir=str(folder),
            mode=None if "WANDB_MODE" in os.environ or _has_key() else "offline",
            settings=wandb.Settings(
                silent=True, console="off", disable_git=True, disable_code=True, init_timeout=_SERVER_TIMEOUT_SECONDS,
                reinit="finish_previous", **patience,
            ),
        )  # fmt: skip
        store_run_id(folder, "wandb", run_id)
        # W&B's own step cannot decrease, but test scores arrive after the next step has been logged
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        self._run.config.update(dict(facts), allow_val_change=True)

    def settings(self, values: Mapping[str, Value]) -> None:
        self._run.config.update(dict(values), allow_val_change=True)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def text(self, name: str, step: int, text: str, markdown: bool) -> None:
        (self._files() / f"{name}.txt").write_text(text, encoding="utf-8")

    def picture(self, name: str, step: int, picture: "NDArray[np.uint8]") -> None:
        self._run.log({"step": step, f"pictures/{name}": self._image(picture)})

    def end(self, status: str, files: Sequence[Path]) -> None:
        for path in files:
            shutil.copy(path, self._files())
        self._run.finish(exit_code=0 if status == "completed" else 1)

    def _files(self) -> Path:
        folder = Path(self._run.dir, "gpipe")  # W&B also writes a config.yaml
        folder.mkdir(exist_ok=True)
        return folder


def _has_key() -> bool:
    """Whether the environment or .netrc has an API key; otherwise, W&B would ask for a key."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    server = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").partition("//")[2].partition("/")[0]
    try:
        return netrc.netrc().authenticators(server) is not None
    except (OSError, netrc.NetrcParseError):
        return False
