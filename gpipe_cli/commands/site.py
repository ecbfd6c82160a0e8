"""`gpipe site FOLDER`: writes a static site that teaches pipelining, with a plan to explore."""

import os
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console

from gpipe_cli.commands.command_line import parse_command_line
from gpipe_cli.commands.command_runner import show_preparation
from gpipe_cli.commands.compose_config import TRAINING_KEYS, compose, training_config
from gpipe_cli.commands.folders import lock_folder
from gpipe_cli.config.groups import model_name
from gpipe_cli.errors import InputError
from gpipe_cli.launch.fork_server import fork_server
from gpipe_cli.reporting.run.lines import show_line, show_text
from gpipe_cli.system.files import read_text
from gpipe_cli.system.interrupts import import_in_thread

HELP = """\
Writes a site that explains pipelining to readers who have installed nothing.

Usage: gpipe site FOLDER [setting=value ...]

Settings
  as of gpipe plan: the explorer shows this plan; without any, the plan of the default training

Files
  index.html         GPipe in five scenes that move as one scrolls or presses a key
  pipeline.html      the page that gpipe plan and gpipe train write, to explore the plan

The files load nothing: they work from a disk, in a mail, or on any host of static files.

Examples
  gpipe site public
  gpipe site public partitions=4 micro_batches=8 hardware=cpu

Exit codes: 0 written, 2 not.
"""
_NO_PRESETS = "the explorer has one plan; give its settings, as to gpipe plan, or remove it"


def main(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["-sc"]:  # tab completion: the argument is a folder, which shells complete by themselves
        return 0
    word, *settings = arguments or [""]
    if not word or word.startswith("-") or "=" in word:
        raise InputError(f"FOLDER: give the folder of the site before anything else{word and f', and not {word}'}; "
                         "for example gpipe site public")  # fmt: skip
    line = replace(parse_command_line("site", settings, "a site has one plan"), command="train")
    line.check_allowed(
        {
            **dict.fromkeys(("run_folder", "output"), "the site is written into FOLDER; remove it"),
            **dict.fromkeys(("resume", "dry_run", "quiet"), "a site runs nothing; remove it"),
            "presets": _NO_PRESETS,
        }
    )
    cfg = compose(line, TRAINING_KEYS)
    if cfg is None:
        return 0
    config, auto = training_config(cfg, line.overrides)
    with lock_folder(Path(word), word, new=False) as folder, show_preparation():
        if config.cost != "datasheet":
            fork_server.start()  # the server imports torch in parallel with this process
        import_in_thread("gpipe_cli.commands.prepare_run")
        from gpipe_cli.commands.prepare_run import check_feasible, prepare
        from gpipe_cli.planner.simulation_data import simulation_data
        from gpipe_cli.reporting.page.page import PAGE, PageContext, write_page
        from gpipe_cli.reporting.site.site import FRONT, write_front

        for file in (folder / FRONT, folder / PAGE):
            _check_replaceable(file)
        if (folder / PAGE).exists() and not (folder / FRONT).exists():
            raise InputError(f"{folder / PAGE}: is the page of a run or a plan; give another folder")
        console = Console()
        check_feasible(config, auto)
        prepared = prepare(config, auto, partial(show_text, console), other_machine=not config.hardware.is_this_machine)
        title = f"{model_name(prepared.config.model)} on {prepared.config.dataset.name}"
        command = shlex.join(["gpipe", "plan", *settings])
        try:
            data = simulation_data(prepared.plan)
            write_page(folder / PAGE, title, data, (), PageContext([command]))
            write_front(folder, title, command)
        except OSError as error:
            raise InputError(f"{word}: cannot be written to ({error.strerror}); give another folder") from error
        show_line(console, f"written      {folder / FRONT} and {folder / PAGE}")
        show_line(console, f"open         {(folder / FRONT).resolve().as_uri()}")
    return 0


def _check_replaceable(file: Path) -> None:
    """Raises InputError for a page that no earlier `gpipe site` has written."""
    if not os.path.lexists(file):
        return
    text = ""
    with suppress(OSError):
        text = "" if file.is_symlink() else read_text(file)
    if "gpipe" not in text or 'id="lanes"' not in text:
        raise InputError(f"{file}: is not a page of gpipe's, and would be replaced; give another folder, or move it")
