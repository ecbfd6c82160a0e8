"""Composes trees of settings from `conf/COMMAND.yaml`, the user's files and what was typed, and turns a tree into
dataclasses.

Everything goes through Hydra's public functions: `initialize_config_dir`, `compose` and the parser of overrides. Hydra
only chooses and composes files; values are set in the composed tree, so that gpipe words the errors in values, and the
runs of a sweep share what was composed. No public function does the work of `_hydras_own_program`.
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

from gpipe_cli.commands.command_line import CommandLine, parsed_settings, translated
from gpipe_cli.config.comments import FOLDER, GROUPS
from gpipe_cli.config.did_you_mean import nearest
from gpipe_cli.config.groups import IMAGES, SCALING, ImagesConfig
from gpipe_cli.config.settings import (
    AUTO,
    AUTO_BATCH,
    CONFIG,
    OWNERS,
    TrainConfig,
    from_tree,
    from_values,
    instead_of,
    key_of,
    load_yaml,
    owner,
    plain_values,
    read_config,
    replaced_batch,
    resolved,
    set_value,
)
from gpipe_cli.config.typed import quoted, settings, unknown
from gpipe_cli.errors import InputError, InvalidSettingError, InvalidValueError, one_line, with_type
from gpipe_cli.planner.step_schedule import check_schedule_files
from gpipe_cli.schedule.placement import PLACEMENTS
from gpipe_cli.system.interrupts import import_apart

if TYPE_CHECKING:
    from gpipe_cli.models.preprocessing import Preprocessing

T = TypeVar("T")
TRAINING_KEYS = tuple(settings(TrainConfig))
_DIVISION = re.compile(r"^.* --help-all\n\n", re.MULTILINE)  # the line between what --help shows and the rest


def combinations(line: CommandLine, more: Mapping[str, str] | None = None) -> list[tuple[str, ...]]:
    """The settings of each run of a sweep: all combinations; the setting typed last varies fastest. `more`: settings
    that a file sweeps (`hydra.sweeper.params`); typed ones win. Raises InputError."""
    typed = [*(f"{key}={value}" for key, value in (more or {}).items()), *line.typed]
    try:
        with _initialized(line):  # glob(*) looks up the choices of a group
            parsed = OverridesParser.create(GlobalHydra.instance().config_loader()).parse_overrides(typed)
            return list(itertools.product(*{setting.get_key_element(): _each(setting) for setting in parsed}.values()))
    except HydraException as error:
        raise translated(error) from error


def _each(setting: Override) -> list[str]:
    """A setting with each of its values. Raises InvalidSettingError for bounds, `seed=interval(0,9)`."""
    if not setting.is_sweep_override():
        return [str(setting.input_line)]
    if not setting.is_discrete_sweep():
        why = "a sweep has no bounds; give the values one by one"
        raise InvalidSettingError(setting.key_or_group, setting.get_value_string(), why)
    return [f"{setting.get_key_element()}={value}" for value in setting.sweep_string_iterator()]


def compose(line: CommandLine, keys: Sequence[str]) -> DictConfig | None:
    """The tree of `conf/COMMAND.yaml` with what was typed; for `keys` see `Trees`. None if something was printed
    instead (`--help`, `--help-all`, `--cfg`, `--info`, completion). Raises InputError if it cannot be composed."""
    options = line.options
    if line.is_question and not (options["help"] or options["help_all"] or options["cfg"]):
        _hydras_own_program(line)
        return None
    tree = Trees(line, keys).whole(line.fixed if options["multirun"] else line.typed)
    if options["help"] or options["help_all"]:
        template = Template(tree.hydra.help.template)
        shown = template.safe_substitute(APP_CONFIG_GROUPS=_groups_shown(line, tree)) + "\n"
        if (divided := _DIVISION.search(shown)) is not None:
            shown = shown.replace(divided[0], "") if options["help_all"] else shown[: divided.end() - 1]
        sys.stdout.write(shown)
        return None
    if options["cfg"] is not None:
        sys.stdout.write(_shown(tree, options))
        return None
    return _own_part(line.command, tree)


def _shown(tree: DictConfig, options: Mapping[str, Any]) -> str:
    """What `--cfg` prints."""
    keys = [str(key) for key in tree if options["cfg"] in ("all", "hydra" if key == "hydra" else "job")]
    shown: Any = OmegaConf.masked_copy(tree, keys)
    header = ""
    package = options["package"]
    if package is not None:
        header = f"# @package {package}\n"
        shown = OmegaConf.select(shown, package)
        if not OmegaConf.is_config(shown):
            raise InputError(f"--package {package}: there is no such group of settings; --cfg job shows all")
    return header + OmegaConf.to_yaml(shown, resolve=options["resolve"])


def _groups_shown(line: CommandLine, tree: DictConfig) -> str:
    """Each group with its choices, the files of its folder in `conf/` and in the user's own folders, and in parentheses
    the chosen file."""
    shown = list[str]()
    chosen = tree.hydra.runtime.choices
    for group in (group for group in GROUPS if group in chosen):
        files = [file for folder in (FOLDER, *_user_folders(line)) for file in (folder / group).glob("*.yaml")]
        text = f"{' | '.join(sorted({file.stem for file in files}))} ({chosen[group]})"
        shown += textwrap.wrap(text, 120, initial_indent=f"  {group:<17}", subsequent_indent=" " * 19)
    return "\n".join(shown)


def _hydras_own_program(line: CommandLine) -> None:
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


class Trees:
    """The trees of a command line or of a sweep's runs. Composing a tree takes Hydra 0.1 to 0.2 s, so each choice of
    groups is composed once, and the other settings are set in a copy.

    `keys`: the settings that the command takes beside those that belong to it alone (`OWNERS`).
    """

    def __init__(self, line: CommandLine, keys: Sequence[str]) -> None:
        self._line = line
        self._keys = [*keys, *(key for key, command in OWNERS.items() if command == line.command)]
        self._folders = [FOLDER, *_user_folders(line)]
        self._composed: dict[tuple[str, ...], DictConfig] = {}

    def tree(self, typed: Sequence[str]) -> DictConfig:
        """The tree with these settings, without Hydra's part and without a recipe's settings for other commands. Raises
        InputError."""
        return _own_part(self._line.command, self.whole(typed))

    def whole(self, typed: Sequence[str]) -> DictConfig:
        """The tree with these settings, Hydra's part included. Raises InputError."""
        parsed = parsed_settings(typed)
        for setting in parsed:  # a recipe may have keys of other commands, which nobody may type
            key = setting.key_or_group
            command = owner(key)
            if not setting.is_delete() and command not in (None, self._line.command):
                why = f"gpipe {self._line.command} has no such setting, gpipe {command} has"
                raise InvalidSettingError(key, setting.value(), why + (nearest(key, self._keys) or "; leave it out"))
        chosen = tuple(str(setting.input_line) for setting in parsed if self._chooses(setting))
        if chosen not in self._composed:
            self._composed[chosen] = _composed(self._line, chosen)
        tree = copy.deepcopy(self._composed[chosen])
        for setting in parsed:
            if not self._chooses(setting):
                self._set(tree, setting)
        return tree

    def _chooses(self, setting: Override) -> bool:
        """Whether a setting chooses files or removes something, so that Hydra has to compose with it."""
        key = setting.key_or_group
        group = "/" in key or any((folder / key).is_dir() for folder in self._folders)
        return group or setting.is_delete() or setting.package is not None or key == "hydra.searchpath"

    def _set(self, tree: DictConfig, setting: Override) -> None:
        key, value = setting.key_or_group, setting.value()
        # a missing key of this command is added: a recipe for another command lacks it
        added = setting.is_add() or setting.is_force_add() or owner(key) is not None
        try:
            merged = isinstance(value, dict) or not isinstance(OmegaConf.select(tree, key), DictConfig)
            OmegaConf.update(tree, key, value, merge=merged, force_add=added)
        except (ConfigAttributeError, ConfigKeyError) as error:
            if key.startswith("hydra."):
                raise InvalidValueError(key, value, "Hydra has no such setting; --cfg hydra lists all") from error
            raise unknown(key, value, self._keys) from error
        except OmegaConfBaseException as error:
            raise InvalidValueError(key, value, f"{one_line(error)}; give another value, or leave it out") from error


