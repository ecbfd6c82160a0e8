"""Runs that lose random processes end with the bits of an undisturbed run.

A training begins at K = 2. At a random moment, or while a checkpoint is being written, one of its processes (parent,
stage, data loader or fork server) is killed by SIGKILL, and must leave no process and no temporary file behind.
The same command with resume=auto and another K continues, and may be killed once more. When the run is complete, its
weights, averaged weights, optimizer state, results and curves are those of an undisturbed run, bit for bit. The seed
determines which process is killed, when, and the values of K, not what the process is doing at that moment.

    python recipes/measurements/random_kills.py [--runs 30] [--seed 0] [setting=value ...]

Linux; 25 minutes on 2 cores.
"""

import argparse
import io
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from logging import ERROR, getLogger
from pathlib import Path
from random import Random

from gpipe_cli.cli import main as gpipe
from gpipe_cli.pipeline.runtime.boundary import same_bits
from gpipe_cli.reporting.compare.run_record import read_curves
from gpipe_cli.reproduction.last_tensors import last_tensors
from gpipe_cli.results.files import read_result
from gpipe_cli.training.checkpoint.files import list_checkpoints

SETTINGS = ["epochs=2", "checkpoint.every_steps=15"]
CURVES = ("train/", "test/")
NOTHING = "nothing"
ROW = "{:>3}{:>3}  {:<10}{:<16}{:>8}  {:<26}{:<9}{:>9}"
MOMENTS = ("any", "in training", "while writing")
PATIENCE_SECONDS = 60.0  # from a command's end until its processes and temporary files must be gone


