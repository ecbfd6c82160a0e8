"""`gpipe launch slurm`: writes the script of a training job, with -m of a job array, checked before it is queued."""

import re
import shlex
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from gpipe_cli.commands.command_line import CommandLine, read, values_of
from gpipe_cli.commands.composing import TRAINING_KEYS, Trees, combinations, compose, own, training
from gpipe_cli.commands.folders import new_run, numbered, refuse_content
from gpipe_cli.commands.outcome import preparing
from gpipe_cli.commands.sweep import differences, folder_name, refuse_without_effect
from gpipe_cli.config.settings import TrainConfig, find_run, key_of, owner
from gpipe_cli.config.slurm import LaunchSettings
from gpipe_cli.config.typed import RefusedError, SettingError, is_one_line, quoted, show
from gpipe_cli.distributed.torchrun import refuse_torchrun
from gpipe_cli.errors import InputError
from gpipe_cli.launch.slurm import script, submit
from gpipe_cli.system.files import write_whole
from gpipe_cli.system.interrupts import interruptible_import

# Settings that `gpipe launch` refuses, with the reason and the remedy.
REFUSED = {
    "resume": "a job begins a run, or goes on with the one that lies in its run_folder; give that",
    "dry_run": "everything is checked in any case; leave it out",
}
FILES = ("config_path", "config_dir", "config_name")  # options passed on to gpipe train
SWEEP_DIR = "hydra.sweep.dir"


def main(arguments: Sequence[str]) -> int:
    named = arguments[:1] == ["slurm"]
    line = read("launch", arguments[1:] if named else arguments)
    line.refuse(REFUSED)
    if line.is_question:
        compose(line, TRAINING_KEYS)
        return 0
    trees, elements = Trees(line, TRAINING_KEYS), _elements(line)
    composed = [trees.tree(typed) for typed in elements]
    job, *_ = [own(LaunchSettings, "launch", tree) for tree in composed]  # the same in all elements of an array
    requests = [training(tree, values_of(typed)) for tree, typed in zip(composed, elements, strict=True)]
    if not named:
        raise InputError("slurm is missing; write gpipe launch slurm [setting=value ...]")
    refuse_torchrun("one process writes the script; call gpipe launch slurm")
    config, auto = requests[0]
    for one_config, _ in requests:
        _refuse(job, one_config)
    if line.options["multirun"]:
        given = line.overrides.get(SWEEP_DIR)
        place = Path(str(given or _unused(Path(config.output) / f"{datetime.now():%Y-%m-%d_%H-%M-%S}_sweep")))
        folders = _below(place, line, elements)
    else:
        place = _unused(new_run(config, datetime.now(), auto)) if config.run_folder is None else Path(config.run_folder)
        folders = [place]
    _refuse_places(place, folders)
    with preparing(), interruptible_import():
        from gpipe_cli.commands.slurm_check import check

        check(job, requests)
    devices = [] if config.device != "auto" else ["device=cuda" if job.gpus_per_node else "device=cpu"]
    trainings = [
        [*_settings(line, typed), *devices, "resume=auto", _hydra("run_folder", folder)]
        for typed, folder in zip(elements, folders, strict=True)
    ]
    path = _script_of(place)
    text = script(job, trainings, ["gpipe", "launch", *arguments], path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except OSError as error:
        why = f"cannot be written ({error.strerror}); give another output=... or run_folder=..."
        raise InputError(f"{path}: {why}") from error
    sys.stdout.write(f"{text}\n")
    how = f"submitted as job {submit(path)}" if job.submit else f"submit it by: sbatch {shlex.quote(str(path))}"
    sys.stdout.write(f"written to {path}; {how}\n")
    return 0


def _elements(line: CommandLine) -> list[tuple[str, ...]]:
    """The typed settings of each training: one, or one per combination of a sweep. Raises InputError for what an array
    cannot have."""
    refuse_without_effect(line)
    for key, value in line.overrides.items():
        if key.startswith("hydra") and key != SWEEP_DIR:
            raise RefusedError(key, value, "a job runs gpipe train by itself; leave it out")
    if not line.options["multirun"]:
        return [line.typed]
    for key in sorted(line.swept):
        if owner(key) is not None:
            raise RefusedError(key, line.overrides[key], "all elements of a job array have the same; give one value")
    if not line.swept:
        raise InputError("-m: no setting has several values; give one several, micro_batches=4,8, or leave -m out")
    line.refuse_search("an array has no search; give the values, one after the other")
    return [tuple(one for one in job if key_of(one) != SWEEP_DIR) for job in combinations(line)]


def _refuse(job: LaunchSettings, config: TrainConfig) -> None:
    """Raises InputError for a device that the job lacks or would leave idle, and if `init_from` is not a run."""
    if config.device == "cuda" and not job.gpus_per_node:
        raise RefusedError("device", config.device, "the job has gpus_per_node=0; give its GPUs, or use device=cpu")
    if config.device == "cpu" and job.gpus_per_node:
        why = f"gpus_per_node={job.gpus_per_node} would idle; use gpus_per_node=0"
        raise RefusedError("device", config.device, why)
    if config.init_from is not None:
        find_run("init_from", config.init_from, config.output)


def _refuse_places(place: Path, folders: Sequence[Path]) -> None:
    """Raises InputError for a folder in which `gpipe train resume=auto` can neither begin nor resume a run; `place`:
    the run's folder or, for a sweep, the folder above `folders`."""
    if not is_one_line(str(Path.cwd())):
        raise InputError(f"the current folder, {show(Path.cwd())}: sbatch cannot read its name; work in another one")
    if not is_one_line(str(place)):
        raise SettingError(SWEEP_DIR, place, "must be a text of one line; choose another folder")
    for folder in folders:
        why = "a link that leads nowhere" if folder.is_symlink() and not folder.exists() else ""
        try:
            refuse_content(folder, again=True)
        except FileNotFoundError:
            pass
        except OSError as error:
            why = str(error.strerror)
        if why:
            raise InputError(f"run_folder={folder}: no folder can be made there ({why}); choose another")


def _settings(line: CommandLine, typed: Sequence[str]) -> list[str]:
    """The arguments that `gpipe train` gets for a training with the settings `typed`."""
    files = [f"--{key.replace('_', '-')}={value}" for key in FILES if (value := line.options[key]) is not None]
    return files + [one for one in typed if owner(one) != "launch" and key_of(one) != "run_folder"]


def _below(place: Path, line: CommandLine, elements: Sequence[Sequence[str]]) -> list[Path]:
    """A folder for each training of a sweep."""
    folders: list[Path] = []
    for name, _ in differences(elements, line.same):
        folders.append(next(folder for folder in numbered(place / folder_name(name)) if folder not in folders))
    return folders


def _unused(path: Path) -> Path:
    """The first of `numbered(path)` that does not exist and has no script."""
    return next(one for one in numbered(path) if not one.exists() and not _script_of(one).exists())


def _script_of(folder: Path) -> Path:
    """The path of a folder's script, beside it; `.` and `..` are resolved, as they do not name a folder."""
    named = folder if folder.name not in ("", "..") else folder.resolve()
    return named.with_name(f"{named.name}.sbatch")


def _hydra(key: str, folder: Path) -> str:
    """The setting `key=folder`, quoted if Hydra's grammar needs it."""
    return f"{key}={folder}" if re.fullmatch(r"[\w./-]+", str(folder)) else f"{key}={quoted(folder)}"
