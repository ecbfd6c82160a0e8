"""What neighbours tell each other, and that a dead one ends the wait."""

import multiprocessing
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from transport_runs import CPU, SIZES, TIMEOUT, activation, neighbour

from gpipe_cli.pipeline.runtime.transport import LocalTransport, PeerLostError
from gpipe_cli.pipeline.schedule.schedules import Action, Kind, build


@pytest.fixture
def start(tmp_path: Path) -> Iterator[object]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "torch.utils.flop_counter", "transport_runs"])
    processes = []

    def launch(how: str) -> list[Connection]:
        connections = []
        for rank in range(2):
            ours, theirs = context.Pipe()
            processes.append(context.Process(target=neighbour, args=(rank, how, tmp_path, theirs), daemon=True))
            processes[-1].start()
            theirs.close()
            connections.append(ours)
        return connections

    yield launch
    for process in processes:
        process.kill()
        process.join()


def hear(connection: Connection) -> object:
    assert connection.poll(30), "no answer"
    return connection.recv()


def test_tensors_arrive_with_their_values_dtypes_and_layout(start) -> None:  # type: ignore[no-untyped-def]
    first, _ = start("well")
    assert hear(first) == "waiting"
    gradients = hear(first)
    assert isinstance(gradients, list), gradients
    for m, gradient in zip((1, 0), gradients, strict=True):
        assert torch.equal(torch.from_numpy(gradient), -activation(m)[0])


@pytest.mark.parametrize("how", ["gradient", "gather", "barrier", "collect"])
def test_a_peer_that_dies_ends_the_wait(how: str, start) -> None:  # type: ignore[no-untyped-def]
    """Not after the timeout of two minutes, and always as the same kind of error: a consequence and not a cause."""
    first, second = start(how)
    assert hear(first) == "waiting"
    second.send("die")
    began = time.monotonic()
    answer = hear(first)
    assert isinstance(answer, PeerLostError), answer
    assert time.monotonic() - began < TIMEOUT / 4


def test_handing_over_inside_a_process() -> None:
    transport = LocalTransport([CPU, CPU])
    transport.begin_step(build("gpipe", 2, 2, "never"), SIZES)
    outputs = torch.ones(3, 2, requires_grad=True) * 2, torch.arange(3)
    transport.send(Action(Kind.F, 0, 1), outputs)
    image, mask = transport.receive(Action(Kind.F, 1, 1))
    assert not image.requires_grad
    assert image.data_ptr() == outputs[0].data_ptr(), "copied"
    assert torch.equal(mask, outputs[1])
    transport.send(Action(Kind.B, 1, 1), (image, None))
    assert transport.receive(Action(Kind.B, 0, 1))[1] is None
    transport.finish_step()
    transport.settle()
    transport.send(Action(Kind.F, 0, 0), outputs)
    with pytest.raises(AssertionError, match="never received"):
        transport.finish_step()
    transport.begin_step(build("gpipe", 2, 2, "never"), SIZES)
    transport.finish_step()
