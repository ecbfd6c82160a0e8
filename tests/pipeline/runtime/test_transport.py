"""What a transport does when a neighbour has died, or a step has failed."""

import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_runs import CPU, fork_server, neighbour

from gpipe_cli.pipeline.runtime.transport import LocalTransport, PeerLostError
from gpipe_cli.pipeline.schedule.orders import build
from gpipe_cli.pipeline.schedule.schedules import Action, Kind


@pytest.fixture
def neighbours(tmp_path: Path) -> Iterator[list[Connection]]:
    context = fork_server()
    processes, connections = [], []
    for rank in range(2):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=neighbour, args=(rank, tmp_path, theirs), daemon=True))
        processes[-1].start()
        theirs.close()
        connections.append(ours)
    yield connections
    for process in processes:
        process.kill()
        process.join()


def answer(connection: Connection) -> Any:
    assert connection.poll(30), "no answer"
    return connection.recv()


def test_a_peer_that_dies_ends_every_wait(neighbours: list[Connection]) -> None:
    """Long before the timeout of two minutes, and whatever was waited for, as the same kind of error: a consequence and
    not a cause."""
    first, second = neighbours
    assert answer(first) == "waiting"
    second.send("die")
    began = time.monotonic()
    for _ in ("gradient", "gather", "barrier", "collect"):
        error = answer(first)
        assert isinstance(error, PeerLostError), error
    assert time.monotonic() - began < 30


def test_what_is_never_received_inside_a_process_is_noticed_and_forgotten_with_the_step() -> None:
    transport = LocalTransport([CPU, CPU])
    transport.begin_step(build("gpipe", 2, 2, "never"), (3, 2))
    transport.send(Action(Kind.F, 0, 0), (torch.ones(3, 2),))
    with pytest.raises(AssertionError, match="never received"):
        transport.finish_step()
    transport.begin_step(build("gpipe", 2, 2, "never"), (3, 2))
    transport.finish_step()
