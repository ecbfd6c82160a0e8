"""From the command line to settings: Hydra reads what was typed and composes `conf/`.

The command runs after Hydra has returned the composed tree, so that an exception is the command's own, Ctrl-C ends the
process, and no folder, log or change of directory comes from Hydra. Only the runs of a sweep start inside Hydra, from
its launcher.
"""

import contextlib
import copy
import io
import math
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import hydra
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.core.plugins import Plugins
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from hydra.main import get_args_parser
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from gpipe_cli.config.comments import GROUPS, of_choices
from gpipe_cli.config.settings import (
    AUTO,
    AUTO_BATCH,
    OWNERS,
    TrainConfig,
    from_tree,
    key_of,
    owner,
    read_yaml,
    replaced_batch,
)
from gpipe_cli.config.typed import (
    ELSEWHERE,
    RefusedError,
    SettingError,
    nearest,
    one_line,
    quoted,
    settings,
    shortened,
    unknown,
    with_type,
)
from gpipe_cli.errors import InputError

T = TypeVar("T")

# Whatever configuration it begins with, Hydra makes no folders and no logs, and its launcher is ours.
_QUIET = (
    "hydra.output_subdir=null",
    "hydra.run.dir=.",
    "hydra/job_logging=none",
    "hydra/hydra_logging=none",
    "hydra.launcher._target_=hydra_plugins.gpipe_cli.SweepLauncher",
)
FOLDERS = ("run", "resume", "init_from", "run_folder", "output", "dataset.root", "file")
TRAINING_KEYS = tuple(settings(TrainConfig))


@dataclass(frozen=True)
class CommandLine:
    """A command's arguments as Hydra reads them."""

    command: str
    arguments: tuple[str, ...]  # as Hydra takes them
    options: dict[str, object]  # of Hydra: multirun, config_name, config_dir, ...
    overrides: dict[str, object]  # what was set: key or group, without +, and value (of a sweep: its text)
    swept: frozenset[str]  # those of them that have several values
    searched: tuple[str, ...]  # those of them between whose bounds a search chooses, `seed=interval(0,9)`
    typed: tuple[str, ...]  # the settings among the arguments

    def refuse_search(self, why: str) -> None:
        """Raises RefusedError for bounds, where it takes values; `why` and the remedy."""
        for key in self.searched:
            raise RefusedError(key, self.overrides[key], why)

    def refuse(self, remedies: Mapping[str, str]) -> None:
        """Raises InputError for a setting that the command has no use for: key, and what to do instead; and for a group
        that is set to something else than the name of a choice."""
        presets = {"presets": "the model and the data set choose it; leave it out, or give ~presets"}
        remedies = presets | dict(remedies)  # Hydra ignores a choice that it lacks
        for key, value in self.overrides.items():
            remedy = remedies.get(key) or remedies.get(key.partition(".")[0])
            if remedy is not None and ("." in key or value not in (None, False)):
                raise RefusedError(key, value, remedy)
        for group in GROUPS:
            if not isinstance(choice := self.overrides.get(group, ""), str):
                number = isinstance(choice, int | float) and group == "learning_rate"
                hint = f"write {ELSEWHERE['lr']}={choice}" if number else "gpipe train --help lists them"
                raise RefusedError(group, choice, f"must be the name of a choice; {hint}")
            if "/" in choice:  # a file of another group, or of any folder
                why = f"there is no such choice; choose one of {', '.join(of_choices(group))}"
                raise SettingError(group, choice, why)


