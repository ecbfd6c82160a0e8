"""`gpipe export`: writes the model of a run as a plain file, or folder, that can be read without gpipe."""

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig

from gpipe_cli.commands.command_line import parse_command_line
from gpipe_cli.commands.command_runner import show_preparation
from gpipe_cli.commands.compose_config import compose
from gpipe_cli.commands.evaluate import RUN_OVERRIDES, run_settings
from gpipe_cli.commands.folders import check_writable
from gpipe_cli.config.groups import HuggingFaceConfig, group_choice
from gpipe_cli.config.schema import setting_names
from gpipe_cli.config.settings import ExportSettings, TrainConfig
from gpipe_cli.errors import InvalidSettingError
from gpipe_cli.launch.fork_server import fork_server
from gpipe_cli.system.interrupts import import_in_thread

KEYS = (*setting_names(ExportSettings), *RUN_OVERRIDES)
# Suffixes by format: programs choose by a file's suffix how to read the file.
SUFFIXES = {"safetensors": (".safetensors",), "torch": (".pt", ".pth"), "onnx": (".onnx",)}
HF_SUBDIR = "hf"  # what format=hf writes, by default, into the run folder
ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")  # the extra `onnx`


def main(arguments: Sequence[str]) -> int:
    cfg = compose(parse_command_line("export", arguments, "call it once for each file"), KEYS)
    if cfg is None:
        return 0
    settings, training = _export_settings(cfg)
    missing = [package for package in ONNX_PACKAGES if importlib.util.find_spec(package) is None]
    if settings.format == "onnx" and missing:
        why = f"needs {', '.join(missing)}, which is not installed"
        raise InvalidSettingError(
            "format", "onnx", f"{why}; pip install {' '.join(missing)}, or use format=safetensors"
        )
    if settings.format == "hf" and not isinstance(training.model, HuggingFaceConfig):
        why = f"is for runs of model=hf, and this one has model={group_choice(training.model)}"
        raise InvalidSettingError("format", "hf", f"{why}; use format={', '.join(SUFFIXES)}")
    file = _output_file(settings)

    fork_server.start(training)  # the server imports torch in parallel with this process
    with show_preparation():
        import_in_thread("gpipe_cli.commands.export_run")  # torch comes with it
        from gpipe_cli.commands.export_run import run_export

        return run_export(settings, training, file)


def _export_settings(cfg: DictConfig) -> tuple[ExportSettings, TrainConfig]:
    """The export that `cfg` describes, and the run's settings, with ema_decay=0 if averages=false. Raises InputError
    for averages that the run did not keep."""
    settings, training = run_settings(ExportSettings, cfg)
    if settings.averages and not training.ema_decay:
        why = "the run kept no average of its weights, as ema_decay=0; remove it"
        raise InvalidSettingError("averages", True, why)
    if settings.averages is False:
        training = replace(training, ema_decay=0.0)
    return settings, training


def _output_file(settings: ExportSettings) -> Path:
    """The file to write, or the folder. Raises InputError for a wrong suffix, a missing folder above it, and what
    exists already."""
    taken = "another file=..., or overwrite=true to replace one"
    if settings.format == "hf":
        folder = Path(settings.file or Path(settings.run) / HF_SUBDIR)
        check_writable("file", folder, alternative=taken, overwrite=settings.overwrite, is_folder=True)
        return folder
    suffixes = SUFFIXES[settings.format]
    file = Path(settings.file or Path(settings.run) / f"model{suffixes[0]}")
    if file.suffix not in suffixes:
        kind = next((kind for kind, endings in SUFFIXES.items() if file.suffix in endings), None)
        other = "" if kind is None else f", or format={kind}"
        why = f"a file of format={settings.format} ends with {' or '.join(suffixes)}"
        raise InvalidSettingError("file", file, f"{why}; use file={file.with_suffix(suffixes[0])}{other}")
    check_writable("file", file, alternative=taken, overwrite=settings.overwrite)
    return file
