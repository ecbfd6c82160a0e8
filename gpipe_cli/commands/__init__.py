"""The commands, and what they share: Hydra reads the command line and composes `conf/`; the command runs after that.

Hydra only takes the composed tree to the door. Nothing runs inside it, so that an exception is the command's own,
Ctrl-C ends the process, and no folder, log or change of directory comes from Hydra.
"""

import contextlib
import io
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from hydra.main import get_args_parser
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from gpipe_cli.commands.config_files import check_config_files
from gpipe_cli.config.owners import OWNERS, owner
from gpipe_cli.config.typed import SettingError, nearest, one_line, quoted, settings, unknown
from gpipe_cli.distributed.torchrun import leads
from gpipe_cli.system.streams import lost_output

# Whatever configuration it begins with, Hydra makes no folders and no logs, and starts no runs by itself.
_QUIET = (
    "hydra.output_subdir=null",
    "hydra.run.dir=.",
    "hydra/job_logging=none",
    "hydra/hydra_logging=none",
    "hydra.launcher._target_=hydra_plugins.gpipe_cli.SweepLauncher",
)
FOLDERS = ("run", "resume", "init_from", "run_folder", "output", "dataset.root")


@dataclass(frozen=True)
class CommandLine:
    """A command's arguments as Hydra reads them."""

    options: dict[str, object]  # of Hydra: multirun, config_name, config_dir, ...
    overrides: dict[str, object]  # what was set: key or group, without +, and value (of a sweep: its text)
    swept: frozenset[str]  # those of them that have several values


def read(command: str, arguments: Sequence[str]) -> CommandLine:
    """Reads the arguments without composing anything.

    Raises:
        ValueError: an option that Hydra does not have, or a setting that is not of the form key=value.
    """
    sys.argv = [f"gpipe {command}", *arguments]
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            options = vars(get_args_parser().parse_args())
    except SystemExit:  # argparse prints its usage, many lines of it, and leaves; its last line says what is wrong
        line = complaint.getvalue().strip().rpartition(": error: ")[2]
        if dashed := re.search(r"--([a-z_.]+)(=\S+)?$", line):
            line += f"; a setting has no dashes: {dashed[1]}{dashed[2] or '=...'}"
        raise ValueError(f"{line}; see gpipe {command} --hydra-help") from None
    try:
        overrides = OverridesParser.create().parse_overrides(options["overrides"])
        for o in overrides:
            if not o.key_or_group:
                raise ValueError(
                    f"{o.input_line}: a value without a setting; write SETTING={str(o.input_line).lstrip('+=')}"
                )
            if o.is_range_sweep() and next(o.sweep_string_iterator(), None) is None:
                raise ValueError(f"{o.input_line}: has no values; give one or more")
        values: dict[str, object] = {
            o.key_or_group: str(o.input_line).partition("=")[2] if o.is_sweep_override() else o.value()
            for o in overrides
            if not o.is_delete()
        }
    except HydraException as error:
        raise translated(error, []) from error
    except RecursionError as error:
        raise ValueError("a setting is nested too deeply; no value is a list of lists") from error
    return CommandLine(options, values, frozenset(o.key_or_group for o in overrides if o.is_sweep_override()))


def arranged(arguments: Sequence[str]) -> list[str]:
    """The arguments as Hydra takes them: options first, then settings, with quotes around folders that need them.

    Hydra's parser refuses settings on both sides of an option, `epochs=2 -m partitions=1,2`. And the run of a sweep
    lies in `micro_batches=4`: one types, or completes, `run=.../micro_batches=4`, which Hydra cannot read.
    """
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            given: list[str] = get_args_parser().parse_intermixed_args(list(arguments)).overrides
    except SystemExit:  # what is wrong is said when they are read
        return list(arguments)

    def readable(argument: str) -> str:
        key, _, value = argument.partition("=")
        if key not in FOLDERS or re.fullmatch(r"[\w./-]*", value) or not os.path.exists(value):
            return argument
        return f"{key}={quoted(value)}"

    options = [argument for argument in arguments if argument not in given]
    return [*options, *(readable(argument) for argument in given)]


