"""The processes of a run: started together, watched together, stopped together (law 7: nothing hangs).

The parent computes nothing. It starts one worker per partition (or one for all), passes on what they report, and ends
the run when one of them fails: it names the first failure and stops the rest. Under torchrun, where every process
is started from outside, each is the parent of a single worker.
"""

import mmap
import os
import signal
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from gpipe_cli.config.settings import TrainConfig
from gpipe_cli.distributed.activity import ACTIVITY_NUMBERS, Activity, Awaited
from gpipe_cli.distributed.torchrun import torchrun
from gpipe_cli.launch.fork_server import Worker, fork_server, temporary_folder
from gpipe_cli.launch.job import Failure, Job, Task
from gpipe_cli.launch.silent_processes import Silence
from gpipe_cli.pipeline.schedule.schedules import Kind
from gpipe_cli.planner.placement import Placement
from gpipe_cli.system.interrupts import Interrupt

Hear = Callable[[str, dict[str, Any]], None]

_GRACE_SECONDS = 1.0  # after the first sign of trouble: how long the process that caused it has to say so
_PATIENCE_SECONDS = 2.0  # between asking a worker to end and ending it


def perform(
    config: TrainConfig, layout: Placement, task: Task, hear: Hear, interrupt: Interrupt, start: str = ""
) -> Failure | None:
    """Have workers, as many as the layout has processes, do a task to its end; returns why it failed, None: it did not.

    `hear` is given what they report; `start` is its name, under torchrun. However this ends, by Ctrl-C too, no worker
    is left.

    Raises KeyboardInterrupt if asked to end, and whatever `hear` raises.
    """
    with tempfile.TemporaryDirectory(dir=temporary_folder()) as meeting:
        crew = _Crew(config, layout)
        try:
            crew.start(task, start or f"{meeting}/rendezvous", interrupt)
            return crew.watch(hear, interrupt)
        except KeyboardInterrupt:
            crew.stop()  # a second Ctrl-C may come while the first one is obeyed
            raise
        finally:
            crew.stop()


class _Crew:
    """The workers of this parent, and what is heard from them."""

    def __init__(self, config: TrainConfig, layout: Placement) -> None:
        self._config, self._layout = config, layout
        self._connections: dict[int, Connection] = {}
        self._workers: dict[int, Worker] = {}
        self._watched_file = os.memfd_create("gpipe_watched")
        os.truncate(self._watched_file, 8 * ACTIVITY_NUMBERS * layout.processes)
        self._watched = memoryview(mmap.mmap(self._watched_file, 0)).cast("q")

    def start(self, task: Task, rendezvous: str, interrupt: Interrupt) -> None:
        """Start the workers; interrupted half-way, `stop` ends those that there are."""
        config, layout = self._config, self._layout
        started = torchrun()
        mine = range(layout.processes) if started is None else (started.rank,)
        for process in mine:
            ours, theirs = Pipe()
            with theirs:
                job = Job(config, layout, task, process, rendezvous)
                self._workers[process] = fork_server.fork(job, theirs, self._watched_file)
            self._connections[process] = ours
            interrupt.check()

    def watch(self, hear: Hear, interrupt: Interrupt) -> Failure | None:
        """Pass on what the workers report until all have ended well (None) or the run has failed."""
        failures: list[Failure] = []
        deadline = float("inf")
        connections, running = dict(self._connections), dict(self._workers)
        silence = Silence(self._config.timeout_seconds, whole=torchrun() is None)
        while running and time.monotonic() < deadline:
            interrupt.check()
            statuses = {worker.status: worker for worker in running.values() if worker.exit_code is None}
            timeout = min(1.0, max(0.0, deadline - time.monotonic()))
            ready = wait([*connections.values(), *statuses], timeout)
            for status, worker in statuses.items():
                if status in ready:
                    worker.read()
            for process, connection in list(connections.items()):
                if connection in ready:
                    try:
                        kind, message = connection.recv()
                    except (EOFError, ConnectionError):
                        del connections[process]
                        continue
                    silence.broken(process)
                    match kind:
                        case "failure":
                            failures.append(message)
                        case "done":  # how it ends does not matter any more
                            del running[process], connections[process]
                        case _:
                            hear(kind, message)
            for process, worker in list(running.items()):
                if worker.exit_code is None or (process in connections and connections[process].poll()):
                    continue  # it is at work, or there is more to be heard
                connections.pop(process, None)  # its other end may live on in a loader process that it started
                del running[process]
                if not any(failure.process == process for failure in failures):
                    failures.append(self._killed(process, worker.exit_code))
            doing = {process: self._doing(process) for process in running}
            stopped = {process for process, worker in running.items() if worker.is_stopped()}
            if not failures and (found := silence.find(doing, stopped)):
                failures.append(self._silent(*found))
            if failures and deadline == float("inf"):
                deadline = time.monotonic() + _GRACE_SECONDS
        return min(failures, key=lambda failure: failure.rank) if failures else None

    def stop(self) -> None:
        """End every worker that still runs, kindly and then not."""
        running = [worker for worker in self._workers.values() if worker.exit_code is None]
        for number in (signal.SIGTERM, signal.SIGKILL):
            until = time.monotonic() + _PATIENCE_SECONDS
            for worker in running:
                worker.send_signal(number)
            while running and (left := until - time.monotonic()) > 0:
                ready = wait([worker.status for worker in running], left)
                for worker in running:
                    if worker.status in ready:
                        worker.read()
                running = [worker for worker in running if worker.exit_code is None]
        if running:  # not forked yet; or the server is stopped, and cannot say how they ended
            fork_server.kill()

    def _doing(self, process: int) -> Activity:
        return Activity(*self._watched[ACTIVITY_NUMBERS * process : ACTIVITY_NUMBERS * (process + 1)])

    def _silent(self, process: int, seconds: float) -> Failure:
        """A process that does nothing any more."""
        limit = f"longer than timeout_seconds={self._config.timeout_seconds:g}"
        text = f"{self._who(process)} has been silent for {seconds:.0f} s {self._where(process)}, {limit}"
        text += "; if it is only slow, use a larger one"
        return Failure(process, "silent", text, "", time.time())

    def _killed(self, process: int, code: int) -> Failure:
        """A process that ended without a word."""
        how = f"was killed by signal {-code} ({_signal_name(-code)})" if code < 0 else f"ended with code {code}"
        hint = (
            "; the machine may be out of memory: more micro_batches or recompute=always need less" if code == -9 else ""
        )
        text = f"{self._who(process)} {how} {self._where(process)}{hint}"
        return Failure(process, "killed", text, "", time.time())

    def _who(self, process: int) -> str:
        stages = self._layout.stages_of(process)
        return f"stage {stages[0]}" if len(stages) == 1 else f"the process of stages 0 to {stages[-1]}"

    def _where(self, process: int) -> str:
        """What it was doing: `in 1F3 (input (8, 3, 8, 8))`."""
        doing, layout = self._doing(process), self._layout
        if doing.awaited == Awaited.DATA:
            return "waiting for a mini-batch"
        if not doing.kind:
            return "before its first action"
        inputs = layout.training_boundaries[doing.stage - 1] if doing.stage > 0 else layout.inputs
        lengths = (doing.length_0, doing.length_1)[: len(layout.lengths)]
        shapes = ", ".join(str(tensor.shape(doing.samples, lengths)) for tensor in inputs)
        action = f"{doing.stage}{tuple(Kind)[doing.kind - 1].value}{doing.micro_batch}"
        return f"in {action} (input {shapes})"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
