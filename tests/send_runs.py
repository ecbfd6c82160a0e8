"""What processes do for the tests of sends over Gloo."""

import time
import weakref
from datetime import timedelta
from typing import Any

import pytest
import torch
from engine_runs import LINKS, Case, train_as

from gpipe_cli.pipeline.runtime import link
from gpipe_cli.pipeline.runtime.executor import Executor
from gpipe_cli.pipeline.runtime.link import Work
from gpipe_cli.pipeline.runtime.p2p_transport import P2PTransport
from gpipe_cli.schedule.schedule import Kind


def bytes_still_held(rank: int, case: Case) -> int:
    """Train on the stages of a process; returns the bytes that it had sent and still held as an action began, seconds
    later. All sends are treated as large ones, as small ones are released later."""
    held: dict[int, int] = {}
    most, until = 0, time.monotonic() + 20
    send, perform = P2PTransport.send, Executor._perform

    def noting(transport: P2PTransport, action: Any, tensors: Any) -> None:
        for storage in (tensor.untyped_storage() for tensor in tensors if tensor is not None):
            held[storage._cdata] = storage.nbytes()
            weakref.finalize(storage, held.pop, storage._cdata)
        send(transport, action, tensors)

    def waiting(executor: Executor, *action: Any) -> None:
        nonlocal most
        while held and time.monotonic() < until:
            time.sleep(1e-3)
        most = max(most, sum(held.values()))
        perform(executor, *action)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(P2PTransport, "send", noting)
        patch.setattr(Executor, "_perform", waiting)
        patch.setattr(link, "_SMALL_BYTES", 0)
        train_as(rank, case)
    return most


SENT: list[Work] = []


def send_two() -> list[bool]:
    """Nobody receives them yet; the second has not even begun."""
    edge = LINKS[2][Kind.F, 0, 1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(link, "_SMALL_BYTES", 0)
        SENT.extend((*edge.send([torch.ones(3)]), *edge.send([torch.ones(3)])))
    for sending in SENT:
        with pytest.raises(RuntimeError, match=r"received for 0\.1 s"):
            sending.wait(timedelta(seconds=0.1))
    return [sending.is_completed() for sending in SENT]


def receive_two() -> None:
    for work in [work for _ in range(2) for work in LINKS[2][Kind.F, 0, 1].receive([torch.zeros(3)])]:
        work.wait()


def await_two() -> list[bool]:
    for sending in SENT:
        sending.wait()
    return [sending.is_completed() for sending in SENT]
