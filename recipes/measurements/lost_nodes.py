"""Lost nodes: a run under torchrun names a machine that is lost, and goes on when it comes back.

Two torchrun agents on this machine stand for two nodes with a stage each. After a checkpoint one of them, with all that
it has started, is killed (SIGKILL) or stopped (SIGSTOP), as a machine that crashes or hangs. Measured: the seconds
until the other node names it, and from when it is back (started again, or SIGCONT) until the run is complete. Neither
command changes: torchrun's --max-restarts starts what failed again, resume=auto goes on from the last checkpoint. In
the end the weights are compared with those of a run that was left alone, bit for bit.

Usage: python recipes/measurements/lost_nodes.py [--timeout 20] [--signals KILL STOP] [setting=value ...]
       Linux; 3 minutes on 2 cores
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from socket import socket
from typing import Any

from random_kills import compare
from runs import command_line

from gpipe_cli.training.checkpoint.store import checkpoints_in

SETTINGS = [
    "model.normal_cells=3", "model.filters=4", "dataset=synthetic_images", "dataset.image_size=16",
    "dataset.num_classes=4", "dataset.train_samples=64", "dataset.test_samples=16", "batch_size=8", "micro_batches=4",
    "data_workers=0", "hardware=cpu", "threads=1", "partitions=2", "epochs=4", "checkpoint.every_steps=4",
]  # fmt: skip
PATIENCE_SECONDS = 240.0
KEEP_ALIVE_SECONDS = (
    10.0  # until torchrun's rendezvous has forgotten a node that was killed; one that starts takes longer
)
ROW = "{:<8}{:>9}{:>9}{:>10}  {}"


class Node:
    """A torchrun agent with one process, and its log."""

    def __init__(self, log: Path, port: int, arguments: Sequence[str]) -> None:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1",
                    "--max-restarts=9", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=lost",
                    "--rdzv-conf=keep_alive_interval=1", "--local-addr=127.0.0.1"]  # fmt: skip
        self.log = log
        with log.open("a") as output:
            self.agent = subprocess.Popen(
                [*torchrun, "-m", "gpipe_cli", "train", *arguments],
                stdout=output,
                stderr=output,
                # torchrun's agents tell each other the address of a shared store once: one that is new waits for ever
                env=os.environ | {"GLOO_SOCKET_IFNAME": "lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
            )

    def send(self, number: signal.Signals) -> None:
        """To the agent and all that it has started: each of its processes has a session of its own."""
        children: dict[int, list[int]] = {}
        for file in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):  # it has ended
                parent = int(file.read_text(encoding="utf-8").rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(file.parent.name))
        family = [self.agent.pid]
        for one in family:
            family += children.get(one, [])
        for one in family:
            with suppress(ProcessLookupError):
                os.kill(one, number)


def wait_for(condition: Callable[[], Any], *nodes: Node) -> Any:
    """What the condition gives once that is true. Ends the program with the logs if it does not become so."""
    until = time.monotonic() + PATIENCE_SECONDS
    while not (found := condition()):
        if time.monotonic() > until:
            raise SystemExit("\n".join(node.log.read_text(encoding="utf-8") for node in nodes))
        time.sleep(0.05)
    return found


def lose(folder: Path, number: signal.Signals, timeout: float, settings: Sequence[str]) -> tuple[float, float, str]:
    """Lose the second node once. Returns the seconds until it is named, those from when it is back until the run is
    complete, and the line that names it."""
    with socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    run = [*SETTINGS, *settings, f"timeout_seconds={timeout:g}", "resume=auto", f"run_folder={folder}"]
    first = Node(folder.with_suffix(".first"), port, run)
    wait_for(lambda: answers(port), first)  # the first one has the store, and process 0
    second = Node(folder.with_suffix(".second"), port, run)
    nodes = [first, second]
    try:
        wait_for(lambda: checkpoints_in(folder) or first.agent.poll() is not None, *nodes)
        began = time.monotonic()
        second.send(number)
        line = r"^error +(.*(?:process|stage) 1\b.*)$"
        named = wait_for(lambda: re.search(line, first.log.read_text(encoding="utf-8"), re.M), *nodes)
        seconds = time.monotonic() - began
        if number == signal.SIGKILL:
            second.agent.wait()
            wait_for(lambda: "exitcode: 1" in first.log.read_text(encoding="utf-8"), *nodes)
            time.sleep(KEEP_ALIVE_SECONDS)
            nodes.append(Node(folder.with_suffix(".third"), port, run))
        else:
            second.send(signal.SIGCONT)
        back = time.monotonic()
        codes = [wait_for(lambda: node.agent.poll() is not None and [node.agent.returncode], *nodes) for node in nodes]  # noqa: B023
        if codes[0] != [0] or codes[-1] != [0]:
            raise SystemExit("\n".join(node.log.read_text(encoding="utf-8") for node in nodes))
        return seconds, time.monotonic() - back, named[1]
    finally:
        for node in nodes:
            node.send(signal.SIGKILL)
            node.agent.wait()


def answers(port: int) -> bool:
    with socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def main(arguments: Sequence[str] | None = None) -> None:
    parser = command_line(__doc__)
    parser.add_argument("--timeout", type=float, default=20.0)
    parser.add_argument("--signals", nargs="*", default=["KILL", "STOP"])
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="nodes_") as base:
        whole = Path(base, "whole")
        alone = [*SETTINGS, *options.settings, "executor=in_process", f"run_folder={whole}"]
        subprocess.run([sys.executable, "-m", "gpipe_cli", "train", *alone], check=True, stdout=subprocess.DEVNULL)
        print(ROW.format("signal", "named", "complete", "timeout", "by the other node"))
        for name in options.signals:
            folder = Path(base, name.lower())
            named, complete, line = lose(folder, signal.Signals[f"SIG{name}"], options.timeout, options.settings)
            print(ROW.format(name, f"{named:.1f} s", f"{complete:.1f} s", f"{options.timeout:g} s", line), flush=True)
            print(f"{'':<8}{compare(folder, whole)}", flush=True)


if __name__ == "__main__":
    main()
