"""How long `gpipe` lets its user wait: for its first line, for its first table, and from its last step to the prompt.

The commands run one after another, with a cache of their own: the first training times the machine, the second one
remembers that. CPU seconds are those of all processes of a command; a busy machine adds to the others.

    python recipes/measurements/waiting_times.py [--cells 6,24,96,192,384] [setting=value ...]
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from gpipe_cli.system.machine import cpu_model, usable_cores

REFUSED = (
    ["train", "modle=resnet"],
    ["train", "partitions=2000"],
    ["train", "model=transformer_nmt", "dataset=parallel_text", "dataset.root=gone"],
)
PLAN = "plan model.normal_cells={} partitions=8 hardware=h100"
MOMENTS = {"first line": "", "first table": r"model  |predicted  ", "last epoch": r"\d+/\d+ "}
ROW = "{:<78}{:>12}{:>13}{:>11}{:>8}{:>8}"


def run(arguments: Sequence[str], folder: str) -> int:
    """Run a command in `folder` and print its row; returns its exit code."""
    began = time.monotonic()
    environment = os.environ | {"XDG_CACHE_HOME": f"{folder}/cache"}
    command = [sys.executable, "-m", "gpipe_cli", *arguments]
    seconds = dict[str, float]()
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as program:
        assert program.stdout is not None
        for line in program.stdout:
            for moment, pattern in MOMENTS.items():
                if re.match(pattern, line) and (moment not in seconds or moment == "last epoch"):
                    seconds[moment] = time.monotonic() - began
        _, status, used = os.wait4(program.pid, 0)
        program.returncode = os.waitstatus_to_exitcode(status)
    end = time.monotonic() - began
    if "last epoch" in seconds:
        seconds["last epoch"] = end - seconds["last epoch"]
    cells = [f"{seconds[moment]:.1f}" if moment in seconds else "" for moment in MOMENTS]
    print(ROW.format(" ".join(arguments), *cells, f"{end:.1f}", f"{used.ru_utime + used.ru_stime:.1f}"), flush=True)
    return program.returncode


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="setting=value", help="settings of the trainings")
    parser.add_argument("--cells", default="6,24,96,192,384", help="numbers of normal cells of the planned AmoebaNets")
    options = parser.parse_args(arguments)
    print(f"{usable_cores()} cores of {cpu_model()}, load {os.getloadavg()[0]:.1f}; seconds")
    print(ROW.format("gpipe", "first line", "first table", "to prompt", "all", "CPU"))
    train = ["train", "max_steps=3", *options.settings]
    plans = [PLAN.format(cells).split() for cells in options.cells.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        codes = [run(line, folder) for line in (train, train, *plans)]
        refused = [run(line, folder) for line in REFUSED]
    return 0 if {*codes} == {0} and {*refused} == {2} else 1


if __name__ == "__main__":
    sys.exit(main())
