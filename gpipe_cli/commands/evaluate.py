"""`gpipe evaluate`: evaluates a checkpoint of a run on its test set; K and M may differ from the training's."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TypeVar

from omegaconf import DictConfig

from gpipe_cli.commands.command_line import read
from gpipe_cli.commands.composing import compose, with_given
from gpipe_cli.commands.outcome import preparing
from gpipe_cli.commands.run_request import load_run
from gpipe_cli.commands.run_start import check_data_present
from gpipe_cli.config.groups import TARGET, DatasetConfig, ImagesConfig, choice_of
from gpipe_cli.config.settings import (
    EvaluateSettings,
    ExportSettings,
    TrainConfig,
    container,
    find_run,
    flattened,
)
from gpipe_cli.config.typed import settings as settings_of
from gpipe_cli.config.typed import typed, unknown
from gpipe_cli.errors import InvalidSettingError
from gpipe_cli.launch.fork_server import fork_server
from gpipe_cli.system.interrupts import import_apart

# Settings that replace the run's own. null keeps the run's value, except for stages_per_process, which is about the
# processes of this command: there null means what it means for a training.
OF_THE_RUN = (
    "partitions", "micro_batches", "batch_size", "batch_tokens", "executor", "stages_per_process", "device",
    "precision", "deterministic", "memory_format", "threads", "data_workers", "timeout_seconds", "partition.balance",
    "dataset.root", "dataset.test", TARGET,
)  # fmt: skip
KEYS = (*settings_of(EvaluateSettings), *OF_THE_RUN)
Settings = TypeVar("Settings", EvaluateSettings, ExportSettings)


def main(arguments: Sequence[str]) -> int:
    line = read("evaluate", arguments, "call it once for each run")
    tree = compose(line, KEYS)
    if tree is None:
        return 0
    settings, training = of_run(EvaluateSettings, tree)
    for key in line.overrides:
        if key.partition(".")[0] == "decode" and training.task != "translation":
            why = f"nothing is translated by a run of model={choice_of(training.model)}; leave it out"
            raise InvalidSettingError(key, line.overrides[key], why)
    check_data_present(training)

    fork_server.start(training)  # the server imports torch in parallel with this process
    with preparing():
        import_apart("gpipe_cli.commands.training_run")  # torch comes with it
        from gpipe_cli.commands.training_run import evaluate

        return evaluate(settings, training)


def of_run(kind: type[Settings], tree: DictConfig) -> tuple[Settings, TrainConfig]:
    """The command's own settings, of a `kind` that has `run` and `output`, and the run's configuration with the given
    settings in place of its own. Raises InputError."""
    values = container(tree)
    settings = typed(kind, {field.name: values.pop(field.name) for field in fields(kind) if field.name in values})
    given = dict(flattened(values))
    for key, value in given.items():
        if key not in OF_THE_RUN:
            raise unknown(key, value, (*settings_of(kind), *OF_THE_RUN))
    saved = load_run(find_run("run", settings.run, settings.output), given.get(TARGET), instead=given)
    replaced = {key: value for key, value in given.items() if value is not None or key == "stages_per_process"}
    # nothing is trained, and the file of a schedule or a placement may be gone, or for another K
    replaced |= {"schedule": "1f1b", "placement": None}
    return settings, with_given(saved, _of_test_set(saved.dataset, replaced) | replaced)


def _of_test_set(dataset: DatasetConfig, given: Mapping[str, object]) -> dict[str, object]:
    """The settings of a run's data set that do not hold for an evaluation, which needs no validation set, nor a share
    of data that have a test set. Raises InvalidSettingError for data in which the validation set would be the test
    set."""
    root = Path(str(given.get("dataset.root", dataset.root)))
    replaced: dict[str, object] = {}
    if isinstance(dataset, ImagesConfig) and dataset.test is not None and (root / "train").is_dir():
        replaced["dataset.test"] = None
    has_test = any((root / f"test{suffix}").exists() for suffix in ("", ".tsv")) or "dataset.test" in given
    if dataset.validation == "val" and root.is_dir() and not has_test:
        why = f"there is no '{root / 'test'}', and val was the validation set of the run"
        use = "give data with a test set, or of a folder of classes the share dataset.test=0.2"
        raise InvalidSettingError("dataset.root", str(root), f"{why}; {use}")
    if dataset.validation == "val" or isinstance(dataset, ImagesConfig):
        replaced["dataset.validation"] = None
    return replaced