class Trial:
    """The folder of a run, the log of all its commands, and the folder for their temporary files."""

    def __init__(self, base: Path, name: str, settings: Sequence[str]) -> None:
        self.folder, self.log, self._temporary = base / name, base / f"{name}.log", base / "tmp"
        self._settings = settings
        self._temporary.mkdir(exist_ok=True)

    def start(self, partitions: int | None = None) -> "subprocess.Popen[bytes]":
        """Start the command that begins or resumes the run; None: with the K of its settings."""
        settings = [*SETTINGS, *self._settings, "resume=auto", f"run_folder={self.folder}"]
        settings += [] if partitions is None else [f"partitions={partitions}"]
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "gpipe_cli", "train", *settings],
                stdout=log,
                stderr=log,
                env=os.environ | {"TMPDIR": str(self._temporary)},
                start_new_session=True,
            )

    def processes(self) -> dict[int, tuple[int, str]]:
        """Parent and command line of each living process of the run, by process ID, orphans included."""
        mine, found = f"TMPDIR={self._temporary}".encode(), {}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # the process has ended meanwhile
                state, parent = (folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[:2]
                if state not in "ZX" and mine in (folder / "environ").read_bytes():
                    found[int(folder.name)] = int(parent), (folder / "cmdline").read_text(encoding="utf-8")
        return found

    def targets(self, parent: int) -> dict[str, list[int]]:
        """The process IDs of the run's living processes, by role."""
        living = self.processes()
        servers = [number for number, (above, line) in living.items() if above == parent and "fork_server" in line]
        stages = sorted(number for number, (above, _) in living.items() if above in servers)
        loaders = sorted(number for number, (above, _) in living.items() if above in stages)
        found = {"parent": [parent], "fork server": servers, "data loader": loaders}
        found |= {f"process {rank} of {len(stages)}": [number] for rank, number in enumerate(stages)}
        return {name: numbers for name, numbers in found.items() if numbers}

    def is_at(self, moment: str) -> bool:
        """Whether the run has reached a moment of MOMENTS."""
        if moment == "while writing":
            return any(self.folder.glob("checkpoints/.*.writing"))
        return moment == "any" or self.done() != NOTHING

    def check_nothing_left(self) -> None:
        """End the program if the ended command has left processes, files or a traceback."""
        until = time.monotonic() + PATIENCE_SECONDS
        while left := [*self.processes().values(), *self._temporary.iterdir()]:
            if time.monotonic() > until:
                raise SystemExit(f"{self.folder.name}: left behind: {left}")
            time.sleep(0.1)
        if "Traceback" in (said := self.log.read_text(encoding="utf-8")):
            raise SystemExit(f"{self.folder.name}: {said}")

    def done(self) -> str:
        """The checkpoint from which the next command continues."""
        found = list_checkpoints(self.folder)
        return f"step {int(found[-1].name.rpartition('_')[2])}" if found else NOTHING


def compare(one: Path, other: Path) -> str:
    """Say what was compared; end the program if anything differs."""
    tensors, curves, results = [], [], []
    for folder in (one, other):
        tensors.append(last_tensors(folder))
        found = {tag: curve for tag, curve in read_curves(folder).items() if tag.startswith(CURVES)}
        points = {tag: zip(curve.steps, curve.values, strict=True) for tag, curve in found.items()}
        curves.append({f"{tag}, step {step}": value for tag in found for step, value in points[tag]})
        results.append(read_result(folder))
    names = tensors[0].keys() | tensors[1].keys()
    both = tensors[0].keys() & tensors[1].keys()
    different = [name for name in names if name not in both or not same_bits(tensors[0][name], tensors[1][name])]
    different += [point for point in curves[0].keys() & curves[1].keys() if curves[0][point] != curves[1][point]]
    if results[0]["status"] == "completed":  # a run may be killed between its last checkpoint and its end
        different += [key for key in ("steps", "test", "best") if results[0][key] != results[1][key]]
    if different:
        raise SystemExit(f"{one.name} and {other.name}: {len(different)} differ: {sorted(different)[:9]}")
    missing = len(curves[1].keys() - curves[0].keys())
    return f"{len(names)} tensors and {len(curves[0])} points of curves ({missing} missing), all the same bits"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="setting=value", help="settings of gpipe train")
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    runs, seed, settings = options.runs, options.seed, options.settings
    getLogger("tensorboard").setLevel(ERROR)  # it warns of the steps that a resumed run repeats
    random = Random(seed)
    with tempfile.TemporaryDirectory(prefix="kills_") as base:
        undisturbed, began = Trial(Path(base), "undisturbed", settings), time.monotonic()
        with redirect_stdout(io.StringIO()) as printed:
            if gpipe(["train", *SETTINGS, *settings, f"run_folder={undisturbed.folder}"]):
                raise SystemExit(printed.getvalue())
        seconds = time.monotonic() - began
        print(f"seed {seed}; undisturbed: {undisturbed.done()} after {seconds:.0f} s")
        print(ROW.format("run", "K", "began at", "killed", "after", "of process", "left", "exit code"))
        kills = 0
        for run in range(1, runs + 1):
            trial, partitions, code, left = Trial(Path(base), f"run_{run}", settings), 2, 1, random.randint(1, 2)
            while code != 0:
                begins = trial.done()
                partitions = 2 if begins == NOTHING else random.choice([k for k in (1, 2, 3) if k != partitions])
                program, began = trial.start(None if begins == NOTHING else partitions), time.monotonic()
                moment, delay = random.choice(MOMENTS), random.uniform(0, seconds / 2)
                kill = "", "", "none"
                if left > 0:
                    while program.poll() is None and not trial.is_at(moment):
                        time.sleep(0.002)
                    with suppress(subprocess.TimeoutExpired):
                        program.wait(0 if moment == "while writing" else delay)
                if left > 0 and program.poll() is None:
                    name, numbers = random.choice(sorted(trial.targets(program.pid).items()))
                    kills, left = kills + 1, left - 1
                    with suppress(ProcessLookupError):  # it has just ended
                        os.kill(random.choice(numbers), signal.SIGKILL)
                    kill = (moment, f"{time.monotonic() - began:.1f} s", name)
                code = program.wait()
                if code != 0 and kill[-1] == "none":
                    raise SystemExit(f"{trial.folder.name}: exit code {code}\n{trial.log.read_text(encoding='utf-8')}")
                trial.check_nothing_left()
                print(ROW.format(run, partitions, begins, *kill, trial.done(), code), flush=True)
            print(f"{'':<9}{trial.folder.name}: {compare(trial.folder, undisturbed.folder)}", flush=True)
        print(f"{kills} kills, {runs} runs: nothing left behind, no bit that differs")


if __name__ == "__main__":
    main()
