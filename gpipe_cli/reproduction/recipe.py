"""A recipe: a table, figure or result of the paper as a configuration of gpipe, with the paper's numbers.

The files in recipes/ are complete configurations of `gpipe bench`, `gpipe plan` or `gpipe train`; settings that several
of them share are in recipes/family/. This module reads their node `recipe`: the source of the paper's numbers, the
hardware that its scale needs, what is scaled down for two CPU cores (scale=small), and the experiment: the module whose
function `reproduce` runs commands and returns tables and notes, and the values that it takes.
"""

import runpy
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

from gpipe_cli.config.did_you_mean import suggest_nearest
from gpipe_cli.config.schema import parse_config
from gpipe_cli.config.settings import flatten, key_of, load_recipe, only_command_of
from gpipe_cli.errors import InputError, InvalidSettingError, format_value
from gpipe_cli.reporting.tables.recipe import Reproduction
from gpipe_cli.reproduction import experiments
from gpipe_cli.reproduction.runner import RECIPES_DIR, Findings, Runner, keep_last
from gpipe_cli.reproduction.scale import Needs, Scale, SmallScale
from gpipe_cli.system.machine import cpu_model, usable_cores
from gpipe_cli.units import plural

# Prefixes of recipe names in the order of the paper: its tables, section 4, section 5.
_ORDER = (
    "table1", "table2", "table3", "figure3", "breakdown", "schedules", "scaling", "published", "unet", "imagenet",
    "transfer_cifar", "transfer_stanford_cars", "transfer_oxford_pets", "transfer_food101", "transfer_fgvc_aircraft",
    "transfer_birdsnap",
    "multilingual_400m", "multilingual_1b", "multilingual_3b", "multilingual_6b", "batch_size_260k", "batch_size_1m",
    "batch_size_4m",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Recipe:
    """The node `recipe` of a file in recipes/."""

    name: str
    folder: str  # the folder of its file
    keys: tuple[str, ...]  # dotted keys that its file and its family set: `model.variant`
    title: str
    claim: str  # the paper's claim in our own words
    source: str  # table and version of the paper
    hardware: str  # the hardware that the paper used
    needs: Needs
    small: SmallScale
    smoke: tuple[str, ...]  # settings added to scale=small's, so that the recipe runs within seconds
    choices: tuple[str, ...]  # values that we chose where the paper gives none, and why
    experiment: str  # a module of `experiments`, or a file next to the recipe's
    values: dict[str, Any]  # the arguments of its function `reproduce`, but for the runner

    def settings(self, scale: Scale) -> tuple[str, ...]:
        """The settings of a scale, which replace the recipe's own."""
        match scale:
            case "paper":
                return ()
            case "small":
                return self.small.settings
            case "smoke":
                return keep_last((*self.small.settings, *self.smoke))

    def experiment_function(self, **values: Any) -> Callable[[Runner], Findings]:
        """The function that runs the experiment with the recipe's values, or with ``values`` instead. Raises InputError
        if there is no such module, or if its function does not take these values."""
        modules = sorted(path.stem for path in Path(experiments.__path__[0]).glob("[a-z]*.py"))
        file = Path(self.folder) / f"{self.experiment}.py"
        if not file.is_file() and self.experiment not in modules:
            raise InputError(f"experiment={self.experiment}: there is no {file}; add it, or use {', '.join(modules)}")
        if file.is_file():
            names: Mapping[str, Any] = runpy.run_path(str(file))
        else:
            names = vars(import_module(f"{experiments.__name__}.{self.experiment}"))
        function: Any = names.get("reproduce")
        values = {**self.values, **values}
        try:
            signature(function).bind(None, **values)
        except TypeError as error:
            raise InputError(f"values of {self.name}: {self.experiment}.reproduce: {error}") from error
        return partial(function, **values)

    def check(self, given: Sequence[str]) -> None:
        """Raises InputError for a setting without effect: any key below `recipe`, and a setting of a single command,
        such as `steps` of `gpipe bench`, that the recipe does not set itself."""
        for setting in given:
            key = key_of(setting)
            if key.partition(".")[0] == "recipe":
                raise InputError(f"{setting}: what a recipe states about the paper cannot be set; remove it")
            if only_command_of(setting) is not None and key not in self.keys:
                belongs = f"{self.name} does not take this setting of gpipe {only_command_of(setting)}"
                raise InputError(f"{setting}: {belongs}; remove it")

    def reproduce(self, runner: Runner, why: str) -> Reproduction:
        """Run the recipe's commands by ``runner``; ``why``: the reason for its scale.

        Raises InputError for bad input, as the commands do, and CommandFailedError if a command fails.
        """
        begin = time.monotonic()
        scale, given = runner.scale, runner.user_settings
        try:
            findings = self.experiment_function()(runner)
        except InvalidSettingError as error:
            if not runner.commands:  # the recipe itself has refused the setting
                raise
            command = [key_of(word) for word in shlex.split(runner.commands[-1]) if "=" in word]
            line = explain_error(error, given, self.settings(scale), (*command, *self.keys))
            if scale == "paper" and self.needs.how is not None and error.key.startswith("dataset"):
                line += f"; {self.needs.how}; scale=small runs without it"
            raise InputError(line) from error
        notes = [("paper's", self.hardware), ("scale", f"{scale}: {why}")]
        if given:
            line = f"{' '.join(given)}: in every command"
            if runner.incomparable_settings():
                labels = "titles, scaled down, our choice, the paper's size"
                line += f"; other statements about models and sizes ({labels})"
                line += " describe the recipe without these settings"
            notes.append(("given", line))
        if scale == "small":
            notes.append(("scaled down", self.small.scaled))
        if scale == "smoke":
            smaller = f" ({' '.join(self.smoke)})" if self.smoke else ""
            simulated = "what is simulated is at the paper's size, what is measured means"
            means = simulated if findings.simulates_paper_size else "numbers mean"
            notes.append(("scaled down", f"shows that the code runs; {means} nothing{smaller}"))
        notes += [*(("our choice", choice) for choice in self.choices), *findings.notes]
        columns = [column for table in findings.tables for column in table.columns]
        if not findings.comparable and any(column.origin == "difference" for column in columns):
            notes.append(("differences", "none where data or sizes are not the paper's"))
        machine = f"{usable_cores()} cores of {cpu_model()}"
        if runner.gpus:
            machine = f"{plural(len(runner.gpus), 'GPU')} ({runner.gpus[0].name}), {machine}"
        return Reproduction(
            name=self.name,
            title=self.title,
            claim=self.claim,
            source=self.source,
            needs=str(self.needs),
            scale=scale,
            machine=machine,
            tables=tuple(findings.tables),
            notes=tuple(notes),
            commands=tuple(runner.commands),
            files=tuple(findings.files),
            seconds=time.monotonic() - begin,
        )


def recipe_names() -> list[str]:
    """The names of all recipes, in the order of the paper."""

    def place(name: str) -> tuple[int, str]:
        return next((at for at, prefix in enumerate(_ORDER) if name.startswith(prefix)), len(_ORDER)), name

    return sorted((file.stem for file in RECIPES_DIR.glob("*.yaml")), key=place)


def read_recipe(name: str, folder: Path = RECIPES_DIR) -> Recipe:
    """The recipe in the file <name>.yaml of a folder. Raises InputError if there is none."""
    recipes = recipe_names()
    if folder == RECIPES_DIR and name not in recipes:
        none = f"{format_value(name) or repr(name)}: no such recipe"
        raise InputError(f"{none}{suggest_nearest(name, recipes)}; choose one of {', '.join(recipes)}")
    tree = load_recipe(folder / f"{name}.yaml")
    node = tree.pop("recipe")
    for parent, key in ((node["small"], "settings"), (node, "smoke")):
        parent[key] = [f"{setting}={format_value(value)}" for setting, value in parent[key].items()]
    return parse_config(Recipe, {"name": name, "folder": str(folder), "keys": [*tree, *dict(flatten(tree))], **node})


def explain_error(
    error: InvalidSettingError, user_settings: Sequence[str], scale_settings: Sequence[str], keys: Sequence[str]
) -> str:
    """The message of a refused setting, with the setting's origin if the user did not give it.
    ``scale_settings``: the recipe's settings at this scale; ``keys``: its file's and the last command's."""
    key = error.key
    of_scale = key in map(key_of, scale_settings)
    if key in map(key_of, user_settings) or not (of_scale or key in keys):
        return str(error)
    place = f"a setting of this recipe{' at this scale' if of_scale else ''}"
    group = next((setting for setting in user_settings if key_of(setting) == key.partition(".")[0]), None)
    if group is None:
        return f"{error} ({place})"
    return f"{str(error).removesuffix('; remove it')} ({place}, which does not go with {group})"