def _composed(line: CommandLine, chosen: Sequence[str]) -> DictConfig:
    """What Hydra composes for these choices. Raises InputError."""
    try:
        primary = _check_files(line, chosen)
        if line.of_file:
            _check_search_path(primary, chosen)
        search_path = _search_path(line, primary)
        kept = [choice for choice in chosen if not search_path or key_of(choice) != "hydra.searchpath"]
        with warnings.catch_warnings(), _initialized(line):
            warnings.simplefilter("error", UserWarning)  # of a missing entry in hydra.searchpath
            return hydra.compose(line.options["config_name"] or line.command, [*kept, *search_path], True)
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        raise translated(error) from error
    except RecursionError as error:
        raise InputError("configuration: a file includes itself in its defaults; leave that line out") from error
    except InputError:
        raise
    except Exception as error:  # Hydra lets Python's own exceptions through for wrong settings or defaults
        given = [choice for choice in chosen if choice.startswith("~") or key_of(choice).startswith("hydra")]
        if (name := line.options["config_name"]) is not None:
            given.append(f"-cn {name}")
        why = f"Hydra cannot use it ({with_type(error)})"
        raise InputError(f"{' '.join(given) or 'configuration'}: {why}; change it, or leave it out") from error


def _user_folders(line: CommandLine) -> list[Path]:
    """The user's own folders of configuration files, beside `conf/`."""
    given = line.overrides.get("hydra.searchpath")
    entries = given if isinstance(given, list) else []
    paths = [line.options["config_path"], line.options["config_dir"]]
    paths += [entry for entry in entries if isinstance(entry, str) and "://" not in entry]
    return [Path(path) for path in paths if path is not None]


