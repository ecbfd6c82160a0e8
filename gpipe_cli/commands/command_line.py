"""Parses the arguments of a command by Hydra's grammar, and turns Hydra's errors into single lines.

Nothing is composed here; `compose_config` does that.
"""

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException

from gpipe_cli.config.comments import GROUPS, choice_descriptions
from gpipe_cli.config.did_you_mean import ALIASES, resolve_alias, suggest_nearest
from gpipe_cli.config.old_words import update_argument
from gpipe_cli.config.schema import quote
from gpipe_cli.config.settings import key_of
from gpipe_cli.errors import InputError, InvalidSettingError, InvalidValueError, error_text, shorten
from gpipe_cli.models.timm_list import timm_models

PATH_SETTINGS = ("run", "resume", "init_from", "run_folder", "output", "dataset.root", "file")


class _Options(argparse.ArgumentParser):
    """The options of Hydra applications, accepted anywhere among the settings."""

    def __init__(self, command: str) -> None:
        super().__init__(add_help=False)
        self._command = command
        self.add_argument("overrides", nargs="*")
        for short, name in (("-h", "--help"), ("-m", "--multirun"), ("-sc", "--shell-completion")):
            self.add_argument(short, name, action="store_true")
        for name in ("--help-all", "--hydra-help", "--version", "--resolve"):
            self.add_argument(name, action="store_true")
        for short, name in (("-cp", "--config-path"), ("-cn", "--config-name"), ("-cd", "--config-dir")):
            self.add_argument(short, name)
        self.add_argument("-c", "--cfg", choices=["job", "hydra", "all"])
        self.add_argument("-p", "--package")
        kinds = ["all", "config", "defaults", "defaults-tree", "plugins", "searchpath"]
        self.add_argument("-i", "--info", const="all", nargs="?", choices=kinds)

    def error(self, message: str) -> NoReturn:
        if dashed := re.search(r"--([a-z_.]+)(=\S+)?$", message):
            message += f"; a setting has no dashes: {dashed[1]}{dashed[2] or '=...'}"
        raise InputError(f"{message}; see gpipe {self._command} --hydra-help")


@dataclass(frozen=True)
class CommandLine:
    """The arguments of a command."""

    command: str
    options: Mapping[str, Any]  # multirun, config_name, config_dir, ...
    typed: tuple[str, ...]  # the settings among the arguments
    parsed: tuple[Override, ...]  # `typed`, as Hydra parses it
    overrides: Mapping[str, object]  # key or group, without + -> its value; if it is swept, the text of its values
    from_file: bool = False  # whether it was read from a file, which may come from elsewhere

    @property
    def swept(self) -> frozenset[str]:
        """The settings that have several values."""
        return frozenset(setting.key_or_group for setting in self.parsed if setting.is_sweep_override())

    @property
    def single_valued(self) -> frozenset[str]:
        """The settings that have a single value."""
        return frozenset(self.overrides) - self.swept

    @property
    def only_prints(self) -> bool:
        """Whether an option only asks for something to be printed, such as --help or --cfg."""
        names = ("help", "help_all", "cfg", "info", "hydra_help", "version", "shell_completion")
        return any(self.options[name] for name in names)

    @property
    def is_sweep(self) -> bool:
        return self.options["multirun"] and not self.only_prints

    @property
    def unswept(self) -> tuple[str, ...]:
        """The settings, as typed, that all runs of a sweep share."""
        return tuple(str(setting.input_line) for setting in self.parsed if not setting.is_sweep_override())

    def check_allowed(self, remedies: Mapping[str, str]) -> None:
        """Raises InputError for a setting in `remedies` (key or group -> what to do instead), and for a group that is
        set to anything but the name of a choice."""
        # Hydra ignores ~presets without presets
        presets = "the model and the data set choose it; remove it, or give ~presets"
        remedies = {"presets": presets, **remedies}
        for key, value in self.overrides.items():
            remedy = remedies.get(key) or remedies.get(key.partition(".")[0])
            if remedy is not None and ("." in key or value not in (None, False)):
                raise InvalidSettingError(key, value, remedy)
        for group in GROUPS:
            if not isinstance(choice := self.overrides.get(group, ""), str):
                number = isinstance(choice, int | float) and group == "learning_rate"
                hint = f"write {ALIASES['lr']}={choice}" if number else "gpipe train --help lists them"
                raise InvalidSettingError(group, choice, f"must be the name of a choice; {hint}")
            if "/" in choice or "${" in choice:  # a file of another group, or of any folder; an interpolation
                why = f"no such choice; choose one of {', '.join(choice_descriptions(group))}"
                raise InvalidValueError(group, choice, why)


