"""A recipe: one table, figure or result of the paper as a configuration of ours, with the paper's numbers.

The files in recipes/ are complete configurations of `gpipe bench`, `gpipe plan` or `gpipe train`; what several of them
share is in recipes/family/. What they say beside that, under `recipe`, is read here: where the numbers stand, what the
machine must have, what is smaller on two CPU cores (a desk), and which experiment it is. Each kind of experiment has a
file of its own in this room.
"""

import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpipe_cli.config.settings import key_of, load_recipe, owner
from gpipe_cli.config.typed import RefusedError, nearest, show, typed
from gpipe_cli.errors import InputError
from gpipe_cli.reporting.run.measurement import hardware
from gpipe_cli.reporting.run.result import flattened
from gpipe_cli.reporting.tables.recipe import Reproduction
from gpipe_cli.reproduction.breakdown import Breakdown
from gpipe_cli.reproduction.consistency import Consistency
from gpipe_cli.reproduction.largest_model import LargestModel
from gpipe_cli.reproduction.published import PublishedSpeeds
from gpipe_cli.reproduction.runner import FOLDER, Gpu, Perform, Runner, Scale, last_wins, with_users
from gpipe_cli.reproduction.scaling import Scaling
from gpipe_cli.reproduction.schedules import Schedules
from gpipe_cli.reproduction.simulated import Simulate
from gpipe_cli.reproduction.smallest import Experiment, smallest
from gpipe_cli.reproduction.throughput import Throughput
from gpipe_cli.reproduction.training import Classification, FineTuning, Size, Translation
from gpipe_cli.units import plural, size

