"""Counts the calls of CUDA that a process and its children make, on a machine that seems to have a GPU.

A library that is loaded before CUDA's runtime replaces all of its functions; it writes each call into a file, and says
that there is one GPU, or none if the first call comes while CUDA_VISIBLE_DEVICES is empty, as the driver would.

As a program, with CUDA_CALLS and LD_PRELOAD as `counted` sets them, this file is what is counted.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from shutil import which
from typing import Any

from training_runs import TINY, configure, spec_of

from gpipe_cli import cli
from gpipe_cli.benchmark import machine_timing
from gpipe_cli.commands import check_run, reproduce, training_run
from gpipe_cli.launch.fork_server import _IMPORTED, _libraries, fork_server
from gpipe_cli.launch.job import Failure, Reason
from gpipe_cli.launch.supervisor import run_task
from gpipe_cli.planner import data_sheet
from gpipe_cli.system.gpus import Gpu

_SOURCE = """
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static int called(const char *name, int *found, int value) {
    static int hidden = -1;
    if (hidden < 0) {
        const char *visible = getenv("CUDA_VISIBLE_DEVICES");
        hidden = visible && !*visible;
    }
    int file = open(getenv("CUDA_CALLS"), O_WRONLY | O_CREAT | O_APPEND, 0600);
    dprintf(file, "%d %s%s\\n", getpid(), hidden ? "hidden " : "", name);
    close(file);
    if (hidden) return 100;  // cudaErrorNoDevice
    if (found) *found = value;
    return 0;
}
int cudaGetDeviceCount(int *found) { return called("cudaGetDeviceCount", found, 1); }
int cudaGetDevice(int *found) { return called("cudaGetDevice", found, 0); }
const char *cudaGetErrorString(int error) { called("cudaGetErrorString", 0, 0); return "an error"; }
const char *cudaGetErrorName(int error) { called("cudaGetErrorName", 0, 0); return "an error"; }
#define REPLACED(name) int name(void) { return called(#name, 0, 0); }
"""
_OWN = ("cudaGetDeviceCount", "cudaGetDevice", "cudaGetErrorString", "cudaGetErrorName")
COMPILER = which("cc")


def runtime_library() -> Path | None:
    """The library of CUDA's runtime that torch has loaded here; None for a torch without CUDA."""
    found = re.search(r"\S*/libcudart\.so\S*", Path("/proc/self/maps").read_text())
    return Path(found[0]) if found else None


def counting_library(folder: Path) -> Path:
    """Compile the library that counts."""
    assert COMPILER is not None
    listed = subprocess.run(["nm", "-D", "--defined-only", str(runtime_library())], capture_output=True, check=True)
    names = set(re.findall(r" T (cuda[A-Z]\w*)", listed.stdout.decode())).difference(_OWN)
    source, library = folder / "counting.c", folder / "counting.so"
    source.write_text(_SOURCE + "".join(f"REPLACED({name})\n" for name in sorted(names)))
    subprocess.run([COMPILER, "-shared", "-fPIC", "-w", "-o", str(library), str(source)], check=True)
    return library


def counted(library: Path, folder: Path, *arguments: str) -> tuple[set[str], set[str]]:
    """The functions of CUDA that this file as a program calls in `folder`, and those that processes started by it call;
    `hidden ` is before those whose caller was told that there is no GPU."""
    calls = folder / "cuda_calls"
    calls.write_text("")
    environment = os.environ | {"LD_PRELOAD": str(library), "CUDA_CALLS": str(calls)}
    environment.pop("CUDA_VISIBLE_DEVICES", None)
    with subprocess.Popen(
        [sys.executable, "-c", "from cuda_calls import main; main()", *arguments],
        env=environment | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])},
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as program:  # fmt: skip
        output, _ = program.communicate()
    assert program.returncode == 0, output
    made = [line.split(" ", 1) for line in calls.read_text().splitlines()]
    own = {call for number, call in made if int(number) == program.pid}
    return own, {call for number, call in made if int(number) != program.pid}


def forge_gpus() -> None:
    """Two GPUs, as NVML would show them."""
    here = (Gpu("NVIDIA H100 80GB HBM3", 85_520_809_984),) * 2
    for module in (data_sheet, reproduce):
        module.usable_gpus = lambda: here  # type: ignore[attr-defined]
    machine_timing.driver_version = lambda: "600.1"  # type: ignore[attr-defined]
    machine_timing.busy_share = lambda number: 0.0  # type: ignore[attr-defined]


def do_nothing(process: Any) -> None:
    """What a worker does here."""


def run_parents(commands: Sequence[str]) -> None:
    """Run the part of each command that comes before its workers, all of which fail at once."""
    asked = Path("asked")

    def fail(*given: object, **settings: object) -> Failure:
        with asked.open("a") as file:  # the commands of a recipe are forks
            file.write("for workers\n")
        return Failure(0, "no worker is started here", time.time(), Reason.OTHER)

    for module in (machine_timing, check_run, training_run):
        module.run_task = fail  # type: ignore[attr-defined]
    for command in commands:
        asked.write_text("")
        code = cli.main(command.split())
        assert asked.read_text() or code == 0, f"{command} has not come as far as its workers"


def main() -> None:
    """Arguments: the modules that the fork server imports, separated by commas (none: those of runs); then commands.

    The parts of the commands that come before their workers run here; then the server forks a worker that does nothing.
    """
    imported, *commands = sys.argv[1:]
    runs = configure("model=timm", "model.name=test_resnet"), configure("dataset=synthetic_images")
    libraries = [*_IMPORTED, *(name for run in runs for name in _libraries(run))]
    forge_gpus()
    fork_server._imported = imported.split(",") if imported else libraries
    fork_server.start()
    run_parents(commands)
    spec = spec_of(configure(*TINY, "device=cuda", "partitions=1"))
    assert set(spec.layout.devices) == {"cuda:0"}
    assert run_task(do_nothing, spec, 60.0, print) is None