def read(command: str, given: Sequence[str], no_sweeps: str = "") -> CommandLine:
    """Reads the arguments without composing anything. `no_sweeps`: why the command has none.

    Raises InputError for an option that Hydra does not have, and for a setting that is not of the form key=value.
    """
    arguments, complaint = arranged(given), io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            options = vars(get_args_parser().parse_args(arguments))
    except SystemExit:  # argparse prints its usage, many lines of it, and exits; its last line says what is wrong
        line = complaint.getvalue().strip().rpartition(": error: ")[2]
        if dashed := re.search(r"--([a-z_.]+)(=\S+)?$", line):
            line += f"; a setting has no dashes: {dashed[1]}{dashed[2] or '=...'}"
        raise InputError(f"{line}; see gpipe {command} --hydra-help") from None
    if options["multirun"] and no_sweeps:
        raise InputError(f"-m: {command} has no sweeps; {no_sweeps}")
    try:
        overrides = _parsed(options["overrides"])
        for o in overrides:
            if not o.key_or_group:
                raise InputError(
                    f"{o.input_line}: a value without a setting; write SETTING={str(o.input_line).lstrip('+=')}"
                )
            if o.is_range_sweep() and next(o.sweep_string_iterator(), None) is None:
                raise InputError(f"{o.input_line}: has no values; give one or more")
        values: dict[str, object] = {
            o.key_or_group: str(o.input_line).partition("=")[2] if o.is_sweep_override() else o.value()
            for o in overrides
            if not o.is_delete()
        }
    except HydraException as error:
        raise translated(error, []) from error
    except RecursionError as error:
        raise InputError("a setting is nested too deeply; no value is a list of lists") from error
    swept = frozenset(o.key_or_group for o in overrides if o.is_sweep_override())
    searched = tuple(o.key_or_group for o in overrides if o.is_sweep_override() and not o.is_discrete_sweep())
    return CommandLine(command, tuple(arguments), options, values, swept, searched, tuple(options["overrides"]))


def _parsed(typed: Sequence[str]) -> list[Override]:
    """Raises HydraException, and SettingError for a number that Python refuses to read because of its length."""
    parser, parsed = OverridesParser.create(), list[Override]()
    for one in typed:
        try:
            parsed += parser.parse_overrides([one])
        except ValueError as error:  # of `int`, as no exception of Hydra's is one
            why = f"a number has at most {sys.get_int_max_str_digits()} digits; give a smaller one"
            raise SettingError(key_of(one), shortened(one.partition("=")[2]), why) from error
    return parsed


def arranged(arguments: Sequence[str]) -> list[str]:
    """The arguments as Hydra takes them: options first, then settings, with quotes around folders that need them.

    Hydra's parser refuses settings on both sides of an option, `epochs=2 -m partitions=1,2`. And the run of a sweep
    lies in `micro_batches=4`: one types, or completes, `run=.../micro_batches=4`, which Hydra cannot read.
    """
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            given: list[str] = get_args_parser().parse_intermixed_args(list(arguments)).overrides
    except SystemExit:  # `read` reports the error
        return list(arguments)

    def readable(argument: str) -> str:
        key, _, value = argument.partition("=")
        if key not in FOLDERS or re.fullmatch(r"[\w./-]*", value) or not os.path.exists(value):
            return argument
        return f"{key}={quoted(value)}"

    options = [argument for argument in arguments if argument not in given]
    return [*options, *(readable(argument) for argument in given)]


def compose(line: CommandLine, keys: Sequence[str]) -> DictConfig | None:
    """The tree that Hydra composes from `conf/COMMAND.yaml`, which has these `keys` and the command's own; None where
    Hydra has answered by itself (`--help`, `--cfg`, `--info`, completion), or run a sweep.

    Raises InputError if it cannot be composed.
    """
    command, arguments = line.command, line.arguments
    keys = [*keys, *(key for key, whose in OWNERS.items() if whose == command)]
    for argument in arguments:  # what a recipe's file has for other commands is ignored; what is typed is not
        if "=" in argument and owner(argument) not in (None, command):
            key, value = key_of(argument), argument.partition("=")[2]
            near = nearest(key, keys) or "; leave it out"
            raise InputError(f"{key}={value}: gpipe {command} has no such setting, gpipe {owner(argument)} has{near}")
    # A recipe for another command lacks what only this one has: `++` sets what is there and adds what is not.
    arguments = tuple(f"++{one}" if one[:1] not in "+~" and "=" in one and owner(one) else one for one in arguments)
    shell_completion = arguments[:1] == ("-sc",)  # installs itself under the name of the program: gpipe
    # Settings stand on one side of the options: behind them if there are some, before an option that may have a value.
    quiet = () if shell_completion else _QUIET
    behind = bool(arguments) and ("=" in arguments[-1] or arguments[-1].startswith("~"))
    given = [*arguments, *quiet] if behind else [*quiet, *arguments]
    composed: list[DictConfig] = []
    try:
        with _hydra("gpipe" if shell_completion else f"gpipe {command}", given):
            hydra.main(config_path="pkg://gpipe_cli.conf", config_name=command, version_base="1.3")(composed.append)()
    except SystemExit as end:  # --help
        if end.code not in (None, 0):
            raise
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise translated(error, keys) from error
    except RecursionError as error:  # in the list of its defaults, without end
        raise InputError("configuration: a file includes itself in its defaults; leave that line out") from error
    except (InputError, OSError):
        raise
    except Exception as error:
        # where its own settings or a list of defaults are wrong Hydra asserts, or raises what Python does
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if frame.f_globals["__name__"].partition(".")[0] not in ("hydra", "omegaconf"):
            raise
        given = [one for one in line.typed if one.startswith("~") or key_of(one).startswith("hydra")]
        if (name := line.options["config_name"]) is not None:
            given.append(f"-cn {name}")
        why = f"Hydra cannot use it ({with_type(error)})"
        raise InputError(f"{' '.join(given) or 'configuration'}: {why}; change it, or leave it out") from error
    for tree in composed:
        drop_others(command, tree)
        return tree
    return None


