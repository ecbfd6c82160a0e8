"""How a recipe runs: its scale, its commands in forks of this process, and its plans in this process itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import IO, Literal

from rich.console import Console

from gpipe_cli.commands.command_line import parse_command_line
from gpipe_cli.commands.command_runner import fork_command, run_command, wait_for
from gpipe_cli.commands.compose_config import TRAINING_KEYS, ConfigComposer, training_config
from gpipe_cli.config.settings import key_of, only_command_of
from gpipe_cli.errors import BAD_INPUT, InputError, InvalidValueError
from gpipe_cli.launch.fork_server import fork_server
from gpipe_cli.reporting.run.console import show_log_tail
from gpipe_cli.reporting.run.lines import show_line
from gpipe_cli.reporting.tables.recipe import Reproduction
from gpipe_cli.reproduction.recipe import Recipe
from gpipe_cli.reproduction.runner import RECIPES_DIR, CommandFailedError, Runner, add_user_settings, keep_last
from gpipe_cli.reproduction.scale import Scale
from gpipe_cli.reproduction.simulated import Simulate, make_simulator
from gpipe_cli.system.gpus import usable_gpus


@dataclass(frozen=True, slots=True)
class ReproduceSettings:
    """Settings of a recipe as a whole, and not of the commands that it runs."""

    scale: Literal["auto", "smoke", "small", "paper"]
    output: str
    run_folder: str | None


def choose_scale(recipe: Recipe, recipe_settings: ReproduceSettings, given: Sequence[str]) -> tuple[Scale, str]:
    """The scale of a recipe on this machine, and the reason for it."""
    if recipe_settings.scale != "auto":
        return recipe_settings.scale, "as requested"
    if any(key_of(setting) == "device" and setting.endswith("=cpu") for setting in given):
        return "small", "device=cpu uses no GPU"
    return recipe.needs.fitting_scale(usable_gpus())


def reproduce(
    recipe: Recipe, recipe_settings: ReproduceSettings, given: tuple[str, ...], folder: Path, console: Console
) -> Reproduction:
    """Run a recipe; `console` shows its progress. Raises the errors that its commands end with."""
    scale, why = choose_scale(recipe, recipe_settings, given)
    user_settings = keep_last(given)
    runner = Runner(
        recipe.name, folder, add_user_settings(recipe.settings(scale), user_settings),
        partial(run_forked, console), make_recipe_simulator(recipe.name, recipe.folder),
        partial(show_line, console), scale, user_settings, usable_gpus(),
        Path(recipe.folder),
    )  # fmt: skip
    return recipe.reproduce(runner, why)


def run_forked(console: Console, command: Sequence[str], log: IO[str]) -> None:
    """Run a command in a fork that writes to `log`, whose newest line `console` shows in a terminal. Raises the
    command's InputError, or CommandFailedError."""
    if command[0] != "plan":
        fork_server.start()  # shared by all forks
    fork = fork_command(lambda: run_command(command[0], command[1:]), log.fileno())
    result = wait_for(fork, show_log_tail(console, Path(log.name)))  # starts a thread, so after the fork
    if result.exit_code < 0:
        fork_server.kill()  # ends the workers of a command that was killed before it could end them
    if result.error:
        log.write(f"gpipe {command[0]}: {result.error}\n")
    if result.exit_code == BAD_INPUT:
        raise result.input_error or InputError(result.error)
    if result.exit_code != 0:
        raise CommandFailedError(result.error)


def check_known(recipe: Recipe, given: Sequence[str]) -> None:
    """Raises InvalidValueError for unknown settings, whatever data set and model the scale brings."""
    try:
        _composer(recipe.name, recipe.folder).compose(
            [setting for setting in given if only_command_of(setting) is None]
        )
    except InvalidValueError:
        raise
    except InputError:  # another scale may have the setting: its commands will report it
        pass


@cache
def make_recipe_simulator(name: str, folder: str = str(RECIPES_DIR)) -> Simulate:
    """A function that plans the recipe `name` of a folder with given settings; it raises InputError as `gpipe plan`."""
    return make_simulator(lambda settings: training_config(_composer(name, folder).compose(settings), {}))


@cache
def _composer(name: str, folder: str) -> ConfigComposer:
    return ConfigComposer(parse_command_line("train", ["-cd", folder, "-cn", name]), TRAINING_KEYS)
