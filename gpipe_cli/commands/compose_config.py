"""Composes configurations from `conf/COMMAND.yaml`, the user's files and what was typed, and converts them into
dataclasses.

Everything goes through Hydra's public functions: `initialize_config_dir`, `compose` and the parser of overrides. Hydra
only chooses and composes files. gpipe sets the values in what Hydra composed, so that errors in values are worded by
gpipe, and the runs of a sweep share it. No public function does the work of `_run_hydra_program`.
"""

import copy
import itertools
import math
import re
import sys
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any, TypeVar

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
from yaml import YAMLError

from gpipe_cli.commands.command_line import CommandLine, parse_settings, to_input_error
from gpipe_cli.config.comments import CONF_DIR, GROUPS
from gpipe_cli.config.did_you_mean import suggest_nearest
from gpipe_cli.config.groups import IMAGE_DATASETS, PREPROCESSING_KEYS, ImagesConfig
from gpipe_cli.config.schema import quote, setting_names, unknown_setting_error
from gpipe_cli.config.settings import (
    AUTO,
    AUTO_BATCH,
    COMMAND_ONLY,
    CONFIG_FILE,
    TrainConfig,
    fallback_values,
    from_cfg,
    from_values,
    key_of,
    load_yaml,
    only_command_of,
    overridden_batch_key,
    plain_values,
    read_config,
    resolve_value,
    set_value,
)
from gpipe_cli.errors import InputError, InvalidSettingError, InvalidValueError, describe_error, error_text
from gpipe_cli.planner.step_schedule import schedule_of_file
from gpipe_cli.system.interrupts import import_in_thread

if TYPE_CHECKING:
    from gpipe_cli.models.preprocessing import Preprocessing

T = TypeVar("T")
TRAINING_KEYS = tuple(setting_names(TrainConfig))
_HELP_ALL_HEADING = re.compile(r"^.* --help-all\n\n", re.MULTILINE)  # the line between what --help shows and the rest


def combinations(line: CommandLine, more: Mapping[str, str] | None = None) -> list[tuple[str, ...]]:
    """The settings of each run of a sweep: all combinations; the setting typed last varies fastest. `more`: settings
    that a file sweeps (`hydra.sweeper.params`); typed ones win. Raises InputError."""
    typed = [*(f"{key}={value}" for key, value in (more or {}).items()), *line.typed]
    try:
        with _hydra_context(line):  # glob(*) looks up the choices of a group
            parsed = OverridesParser.create(GlobalHydra.instance().config_loader()).parse_overrides(typed)
            return list(
                itertools.product(*{setting.get_key_element(): _expand_sweep(setting) for setting in parsed}.values())
            )
    except HydraException as error:
        raise to_input_error(error) from error


def _expand_sweep(setting: Override) -> list[str]:
    """A setting with each of its values. Raises InvalidSettingError for bounds, `seed=interval(0,9)`."""
    if not setting.is_sweep_override():
        return [str(setting.input_line)]
    if not setting.is_discrete_sweep():
        why = "a sweep has no bounds; give the values one by one"
        raise InvalidSettingError(setting.key_or_group, setting.get_value_string(), why)
    return [f"{setting.get_key_element()}={value}" for value in setting.sweep_string_iterator()]


def compose(line: CommandLine, keys: Sequence[str]) -> DictConfig | None:
    """The configuration of `conf/COMMAND.yaml` with what was typed; for `keys` see `ConfigComposer`. None if something
    was printed instead (`--help`, `--help-all`, `--cfg`, `--info`, completion). Raises InputError if it cannot be
    composed."""
    options = line.options
    if line.only_prints and not (options["help"] or options["help_all"] or options["cfg"]):
        _run_hydra_program(line)
        return None
    cfg = ConfigComposer(line, keys).compose_full(line.unswept if options["multirun"] else line.typed)
    if options["help"] or options["help_all"]:
        template = Template(cfg.hydra.help.template)
        shown = template.safe_substitute(APP_CONFIG_GROUPS=_describe_groups(line, cfg)) + "\n"
        if (divided := _HELP_ALL_HEADING.search(shown)) is not None:
            shown = shown.replace(divided[0], "") if options["help_all"] else shown[: divided.end() - 1]
        sys.stdout.write(shown)
        return None
    if options["cfg"] is not None:
        sys.stdout.write(_cfg_text(cfg, options))
        return None
    return _strip_hydra_and_foreign_keys(line.command, cfg)


