"""The processes of a run: started together, watched together, stopped together (law 7: nothing hangs).

The parent computes nothing. It starts one worker per partition (or one for all), shows and writes what they report, and
ends the run when one of them fails: it names the first failure and stops the rest. Under torchrun, where every process
is started from outside, each is the parent of a single worker.
"""

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import Any

from gpipe_cli.config import DecodeConfig, EvaluateConfig, TrainConfig, to_yaml
from gpipe_cli.pipeline.schedule import Kind
from gpipe_cli.training.checkpoint import find_checkpoint
from gpipe_cli.training.layout import Layout, make_layout, torchrun_world
from gpipe_cli.training.show import Show, ShowEvaluation, ShowNothing, show_dry_run
from gpipe_cli.training.work import WATCHED, Failure, Work, begin, workers

_GRACE_SECONDS = 1.0  # after the first sign of trouble: how long the process that caused it has to say so
_PATIENCE_SECONDS = 2.0  # between asking a worker to end and ending it


def launch(config: TrainConfig | EvaluateConfig, folder: Path) -> int:
    """Run the training or evaluation to its end; returns the exit code (0, 1 failed, 2 bad input, 130 interrupted).

    Raises ValueError, one line, for what the user can mend before anything has run.
    """
    if isinstance(config, EvaluateConfig):
        training, decode = config.training, config.decode
        checkpoint = find_checkpoint(folder, config.checkpoint, "run")
    else:
        training, checkpoint, decode = config, None, None
    layout = make_layout(training)
    text = to_yaml(training)
    if checkpoint is None and training.dry_run:
        show_dry_run(training, text, layout, folder)
        return 0
    show: Show | ShowEvaluation | ShowNothing
    if int(os.environ.get("RANK", "0")) != 0:
        show = ShowNothing()
    elif checkpoint is None:
        show = Show(training, text, layout, folder)
    else:
        show = ShowEvaluation(training, checkpoint, folder)
    with tempfile.TemporaryDirectory(prefix="gpipe_") as meeting, _interruptible() as interrupt:
        crew = _Crew(training, layout)
        try:
            crew.start(text, folder, checkpoint, decode, Path(meeting) / "rendezvous", interrupt)
            failure = crew.watch(show, interrupt)
        except KeyboardInterrupt:
            crew.stop()
            show.finish("interrupted", None)
            return 130
        except SystemExit:  # the console's reader has gone, as in `gpipe train | head`
            crew.stop()
            show.finish("interrupted", "nobody reads the output any more")
            raise
        finally:
            crew.stop()
    if failure is None:
        show.finish("completed", None)
        return 0
    if failure.kind == "user" and not show.started:
        raise ValueError(failure.text)
    if failure.kind == "error" and folder.is_dir():
        details = folder / "failure.txt"
        details.write_text(failure.details, encoding="utf-8")
        failure = replace(failure, text=f"{failure.text} (traceback in {details})")
    show.finish("failed", failure.text)
    return 2 if failure.kind == "user" else 1


class _Crew:
    """The workers of this parent, and what is heard from them."""

    def __init__(self, config: TrainConfig, layout: Layout) -> None:
        self._config, self._layout = config, layout
        self._context = workers()
        self._watched = self._context.RawArray("q", WATCHED * layout.processes)
        self._connections: dict[int, Connection] = {}
        self._processes: dict[int, Any] = {}

    def start(
        self,
        text: str,
        folder: Path,
        checkpoint: Path | None,
        decode: DecodeConfig | None,
        meeting: Path,
        interrupt: "_Interrupt",
    ) -> None:
        """Start the workers; interrupted half-way, `stop` ends those that there are."""
        config, layout, context = self._config, self._layout, self._context
        outside = torchrun_world()
        mine = range(layout.processes) if outside in (None, 1) else (int(os.environ["RANK"]),)
        rendezvous = None if layout.processes == 1 else f"file://{meeting}" if outside in (None, 1) else "env://"
        for process in mine:
            ours, theirs = context.Pipe()
            job = Work(config, text, layout, folder, process, rendezvous, checkpoint, decode)
            worker = context.Process(target=begin, args=(job, theirs, self._watched), name=f"gpipe-{process}")
            self._connections[process], self._processes[process] = ours, worker
            worker.start()
            theirs.close()
            with suppress(OSError):  # it is dead already; `watch` will see that
                ours.send("begin")
            interrupt.check()

    def watch(self, show: Any, interrupt: "_Interrupt") -> Failure | None:
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
                        show.hear(kind, message)
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


class _Interrupt:
    """Whether the run was asked to end; remembered, because an exception can be lost in the callback of a library."""

    asked = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        raise KeyboardInterrupt

    def check(self) -> None:
        """Raise KeyboardInterrupt if the run was asked to end, whatever became of the first one."""
        if self.asked:
            raise KeyboardInterrupt


@contextmanager
def _interruptible() -> Iterator[_Interrupt]:
    """Ctrl-C and SIGTERM (SLURM, torchrun, a sweep) end a run alike."""
    interrupt = _Interrupt()
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