def _main_folder(line: CommandLine) -> Path:
    """The folder of the primary configuration file, which Hydra looks for in a single place."""
    file = f"{(line.options['config_name'] or line.command).removesuffix('.yaml')}.yaml"
    return next((folder for folder in (FOLDER, *_user_folders(line)) if (folder / file).is_file()), FOLDER)


def _initialized(line: CommandLine) -> AbstractContextManager[None]:
    """A context in which Hydra can compose."""
    return hydra.initialize_config_dir(str(_main_folder(line).absolute()), version_base="1.3")


def _search_path(line: CommandLine, primary: DictConfig | None) -> list[str]:
    """The setting that adds all folders but the main one to Hydra's search path; [] if there are no others. `primary`:
    the user's primary file, which may name more folders."""
    given = line.overrides.get("hydra.searchpath")
    if given is None and primary is not None:
        entries = OmegaConf.select(primary, "hydra.searchpath")
        given = None if entries is None else OmegaConf.to_container(entries)
    others = [str(folder.absolute()) for folder in (FOLDER, *_user_folders(line)) if folder != _main_folder(line)]
    if not others or not isinstance(given, list | None):
        return []
    others += [entry for entry in given or [] if str(Path(entry).absolute()) not in others]
    return [f"hydra.searchpath=[{','.join(map(quoted, others))}]"]


def _check_search_path(primary: DictConfig | None, chosen: Sequence[str]) -> None:
    """Raises InputError for a search path that is no folder, but a package: to look for files in it imports it."""
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
            tree = load_yaml(file)
            primary = primary or tree
            defaults = OmegaConf.select(tree, "defaults")
            for default in defaults if isinstance(defaults, ListConfig) else ():
                pairs = default.items() if isinstance(default, DictConfig) else [("", default)]
                waiting += ["/".join([*str(key).split()[-1:], str(value)]).lstrip("/") for key, value in pairs]
    return primary


def _own_part(command: str, tree: DictConfig) -> DictConfig:
    with open_dict(tree):
        del tree["hydra"]
    drop_others(command, tree)
    return tree


def drop_others(command: str, tree: DictConfig) -> None:
    """Remove from `tree` what a recipe's file has for other commands."""
    with open_dict(tree):
        for key in [key for key, owning_command in OWNERS.items() if owning_command != command]:
            tree.pop(key, None)


def own(kind: type[T], command: str, tree: DictConfig) -> T:
    """The settings of `command` beside those of a training, taken out of `tree`; any that a recipe lacks are as in
    `conf/COMMAND.yaml`. Raises InputError, as `from_tree`."""
    text = resources.files("gpipe_cli.conf").joinpath(f"{command}.yaml").read_text(encoding="utf-8")
    defaults = OmegaConf.create(text.partition("\nhydra:")[0])
    with open_dict(tree):
        given = {key: tree.pop(key, OmegaConf.select(defaults, key)) for key in settings(kind)}
    return from_tree(kind, OmegaConf.create(given))


def training(tree: DictConfig, given: Mapping[str, object]) -> tuple[TrainConfig, tuple[str, ...]]:
    """The training that `tree` describes, and the keys of its `auto` settings, for which `take_auto` has set numbers.

    `given`: the typed settings. Raises InputError, as `from_tree`.
    """
    if (key := replaced_batch(given)) is not None:  # the value replaced is a default or a preset's
        OmegaConf.update(tree, key, None, force_add=True)
    _take_size_of_tokenizer(tree, given)
    auto = take_auto(tree)
    config = _with_preprocessing(tree, given)
    if not auto:
        check_schedule_files(config)
    return config, auto