class JobTrees:
    """The trees of a sweep's jobs. To compose one takes Hydra a tenth of a second or two: each choice of groups is
    composed once, and a job's values are set in a copy of that.

    `compose_job`: a tree from the settings of a job, as strings.
    """

    def __init__(self, compose_job: Callable[[tuple[str, ...]], DictConfig]) -> None:
        self._composed = lru_cache(maxsize=None)(compose_job)

    def tree(self, settings_typed: Sequence[str]) -> DictConfig:
        """Raises what composing raises."""
        parsed = OverridesParser.create().parse_overrides(list(settings_typed))
        values = [o for o in parsed if o.type is OverrideType.CHANGE and o.key_or_group in TRAINING_KEYS and
                  o.package is None and o.key_or_group not in GROUPS]  # fmt: skip
        tree = copy.deepcopy(self._composed(tuple(str(o.input_line) for o in parsed if o not in values)))
        with read_write(tree), open_dict(tree):
            for o in values:
                OmegaConf.update(tree, o.key_or_group, o.value(), force_add=True)
        return tree


@contextlib.contextmanager
def _hydra(program: str, arguments: Sequence[str]) -> Iterator[None]:
    """Inside, Hydra gets these arguments, which it takes from `sys.argv`, raises its errors instead of printing them,
    and says which file it cannot read."""
    Plugins.instance()  # which registers Hydra's own way to read files first
    SourcesRegistry.instance().types[FileConfigSource.scheme()] = _Files
    argv, full = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv, os.environ["HYDRA_FULL_ERROR"] = [program, *arguments], "1"
    try:
        with warnings.catch_warnings():  # of a folder in hydra.searchpath that there is not
            warnings.filterwarnings("error", module=r"hydra\._internal\.config_loader_impl")
            yield
    finally:
        sys.argv = argv
        os.environ.pop("HYDRA_FULL_ERROR")
        if full is not None:
            os.environ["HYDRA_FULL_ERROR"] = full


class _Files(FileConfigSource):
    """Configuration files of users as Hydra reads them; what is none is an error that names the file."""

    def load_config(self, config_path: str) -> ConfigResult:
        file = Path(self.path, self._normalize_file_name(config_path))
        try:
            if file.is_file():  # or else Hydra reports it
                read_yaml(file)
            return super().load_config(config_path)
        except (OSError, RecursionError, YAMLError) as error:  # OSError: also of OmegaConf's, where it holds a number
            why = error.strerror if isinstance(error, OSError) and error.strerror else one_line(error)
            raise InputError(f"{file}: holds no settings ({why}); write lines key: value, in UTF-8") from error


def drop_others(command: str, tree: DictConfig) -> None:
    """Removes from `tree` what a recipe's file has for other commands."""
    with open_dict(tree):
        for key in [key for key, whose in OWNERS.items() if whose != command]:
            tree.pop(key, None)


def own(kind: type[T], command: str, tree: DictConfig) -> T:
    """What `command` has beside the settings of a training, taken out of `tree`. What a recipe does not have is as in
    `conf/COMMAND.yaml`. Raises InputError, as `typed`."""
    text = resources.files("gpipe_cli.conf").joinpath(f"{command}.yaml").read_text(encoding="utf-8")
    defaults = OmegaConf.create(text.partition("\nhydra:")[0])
    with open_dict(tree):
        given = {key: tree.pop(key, OmegaConf.select(defaults, key)) for key in settings(kind)}
    return from_tree(kind, OmegaConf.create(given))