# Of the paper: its tables, section 4, section 5; beginnings of names.
_ORDER = (
    "table1", "table2", "table3", "figure3", "breakdown", "schedules", "scaling", "published", "imagenet",
    "transfer_cifar", "transfer_stanford_cars", "transfer_oxford_pets", "transfer_food101", "transfer_fgvc_aircraft",
    "transfer_birdsnap",
    "multilingual_400m", "multilingual_1b", "multilingual_3b", "multilingual_6b", "batch_size_260k", "batch_size_1m",
    "batch_size_4m",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Needs:
    """What the paper's scale takes."""

    gpus: int
    memory_gib: float  # of each
    data: str | None = None  # dataset=..., if it does not come with the program
    how: str | None = None  # to get the data, and where to put it

    def __str__(self) -> str:
        machine = f"{plural(self.gpus, 'GPU')} of {self.memory_gib:g} GiB" if self.gpus else "no GPU"
        return f"{machine}, {self.data}" if self.data else machine

    def fitting_scale(self, gpus: Sequence[Gpu]) -> tuple[Scale, str]:
        """The scale that the machine allows, and why."""
        if not self.gpus:
            return "paper", "it needs no GPU"
        wanted = f"the paper's scale needs {plural(self.gpus, 'GPU')} of {self.memory_gib:g} GiB"
        enough = [gpu for gpu in gpus if gpu.memory_bytes >= self.memory_gib * 2**30]
        if len(enough) >= self.gpus:
            return "paper", f"{wanted}: they are here"
        here = f"{plural(len(gpus), 'GPU')} of {size(min(gpu.memory_bytes for gpu in gpus))}" if gpus else "no GPU"
        return "desk", f"{wanted}, and there is {here}"


@dataclass(frozen=True, slots=True)
class Desk:
    """The same experiment on two CPU cores."""

    settings: tuple[str, ...]  # in place of the recipe's: `batch_size=32`
    scaled: str  # what is smaller, and what stands in for the data: a line
    minutes: float  # on 2 CPU cores, as it was

    @property
    def duration(self) -> str:
        return f"{self.minutes:g} min"


@dataclass(frozen=True, slots=True)
class Recipe:
    """A file in recipes/, and its node `recipe`. Exactly one experiment is not None."""

    name: str
    keys: tuple[str, ...]  # of what its file and its family set, in dotted form: `model.variant`
    title: str
    claim: str  # what the paper says, as a sentence of our own
    source: str  # table and version of the paper
    hardware: str  # of the paper
    needs: Needs
    desk: Desk
    smoke: tuple[str, ...]  # settings beside the desk's, at which it runs within seconds
    choices: tuple[str, ...]  # where the paper gives no number: what we took, and why
    size: Size | None = None  # of the full model
    largest_model: LargestModel | None = None
    throughput: Throughput | None = None
    breakdown: Breakdown | None = None
    schedules: Schedules | None = None
    scaling: Scaling | None = None
    published: PublishedSpeeds | None = None
    classification: Classification | None = None
    translation: Translation | None = None
    fine_tuning: FineTuning | None = None
    consistency: Consistency | None = None

    @property
    def experiment(self) -> Experiment:
        trained = self.classification, self.translation, self.fine_tuning, self.consistency
        speeds = self.throughput, self.breakdown, self.schedules, self.scaling, self.published
        kinds = self.largest_model, *speeds, *trained
        (found,) = (kind for kind in kinds if kind is not None)
        return found

    def settings(self, scale: Scale) -> tuple[str, ...]:
        """In place of the recipe's own."""
        match scale:
            case "paper":
                return ()
            case "desk":
                return self.desk.settings
            case "smoke":
                return last_wins((*self.desk.settings, *self.smoke))

    def check(self, given: Sequence[str]) -> None:
        """Raises InputError for settings without effect: `steps=5` is one of `gpipe bench`, which only a recipe that
        sets it runs, and what a recipe says of the paper is none."""
        for setting in given:
            key = key_of(setting)
            if key.partition(".")[0] == "recipe":
                raise InputError(f"{setting}: what a recipe says of the paper cannot be set; leave it out")
            if owner(setting) is not None and key not in self.keys:
                reads = f"does not run what reads it (gpipe {owner(setting)})"
                raise InputError(f"{setting}: {self.name} {reads}; leave it out")

    def reproduce(
        self,
        scale: Scale,
        why: str,
        gpus: Sequence[Gpu],
        given: Sequence[str],
        folder: Path,
        perform: Perform,
        simulate: Simulate,
        progress: Callable[[str], None],
    ) -> Reproduction:
        """Run the recipe's commands into ``folder``; ``given`` are settings of the user, which win.

        Raises InputError as the commands do for bad input, and CommandFailedError.
        """
        begin = time.monotonic()
        desk = self.settings(scale)
        settings = with_users(desk, given)
        runner = Runner(self.name, folder, settings, perform, simulate, progress, scale, last_wins(given), gpus)
        try:
            experiment = smallest(self.experiment) if scale == "smoke" else self.experiment
            found = experiment.reproduce(runner)
            sizes = () if self.size is None else (self.size.table(runner),)
        except RefusedError as error:
            if not runner.commands:  # refused by the recipe itself
                raise
            command = [key_of(one) for one in shlex.split(runner.commands[-1]) if "=" in one]
            line = explained(error, given, desk, (*command, *self.keys))
            if scale == "paper" and self.needs.how is not None and error.key.startswith("dataset"):
                line += f"; {self.needs.how}; scale=desk runs without it"
            raise InputError(line) from error
        notes = [("paper's", self.hardware), ("scale", f"{scale}: {why}")]
        if given:
            line = f"{' '.join(given)}: in every command"
            if runner.changed():
                said = "titles, scaled down, our choice, the paper's size"
                line += f"; what else is said of models and sizes ({said}) holds for the recipe without them"
            notes.append(("given", line))
        if scale == "desk":
            notes.append(("scaled down", self.desk.scaled))
        if scale == "smoke":
            smaller = f" ({' '.join(self.smoke)})" if self.smoke else ""
            notes.append(("scaled down", f"as far as it runs; what is measured says nothing{smaller}"))
        notes += [*(("our choice", choice) for choice in self.choices), *found.notes]
        if self.size is not None:
            smaller = " ".join(self.size.settings)
            notes.append(("counted", f"from the paper's configuration with {smaller}, dry_run=true"))
        if not found.comparable:
            notes.append(("differences", "none where data or sizes are not the paper's"))
        host = hardware((), 1)
        machine = f"{host['cores']} cores of {host['cpu']}"
        if runner.gpus:
            machine = f"{plural(len(gpus), 'GPU')} ({gpus[0].name}), {machine}"
        return Reproduction(
            name=self.name,
            title=self.title,
            claim=self.claim,
            source=self.source,
            needs=str(self.needs),
            scale=scale,
            machine=machine,
            tables=(*found.tables, *sizes),
            notes=tuple(notes),
            commands=tuple(runner.commands),
            files=found.files,
            seconds=time.monotonic() - begin,
        )


def names() -> list[str]:
    """Of all recipes, in the order of the paper."""

    def place(name: str) -> tuple[int, str]:
        return next((at for at, prefix in enumerate(_ORDER) if name.startswith(prefix)), len(_ORDER)), name

    return sorted((file.stem for file in FOLDER.glob("*.yaml")), key=place)


def load(name: str) -> Recipe:
    """The recipe in recipes/<name>.yaml. Raises InputError if there is none."""
    known = names()
    if name not in known:
        none = f"{show(name) or repr(name)}: there is no such recipe"
        raise InputError(f"{none}{nearest(name, known)}; choose one of {', '.join(known)}")
    tree = load_recipe(FOLDER / f"{name}.yaml")
    said = tree.pop("recipe")
    for where, key in ((said["desk"], "settings"), (said, "smoke")):
        where[key] = [f"{setting}={show(value)}" for setting, value in where[key].items()]
    return typed(Recipe, {"name": name, "keys": [*tree, *dict(flattened(tree))], **said})


def explained(error: RefusedError, users: Sequence[str], desk: Sequence[str], own: Sequence[str]) -> str:
    """The refusal of a setting, and whose it is if it is not the user's: ``desk`` are settings of the recipe, ``own``
    keys of its file and of a row of its table."""
    key, at_desk = error.key, error.key in map(key_of, desk)
    if key in map(key_of, users) or not (at_desk or key in own):
        return str(error)
    place = f"a setting of this recipe{' at desk scale' if at_desk else ''}"
    group = next((one for one in users if key_of(one) == key.partition(".")[0]), None)
    if group is None:
        return f"{error} ({place})"
    return f"{str(error).removesuffix('; leave it out')} ({place}, which {group} does not go with)"