def _cfg_text(cfg: DictConfig, options: Mapping[str, Any]) -> str:
    """What `--cfg` prints."""
    keys = [str(key) for key in cfg if options["cfg"] in ("all", "hydra" if key == "hydra" else "job")]
    shown: Any = OmegaConf.masked_copy(cfg, keys)
    header = ""
    package = options["package"]
    if package is not None:
        header = f"# @package {package}\n"
        shown = OmegaConf.select(shown, package)
        if not OmegaConf.is_config(shown):
            raise InputError(f"--package {package}: no such group of settings; --cfg job shows all")
    return header + OmegaConf.to_yaml(shown, resolve=options["resolve"])


def _describe_groups(line: CommandLine, cfg: DictConfig) -> str:
    """Each group with its choices, the files of its folder in `conf/` and in the user's own folders, and in parentheses
    the chosen file."""
    shown = list[str]()
    chosen = cfg.hydra.runtime.choices
    for group in (group for group in GROUPS if group in chosen):
        files = [file for folder in (CONF_DIR, *_user_folders(line)) for file in (folder / group).glob("*.yaml")]
        text = f"{' | '.join(sorted({file.stem for file in files}))} ({chosen[group]})"
        shown += textwrap.wrap(text, 120, initial_indent=f"  {group:<17}", subsequent_indent=" " * 19)
    return "\n".join(shown)


def _run_hydra_program(line: CommandLine) -> None:
    """Let Hydra print what only it knows: `--info`, `--hydra-help`, and completion for shells.

    Hydra has no function for these, only options of the program that `hydra.main` makes, which reads `sys.argv`.
    Shells complete for the program's name, `gpipe`.
    """
    flags = [f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}")
             for name, value in line.options.items() if value]  # fmt: skip
    argv, sys.argv = sys.argv, ["gpipe", *flags, *line.typed]
    try:
        hydra.main(config_path="pkg://gpipe_cli.conf", config_name=line.command, version_base="1.3")(lambda _: None)()
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
    finally:
        sys.argv = argv


class ConfigComposer:
    """The configurations of a command line or of a sweep's runs. Hydra takes 0.1 to 0.2 s for each, so a choice of
    groups is composed once, and the other settings are set in a copy.

    `keys`: the settings that the command takes in addition to its own (`COMMAND_ONLY`).
    """

    def __init__(self, line: CommandLine, keys: Sequence[str]) -> None:
        self._line = line
        self._keys = [*keys, *(key for key, command in COMMAND_ONLY.items() if command == line.command)]
        self._folders = [CONF_DIR, *_user_folders(line)]
        self._composed: dict[tuple[str, ...], DictConfig] = {}

    def compose(self, typed: Sequence[str]) -> DictConfig:
        """The configuration with these settings, without Hydra's part and a recipe's settings for other commands.
        Raises InputError."""
        return _strip_hydra_and_foreign_keys(self._line.command, self.compose_full(typed))

    def compose_full(self, typed: Sequence[str]) -> DictConfig:
        """The configuration with these settings, Hydra's part included. Raises InputError."""
        parsed = parse_settings(typed)
        for setting in parsed:  # a recipe may have keys of other commands, which nobody may type
            key = setting.key_or_group
            command = only_command_of(key)
            if not setting.is_delete() and command not in (None, self._line.command):
                why = f"gpipe {self._line.command} has no such setting, gpipe {command} has"
                raise InvalidSettingError(
                    key, setting.value(), why + (suggest_nearest(key, self._keys) or "; remove it")
                )
        chosen = tuple(str(setting.input_line) for setting in parsed if self._selects_files(setting))
        if chosen not in self._composed:
            self._composed[chosen] = _compose_with_hydra(self._line, chosen)
        cfg = copy.deepcopy(self._composed[chosen])
        for setting in parsed:
            if not self._selects_files(setting):
                self._set_value(cfg, setting)
        return cfg

    def _selects_files(self, setting: Override) -> bool:
        """Whether a setting chooses files or removes something, so that Hydra has to compose with it."""
        key = setting.key_or_group
        group = "/" in key or any((folder / key).is_dir() for folder in self._folders)
        return group or setting.is_delete() or setting.package is not None or key == "hydra.searchpath"

    def _set_value(self, cfg: DictConfig, setting: Override) -> None:
        key, value = setting.key_or_group, setting.value()
        # a missing key of this command is added: a recipe for another command lacks it
        added = setting.is_add() or setting.is_force_add() or only_command_of(key) is not None
        try:
            merged = isinstance(value, dict) or not isinstance(OmegaConf.select(cfg, key), DictConfig)
            OmegaConf.update(cfg, key, value, merge=merged, force_add=added)
        except (ConfigAttributeError, ConfigKeyError) as error:
            if key.startswith("hydra."):
                raise InvalidValueError(key, value, "Hydra has no such setting; --cfg hydra lists all") from error
            raise unknown_setting_error(key, value, self._keys) from error
        except OmegaConfBaseException as error:
            raise InvalidValueError(key, value, f"{error_text(error)}; give another value, or remove it") from error


