"""Tab completion beyond Hydra's own: commands, recipes, runs, help topics, and the values of a setting.

Hydra's script for a shell calls `gpipe -sc query=SHELL`, without a command, and passes the typed line in COMP_LINE.
"""

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from gpipe_cli.config.pipeline_settings import SCHEDULES
from gpipe_cli.config.schema import allowed_words
from gpipe_cli.config.settings import (
    AUTO,
    CONFIG_FILE,
    EvaluateSettings,
    ExportSettings,
    PlanSettings,
    TrainConfig,
    run_folders_in,
)
from gpipe_cli.reporting.tables.table import FORMATS

_COMMAND_SETTINGS = {"evaluate": EvaluateSettings, "export": ExportSettings, "plan": PlanSettings}
_RUNS = ("run", "resume", "init_from")


def complete(shell: Sequence[str], commands: Sequence[str]) -> list[str] | None:
    """Print the completions and return None, or return the arguments with which to call Hydra's completion.

    `shell`: the arguments of Hydra's script, `query=bash`, or `install=bash` without COMP_LINE.
    """
    words = os.environ.get("COMP_LINE", "gpipe train ").split(" ")
    separator = "\n" if "query=fish" in shell else " "

    def offer(offered: Iterable[str]) -> None:
        sys.stdout.write(separator.join(word for word in offered if word.startswith(words[-1])) + "\n")

    if len(words) < 3:
        sys.stdout.write(separator.join(commands) + "\n")
        return None
    command = words.pop(1)
    if command in ("compare", "list", "plan") and words[-1].startswith("format"):
        offer(f"format={form}" for form in FORMATS)
        return None
    if command not in commands or command == "compare":  # folders, which shells complete by themselves
        return None
    last = words[-1]
    key = last.partition("=")[0].lstrip("+")
    if command in ("list", "help", "reproduce") or words[-2] in ("-cn", "--config-name"):
        offer(_names(command, first=len(words) == 2 or words[1] == "-k"))
    elif "=" in last and (allowed := _values(command, key, last.partition("=")[2])):
        offer(f"{last.partition('=')[0]}={value}" for value in allowed)
    else:
        os.environ["COMP_LINE"] = " ".join(words)
        return [command, "-sc", *shell]
    return None


def _names(command: str, *, first: bool) -> Sequence[str]:
    """The words that may follow `command` (`first`: directly) instead of settings; for -cn the recipes."""
    if command == "list":
        from gpipe_cli.commands.list import TOPICS

        return list(TOPICS) if first else []
    if command == "help":
        from gpipe_cli.commands.help import topics

        return ["-k", *sorted({name.replace(" ", "_") for name in topics()})] if first else []
    from gpipe_cli.commands.recipe_run import ReproduceSettings
    from gpipe_cli.commands.reproduce import ALL
    from gpipe_cli.reproduction.recipe import recipe_names

    if command == "reproduce" and not first:
        return [*recipe_names(), *(f"scale={scale}" for scale in allowed_words(ReproduceSettings, "scale"))]
    return [*recipe_names(), ALL] if command == "reproduce" else recipe_names()


def _values(command: str, key: str, begun: str) -> list[str]:
    """The values of a setting that takes a word or a run; [] leaves the completion to Hydra, as for ./a and /a."""
    if key in _RUNS:
        if begun.startswith((".", "/")):
            return []
        parent = Path(begun.rpartition("/")[0] or "outputs")
        runs = sorted(run_folders_in(parent), key=lambda run: (run / CONFIG_FILE).stat().st_mtime, reverse=True)
        return [str(run) for run in runs] + (["auto"] if key == "resume" else [])
    if key == "schedule":
        return list(SCHEDULES)
    command_choices = allowed_words(_COMMAND_SETTINGS[command], key) if command in _COMMAND_SETTINGS else []
    return command_choices or allowed_words(TrainConfig, key) or (["auto"] if key in AUTO else [])
