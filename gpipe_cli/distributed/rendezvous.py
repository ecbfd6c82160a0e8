"""What process 0 decides for all processes that torchrun has started, before they are connected.

They may run in different folders and on different machines, so they use torchrun's key-value store. The store lives as
long as torchrun: when a process has failed and all are started again, keys of the earlier start must not be taken for
this start's. (TORCHELASTIC_RESTART_COUNT does not help: each machine counts its own failures.)
"""

import json
import socket
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from threading import Thread

import torch.distributed as dist

from gpipe_cli.distributed.torchrun_env import (
    Torchrun,
    describe_variables,
    get_wait_limit,
    is_rank_zero,
    may_restart,
    read_torchrun_env,
    store_address,
)
from gpipe_cli.system.status_line import end_phase

_FOLDER = "gpipe/run_folder"
_START = "gpipe/start"
_PROCESS_TIMEOUT = timedelta(minutes=15)  # for the slowest process to import its libraries
_STORE_TIMEOUT = timedelta(minutes=1)  # for torchrun's own store, which exists before torchrun starts a process
_POLL_SECONDS = 0.05
_REPORT_AFTER_SECONDS = 5.0  # of waiting, after which a message names whom


@dataclass(frozen=True)
class Decision:
    """Where a run writes to, and what it resumes from."""

    folder: Path
    resume: str | None  # the setting `resume`
    source: Path | None  # the checkpoint that the weights come from
    complete: bool = False  # whether the run in `folder` is complete, with nothing left to do
    start: str = ""  # under torchrun: names this start of all processes


def previous_run_folder() -> Path | None:
    """The run folder of an earlier start by the same torchrun, None for the first start; called in process 0."""
    if not may_restart() or not store().check([_FOLDER]):
        return None
    return Path(json.loads(store().get(_FOLDER)))


def broadcast_decision(decide: Callable[[], Decision]) -> Decision:
    """What process 0 decides, with absolute paths; the other processes wait for it. After a restart by torchrun,
    `previous_run_folder` finds its run folder. Raises ConnectionError or TimeoutError if a process does not come."""
    torchrun = read_torchrun_env()
    if not is_rank_zero():
        assert torchrun is not None
        return _receive(torchrun)
    decision = decide()
    if may_restart():
        store().set(_FOLDER, json.dumps(str(decision.folder.absolute())))
    return decision if torchrun is None else _send(torchrun, decision)


def broadcast_text(key: str, decide: Callable[[], str]) -> str:
    """The text that process 0 decides under `key`, also if torchrun starts the processes again; the others wait for it.
    Raises ConnectionError or TimeoutError if a process does not come."""
    key = f"gpipe/{key}"
    if not is_rank_zero():
        shared = store()
        _wait(partial(shared.check, [key]), "process 0")
    elif not (shared := store(hosts=not may_restart())).check([key]):
        shared.set(key, decide())
    return shared.get(key).decode()


def _send(torchrun: Torchrun, decision: Decision) -> Decision:
    paths = decision.folder, decision.resume, decision.source
    decided = json.dumps([*(None if path is None else str(Path(path).absolute()) for path in paths), decision.complete])
    shared = store(hosts=not may_restart())
    start = uuid.uuid4().hex
    shared.set(_START, start)
    began = time.monotonic()
    for other in range(1, torchrun.world_size):
        arrived = f"{start}/{other}"
        _wait(partial(shared.check, [arrived]), f"process {other} of {torchrun.world_size}", began=began)
        shared.set(f"{start}/{shared.get(arrived).decode()}", decided)
    return _read(decided, start)


def _receive(torchrun: Torchrun) -> Decision:
    shared = store()
    token = uuid.uuid4().hex
    start = ""

    def has_decision() -> bool:
        nonlocal start
        if not shared.check([_START]):
            return False
        # Perhaps the store of an earlier start, whose process 0 has ended and never answers: read again at every call.
        start = shared.get(_START).decode()
        shared.set(f"{start}/{torchrun.rank}", token)
        return shared.check([f"{start}/{token}"])

    _wait(has_decision, "process 0")
    return _read(shared.get(f"{start}/{token}"), start)


def _read(decided: str | bytes, start: str) -> Decision:
    folder, resume, source, complete = json.loads(decided)
    return Decision(Path(folder), resume, None if source is None else Path(source), complete, start)


def _wait(
    is_done: Callable[[], bool], whom: str, max_wait: timedelta = timedelta.max, began: float | None = None
) -> None:
    """Poll until `is_done()` is true: signals can interrupt it, unlike the store's own wait. A line names a long wait.
    `began`: when it has begun, by time.monotonic(); None: now. Raises TimeoutError."""
    limit = min(max_wait, _process_timeout()).total_seconds()
    began = time.monotonic() if began is None else began
    report_at = time.monotonic() + _REPORT_AFTER_SECONDS
    unset = describe_variables()
    while not is_done():
        if time.monotonic() > began + limit:
            raise TimeoutError(f"torchrun: no answer from {whom} within {limit:g} s; {unset}")
        if time.monotonic() > report_at:
            report_at = float("inf")
            setting = "" if get_wait_limit() is None else " (timeout_seconds)"
            end_phase()
            with suppress(OSError):
                sys.stderr.write(f"waiting for {whom}, at most {limit:g} s{setting}; {unset}\n")
                sys.stderr.flush()
        time.sleep(_POLL_SECONDS)


def _process_timeout() -> timedelta:
    """How long to wait for another process."""
    seconds = get_wait_limit()
    return _PROCESS_TIMEOUT if seconds is None else timedelta(seconds=seconds)


@cache
def store(*, hosts: bool = False) -> dist.TCPStore:
    """The store of all processes: torchrun's or, if something else has started them, a store that process 0 `hosts`.

    Raises ConnectionError or TimeoutError if no store answers.
    """
    named, port = store_address()
    address = "localhost" if hosts else named  # it listens at all addresses, and the name may lead elsewhere
    whom, max_wait = ("its store", _STORE_TIMEOUT) if may_restart() else ("process 0", timedelta.max)
    made: list[dist.TCPStore | dist.DistError] = []
    timeout = _process_timeout()

    def make() -> None:
        try:
            made.append(dist.TCPStore(address, port, is_master=hosts, wait_for_workers=False, timeout=timeout))
        except dist.DistError as error:
            made.append(error)

    if not hosts:
        _wait(partial(_is_listening, address, port), whom, max_wait)
    # in a thread: in C++ it waits forever if another program listens there, and no signal interrupts it
    Thread(target=make, daemon=True).start()
    _wait(lambda: bool(made), whom, max_wait)
    (shared,) = made
    if isinstance(shared, dist.DistError):
        reason = str(shared).partition("\n")[0]
        raise ConnectionError(f"MASTER_ADDR={named}, MASTER_PORT={port}: no store answers ({reason})") from shared
    return shared


def _is_listening(address: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection((address, port), timeout=1):
        return True
    return False