def with_given(saved: TrainConfig, given: Mapping[str, Any]) -> TrainConfig:
    """The configuration of a run, with the settings in `given` in place of its own.

    A group given as the choice that the run already has keeps the run's settings. Raises InputError, as `from_tree`.
    """
    values = plain_values(OmegaConf.create(asdict(saved)))
    saved_dataset = dict(values["dataset"])
    if (partitions := given.get("partitions", saved.partitions)) != saved.partitions:
        values["partition"]["balance"] = None  # the balance is for another number of partitions
        if saved.placement not in PLACEMENTS:
            values["placement"] = None
        if isinstance(partitions, int) and partitions < (saved.stages_per_process or 0):
            values["stages_per_process"] = None  # the model has fewer stages than that
    if (replaced := replaced_batch(given)) is not None:
        values[replaced] = None
    if given.get("partition.balance") is not None:
        values["partition"]["method"] = "exact"  # the given balance replaces the run's method
    if given.get("partition.method", "exact") != "exact":
        values["partition"]["balance"] = None
    for key, setting in given.items():
        value = resolved(setting)
        if key not in GROUPS or value["name"] != values[key]["name"]:
            set_value(values, key, value)
    # other images are scaled as those that the weights have seen
    unset = [key for key in SCALING if key in saved_dataset and values["dataset"].get(key) is None]
    values["dataset"] |= {key: saved_dataset[key] for key in unset}
    return from_values(TrainConfig, values)


def _take_size_of_tokenizer(tree: DictConfig, given: Mapping[str, object]) -> None:
    """Sets dataset.vocabulary to the size of dataset.tokenizer, if the vocabulary is null or only the tokenizer was
    typed. Raises InvalidSettingError for a tokenizer that cannot be read."""
    place, size = (OmegaConf.select(tree, f"dataset.{key}") for key in ("tokenizer", "vocabulary"))
    typed_alone = "dataset.tokenizer" in given and "dataset.vocabulary" not in given
    if isinstance(place, str) and (size is None or typed_alone):
        import_apart("gpipe_cli.data.pretrained_tokenizer")  # torch comes with it
        from gpipe_cli.data.pretrained_tokenizer import HFTokenizer

        OmegaConf.update(tree, "dataset.vocabulary", HFTokenizer(place).size)


def _with_preprocessing(tree: DictConfig, given: Mapping[str, object]) -> TrainConfig:
    """The training that `tree` describes. What is null of dataset.mean, std and interpolation becomes what its initial
    weights were trained with, or else the default. With pretrained weights dataset.image_size becomes theirs, too,
    unless it was typed or a file of the user's sets another than `conf/dataset`. Raises InputError, as `from_tree`."""
    if OmegaConf.select(tree, "dataset.name") not in IMAGES:
        return from_tree(TrainConfig, tree)
    unset = [key for key in SCALING if OmegaConf.select(tree, f"dataset.{key}") is None]
    with open_dict(tree):
        for key in unset:
            tree.dataset.pop(key, None)
    config = from_tree(TrainConfig, tree)
    if (trained := _trained_with(config)) is None:
        return config
    usual_size = load_yaml(FOLDER / "dataset" / f"{config.dataset.name}.yaml").image_size
    if config.init_from is None and "dataset.image_size" not in given and tree.dataset.image_size == usual_size:
        unset.append("image_size")
    OmegaConf.update(tree, "dataset", {key: getattr(trained, key) for key in unset}, force_add=True)
    return from_tree(TrainConfig, tree)


def _trained_with(config: TrainConfig) -> "ImagesConfig | Preprocessing | None":
    """How the images were scaled on which the initial weights of a training were trained, be they of a run or
    pretrained; None without such weights, or if nobody knows."""
    model = config.model
    if config.init_from is not None:  # a folder without a run is refused later
        folder = Path(config.init_from)
        saved = read_config(folder, instead_of(config)).dataset if (folder / CONFIG).is_file() else None
        return saved if isinstance(saved, ImagesConfig) else None
    if not getattr(model, "pretrained", False) and getattr(model, "weights", None) is None:
        return None
    import_apart("gpipe_cli.assembly.build")  # torch comes with it
    from gpipe_cli.assembly.build import preprocessing_of

    return preprocessing_of(config)


def take_auto(tree: DictConfig) -> tuple[str, ...]:
    """The keys of the `auto` settings. In `tree` each becomes 1, but batch_size a sample per micro-batch."""
    auto = tuple(key for key in (*AUTO, *AUTO_BATCH) if OmegaConf.select(tree, key) == "auto")
    for key in auto:
        OmegaConf.update(tree, key, 1)
    if "batch_size" in auto:
        counts = [OmegaConf.select(tree, key) for key in ("micro_batches", "replicas")]
        if all(isinstance(count, int) and count > 0 for count in counts):  # anything else is refused later, as typed
            OmegaConf.update(tree, "batch_size", math.prod(counts))
    return auto
