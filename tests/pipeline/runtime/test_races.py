"""No two streams use the same memory without an order: what a sanitizer would find on GPUs, found on a CPU.

The apparatus is in vector_clocks.py; each planted fault shows that it finds what it is to find.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch
import vector_clocks
from engine_runs import MODELS, Case, CrossEntropy, build_stages, costs_of, covering, data
from vector_clocks import Event, Message, Stream, WatchedGroup, WatchedLink, Work, World

from gpipe_cli.data.micro_batches import micro_batch_sizes
from gpipe_cli.pipeline.runtime import deferred_batch_norm, replicas, transport
from gpipe_cli.pipeline.runtime.executor import Executor
from gpipe_cli.pipeline.runtime.link import Edge, Links
from gpipe_cli.pipeline.runtime.p2p_transport import Boundaries, P2PTransport
from gpipe_cli.pipeline.runtime.replicas import Replicas
from gpipe_cli.pipeline.runtime.transport import LocalTransport
from gpipe_cli.pipeline.schedule.named_schedules import SCHEDULES, build, forward_only
from gpipe_cli.pipeline.schedule.schedule import RECOMPUTE, Kind, Schedule
from gpipe_cli.system.accelerator import to_device, to_host
from gpipe_cli.training.checkpoint.background_writer import Snapshot


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()  # without the cache, whose key has a tensor's device: there is only one here
    monkeypatch.setattr(deferred_batch_norm, "_values_of_channels", deferred_batch_norm._values_of_channels.__wrapped__)
    world.install(monkeypatch)
    return world


def train(
    world: World, case: Case, devices: Sequence[torch.device], here: Sequence[int], transport: Any,
    sums: Replicas | None = None, empty: bool = False,
) -> None:  # fmt: skip
    """Two steps of different sizes, then an evaluation, of the stages `here`; `empty`: no samples in the second."""
    model, costs = MODELS[case.model](), costs_of(case.model, case.frozen)
    balance = case.balance or micro_batch_sizes(len(model), case.partitions)
    stages = {}
    for k in here:
        stages |= build_stages(model, costs, balance, here=[k], device=devices[k])
        world.place([*stages[k].module.parameters(), *stages[k].module.buffers()], devices[k].index)
    executor = Executor(stages, [device.index for device in devices], transport)
    with world.watching(devices[here[0]].index):
        for step, samples in enumerate((*case.samples, case.samples[0])):
            trains = step < len(case.samples)
            samples = 0 if empty and step == 1 else samples
            sizes = micro_batch_sizes(samples, case.micro_batches) if samples else ()
            order = Schedule(((),) * case.partitions)
            if sizes:
                order = build(case.schedule, case.partitions, len(sizes), case.recompute, case.processes)
            images, targets = data(case, min(step, 1) if trains else 0)
            world.place([images], devices[0].index)
            world.place([targets], devices[-1].index)
            for stage in stages.values():
                stage.set_training(trains)
            executor.run(
                order if trains else forward_only(case.partitions, len(sizes)), step, sizes,
                (images,) if 0 in stages and sizes else None,
                CrossEntropy(targets.split(sizes), samples) if case.partitions - 1 in stages and sizes else None,
                replicas=sums if trains else None,
            )  # fmt: skip
            if sums is not None and trains:
                sums.finish()
            for stage in stages.values():
                with torch.no_grad():
                    for parameter in stage.module.parameters():
                        if parameter.grad is not None:
                            parameter -= 0.1 * parameter.grad
                            parameter.grad = None
        executor.settle()
    world.ended.update(devices[k].index for k in here)


def in_one_process(world: World, case: Case, devices: int) -> None:
    places = [torch.device("cpu", stage % devices) for stage in range(case.partitions)]
    train(world, case, places, range(case.partitions), LocalTransport(places))


def in_processes(world: World, case: Case) -> None:
    """Each process is a thread with a device of its own."""
    of_stage, costs = case.process_of_stage, costs_of(case.model, case.frozen)
    balance = case.balance or micro_batch_sizes(len(MODELS[case.model]()), case.partitions)
    boundaries = [costs[end - 1].outputs for end in accumulate(balance[:-1])]
    places = [torch.device("cpu", process) for process in of_stage]
    forward = [(Kind.F, stage, stage + 1) for stage in range(case.partitions - 1)]
    edges = [*forward, *((Kind.B, receiver, sender) for _, sender, receiver in forward)]
    messages: dict[Edge, deque[Message]] = {(kind, receiver): deque() for kind, _, receiver in edges}
    failed: list[BaseException] = []

    def process(number: int) -> None:
        try:
            links: dict[Edge, Any] = {}
            for kind, sender, receiver in edges:
                ends, edge = (of_stage[sender], of_stage[receiver]), (kind, receiver)
                if number in ends and ends[0] != ends[1]:
                    links[edge] = WatchedLink(world, messages[edge], number, edge, ends[ends[0] == number])
            world.here.home = number
            device = torch.device("cpu", number)
            moves = P2PTransport(number, of_stage, Links(links, 20, 20), Boundaries(boundaries, boundaries), device)
            here = [stage for stage, owner in enumerate(of_stage) if owner == number]
            train(world, case, places, here, moves)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=process, args=(number,)) for number in range(case.processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def in_replicas(world: World, case: Case, size: int) -> None:
    """Each replica is a thread with a device of its own. The last one has no samples in the second step."""
    calls: dict[int, dict[int, Any]] = {}
    failed: list[BaseException] = []

    def pipeline(rank: int) -> None:
        try:
            places = [torch.device("cpu", rank)] * case.partitions
            group: Any = WatchedGroup(world, calls, rank, size, rank)
            moves, sums = LocalTransport(places), Replicas({torch.device("cpu"): group}, size)
            train(world, case, places, range(case.partitions), moves, sums, empty=rank == size - 1)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=pipeline, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


CASES = [
    Case(samples=(7, 10), **row)
    for row in covering(
        schedule=[*SCHEDULES], recompute=[*RECOMPUTE], partitions=[2, 3, 4], micro_batches=[1, 3, 4],
        stages_per_process=[1, 2],
    )
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.schedule} {case.recompute} K={case.partitions}")
def test_steps_have_no_races(case: Case, world: World) -> None:
    """Layers hand on their input, and one tensor twice; buffers grow, and are used by several micro-batches."""
    if case.stages_per_process == 1 and case.schedule != "interleaved":
        in_one_process(world, case, 2)
    if case.processes > 1:
        in_processes(world, case)
    assert world.races == []


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_sums_over_replicas_have_no_races(schedule: str, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """With several buckets for a stage, some of which are sent while others still get gradients."""
    monkeypatch.setattr(replicas, "_BUCKET_BYTES", 500)
    in_replicas(world, Case(partitions=3, micro_batches=2, schedule=schedule, samples=(7, 10)), 3)
    assert world.races == []


def test_checkpoints_and_copies_have_no_races(world: World) -> None:
    copied_and_written(world)
    assert world.races == []


def copied_and_written(world: World, arrives: bool = True) -> None:
    """A step reads its numbers, and a checkpoint is written in a thread while the next step changes the weights."""
    weight, snapshot = torch.ones(4, 4), Snapshot()
    world.place([weight], 0)
    with world.watching():
        for _ in range(2):
            images = to_device(torch.ones(4, 4), torch.device("cpu", 0))
            read = to_host(weight @ images)
            copies, arrived = snapshot.take({"weight": weight})
            weight += 1

            def write(copies: Any, arrived: Callable[[], None], done: list[vector_clocks.Clock]) -> None:
                if arrives:
                    arrived()
                world.host_reads(*copies.values())
                done.append(dict(world.here.clock))

            done: list[vector_clocks.Clock] = []
            thread = threading.Thread(target=write, args=(copies, arrived, done))
            thread.start()
            world.host_reads(read())
            thread.join()
            vector_clocks.merge(world.here.clock, done[0])  # the next snapshot waits for the thread


def without_wait(self: LocalTransport, action: Any) -> Any:
    return self._sent.pop(replace(action, kind=action.kind.direction) if False else type(action)(
        action.kind.direction, action.stage, action.micro_batch))  # fmt: skip


def waits_on_host_only(self: Work, *timeout: object) -> None:
    self.clock()


def forgets_readers(self: P2PTransport) -> None:
    self._launched += 1
    self._ends[self._launched] = Event(self._receiving.world)  # type: ignore[union-attr, assignment]
    self._post()


def reads_early(self: Replicas) -> None:
    for bucket in self._buckets:
        bucket.received += 1
    FINISH(self)


FINISH = Replicas.finish


def nothing(*given: object) -> None:
    pass


PLANTED: dict[str, tuple[Any, str, Any, str]] = {
    "a receive between devices does not wait for the copy": (LocalTransport, "receive", without_wait, "local"),
    "a sent tensor's memory is not kept for the copy": (transport, "keep_for", nothing, "local"),
    "a receive does not wait for the last reader of its buffer": (P2PTransport, "launched", forgets_readers, "p2p"),
    "a buffer is overwritten while its content is sent on": (P2PTransport, "_let_leave", nothing, "p2p"),
    "a stream does not wait for a receive": (Work, "wait", waits_on_host_only, "p2p"),
    "receives of a step do not wait for the step before": (Stream, "wait_stream", nothing, "p2p"),
    "gradients are summed before they have come": (Replicas, "finish", reads_early, "sums"),
    "a thread writes a checkpoint that has not arrived": (None, "", None, "written"),
    "the host reads what has not arrived": (Event, "synchronize", nothing, "copied"),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_race_is_found(fault: str, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, instead, where = PLANTED[fault]
    if owner is not None:
        monkeypatch.setattr(owner, name, instead)
    case = Case(partitions=4, micro_batches=4, schedule="1f1b", samples=(7, 10))
    match where:
        case "local":
            in_one_process(world, case, 2)
        case "p2p":
            in_processes(world, replace(case, recompute="always"))
        case "sums":
            in_replicas(world, case, 2)
        case _:
            copied_and_written(world, arrives=where != "written")
    assert world.races, "it was not found"
    print(f"{fault}: {world.races[0]}")
