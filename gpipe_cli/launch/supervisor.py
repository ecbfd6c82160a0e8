"""Starts, watches and stops all processes of a run together, so that no failure makes it hang (law 8).

The parent computes nothing. It starts a worker per partition (or a single worker), passes on their messages, and ends
the run when a worker fails: it names the first failure and stops the rest. Under torchrun, which starts several
processes of gpipe, each is the parent of a single worker.
"""

import gc
import mmap
import os
import signal
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from multiprocessing.connection import wait

from gpipe_cli.distributed.control_group import ACTIVITY_NUMBERS, HANDLED, STOP, Activity, BlockedOn
from gpipe_cli.distributed.heartbeat import Heartbeat
from gpipe_cli.launch.fork_server import Worker, fork_server, temporary_folder
from gpipe_cli.launch.job import Done, Failure, Job, Reason, Task
from gpipe_cli.planner.pipeline_spec import PipelineSpec
from gpipe_cli.schedule.schedule import Kind
from gpipe_cli.system.interrupts import Interrupt, catch_interrupts, exception_of
from gpipe_cli.training.events import StepRecorded
from gpipe_cli.units import join_ranges

OnMessage = Callable[[object], None]

_FAILURE_TIMEOUT_SECONDS = 1.0  # how long the process that caused trouble has to report it
_LAST_CHECKPOINT_TIMEOUT_SECONDS = 7.0  # the same while a failed process writes its checkpoint
_END_TIMEOUT_SECONDS = 2.0  # how long the server has to report that workers have ended
_BATCH_SECONDS = 0.05  # for which messages gather after a step was reported: a pipe has room for 40 steps' messages
_MAX_GAP_SECONDS = 2.0  # longer gaps between two looks count as this: during Ctrl-Z or sleep all processes were silent


def run_task(
    task: Task,
    spec: PipelineSpec,
    timeout_seconds: float,
    on_message: OnMessage,
    start: str = "",
    *,
    stops: Collection[int] = (),
) -> Failure | None:
    """Start the workers of this spec (under torchrun: a single worker), and wait until they have done the task; returns
    why the run failed, None if it did not.

    `on_message` is called with every message of the workers, and with SIGINT once that has asked the task to end. A
    worker that is silent for `timeout_seconds` has failed.
    `start`: the name of this start, under torchrun. The signals in `stops` are passed on to the task once it has begun;
    it then ends by itself. Ctrl-C passes on the first one only. However this ends, no worker is left.

    Raises KeyboardInterrupt if asked to end, and whatever `on_message` raises.
    """
    supervisor = Supervisor(spec, timeout_seconds, stops)
    with catch_interrupts(supervisor.takes) as interrupt, tempfile.TemporaryDirectory(dir=temporary_folder()) as folder:
        torchrun = spec.layout.torchrun
        heartbeat = None if torchrun is None else Heartbeat(torchrun, start, timeout_seconds)
        failed = True
        gc.freeze()  # to look for garbage among all that was imported would take a core from the stages
        try:
            supervisor.start(task, start or f"{folder}/rendezvous", interrupt)
            failure = supervisor.watch(on_message, interrupt, heartbeat)
            failed = failure is not None
            return failure
        except KeyboardInterrupt:
            supervisor.stop()  # and again below: a second Ctrl-C may interrupt this call
            raise
        finally:
            gc.unfreeze()
            if heartbeat is not None:
                heartbeat.stop(failed=failed)
            supervisor.stop()