def training(tree: DictConfig, given: Mapping[str, object]) -> tuple[TrainConfig, tuple[str, ...]]:
    """The training that `tree` describes, and its settings that are to be chosen, where a 1 stands for them.

    `given` is what was typed. Raises InputError, as `from_tree`.
    """
    if (key := replaced_batch(given)) is not None:  # a default, or a preset's
        OmegaConf.update(tree, key, None, force_add=True)
    auto = take_auto(tree)
    return from_tree(TrainConfig, tree), auto


def with_given(saved: TrainConfig, given: Mapping[str, Any]) -> TrainConfig:
    """The configuration of a run with what is given in the place of its own.

    A group that is given with the choice that the run has already keeps the run's settings. Raises InputError, as
    `from_tree`.
    """
    base = OmegaConf.create(asdict(saved))
    if (partitions := given.get("partitions", saved.partitions)) != saved.partitions:
        OmegaConf.update(base, "partition.balance", None)  # it was made for another number of partitions
        if isinstance(partitions, int) and partitions < (saved.stages_per_process or 0):
            OmegaConf.update(base, "stages_per_process", None)  # more than there are now
    if (replaced := replaced_batch(given)) is not None:
        OmegaConf.update(base, replaced, None)
    if given.get("partition.balance") is not None:
        OmegaConf.update(base, "partition.method", "exact")  # the run's, which the cut by hand takes the place of
    if given.get("partition.method", "exact") != "exact":
        OmegaConf.update(base, "partition.balance", None)
    for key, value in given.items():
        if not (isinstance(value, DictConfig) and value.get("name") == OmegaConf.select(base, f"{key}.name")):
            OmegaConf.update(base, key, value, merge=False, force_add=True)
    return from_tree(TrainConfig, base)


def take_auto(tree: DictConfig) -> tuple[str, ...]:
    """The settings that are to be chosen; in `tree` they become 1, and a mini-batch one sample per micro-batch."""
    auto = tuple(key for key in (*AUTO, *AUTO_BATCH) if OmegaConf.select(tree, key) == "auto")
    for key in auto:
        OmegaConf.update(tree, key, 1)
    if "batch_size" in auto:
        pieces = [OmegaConf.select(tree, key) for key in ("micro_batches", "replicas")]
        if all(isinstance(number, int) and number > 0 for number in pieces):  # others are refused as they are typed
            OmegaConf.update(tree, "batch_size", math.prod(pieces))
    return auto


def translated(error: Exception, keys: Sequence[str]) -> InputError:
    """An error of Hydra's in one line, with what to write instead."""
    message = one_line(error) if str(error) or error.__cause__ is None else one_line(error.__cause__)
    match error:
        case OverrideParseException():
            # Around what is wrong stand "Error parsing override" and "See https://...".
            lines = [line for line in error.message.splitlines() if not line.startswith(("Error parsing", "See "))]
            wrong = lines[0] if lines else "not setting=value"
            if not str(error.override).strip():
                return InputError(f"'{error.override}': an argument is empty; leave it out")
            if "=" not in str(error.override):
                return InputError(f"{error.override}: a setting without a value; write {error.override}=VALUE")
            return InputError(f"{error.override}: cannot be read ({wrong}); write setting=value, in quotes if need be")
        case MissingConfigException() if error.options and error.missing_cfg_file:
            group, _, choice = error.missing_cfg_file.rpartition("/")
            options = ", ".join(error.options)
            hint = nearest(choice, list(error.options))
            return SettingError(group, choice, f"there is no such choice; choose one of {options}{hint}")
        case MissingConfigException() if error.missing_cfg_file:
            name = error.missing_cfg_file
            return InputError(f"-cn {name}: there is no such configuration; give the folder of {name}.yaml with -cd")
        case ConfigCompositionException():
            if found := re.match(r"Could not override '(.+?)'\.; To append to your config use \+\S+?=(.*)", message):
                if found[1].startswith("hydra."):
                    return InputError(f"{found[1]}={found[2]}: Hydra has no such setting; --cfg hydra lists all")
                return unknown(found[1], found[2], keys)
            if found := re.match(r"Error merging override \+*(.+?)=(.*)", message):  # a list, where a group stands
                why = "must be a group of settings"
                return SettingError(found[1], found[2], f"{why}; for example {found[1]}={{NAME:VALUE}}")
            if found := re.match(r"(?:Ambiguous value for argument|Sweep parameters) '\+*(.+?)'", message):
                return InputError(
                    f"{found[1]}: several values are a sweep; add -m, or write a list in brackets, key=[1,2]"
                )
    return InputError(f"configuration: {message}")