def _compose_with_hydra(line: CommandLine, chosen: Sequence[str]) -> DictConfig:
    """What Hydra composes for these choices. Raises InputError."""
    try:
        primary = _check_files(line, chosen)
        if line.from_file:
            _check_search_path(primary, chosen)
        search_path = _search_path_setting(line, primary)
        kept = [choice for choice in chosen if not search_path or key_of(choice) != "hydra.searchpath"]
        with warnings.catch_warnings(), _hydra_context(line):
            warnings.simplefilter("error", UserWarning)  # of a missing entry in hydra.searchpath
            return hydra.compose(line.options["config_name"] or line.command, [*kept, *search_path], True)
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise to_input_error(error) from error
    except RecursionError as error:
        raise InputError("configuration: a file includes itself in its defaults; remove that line") from error
    except InputError:
        raise
    except Exception as error:  # Hydra lets Python's own exceptions through for wrong settings or defaults
        given = [choice for choice in chosen if choice.startswith("~") or key_of(choice).startswith("hydra")]
        if (name := line.options["config_name"]) is not None:
            given.append(f"-cn {name}")
        why = f"Hydra cannot use it ({describe_error(error)})"
        raise InputError(f"{' '.join(given) or 'configuration'}: {why}; change it, or remove it") from error


def _user_folders(line: CommandLine) -> list[Path]:
    """The user's own folders of configuration files, in addition to `conf/`."""
    given = line.overrides.get("hydra.searchpath")
    entries = given if isinstance(given, list) else []
    paths = [line.options["config_path"], line.options["config_dir"]]
    paths += [entry for entry in entries if isinstance(entry, str) and "://" not in entry]
    return [Path(path) for path in paths if path is not None]


def _main_folder(line: CommandLine) -> Path:
    """The folder of the primary configuration file, which Hydra looks for in a single place."""
    file = f"{(line.options['config_name'] or line.command).removesuffix('.yaml')}.yaml"
    return next((folder for folder in (CONF_DIR, *_user_folders(line)) if (folder / file).is_file()), CONF_DIR)


def _hydra_context(line: CommandLine) -> AbstractContextManager[None]:
    """A context in which Hydra can compose."""
    return hydra.initialize_config_dir(str(_main_folder(line).absolute()), version_base="1.3")


def _search_path_setting(line: CommandLine, primary: DictConfig | None) -> list[str]:
    """The setting that adds all folders but the main one to Hydra's search path; [] without others. `primary`:
    the user's primary file, which may name more folders."""
    given = line.overrides.get("hydra.searchpath")
    if given is None and primary is not None:
        entries = OmegaConf.select(primary, "hydra.searchpath")
        given = None if entries is None else OmegaConf.to_container(entries)
    others = [str(folder.absolute()) for folder in (CONF_DIR, *_user_folders(line)) if folder != _main_folder(line)]
    if not others or not isinstance(given, list | None):
        return []
    others += [entry for entry in given or [] if str(Path(entry).absolute()) not in others]
    return [f"hydra.searchpath=[{','.join(map(quote, others))}]"]


