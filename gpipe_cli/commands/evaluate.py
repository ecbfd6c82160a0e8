"""`gpipe evaluate`: evaluates a checkpoint of a run on its test set; K and M may differ from the training's."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TypeVar

from omegaconf import DictConfig

from gpipe_cli.commands.command_line import parse_command_line
from gpipe_cli.commands.command_runner import show_preparation
from gpipe_cli.commands.compose_config import apply_overrides, compose
from gpipe_cli.commands.run_request import load_run
from gpipe_cli.commands.run_start import check_data_present
from gpipe_cli.config.groups import TARGET, DatasetConfig, ImagesConfig, group_choice
from gpipe_cli.config.schema import parse_config, setting_names, unknown_setting_error
from gpipe_cli.config.settings import (
    EvaluateSettings,
    ExportSettings,
    TrainConfig,
    find_run,
    flatten,
    to_plain_dict,
)
from gpipe_cli.errors import InvalidSettingError
from gpipe_cli.launch.fork_server import fork_server
from gpipe_cli.system.interrupts import import_in_thread

# Settings that replace the run's own. null keeps the run's value, except for stages_per_process, which is about the
# processes of this command: there null means what it means for a training.
RUN_OVERRIDES = (
    "partitions", "micro_batches", "batch_size", "batch_tokens", "executor", "stages_per_process", "device",
    "precision", "deterministic", "memory_format", "threads", "data_workers", "timeout_seconds", "partition.balance",
    "dataset.root", "dataset.test", TARGET,
)  # fmt: skip
KEYS = (*setting_names(EvaluateSettings), *RUN_OVERRIDES)
Settings = TypeVar("Settings", EvaluateSettings, ExportSettings)


def main(arguments: Sequence[str]) -> int:
    line = parse_command_line("evaluate", arguments, "call it once for each run")
    cfg = compose(line, KEYS)
    if cfg is None:
        return 0
    settings, training = run_settings(EvaluateSettings, cfg)
    for key in line.overrides:
        if key.partition(".")[0] == "decode" and training.task != "translation":
            why = f"nothing is translated by a run of model={group_choice(training.model)}; remove it"
            raise InvalidSettingError(key, line.overrides[key], why)
    check_data_present(training)

    fork_server.start(training)  # the server imports torch in parallel with this process
    with show_preparation():
        import_in_thread("gpipe_cli.commands.training_run")  # torch comes with it
        from gpipe_cli.commands.training_run import evaluate

        return evaluate(settings, training)


def run_settings(kind: type[Settings], cfg: DictConfig) -> tuple[Settings, TrainConfig]:
    """The command's own settings, of a `kind` that has `run` and `output`, and the run's configuration with the given
    settings replacing its own. Raises InputError."""
    values = to_plain_dict(cfg)
    settings = parse_config(
        kind, {field.name: values.pop(field.name) for field in fields(kind) if field.name in values}
    )
    overrides = dict(flatten(values))
    for key, value in overrides.items():
        if key not in RUN_OVERRIDES:
            raise unknown_setting_error(key, value, (*setting_names(kind), *RUN_OVERRIDES))
    saved = load_run(find_run("run", settings.run, settings.output), overrides.get(TARGET), fallbacks=overrides)
    replaced = {key: value for key, value in overrides.items() if value is not None or key == "stages_per_process"}
    # nothing is trained, and the file of a schedule may be gone, or for another K
    replaced |= {"schedule": "1f1b", "placement": None}
    return settings, apply_overrides(saved, _of_test_set(saved.dataset, replaced) | replaced)


def _of_test_set(dataset: DatasetConfig, overrides: Mapping[str, object]) -> dict[str, object]:
    """The settings of a run's data set that do not hold for an evaluation, which needs no validation set, nor a share
    of data that have a test set. Raises InvalidSettingError for data in which the validation set would be the test
    set."""
    root = Path(str(overrides.get("dataset.root", dataset.root)))
    replaced: dict[str, object] = {}
    if isinstance(dataset, ImagesConfig) and dataset.test is not None and (root / "train").is_dir():
        replaced["dataset.test"] = None
    has_test = any((root / f"test{suffix}").exists() for suffix in ("", ".tsv")) or "dataset.test" in overrides
    if dataset.validation == "val" and root.is_dir() and not has_test:
        why = f"there is no '{root / 'test'}', and val was the validation set of the run"
        use = "give data with a test set, or of a folder of classes the share dataset.test=0.2"
        raise InvalidSettingError("dataset.root", str(root), f"{why}; {use}")
    if dataset.validation == "val" or isinstance(dataset, ImagesConfig):
        replaced["dataset.validation"] = None
    return replaced
