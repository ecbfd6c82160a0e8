"""`gpipe site FOLDER`: writes a static site that teaches pipelining, with presets to explore."""

import os
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from rich.console import Console

from gpipe_cli.commands.folders import locked_folder
from gpipe_cli.commands.words import words_and_settings
from gpipe_cli.config.typed import RefusedError, nearest
from gpipe_cli.errors import InputError
from gpipe_cli.reporting.run.lines import show_line
from gpipe_cli.reproduction.presets import Preset, presets
from gpipe_cli.system.interrupts import interruptible_import
from gpipe_cli.units import plural

HELP = """\
Writes a site that explains pipelining to readers who have installed nothing.

Usage: gpipe site FOLDER [presets=PATTERN,...]

Settings
  presets            which models the explorer offers, by name or pattern: digits, 'table2*' (all of them); all take a
                     minute or two, as each is planned

Files
  index.html         GPipe in five scenes that move as one scrolls or presses a key
  explorer.html      the page that gpipe plan and gpipe train write, for all presets, each with a challenge
  timeline.svg       the picture at the top of the README

The files load nothing, not even from each other: they work from a disk, in a mail, or on any host of static files.

Examples
  gpipe site public
  gpipe site public presets=digits,gpt-7b

Exit codes: 0 written, 2 not.
"""


def main(arguments: Sequence[str]) -> int:
    if arguments[:1] == ["-sc"]:  # tab completion: the argument is a folder, which shells complete by themselves
        return 0
    if any(argument in ("-h", "--help") for argument in arguments):
        sys.stdout.write(HELP)
        return 0
    folders, given = words_and_settings(arguments, "presets")
    if len(folders) != 1:
        raise InputError(f"FOLDER: give one folder for the site, and not {len(folders)}; for example gpipe site public")
    if (word := folders[0]).startswith("-") or ("=" in word and not os.path.exists(word)):
        raise InputError(f"{word}: there is no such option; write gpipe site FOLDER or presets=digits")
    wanted = _wanted(given.get("presets", "*"))
    folder = Path(word)
    with locked_folder(folder, word, new=False) as folder:
        console = Console()
        with interruptible_import():
            from gpipe_cli.commands.site_plans import planned
            from gpipe_cli.reporting.site.site import EXPLORER, FRONT, write_site
        found = []
        for number, preset in enumerate(wanted, 1):
            show_line(console, f"planning     {number} of {len(wanted)}: {preset.title}")
            found.append(planned(preset))
        try:
            write_site(folder, found)
        except OSError as error:
            raise InputError(f"{word}: cannot be written to ({error.strerror}); give another folder") from error
        show_line(console, f"written      {folder / FRONT} and {folder / EXPLORER}: {plural(len(found), 'preset')}")
        show_line(console, f"open         {(folder / FRONT).resolve().as_uri()}")
    return 0


def _wanted(patterns: str) -> list[Preset]:
    """The presets whose names match one of the patterns. Raises RefusedError for a pattern that matches none."""
    known = list(presets())
    names = [one.name for one in known]
    for pattern in patterns.split(","):
        if not any(fnmatchcase(name, pattern) for name in names):
            hint = nearest(pattern, names) or f"; choose among {', '.join(names)}"
            raise RefusedError("presets", pattern, f"there is no such preset{hint}")
    return [one for one in known if any(fnmatchcase(one.name, pattern) for pattern in patterns.split(","))]
