"""`gpipe demo`: what a pipeline and its micro-batches do to the speed, measured on this machine in half a minute."""

import os
import sys
import webbrowser
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from rich.console import Console

from gpipe_cli.commands.folders import locked_folder
from gpipe_cli.commands.outcome import import_torch
from gpipe_cli.commands.recipe_run import perform
from gpipe_cli.commands.words import words_and_settings
from gpipe_cli.config.typed import RefusedError, quoted
from gpipe_cli.distributed.torchrun import refuse_torchrun
from gpipe_cli.errors import FAILED, InputError
from gpipe_cli.launch.fork_server import fork_server
from gpipe_cli.pipeline.schedule.simulator import ideal_bubble
from gpipe_cli.reporting.page.page import PAGE
from gpipe_cli.reporting.run.lines import LOG, show_facts, show_line, show_text
from gpipe_cli.reporting.tables.demo import show_demo
from gpipe_cli.reproduction.runner import CommandFailedError
from gpipe_cli.results.run import read_run_result, run_result_or_none

HELP = """\
Measures in half a minute what a pipeline does: one process, two, and two with micro-batches.

Usage: gpipe demo [open=false] [output=FOLDER]

Trains the default model, a small AmoebaNet-D, for six steps each with K = 1, M = 1; with K = 2, M = 1; and with
K = 2, M = 4, and compares their speeds. Every process computes with one thread on a CPU core. Nothing is recomputed:
recomputation saves memory, and costs time. The answer may be that there is no gain; then it says what is in the way.

Settings
  open               true: opens the page of the last measurement in a browser, if there is a display |
                     false: only says where it is (true)
  output             folder in which the command makes a folder for the three measurements (outputs)

gpipe bench measures your own settings.
"""
# Micro-batches have 24 samples: in pieces of 8, a mini-batch takes a core half as much time again, which would hide
# what the pipeline gains. The figures of a data sheet suffice for the cut; to time the machine takes seconds.
MEASURED = (
    "batch_size=96", "recompute=never", "threads=1", "device=cpu", "hardware=cpu", "logger=[]", "steps=5",
    "warm_up_steps=1",
)  # fmt: skip
K, M = 2, 4  # of the last measurement
# Label, settings, and what is measured and expected.
CELLS = (
    ("K = 1, M = 1", ("partitions=1", "micro_batches=1"),
     "one process has the whole model; the others are compared with it"),
    (f"K = {K}, M = 1", (f"partitions={K}", "micro_batches=1"),
     "two processes with half of it each: no faster, as they take turns"),
    (f"K = {K}, M = {M}", (f"partitions={K}", f"micro_batches={M}"),
     f"micro-batches, so that both work at once: up to {K * (1 - ideal_bubble(K, M)):.1f} times as fast"),
)  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    if any(argument in ("-h", "--help") for argument in arguments):
        sys.stdout.write(HELP)
        return 0
    words, settings = words_and_settings(arguments, "open", "output")
    for word in words:
        raise InputError(f"{word}: gpipe demo takes only open=false and output=FOLDER; gpipe bench takes all settings")
    opens = settings.get("open", "true")
    if opens not in ("true", "false"):
        raise RefusedError("open", opens, "must be true or false; for example open=false")
    refuse_torchrun("the demo starts its own processes; call gpipe demo")
    console, output = Console(), settings.get("output", "outputs")
    show_text(console, "Three measurements of a small AmoebaNet-D, which take about half a minute:")
    fork_server.start()  # imports what the workers need, in parallel with this process
    import_torch()
    new = Path(output, f"{datetime.now():%Y-%m-%d_%H-%M-%S}_demo")
    with locked_folder(new, f"output={output}", new=True) as folder:
        runs = [folder / "_".join(own) for _, own, _ in CELLS]
        with (folder / LOG).open("a", encoding="utf-8") as log:
            for (label, own, what), run in zip(CELLS, runs, strict=True):
                show_facts(console, [(label, what)])
                try:
                    perform(console, ["bench", *MEASURED, *own, f"run_folder={quoted(run)}"], log)
                except CommandFailedError as error:
                    result = run_result_or_none(run)  # it says more, if the run has begun
                    why = (result and result.error) or error
                    show_line(console, f"failed: {why}; its output is in {log.name}", "bold red")
                    return FAILED
        show_demo(console, [read_run_result(run) for run in runs])
    page = runs[-1] / PAGE
    opened = opens == "true" and _has_browser() and webbrowser.open(page.resolve().as_uri())
    console.print()
    where = [("page", str(page)), *([("", "opened in the browser")] if opened else [])]
    show_facts(console, [*where, ("next", "gpipe train"), ("", "gpipe help")])
    return 0


def _has_browser() -> bool:
    """Whether a browser can be shown: over ssh, a text browser would take the terminal."""
    return sys.platform != "linux" or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")))
