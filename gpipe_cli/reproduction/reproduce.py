"""From a recipe to its tables: `gpipe reproduce` below the command line."""

import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from gpipe_cli.config.setting_owners import key_of
from gpipe_cli.config.typed import RefusedError
from gpipe_cli.reporting.run.measurement import hardware
from gpipe_cli.reporting.tables.recipe import Reproduction
from gpipe_cli.reproduction.numbers import changing
from gpipe_cli.reproduction.recipe import Needs, Recipe, settings_of
from gpipe_cli.reproduction.runner import Gpu, Perform, Runner, last_wins, with_users
from gpipe_cli.units import plural, size

Scale = Literal["desk", "paper"]


def fitting_scale(needs: Needs, gpus: Sequence[Gpu]) -> tuple[Scale, str]:
    """The scale that the machine allows, and why."""
    wanted = f"the paper's scale needs {plural(needs.gpus, 'GPU')} of {needs.memory_gib:g} GiB"
    enough = [gpu for gpu in gpus if gpu.memory_bytes >= needs.memory_gib * 2**30]
    if len(enough) >= needs.gpus:
        return "paper", f"{wanted}: they are here"
    here = f"{plural(len(gpus), 'GPU')} of {size(min(gpu.memory_bytes for gpu in gpus))}" if gpus else "no GPU"
    return "desk", f"{wanted}, and there is {here}"


def reproduce(
    name: str,
    recipe: Recipe,
    scale: Scale,
    why: str,
    gpus: Sequence[Gpu],
    given: Sequence[str],
    folder: Path,
    perform: Perform,
    progress: Callable[[str], None],
) -> Reproduction:
    """Run the recipe's commands into ``folder``; ``given`` are settings of the user, which win.

    Raises ValueError as the commands do for bad input, and CommandFailedError.
    """
    begin = time.monotonic()
    desk = recipe.desk.settings if scale == "desk" else ()
    settings = with_users(desk, given)
    runner = Runner(name, folder, settings, perform, progress, scale == "desk", last_wins(given), gpus)
    try:
        found = recipe.experiment.reproduce(runner)
        sizes = () if recipe.size is None else (recipe.size.table(runner),)
    except RefusedError as error:
        if not runner.commands:  # refused by the recipe itself
            raise
        command = [key_of(one) for one in shlex.split(runner.commands[-1]) if "=" in one]
        line = explained(error, given, desk, (*command, *settings_of(name)))
        if scale == "paper" and recipe.needs.how is not None and error.key.startswith("dataset"):
            line += f"; {recipe.needs.how}; scale=desk runs without it"
        raise ValueError(line) from error
    notes = [("paper's", recipe.hardware), ("scale", f"{scale}: {why}")]
    if given:
        line = f"{' '.join(given)}: in every command"
        if changing(given):
            said = "titles, scaled down, our choice, the paper's size"
            line += f"; what else is said of models and sizes ({said}) holds for the recipe without them"
        notes.append(("given", line))
    if scale == "desk":
        notes.append(("scaled down", recipe.desk.scaled))
    notes += [*(("our choice", choice) for choice in recipe.choices), *found.notes]
    if recipe.size is not None:
        smaller = " ".join(recipe.size.settings)
        notes.append(("counted", f"from the paper's configuration with {smaller}, dry_run=true"))
    if not found.comparable:
        notes.append(("differences", "none where data or sizes are not the paper's"))
    host = hardware((), 1)
    machine = f"{host['cores']} cores of {host['cpu']}"
    if runner.gpus:
        machine = f"{plural(len(gpus), 'GPU')} ({gpus[0].name}), {machine}"
    return Reproduction(
        name=name,
        title=recipe.title,
        source=recipe.source,
        scale=scale,
        machine=machine,
        tables=(*found.tables, *sizes),
        notes=tuple(notes),
        commands=tuple(runner.commands),
        files=found.files,
        seconds=time.monotonic() - begin,
    )


def explained(error: RefusedError, users: Sequence[str], desk: Sequence[str], own: Sequence[str]) -> str:
    """The refusal of a setting, and whose setting it is if the user has not given it.

    Args:
        users: settings of the user.
        desk: those of the recipe at desk scale, if that is its scale.
        own: keys of all others that the command had: of the recipe's file, and of a row of its table.
    """
    key, at_desk = error.key, error.key in map(key_of, desk)
    if key in map(key_of, users) or not (at_desk or key in own):
        return str(error)
    place = f"a setting of this recipe{' at desk scale' if at_desk else ''}"
    group = next((one for one in users if key_of(one) == key.partition(".")[0]), None)
    if group is None:
        return f"{error} ({place})"
    return f"{str(error).removesuffix('; leave it out')} ({place}, which {group} does not go with)"