class Supervisor:
    """The workers of this parent, from their start to their end."""

    def __init__(self, spec: PipelineSpec, timeout_seconds: float, stops: Collection[int] = ()) -> None:
        self._spec, self._layout, self._timeout_seconds = spec, spec.layout, timeout_seconds
        self._stops = stops
        self._workers: dict[int, Worker] = {}
        self._running: dict[int, Worker] = {}  # workers that may still send something
        self._failures: list[Failure] = []
        self._activity_file = os.fdopen(os.memfd_create("gpipe_activity"), "r+b")  # until `stop`
        self._activity_file.truncate(8 * (ACTIVITY_NUMBERS * spec.layout.processes + 2))
        self._activity = memoryview(mmap.mmap(self._activity_file.fileno(), 0)).cast("q")
        self._last: object = None  # the last message

    def start(self, task: Task, rendezvous: str, interrupt: Interrupt) -> None:
        """Start the workers; if this is interrupted, `stop` ends those started so far."""
        torchrun = self._layout.torchrun
        for rank in range(self._layout.processes) if torchrun is None else (torchrun.rank,):
            job = Job(task, self._spec, rank, rendezvous, self._timeout_seconds)
            self._workers[rank] = fork_server.fork(job, self._activity_file.fileno())
            interrupt.check()
        self._running = dict(self._workers)

    def takes(self, number: int) -> bool:
        """Whether signal `number` asks the workers to end after the current step, as this then does; not a Ctrl-C that
        comes after such a signal."""
        if number not in self._stops or (number == signal.SIGINT and self._activity[STOP]):
            return False
        self._activity[STOP] = self._activity[STOP] or number
        return True

    def watch(self, on_message: OnMessage, interrupt: Interrupt, heartbeat: Heartbeat | None) -> Failure | None:
        """Pass on the workers' messages until all have done their task (returns None) or the run has failed."""
        deadline = float("inf")
        failed_at = 0.0
        told = False
        silence = SilenceTimer(self._timeout_seconds, watches_all=self._layout.torchrun is None)
        while self._running and time.monotonic() < deadline:
            interrupt.check()
            self._receive(min(1.0, max(0.0, deadline - time.monotonic())), on_message)
            self._note_ended()
            doing = {rank: self._activity_of(rank) for rank in self._running}
            if not self._failures and (silent := silence.find(doing, lambda k: self._running[k].is_stopped())):
                self._failures.append(self._silence_failure(*silent))
            elif not self._failures and heartbeat is not None and (lost := heartbeat.find_lost()):
                self._failures.append(self._loss_failure(*lost))
            if (number := self._activity[STOP]) and not self._failures and doing and not self._has_begun(doing):
                raise exception_of(number)  # no step has begun, at whose end a worker would stop
            if number == signal.SIGINT and not told:
                on_message(signal.SIGINT)
                told = True
            if self._failures:
                writing = any(activity.blocked_on == BlockedOn.LAST_CHECKPOINT for activity in doing.values())
                failed_at = failed_at or time.monotonic()
                deadline = failed_at + (_LAST_CHECKPOINT_TIMEOUT_SECONDS if writing else _FAILURE_TIMEOUT_SECONDS)
        cause = first_cause(self._failures)
        if cause is not None and cause.reason in (Reason.ABORTED, Reason.PEER) and heartbeat is not None:
            return self._find_lost(heartbeat, interrupt) or cause
        return cause

    def _has_begun(self, doing: Mapping[int, Activity]) -> bool:
        """Whether the steps have begun: process 0 says so, the others have begun an action."""
        return self._last is not None if 0 in self._workers else any(activity.kind for activity in doing.values())

    def _find_lost(self, heartbeat: Heartbeat, interrupt: Interrupt) -> Failure | None:
        """The failure of the lost process, of another supervisor; this worker only knows that some process is lost."""
        deadline = time.monotonic() + heartbeat.shorten_limit()
        while time.monotonic() < deadline and not self._activity[STOP]:  # else torchrun is ending all processes
            interrupt.check()
            if lost := heartbeat.find_lost():
                return self._loss_failure(*lost)
            time.sleep(0.1)
        return None

    def _receive(self, timeout: float, on_message: OnMessage) -> None:
        """Wait for messages and exit codes of the workers, and take those that have arrived."""
        running = list(self._running.items())
        statuses = [worker.status for _, worker in running if worker.exit_code is None]
        connections = [worker.connection for _, worker in running if not worker.connection.closed]
        if isinstance(self._last, StepRecorded) and not self._failures:
            time.sleep(_BATCH_SECONDS)
        ready = wait([*statuses, *connections], timeout)
        for rank, worker in running:
            if worker.status in ready:
                worker.read_status()
            if worker.connection not in ready:
                continue
            for message in worker.receive():
                self._last = message
                match message:
                    case Failure():
                        self._failures.append(message)
                    case Done():  # how the worker exits does not matter any more
                        del self._running[rank]
                    case _:
                        on_message(message)
                        if rank == 0:
                            self._activity[HANDLED] += 1

    def _note_ended(self) -> None:
        """Record the failure of workers that ended before their task was done, once all their messages are read."""
        for rank, worker in list(self._running.items()):
            if worker.exit_code is None or (not worker.connection.closed and worker.connection.poll()):
                continue  # there may be no EOF: a data loader of the worker may hold the connection open
            del self._running[rank]
            if not any(failure.rank == rank for failure in self._failures):
                self._failures.append(self._exit_failure(rank, worker.exit_code))

    def stop(self) -> None:
        """Kill every worker that still runs; the kernel ends their data loaders with them."""
        self._activity_file.close()
        running = [worker for worker in self._workers.values() if worker.exit_code is None]
        deadline = time.monotonic() + _END_TIMEOUT_SECONDS
        for worker in running:
            worker.kill()
        while running and (remaining := deadline - time.monotonic()) > 0:
            ready = wait([worker.status for worker in running], remaining)
            for worker in running:
                if worker.status in ready:
                    worker.read_status()
                    worker.kill()  # its process id may have come only now
            running = [worker for worker in running if worker.exit_code is None]
        if running:  # not forked yet; or the server is stopped, and cannot report how they ended
            fork_server.kill()

    def _activity_of(self, rank: int) -> Activity:
        return Activity(*self._activity[ACTIVITY_NUMBERS * rank : ACTIVITY_NUMBERS * (rank + 1)])

    def _silence_failure(self, rank: int, seconds: float) -> Failure:
        """The failure of a process that has been silent for too long."""
        limit = f"longer than timeout_seconds={self._timeout_seconds:g}; if it is only slow, use a larger one"
        text = f"{self._name_of(rank)} has been silent for {seconds:.0f} s {self._describe_activity(rank)}, {limit}"
        return Failure(rank, text, time.time(), Reason.LOST)

    def _loss_failure(self, rank: int, seconds: float | None) -> Failure:
        """The failure of another supervisor's process; `seconds` of silence, None if it has reported the failure."""
        if seconds is None:
            text = f"{self._name_of(rank)} has failed, and reports itself why"
        else:
            text = (
                f"{self._name_of(rank)}: nothing was heard of its supervisor for {seconds:.0f} s "
                f"(timeout_seconds={self._timeout_seconds:g}); its machine is lost, stopped or cut off"
            )
        return Failure(rank, text, time.time(), Reason.PEER if seconds is None else Reason.LOST)

    def _exit_failure(self, rank: int, code: int) -> Failure:
        """The failure of a process that ended without reporting it."""
        names = {number.value: number.name for number in signal.Signals}
        name = names.get(-code, "unknown")
        how = f"was killed by signal {-code} ({name})" if code < 0 else f"ended with code {code}"
        text = f"{self._name_of(rank)} {how} {self._describe_activity(rank)}"
        reason = Reason.LOST if code < 0 else Reason.OTHER
        if code == -signal.SIGABRT and self._layout.distributed and not self._layout.on_cpu:
            reason = Reason.ABORTED
            text += "; so NCCL ends a process whose GPU has failed, or whose peer is lost: NCCL_DEBUG=WARN shows more"
        if code == -signal.SIGKILL:
            text += "; the machine may be out of memory: more micro_batches or recompute=always need less"
        return Failure(rank, text, time.time(), reason)

    def _name_of(self, rank: int) -> str:
        stages = self._layout.stages_of(rank)
        several = f"the process of stages {' and '.join(join_ranges(stages, ' to '))}"
        who = f"stage {stages[0]}" if len(stages) == 1 else several
        return f"{who} of replica {self._layout.replica_of(rank)}" if self._layout.replicas > 1 else who

    def _describe_activity(self, rank: int) -> str:
        """What the process was doing: `in 1F3 (input (8, 3, 8, 8))`."""
        doing = self._activity_of(rank)
        spec = self._spec
        if doing.blocked_on == BlockedOn.DATA:
            return "waiting for a mini-batch"
        if doing.blocked_on == BlockedOn.DISK:
            return "waiting for a checkpoint to be written"
        if not doing.kind:
            return "before its first action"
        lengths = (doing.length_0, doing.length_1)[: len(spec.lengths)]
        shapes = ", ".join(str(tensor.shape(doing.samples, lengths)) for tensor in spec.stage_inputs(doing.stage))
        action = f"{doing.stage}{tuple(Kind)[doing.kind - 1].value}{doing.micro_batch}"
        return f"in {action} (input {shapes})"


