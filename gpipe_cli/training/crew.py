"""The processes of a run: started together, watched together, stopped together (law 7: nothing hangs).

The parent computes nothing. It starts one worker per partition (or one for all), passes on what they report, and ends
the run when one of them fails: it names the first failure and stops the rest. Under torchrun, where every process
is started from outside, each is the parent of a single worker.
"""

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import Any

from gpipe_cli.config import TrainConfig
from gpipe_cli.pipeline.schedule import Kind
from gpipe_cli.training.layout import Layout, torchrun_world
from gpipe_cli.training.work import WATCHED, Failure, Task, Work, begin, workers

Hear = Callable[[str, dict[str, Any]], None]

_GRACE_SECONDS = 1.0  # after the first sign of trouble: how long the process that caused it has to say so
_PATIENCE_SECONDS = 2.0  # between asking a worker to end and ending it


def perform(config: TrainConfig, layout: Layout, task: Task, hear: Hear, interrupt: "Interrupt") -> Failure | None:
    """Have workers, as many as the layout has processes, do a task to its end; returns why it failed, None: it did not.

    `hear` is given what they report. However this ends, by Ctrl-C too, no worker is left.

    Raises KeyboardInterrupt if asked to end, and whatever `hear` raises.
    """
    with tempfile.TemporaryDirectory(prefix="gpipe_") as meeting:
        crew = _Crew(config, layout)
        try:
            crew.start(task, Path(meeting) / "rendezvous", interrupt)
            return crew.watch(hear, interrupt)
        except KeyboardInterrupt:
            crew.stop()  # a second Ctrl-C may come while the first one is obeyed
            raise
        finally:
            crew.stop()


class _Crew:
    """The workers of this parent, and what is heard from them."""

    def __init__(self, config: TrainConfig, layout: Layout) -> None:
        self._config, self._layout = config, layout
        self._context = workers()
        self._watched = self._context.RawArray("q", WATCHED * layout.processes)
        self._connections: dict[int, Connection] = {}
        self._processes: dict[int, Any] = {}

    def start(self, task: Task, meeting: Path, interrupt: "Interrupt") -> None:
        """Start the workers; interrupted half-way, `stop` ends those that there are."""
        config, layout, context = self._config, self._layout, self._context
        outside = torchrun_world()
        mine = range(layout.processes) if outside in (None, 1) else (int(os.environ["RANK"]),)
        rendezvous = None if layout.processes == 1 else f"file://{meeting}" if outside in (None, 1) else "env://"
        for process in mine:
            ours, theirs = context.Pipe()
            job = Work(config, layout, task, process, rendezvous)
            worker = context.Process(target=begin, args=(job, theirs, self._watched), name=f"gpipe-{process}")
            self._connections[process], self._processes[process] = ours, worker
            worker.start()
            theirs.close()
            with suppress(OSError):  # it is dead already; `watch` will see that
                ours.send("begin")
            interrupt.check()

    def watch(self, hear: Hear, interrupt: "Interrupt") -> Failure | None:
        """Pass on what the workers report until all have ended well (None) or the run has failed."""
        failures: list[Failure] = []
        deadline = float("inf")
        silent = dict(self._connections)
        running = dict(self._processes)
        while running and time.monotonic() < deadline:
            interrupt.check()
            sentinels = {worker.sentinel: process for process, worker in running.items()}
            ready = wait([*silent.values(), *sentinels], timeout=min(1.0, max(0.0, deadline - time.monotonic())))
            for process, connection in list(silent.items()):
                if connection in ready:
                    try:
                        kind, message = connection.recv()
                    except (EOFError, ConnectionError):
                        del silent[process]
                        continue
                    if kind == "failure":
                        failures.append(message)
                    else:
                        hear(kind, message)
            for sentinel, process in sentinels.items():
                if sentinel in ready and process not in silent:
                    code = running.pop(process).exitcode
                    if code != 0 and not any(failure.process == process for failure in failures):
                        failures.append(self._killed(process, code))
                elif sentinel in ready and not silent[process].poll():
                    del silent[process]  # its other end may live on in a loader process that it started
            if failures and deadline == float("inf"):
                deadline = time.monotonic() + _GRACE_SECONDS
        return min(failures, key=lambda failure: failure.rank) if failures else None

    def stop(self) -> None:
        """End every worker that still runs, kindly and then not."""
        started = [worker for worker in self._processes.values() if worker.pid is not None]
        for worker in started:
            if worker.is_alive():
                worker.terminate()
        until = time.monotonic() + _PATIENCE_SECONDS
        for worker in started:
            worker.join(max(0.0, until - time.monotonic()))
            if worker.is_alive():
                worker.kill()
                worker.join(_PATIENCE_SECONDS)

    def _killed(self, process: int, code: int | None) -> Failure:
        """A process that ended without a word: what was it doing?"""
        layout = self._layout
        stages = layout.stages_of(process)
        who = f"stage {stages[0]}" if len(stages) == 1 else f"the process of stages 0 to {stages[-1]}"
        how = (
            f"was killed by signal {-code} ({_signal_name(-code)})"
            if code is not None and code < 0
            else f"ended with code {code}"
        )
        number, stage, micro_batch, samples, *lengths = self._watched[WATCHED * process : WATCHED * (process + 1)]
        doing = "before its first action"
        if number:
            kind = tuple(Kind)[number - 1]
            inputs = layout.training_boundaries[stage - 1] if stage > 0 else layout.inputs
            shapes = [tensor.shape(samples, lengths[: len(layout.lengths)]) for tensor in inputs]
            doing = f"in {stage}{kind.value}{micro_batch} (input {', '.join(map(str, shapes))})"
        hint = (
            "; the machine may be out of memory: more micro_batches or recompute=always need less" if code == -9 else ""
        )
        return Failure(process, "killed", f"{who} {how} {doing}{hint}", "", time.time())


class Interrupt:
    """Whether the command was asked to end; remembered: an exception can be lost in the callback of a library."""

    asked = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        raise KeyboardInterrupt

    def check(self) -> None:
        """Raise KeyboardInterrupt if the command was asked to end, whatever became of the first one."""
        if self.asked:
            raise KeyboardInterrupt


@contextmanager
def interruptible() -> Iterator[Interrupt]:
    """Ctrl-C and SIGTERM (SLURM, torchrun, a sweep) end a run alike."""
    interrupt = Interrupt()
    before = [(number, signal.signal(number, interrupt)) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        yield interrupt
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
