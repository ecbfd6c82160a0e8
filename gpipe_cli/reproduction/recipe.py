"""A recipe: one table, figure or result of the paper as a configuration of ours, with the paper's numbers.

The files in recipes/ are complete configurations of `gpipe bench`, `gpipe plan` or `gpipe train`; what several of them
share is in recipes/family/. What they say beside that, under `recipe`, is read here: where the numbers stand, what the
machine must have, what is smaller on two CPU cores (a desk), and which experiment it is. Each kind of experiment has a
file of its own in this room.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import yaml

from gpipe_cli.config.setting_owners import key_of, owner
from gpipe_cli.config.settings import load_recipe
from gpipe_cli.config.typed import nearest, one_line, show, typed
from gpipe_cli.reporting.run.result import flattened
from gpipe_cli.reproduction.breakdown import Breakdown
from gpipe_cli.reproduction.consistency import Consistency
from gpipe_cli.reproduction.largest_model import LargestModel
from gpipe_cli.reproduction.runner import FOLDER
from gpipe_cli.reproduction.throughput import Throughput
from gpipe_cli.reproduction.training import Classification, FineTuning, Size, Translation

# Of the paper: its tables, section 4, section 5; beginnings of names.
_ORDER = (
    "table1", "table2", "table3", "figure3", "breakdown", "imagenet", "transfer_cifar", "transfer_stanford_cars",
    "transfer_oxford_pets", "transfer_food101", "transfer_fgvc_aircraft", "transfer_birdsnap", "multilingual_400m",
    "multilingual_1b", "multilingual_3b", "multilingual_6b", "batch_size_260k", "batch_size_1m", "batch_size_4m",
)  # fmt: skip
Experiment = LargestModel | Throughput | Breakdown | Classification | Translation | FineTuning | Consistency


@dataclass(frozen=True, slots=True)
class Needs:
    """What the paper's scale takes."""

    gpus: int
    memory_gib: float  # of each
    data: str | None = None  # dataset=..., if it does not come with the program
    how: str | None = None  # to get the data, and where to put it


@dataclass(frozen=True, slots=True)
class Desk:
    """The same experiment on two CPU cores."""

    settings: tuple[str, ...]  # in place of the recipe's: `batch_size=32`
    scaled: str  # what is smaller, and what stands in for the data: a line
    duration: str  # on 2 CPU cores, as it was


@dataclass(frozen=True, slots=True)
class Recipe:
    """The node `recipe` of a file in recipes/. Exactly one experiment is not None."""

    title: str
    source: str  # table and version of the paper
    hardware: str  # of the paper
    needs: Needs
    desk: Desk
    choices: tuple[str, ...]  # where the paper gives no number: what we took, and why
    size: Size | None = None  # of the full model
    largest_model: LargestModel | None = None
    throughput: Throughput | None = None
    breakdown: Breakdown | None = None
    classification: Classification | None = None
    translation: Translation | None = None
    fine_tuning: FineTuning | None = None
    consistency: Consistency | None = None

    def __post_init__(self) -> None:
        if len(self._experiments) != 1:
            names = ", ".join(field.name for field in fields(self)[-7:])
            raise ValueError(f"recipe: has {len(self._experiments)} experiments; give one of {names}")

    @property
    def experiment(self) -> Experiment:
        return self._experiments[0]

    @property
    def _experiments(self) -> list[Experiment]:
        trained = self.classification, self.translation, self.fine_tuning, self.consistency
        kinds = self.largest_model, self.throughput, self.breakdown, *trained
        return [kind for kind in kinds if kind is not None]


def names() -> list[str]:
    """Of all recipes, in the order of the paper."""

    def place(name: str) -> tuple[int, str]:
        return next((at for at, prefix in enumerate(_ORDER) if name.startswith(prefix)), len(_ORDER)), name

    return sorted((file.stem for file in FOLDER.glob("*.yaml")), key=place)


def load(name: str) -> Recipe:
    """The recipe in recipes/<name>.yaml.

    Raises:
        ValueError: there is none, or it is not one.
    """
    try:
        tree = _read(name)["recipe"]
        desk = tree["desk"]
        desk["settings"] = [f"{key}={show(value)}" for key, value in desk["settings"].items()]
        return typed(Recipe, tree)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{FOLDER / name}.yaml: cannot be read as a recipe: {one_line(error)}") from error


def settings_of(name: str) -> tuple[str, ...]:
    """Keys of what recipes/<name>.yaml and its family set, in dotted form: `model.variant`."""
    tree = _read(name)
    return *tree, *dict(flattened(tree))


def check_settings(name: str, given: Sequence[str]) -> None:
    """Raises ValueError for settings without effect: `steps=5` is one of `gpipe bench`, which only a recipe that sets
    it runs, and what a recipe says of the paper is none. And for a recipe that does not exist."""
    keys = _read(name)
    for setting in given:
        key = key_of(setting)
        if key.partition(".")[0] == "recipe":
            raise ValueError(f"{setting}: what a recipe says of the paper cannot be set; leave it out")
        if owner(setting) is not None and key not in keys:
            raise ValueError(f"{setting}: {name} does not run what reads it (gpipe {owner(setting)}); leave it out")


def _read(name: str) -> dict[str, Any]:
    known = names()
    if name not in known:
        raise ValueError(f"{name}: there is no such recipe{nearest(name, known)}; choose one of {', '.join(known)}")
    file = FOLDER / f"{name}.yaml"
    try:
        return load_recipe(file)
    except (OSError, yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{file}: cannot be read as a recipe: {one_line(error)}") from error