def first_cause(failures: Sequence[Failure]) -> Failure | None:
    """The earliest failure that is not the loss of a peer; else the earliest that may be another's; else the
    earliest."""
    priority = {Reason.ABORTED: 1, Reason.PEER: 2}
    return min(failures, key=lambda failure: (priority.get(failure.reason, 0), failure.seconds), default=None)


class SilenceTimer:
    """Measures for how long processes have done nothing, counting only the time in which this process ran.

    When a process is stopped, hangs or gets no data, the others soon wait for it forever: the cause is the process
    that waits for no other process.
    """

    def __init__(self, limit_seconds: float, watches_all: bool) -> None:
        """`watches_all`: all processes of the run are watched; otherwise some may wait for a process that is not."""
        self._limit, self._watches_all = limit_seconds, watches_all
        self._seen: dict[int, Activity] = {}
        self._seconds: dict[int, float] = {}
        self._looked_at = time.monotonic()

    def find(self, processes: Mapping[int, Activity], stopped: Callable[[int], bool]) -> tuple[int, float] | None:
        """The process that holds up the run and its seconds of silence, if these exceed the limit. `stopped`: whether a
        process is stopped by a signal, which is asked for silent ones only.

        For the others no limit holds before the first mini-batch is asked for (a vocabulary may be learned, a data set
        fetched), and none while they compile.
        """
        looked_at = time.monotonic()
        passed = min(looked_at - self._looked_at, _MAX_GAP_SECONDS)
        self._looked_at = looked_at
        silent: dict[int, float] = {}
        for rank, doing in processes.items():
            unchanged = self._seen.get(rank) == doing
            self._seen[rank] = doing
            self._seconds[rank] = self._seconds.get(rank, 0.0) + passed if unchanged else 0.0
            begun = doing.kind > 0 or doing.blocked_on == BlockedOn.DATA
            has_begun = begun and doing.blocked_on != BlockedOn.COMPILER
            if self._seconds[rank] > self._limit and (has_begun or stopped(rank)):
                silent[rank] = self._seconds[rank]
        if not silent:
            return None
        causes = {rank for rank in silent if processes[rank].blocked_on != BlockedOn.PROCESS or stopped(rank)}
        if not causes and not (self._watches_all and len(silent) == len(processes)):
            return None
        rank = max(causes or silent, key=silent.__getitem__)
        return rank, silent[rank]