def compose(command: str, arguments: Sequence[str], kind: type, received: list[Any]) -> None:
    """Runs Hydra for `conf/<command>.yaml`, whose keys are those of the dataclass `kind`.

    `received` gets the composed tree, a DictConfig; or of a sweep every `Run` that ended; or nothing where Hydra has
    answered by itself (`--cfg`, `--info`, completion). `--help` leaves by SystemExit.

    Raises:
        ValueError: the configuration cannot be composed.
    """

    def take(given: Any) -> None:
        if isinstance(given, DictConfig):
            drop_others(command, given)
        received.append(given)

    for argument in arguments:  # what a recipe's file says to others is left alone; what is typed is meant for this one
        if "=" in argument and owner(argument) not in (None, command):
            key, _, value = argument.lstrip("+~").partition("=")
            near = nearest(key, settings(kind)) or "; leave it out"
            raise ValueError(f"{key}={value}: gpipe {command} has no such setting, gpipe {owner(argument)} has{near}")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # or else Hydra prints what went wrong, and leaves
    check_config_files()
    shell_completion = arguments[:1] == ["-sc"]  # installs itself under the name of the program: gpipe
    # Settings stand on one side of the options: behind them if there are some, before an option that may have a value.
    quiet = () if shell_completion else _QUIET
    behind = bool(arguments) and ("=" in arguments[-1] or arguments[-1].startswith("~"))
    given = [*arguments, *quiet] if behind else [*quiet, *arguments]
    sys.argv = ["gpipe" if shell_completion else f"gpipe {command}", *given]
    try:
        hydra.main(config_path="pkg://gpipe_cli.conf", config_name=command, version_base="1.3")(take)()
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise translated(error, settings(kind)) from error
    except RecursionError as error:  # in the list of its defaults, without end
        raise ValueError("configuration: a file includes itself in its defaults; leave that line out") from error


def drop_others(command: str, tree: DictConfig) -> None:
    """Takes out of `tree` what a recipe's file says to other commands."""
    with open_dict(tree):
        for key in [key for key, whose in OWNERS.items() if whose != command]:
            tree.pop(key, None)


def replace_batch_size(tree: DictConfig, given: Mapping[str, object]) -> None:
    """What is given of `batch_size` and `batch_tokens` takes the place of the other in `tree`, be that a default, a
    preset's or a run's; if both are, both stay."""
    for key, other in (("batch_size", "batch_tokens"), ("batch_tokens", "batch_size")):
        if given.get(key) is not None and given.get(other) is None:
            OmegaConf.update(tree, other, None, force_add=True)


def take_auto(tree: DictConfig) -> tuple[str, ...]:
    """The settings that are to be chosen; in `tree` they get a number that stands for any other."""
    auto = tuple(key for key in ("partitions", "micro_batches") if OmegaConf.select(tree, key) == "auto")
    for key in auto:
        OmegaConf.update(tree, key, 1)
    return auto


@contextlib.contextmanager
def preparing() -> Iterator[None]:
    """Around what takes seconds before its first line (torch is imported, workers start): a terminal shows it.

    The line has no end: a longer one, which every banner and every error begins with, takes its place.
    """
    if (lost := lost_output()) is not None:
        raise lost
    note = "starting ..." if sys.stdout.isatty() and leads() else ""
    sys.stdout.write(f"{note}\r" if note else "")
    sys.stdout.flush()
    try:
        yield
    finally:  # if nothing came after it
        sys.stdout.write(f"\r{' ' * len(note)}\r" if note else "")
        sys.stdout.flush()


def translated(error: Exception, keys: Sequence[str]) -> ValueError:
    """Hydra's complaint in one line that says what to write instead."""
    message = one_line(error) if str(error) or error.__cause__ is None else one_line(error.__cause__)
    match error:
        case OverrideParseException():
            # Around what is wrong stand "Error parsing override" and "See https://...".
            lines = [line for line in error.message.splitlines() if not line.startswith(("Error parsing", "See "))]
            wrong = lines[0] if lines else "not setting=value"
            if "=" not in str(error.override):
                return ValueError(f"{error.override}: a setting without a value; write {error.override}=VALUE")
            return ValueError(f"{error.override}: cannot be read ({wrong}); write setting=value, in quotes if need be")
        case MissingConfigException() if error.options and error.missing_cfg_file:
            group, _, choice = error.missing_cfg_file.rpartition("/")
            options = ", ".join(error.options)
            hint = nearest(choice, list(error.options))
            return SettingError(f"{group}={choice}: there is no such choice; choose one of {options}{hint}")
        case MissingConfigException() if error.missing_cfg_file:
            name = error.missing_cfg_file
            return ValueError(f"-cn {name}: there is no such configuration; give the folder of {name}.yaml with -cd")
        case ConfigCompositionException():
            if found := re.match(r"Could not override '(.+?)'\.; To append to your config use \+\S+?=(.*)", message):
                if found[1].startswith("hydra."):
                    return ValueError(f"{found[1]}={found[2]}: Hydra has no such setting; --cfg hydra lists all")
                return unknown(found[1], found[2], keys)
            if found := re.match(r"(?:Ambiguous value for argument|Sweep parameters) '(.+?)'", message):
                return ValueError(
                    f"{found[1]}: several values are a sweep; add -m, or write a list in brackets, key=[1,2]"
                )
    return ValueError(f"configuration: {message}")
