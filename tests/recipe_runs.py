"""Recipes for the tests of `gpipe_cli.reproduction`: their commands run in this process, as a user types them."""

import contextlib
import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf, open_dict

from gpipe_cli.commands import take_auto
from gpipe_cli.commands.child import error_line
from gpipe_cli.config.owners import OWNERS
from gpipe_cli.reporting.tables.recipe import Table
from gpipe_cli.reproduction.recipe import FOLDER
from gpipe_cli.reproduction.runner import Runner, last_wins

# All stages in one process; and the images of any recipe, tiny.
HERE = ("executor=in_process", "device=cpu", "threads=1", "data_workers=0")
TINY = ("model.normal_cells=3", "model.filters=4", "dataset.image_size=16", "batch_size=16", *HERE)


def perform(command: Sequence[str], log: IO[str]) -> tuple[int, str, bool]:
    """As `run_process`, without a process: importing torch again takes longer than what the tests train."""
    from gpipe_cli.cli import main

    arguments, hydra, errors = sys.argv, os.environ.get("HYDRA_FULL_ERROR"), io.StringIO()
    try:
        with contextlib.redirect_stdout(log), contextlib.redirect_stderr(errors):
            code = main(list(command[3:]))  # without python -m gpipe_cli
    finally:
        sys.argv = arguments
        os.environ.pop("HYDRA_FULL_ERROR", None)
        if hydra is not None:
            os.environ["HYDRA_FULL_ERROR"] = hydra
    return code, error_line(errors.getvalue()), False


def real_runner(name: str, folder: Path, *settings: str, desk: bool = True) -> Runner:
    """Of the recipe ``name``, with these settings for every command."""
    folder.mkdir(parents=True, exist_ok=True)
    return Runner(name, FOLDER, folder, settings, perform, lambda line: None, desk)


def merged(*settings: str) -> tuple[str, ...]:
    """As the program merges a desk's settings with the user's."""
    return last_wins(settings)


def compose_recipe(name: str, *settings: str) -> tuple[DictConfig, list[str]]:
    """The recipe's configuration as `gpipe train` gets it, and what the user must give, to which a value was given."""
    with initialize_config_dir(str(FOLDER), version_base="1.3"):
        tree = compose(name, [*settings, "hydra.searchpath=[pkg://gpipe_cli.conf]"])
    with open_dict(tree):
        for key in OWNERS:
            tree.pop(key, None)
    missing = sorted(OmegaConf.missing_keys(tree))
    for key in missing:
        OmegaConf.update(tree, key, "given")
    take_auto(tree)
    return tree, missing


def column(table: Table, heading: str, origin: str = "") -> list[str]:
    """The cells of the column with this heading and origin."""
    headings = [(column.heading, column.origin) for column in table.columns]
    return [row[headings.index((heading, origin))] for row in table.rows]
