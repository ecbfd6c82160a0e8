"""Sends between processes over Gloo: their memory, and how long they are waited for."""

from collections.abc import Iterator

import pytest
from engine_runs import Case, Pool
from send_runs import await_two, bytes_still_held, receive_two, send_two


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    pool = Pool(2)
    yield pool
    pool.close()


@pytest.mark.parametrize("recompute", ["always", "never"])
def test_what_is_sent_takes_no_memory_any_more(recompute: str, pool: Pool) -> None:
    """As planned. All 8 outputs and gradients were held to the end of the step, half as much again where only inputs
    are kept."""
    case = Case(model="plain", partitions=2, micro_batches=8, recompute=recompute, samples=(16,))
    answers = [process.submit(bytes_still_held, rank, case) for rank, process in enumerate(pool.processes)]
    assert [answer.result(60) for answer in answers] == [0, 0]


def test_a_send_is_waited_for_no_longer_than_asked(pool: Pool) -> None:
    sender, receiver = pool.processes
    assert sender.submit(send_two).result(60) == [False, False]
    receiver.submit(receive_two).result(60)
    assert sender.submit(await_two).result(60) == [True, True]
