"""Sends between processes over Gloo: their memory, and how long they are waited for."""

import time
import weakref
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from engine_runs import LINKS, Case, Pool, train_as

from gpipe_cli.pipeline.runtime.executor import Executor
from gpipe_cli.pipeline.runtime.link import Work
from gpipe_cli.pipeline.runtime.p2p_transport import P2PTransport
from gpipe_cli.schedule.schedule import Kind


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    pool = Pool(2)
    yield pool
    pool.close()


def bytes_still_held(rank: int, case: Case) -> int:
    """Train on the stages of a process; returns the bytes that it had sent and still held as an action began, seconds
    later."""
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
        train_as(rank, case)
    return most


@pytest.mark.parametrize("recompute", ["always", "never"])
def test_what_is_sent_takes_no_memory_any_more(recompute: str, pool: Pool) -> None:
    """As planned. All 8 outputs and gradients were held to the end of the step, half as much again where only inputs
    are kept."""
    case = Case(model="plain", partitions=2, micro_batches=8, recompute=recompute, samples=(16,))
    answers = [process.submit(bytes_still_held, rank, case) for rank, process in enumerate(pool.processes)]
    assert [answer.result(60) for answer in answers] == [0, 0]


SENT: list[Work] = []


def send_two() -> list[bool]:
    """Nobody receives them yet; the second has not even begun."""
    link = LINKS[2][Kind.F, 0, 1]
    SENT.extend((*link.send([torch.ones(3)]), *link.send([torch.ones(3)])))
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


def test_a_send_is_waited_for_no_longer_than_asked(pool: Pool) -> None:
    sender, receiver = pool.processes
    assert sender.submit(send_two).result(60) == [False, False]
    receiver.submit(receive_two).result(60)
    assert sender.submit(await_two).result(60) == [True, True]