def _check_search_path(primary: DictConfig | None, chosen: Sequence[str]) -> None:
    """Raises InputError for a package in the search path, as looking for files in it would import it."""
    entries = [choice.partition("=")[2] for choice in chosen if key_of(choice) == "hydra.searchpath"]
    if primary is not None and (given := OmegaConf.select(primary, "hydra.searchpath")) is not None:
        entries += map(str, given)
    for entry in entries:
        if "://" in entry:
            why = "code that a file names is not imported; give the folder of the package, and begin the sweep again"
            raise InputError(f"hydra.searchpath={entry}: {why}")


def _check_files(line: CommandLine, chosen: Sequence[str]) -> DictConfig | None:
    """The user's primary configuration file; None without it. Raises InputError for a user's file that holds no
    settings, because Hydra's errors do not name the file."""
    name = line.options["config_name"] or line.command
    primary = None
    waiting = [name.removesuffix(".yaml"), *(choice.lstrip("+").replace("=", "/", 1) for choice in chosen)]
    seen = set[Path]()
    while waiting:
        entry = waiting.pop(0)
        for file in (folder / f"{entry}.yaml" for folder in _user_folders(line)):
            if file in seen or not file.is_file():
                continue
            seen.add(file)
            cfg = load_yaml(file)
            primary = primary or cfg
            defaults = OmegaConf.select(cfg, "defaults")
            for default in defaults if isinstance(defaults, ListConfig) else ():
                pairs = default.items() if isinstance(default, DictConfig) else [("", default)]
                waiting += ["/".join([*str(key).split()[-1:], str(value)]).lstrip("/") for key, value in pairs]
    return primary


def _strip_hydra_and_foreign_keys(command: str, cfg: DictConfig) -> DictConfig:
    with open_dict(cfg):
        del cfg["hydra"]
    strip_foreign_keys(command, cfg)
    return cfg


def strip_foreign_keys(command: str, cfg: DictConfig) -> None:
    """Remove from `cfg` what a recipe's file has for other commands."""
    with open_dict(cfg):
        for key in [key for key, owning_command in COMMAND_ONLY.items() if owning_command != command]:
            cfg.pop(key, None)


def command_settings(kind: type[T], command: str, cfg: DictConfig) -> T:
    """The settings of `command` that a training lacks, taken out of `cfg`; any that a recipe lacks are as in
    `conf/COMMAND.yaml`. Raises InputError for invalid settings."""
    text = resources.files("gpipe_cli.conf").joinpath(f"{command}.yaml").read_text(encoding="utf-8")
    defaults = OmegaConf.create(text.partition("\nhydra:")[0])
    with open_dict(cfg):
        values = {key: cfg.pop(key, OmegaConf.select(defaults, key)) for key in setting_names(kind)}
    return from_cfg(kind, OmegaConf.create(values))


def training_config(cfg: DictConfig, overrides: Mapping[str, object]) -> tuple[TrainConfig, tuple[str, ...]]:
    """The training that `cfg` describes, and the keys of its `auto` settings, for which `substitute_auto` has set
    numbers.

    `overrides`: the typed settings. Raises InputError for invalid settings.
    """
    if (key := overridden_batch_key(overrides)) is not None:  # the value replaced is a default or a preset's
        OmegaConf.update(cfg, key, None, force_add=True)
    _set_vocabulary_size(cfg, overrides)
    auto = substitute_auto(cfg)
    config = _resolve_preprocessing(cfg, overrides)
    if config.schedule_is_file and not auto:
        schedule_of_file(config)  # which is checked
    return config, auto


def apply_overrides(saved: TrainConfig, overrides: Mapping[str, Any]) -> TrainConfig:
    """The configuration of a run, with the settings in `overrides` replacing its own.

    A group given as the run's choice keeps the run's settings. Raises InputError for invalid settings.
    """
    values = plain_values(OmegaConf.create(asdict(saved)))
    saved_dataset = dict(values["dataset"])
    if (partitions := overrides.get("partitions", saved.partitions)) != saved.partitions:
        values["partition"]["balance"] = None  # the balance is for another number of partitions
        if isinstance(partitions, int) and partitions < (saved.stages_per_process or 0):
            values["stages_per_process"] = None  # the model has fewer stages than that
    if (replaced := overridden_batch_key(overrides)) is not None:
        values[replaced] = None
    if overrides.get("partition.balance") is not None:
        values["partition"]["method"] = "exact"  # the given balance replaces the run's method
    if overrides.get("partition.method", "exact") != "exact":
        values["partition"]["balance"] = None
    for key, setting in overrides.items():
        value = resolve_value(setting)
        if key not in GROUPS or value["name"] != values[key]["name"]:
            set_value(values, key, value)
    # other images are scaled as those that the weights have seen
    unset = [key for key in PREPROCESSING_KEYS if key in saved_dataset and values["dataset"].get(key) is None]
    values["dataset"] |= {key: saved_dataset[key] for key in unset}
    return from_values(TrainConfig, values)