def parse_command_line(command: str, arguments: Sequence[str], sweep_alternative: str = "") -> CommandLine:
    """Parse the arguments without composing anything. `sweep_alternative`: what to do instead, if the command has no
    sweeps. Raises InputError for an unknown option, a setting that is not key=value, and several values without -m."""
    options = vars(_Options(command).parse_intermixed_args(list(arguments)))
    for flag, key in (("-cd", "config_dir"), ("-cp", "config_path")):
        if (folder := options[key]) is not None:
            options[key] = str(find_config_dir(folder))
            if not Path(options[key]).is_dir():
                raise InputError(f"{flag} {folder}: no such folder; give the one with your configurations")
    overrides = options.pop("overrides")
    updated = [update_argument(argument, command) for argument in overrides]
    for old, new in zip(overrides, updated, strict=True):
        if old != new:
            sys.stderr.write(f"gpipe {command}: {old} is {new} today\n")
    typed = tuple(map(_quote_path, updated))
    try:
        parsed = parse_settings(typed)
        for setting in parsed:
            if not setting.key_or_group:
                raise InputError(f"{setting.input_line}: a value without a setting; write SETTING=VALUE")
            if setting.is_range_sweep() and next(setting.sweep_string_iterator(), None) is None:
                raise InputError(f"{setting.input_line}: has no values; give one or more")
        values = setting_values(parsed)
    except HydraException as error:
        raise to_input_error(error) from error
    except RecursionError as error:
        raise InputError("a setting is nested too deeply; no value is a list of lists") from error
    options["multirun"] |= values.get("hydra.mode") == "MULTIRUN"
    if options["multirun"] and sweep_alternative:
        raise InputError(f"-m: {command} has no sweeps; {sweep_alternative}")
    line = CommandLine(command, options, typed, tuple(parsed), values)
    for key in sorted(line.swept) if not options["multirun"] and command != "reproduce" else ():
        why = "several values are a sweep; add -m, or write a list in brackets, key=[1,2]"
        raise InputError(f"{key}={values[key]}: {why}")
    return line


def find_config_dir(path: str) -> Path:
    """The folder that the option -cd names: `recipes` stands for gpipe's recipes unless such a folder exists."""
    if path != "recipes" or Path(path).exists():
        return Path(path)
    from gpipe_cli.reproduction.runner import RECIPES_DIR  # here, as it imports what no other command needs

    return RECIPES_DIR


def _quote_path(argument: str) -> str:
    """The argument, with quotes around a path that Hydra's grammar does not take: with letters beyond ASCII, or an
    existing path such as `run=.../micro_batches=4`, the folder of a sweep's run."""
    key, _, value = argument.partition("=")
    plain = re.fullmatch(r"[\w./-]*", value) is not None
    if key not in PATH_SETTINGS or (plain and value.isascii()) or not (plain or os.path.exists(value)):
        return argument
    return f"{key}={quote(value)}"


def parse_settings(typed: Sequence[str]) -> list[Override]:
    """Settings, parsed by Hydra. Raises HydraException, and InvalidValueError for a number that is too long for
    Python."""
    parser = OverridesParser.create()
    parsed = list[Override]()
    for argument in typed:
        try:
            parsed += parser.parse_overrides([argument])
        except ValueError as error:  # from `int`: no exception of Hydra's is a ValueError
            why = f"a number has at most {sys.get_int_max_str_digits()} digits; give a smaller one"
            raise InvalidValueError(key_of(argument), shorten(argument.partition("=")[2]), why) from error
    return parsed


def setting_values(settings_typed: Sequence[Override] | Sequence[str]) -> dict[str, object]:
    """Key or group -> value of each setting; if it is swept, the text of its values."""
    parsed = [setting if isinstance(setting, Override) else parse_settings([setting])[0] for setting in settings_typed]
    return {
        setting.key_or_group: setting.get_value_string() if setting.is_sweep_override() else setting.value()
        for setting in parsed
        if not setting.is_delete()
    }


def _suggest_choice(group: str, choice: str) -> str:
    """How a choice that other programs have, or a model or a family of timm's, is written here; "" if unknown."""
    if (written := resolve_alias(group, choice)) or group != "model":
        return written
    chains = [name for name, row in timm_models().items() if row and name.startswith(choice)]
    if not chains or len(choice) < 3:
        return ""
    name = min(chains, key=len)  # the choice itself, if it is a name
    size = re.search(r"(?:patch|mixer_\w)\d+_(\d+)$", name)  # others take many sizes, but not all take digits' size
    return f"model=timm model.name={name} dataset.image_size={size[1] if size else 224}"


def to_input_error(error: Exception) -> InputError:
    """Hydra's error in a single line, with what to write instead."""
    match error:
        case OverrideParseException(override=given):
            if not str(given).strip():
                return InputError(f"'{given}': an argument is empty; remove it")
            if "=" not in str(given):
                return InputError(f"{given}: a setting without a value; write {given}=VALUE")
            return InputError(f"{given}: cannot be read; write setting=value, in quotes if need be")
        case MissingConfigException(missing_cfg_file=str(missing), options=options) if options:
            group, _, choice = missing.rpartition("/")
            if written := _suggest_choice(group, choice):
                return InvalidValueError(group, choice, f"no such choice; write {written}")
            hint = suggest_nearest(choice, list(options))
            return InvalidValueError(group, choice, f"no such choice; choose one of {', '.join(options)}{hint}")
        case MissingConfigException(missing_cfg_file=str(name)):
            return InputError(f"-cn {name}: no such configuration; give the folder of {name}.yaml with -cd")
    message = error_text(error) if str(error) or error.__cause__ is None else error_text(error.__cause__)
    return InputError(f"configuration: {message}")