def _set_vocabulary_size(cfg: DictConfig, overrides: Mapping[str, object]) -> None:
    """Sets dataset.vocabulary to the size of dataset.tokenizer, if the vocabulary is null or only the tokenizer was
    typed. Raises InvalidSettingError for a tokenizer that cannot be read."""
    place, size = (OmegaConf.select(cfg, f"dataset.{key}") for key in ("tokenizer", "vocabulary"))
    typed_alone = "dataset.tokenizer" in overrides and "dataset.vocabulary" not in overrides
    if isinstance(place, str) and (size is None or typed_alone):
        import_in_thread("gpipe_cli.data.pretrained_tokenizer")  # torch comes with it
        from gpipe_cli.data.pretrained_tokenizer import HFTokenizer

        OmegaConf.update(cfg, "dataset.vocabulary", HFTokenizer(place).size)


def _resolve_preprocessing(cfg: DictConfig, overrides: Mapping[str, object]) -> TrainConfig:
    """The training that `cfg` describes. What is null of dataset.mean, std and interpolation becomes what its initial
    weights were trained with, or else the default. With pretrained weights dataset.image_size also becomes theirs,
    unless it was typed or a user's file sets another than `conf/dataset`. Raises InputError for invalid settings."""
    if OmegaConf.select(cfg, "dataset.name") not in IMAGE_DATASETS:
        return from_cfg(TrainConfig, cfg)
    unset = [key for key in PREPROCESSING_KEYS if OmegaConf.select(cfg, f"dataset.{key}") is None]
    with open_dict(cfg):
        for key in unset:
            cfg.dataset.pop(key, None)
    config = from_cfg(TrainConfig, cfg)
    if (trained := _pretrained_preprocessing(config)) is None:
        return config
    usual_size = load_yaml(CONF_DIR / "dataset" / f"{config.dataset.name}.yaml").image_size
    if config.init_from is None and "dataset.image_size" not in overrides and cfg.dataset.image_size == usual_size:
        unset.append("image_size")
    OmegaConf.update(cfg, "dataset", {key: getattr(trained, key) for key in unset}, force_add=True)
    return from_cfg(TrainConfig, cfg)


def _pretrained_preprocessing(config: TrainConfig) -> "ImagesConfig | Preprocessing | None":
    """How the images were scaled on which the initial weights of a training were trained, be they of a run or
    pretrained; None without such weights, or if nobody knows."""
    model = config.model
    if config.init_from is not None:  # a folder without a run is refused later
        folder = Path(config.init_from)
        saved = read_config(folder, fallback_values(config)).dataset if (folder / CONFIG_FILE).is_file() else None
        return saved if isinstance(saved, ImagesConfig) else None
    if not getattr(model, "pretrained", False) and getattr(model, "weights", None) is None:
        return None
    import_in_thread("gpipe_cli.assembly.build")  # torch comes with it
    from gpipe_cli.assembly.build import preprocessing_of

    return preprocessing_of(config)


def substitute_auto(cfg: DictConfig) -> tuple[str, ...]:
    """The keys of the `auto` settings. In `cfg` each becomes 1, but batch_size a sample per micro-batch."""
    auto = tuple(key for key in (*AUTO, *AUTO_BATCH) if OmegaConf.select(cfg, key) == "auto")
    for key in auto:
        OmegaConf.update(cfg, key, 1)
    if "batch_size" in auto:
        counts = [OmegaConf.select(cfg, key) for key in ("micro_batches", "replicas")]
        if all(isinstance(count, int) and count > 0 for count in counts):  # anything else is refused later, as typed
            OmegaConf.update(cfg, "batch_size", math.prod(counts))
    return auto
