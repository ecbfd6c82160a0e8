"""No two streams use the same memory without an order: what a sanitizer would find on GPUs, found on a CPU.

The apparatus is in vector_clocks.py; each planted fault shows that it finds what it is to find.
"""

import re
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import accumulate, islice
from typing import Any

import pytest
import torch
import vector_clocks
from engine_runs import MODELS, Case, CrossEntropy, build_stages, costs_of, covering, data, local_transport
from vector_clocks import Event, Message, WatchedGroup, WatchedLink, Work, World

from gpipe_cli.assembly.optimizer import clip_gradients, gradient_norms, gradients_of
from gpipe_cli.data.micro_batches import micro_batch_sizes
from gpipe_cli.pipeline.runtime import deferred_batch_norm, p2p_transport, replicas, transport
from gpipe_cli.pipeline.runtime.boundary import Boundary
from gpipe_cli.pipeline.runtime.executor import Executor
from gpipe_cli.pipeline.runtime.link import Edge, Links
from gpipe_cli.pipeline.runtime.p2p_transport import P2PTransport
from gpipe_cli.pipeline.runtime.replicas import Replicas
from gpipe_cli.pipeline.runtime.routes import Boundaries, routes
from gpipe_cli.pipeline.runtime.step_timings import StreamClock
from gpipe_cli.pipeline.runtime.tied_weights import TiedWeights, find_ties, stages_of, trained_parameters
from gpipe_cli.pipeline.runtime.transport import LocalTransport
from gpipe_cli.schedule import prefetched_receives
from gpipe_cli.schedule.named_schedules import SCHEDULES, build, forward_only
from gpipe_cli.schedule.schedule import RECOMPUTE_MODES, Action, Kind, Schedule
from gpipe_cli.system.accelerator import copy_to_host_async, to_device
from gpipe_cli.training.checkpoint.background_writer import Snapshot


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()  # without the cache, whose key has a tensor's device: there is only one here
    monkeypatch.setattr(deferred_batch_norm, "_values_of_channels", deferred_batch_norm._values_of_channels.__wrapped__)
    uncached = prefetched_receives.prefetched_receives.__wrapped__  # a planted fault must not stay in the cache
    monkeypatch.setattr(p2p_transport, "prefetched_receives", uncached)
    world.install(monkeypatch)
    return world


# Of which size, and whether it trains. No gradient comes back from an evaluation, so only the streams here order its
# reads before the receives of the next step.
RUNS = (0, True), (1, True), (0, False), (0, True)


def train(
    world: World, case: Case, devices: Sequence[torch.device], here: Sequence[int], transport: Any,
    sums: Replicas | None = None, empty: bool = False,
) -> None:  # fmt: skip
    """Steps of different sizes with an evaluation between, of the stages `here`; `empty`: no samples in the second."""
    model, costs = MODELS[case.model](), costs_of(case.model, case.frozen)
    balance, ties = case.balance or micro_batch_sizes(len(model), case.partitions), find_ties(model)
    stages, optimizers = {}, {}
    for k in here:
        stages |= build_stages(model, costs, balance, here=[k], device=devices[k])
        world.place([*stages[k].module.parameters(), *stages[k].module.buffers()], devices[k].index)
        own = trained_parameters(stages[k].module, ties).values()
        optimizers[k] = torch.optim.SGD(own, 0.1, momentum=0.9, foreach=True)
    layers = iter(dict(model.named_children()))
    of_uses = stages_of(ties, [[*islice(layers, size)] for size in balance])
    tied = TiedWeights(ties, of_uses, stages, rank_of_stage=[0] * case.partitions)
    executor = Executor(stages, [device.index for device in devices], transport)
    batches = [data(case, size) for size, _ in RUNS]
    homes = {devices[k].index for k in here}
    with world.watching(homes.pop() if len(homes) == 1 else None):
        for step, (size, trains) in enumerate(RUNS):
            samples = 0 if empty and size == 1 else case.samples[size]
            sizes = micro_batch_sizes(samples, case.micro_batches) if samples else ()
            order = Schedule(((),) * case.partitions)
            if sizes:
                order = build(case.schedule, case.partitions, len(sizes), case.recompute, case.processes)
            images, targets = batches[step]
            inputs = (to_device(images, devices[0]),) if 0 in stages and sizes else None
            objective = None
            if case.partitions - 1 in stages and sizes:
                objective = CrossEntropy(to_device(targets, devices[-1]).split(sizes), samples)
            for stage in stages.values():
                stage.set_training(trains)
            executor.run(
                order if trains else forward_only(case.partitions, len(sizes)), step, sizes, inputs, objective,
                replicas=sums if trains else None,
            )  # fmt: skip
            if sums is not None and trains:
                sums.finish()
            if trains:
                tied.sum_gradients()
            for k, stage in stages.items() if trains else ():
                gradients = gradients_of(stage.module.parameters())
                norms = gradient_norms(gradients)
                read = (
                    copy_to_host_async(norms) if world.here.home is not None else None
                )  # else it asks for a stream of another
                clip_gradients(gradients, norms, 1.0)
                del gradients
                optimizers[k].step()
                optimizers[k].zero_grad(set_to_none=True)
                if read is not None:
                    world.host_reads(read())
        executor.drain_sends()
    world.ended.update(devices[k].index for k in here)


def in_one_process(world: World, case: Case) -> None:
    """With a device for each stage, or for several stages."""
    places = [torch.device("cpu", device) for device in case.rank_of_stage]
    boundaries = boundaries_of(case)
    moves = LocalTransport(places, Boundaries(boundaries, boundaries))
    train(world, case, places, range(case.partitions), moves)


def boundaries_of(case: Case) -> list[Boundary]:
    balance = case.balance or micro_batch_sizes(len(MODELS[case.model]()), case.partitions)
    return [costs_of(case.model, case.frozen)[end - 1].outputs for end in accumulate(balance[:-1])]


def in_threads(work: Callable[[int], None], number: int) -> None:
    """Do `work` in that many threads, each with its index. Raises what one of them raises."""
    with ThreadPoolExecutor(number) as pool:
        for done in [pool.submit(work, index) for index in range(number)]:
            done.result()


def in_processes(world: World, case: Case, of_stage: tuple[int, ...] = ()) -> None:
    """Each process is a thread with its device; `of_stage`: the process of each stage, if not the case's."""
    of_stage, boundaries = of_stage or case.rank_of_stage, boundaries_of(case)
    places = [torch.device("cpu", process) for process in of_stage]
    forward = [(Kind.F, route.sender, route.receiver) for route in routes(boundaries)]
    edges: list[Edge] = [*forward, *((Kind.B, receiver, sender) for _, sender, receiver in forward)]
    messages: dict[Edge, deque[Message]] = {edge: deque() for edge in edges}

    def process(number: int) -> None:
        links: dict[Edge, Any] = {}
        for edge in edges:
            _, sender, receiver = edge
            ends = of_stage[sender], of_stage[receiver]
            if number in ends and ends[0] != ends[1]:
                links[edge] = WatchedLink(world, messages[edge], number, edge, ends[ends[0] == number])
        device = torch.device("cpu", number)
        moves = P2PTransport(number, of_stage, Links(links, 20, 20), Boundaries(boundaries, boundaries), device)
        here = [stage for stage, owner in enumerate(of_stage) if owner == number]
        train(world, case, places, here, moves)

    in_threads(process, case.processes)


def in_replicas(world: World, case: Case, size: int) -> None:
    """Each replica is a thread with its device. The last one has no samples in the second step."""
    calls: dict[int, dict[int, Any]] = {}
    boundaries = Boundaries(boundaries_of(case), boundaries_of(case))

    def pipeline(rank: int) -> None:
        places = [torch.device("cpu", rank)] * case.partitions
        group: Any = WatchedGroup(world, calls, rank, size, rank)
        moves, sums = LocalTransport(places, boundaries), Replicas({torch.device("cpu"): group}, size)
        train(world, case, places, range(case.partitions), moves, sums, empty=rank == size - 1)

    in_threads(pipeline, size)


PAIRS = Case(partitions=4, micro_batches=4, stages_per_process=2, samples=(7, 10))
CASES = covering(
    schedule=[*SCHEDULES], recompute=[*RECOMPUTE_MODES], partitions=[2, 3, 4], micro_batches=[1, 3, 4],
    stages_per_process=[1, 2], run=[in_one_process, in_processes],
)  # fmt: skip


@pytest.mark.parametrize("row", CASES, ids=lambda row: f"{row['run'].__name__} {row['schedule']} {row['recompute']}")
def test_steps_have_no_races(row: dict[str, Any], world: World) -> None:
    """Between devices, and between processes, whose buffers grow and are used by several micro-batches. Layers hand on
    their input, and one tensor twice."""
    run, case = row["run"], Case(samples=(7, 10), **{name: row[name] for name in row if name != "run"})
    run(world, case)
    assert world.races == []


@pytest.mark.parametrize("number", range(len(SCHEDULES)))
def test_skips_have_no_races(number: int, world: World) -> None:
    """Skips of images and of a tensor that goes on as well, between devices and between processes, each of which has
    one stage or two."""
    settings = {"model": "skipping", "schedule": [*SCHEDULES][number], "recompute": "except_last"}
    for run, each in ((in_one_process, 1 + number % 2), (in_processes, 2 - number % 2)):
        run(world, Case(**settings, partitions=4, stages_per_process=each))
    assert world.races == []


@pytest.mark.parametrize("schedule", ["gpipe", "zero_bubble"])
def test_tied_weights_have_no_races(schedule: str, world: World) -> None:
    """The gradients of three layers on three devices are added on one of them, and the sum goes to all."""
    in_one_process(world, Case(model="tied", schedule=schedule, partitions=4, balance=(1, 2, 1, 2), recompute="always"))
    assert world.races == []


@pytest.mark.parametrize("of_stage", [(0, 0, 1, 1), (0, 1, 1, 0)], ids=["neighbours", "v"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble"])
def test_steps_of_neighbours_have_no_races(schedule: str, of_stage: tuple[int, ...], world: World) -> None:
    """A stage hands a part of its receive buffer on to the next stage of the same process; in a V that one sends it on
    to the process that it came from."""
    in_processes(world, replace(PAIRS, schedule=schedule), of_stage)
    assert world.races == []


@pytest.mark.parametrize(("schedule", "model"), [("1f1b", "tricky"), ("zero_bubble", "tricky"), ("1f1b", "plain")])
def test_sums_over_replicas_have_no_races(
    schedule: str, model: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With several buckets for a stage, some of which are sent while others still get gradients. Without batch norms,
    whose sums come last in the group, nothing else waits for the gradients."""
    monkeypatch.setattr(replicas, "_BUCKET_BYTES", 500)
    in_replicas(world, Case(model=model, partitions=3, micro_batches=2, schedule=schedule, samples=(7, 10)), 3)
    assert world.races == []


def test_recordings_have_no_races(world: World) -> None:
    recorded(world)
    assert world.races == []


def recorded(world: World) -> None:
    """The marks of a step are read when the next one has run, as a training does."""
    case, place, sizes = Case(model="plain", partitions=2), torch.device("cpu", 0), (4, 3)
    stages = build_stages(MODELS["plain"](), costs_of("plain", case.frozen), (3, 2), here=(0, 1), device=place)
    for stage in stages.values():
        world.place(stage.module.parameters(), 0)
    executor = Executor(stages, [0, 0], local_transport(stages))
    batches = [data(replace(case, samples=(sum(sizes),)), 0) for _ in range(3)]
    before, at_once = None, dict[int, list[float]]()
    with world.watching(0):
        for step, batch in enumerate(batches):
            images, targets = (to_device(tensor, place) for tensor in batch)
            objective = CrossEntropy(targets.split(sizes), sum(sizes))
            timings = executor.run(build("1f1b", 2, 2, "never", 1), step, sizes, (images,), objective)
            if before is not None and before.seconds() != at_once:
                world.races.append("marks have been made again before they are read")
            races, known = len(world.races), dict(world.here.clock)
            before, at_once = timings, timings.seconds()
            world.here.clock = known  # as if this reading, which waits for the device, had not been
            del world.races[races:]


def test_checkpoints_and_copies_have_no_races(world: World) -> None:
    copied_and_written(world)
    assert world.races == []


def copied_and_written(world: World, waits: bool = True) -> None:
    """A step reads its numbers, and a checkpoint is written in a thread while the next step changes the weights. The
    next checkpoint `waits` for that thread."""
    weight, snapshot = torch.ones(4, 4), Snapshot()
    world.place([weight], 0)
    with world.watching(0):
        for turn in range(3):
            images = to_device(torch.ones(4, 4), torch.device("cpu", 0))
            read = copy_to_host_async(weight @ images)
            copies, wait_for_copies = snapshot.copy_to_host({"weight": weight})
            weight += 1

            def write(copies: Any, wait_for_copies: Callable[[], None], done: list[vector_clocks.Clock]) -> None:
                wait_for_copies()
                world.host_reads(*copies.values())
                done.append(dict(world.here.clock))

            done: list[vector_clocks.Clock] = []
            thread = threading.Thread(target=write, args=(copies, wait_for_copies, done))
            thread.start()
            world.host_reads(read())
            thread.join()
            if waits or turn == 0:
                vector_clocks.merge(world.here.clock, done[0])


def nothing(*given: object) -> None:
    pass


def without_wait(self: LocalTransport, action: Action, sender: int) -> Any:
    return self._sent.pop((Action(action.kind.direction, action.stage, action.micro_batch), sender))


def keeps_copies_only(tensor: torch.Tensor, stream: Any) -> None:
    if stream.name.startswith("compute"):
        stream.world.record_use(tensor, stream)


def keeps_sources_only(tensor: torch.Tensor, stream: Any) -> None:
    if not stream.name.startswith("compute"):
        stream.world.record_use(tensor, stream)


def waits_on_host_only(self: Work, *timeout: object) -> None:
    self.clock()


def forgets_readers(self: P2PTransport) -> None:
    self._launched += 1
    self._ends[self._launched] = Event(self._receiving.world)  # type: ignore[union-attr, assignment]
    self._post()


def begins_at_once(self: P2PTransport, *given: Any) -> None:
    self._receiving.wait_stream = nothing  # type: ignore[union-attr, method-assign]
    BEGIN_STEP(self, *given)


def drops_what_it_sends(self: P2PTransport, *given: Any) -> None:
    SEND(self, *given)
    self._sends = deque(([], works) for _, works in self._sends)


def sums_early(self: Replicas) -> None:
    for bucket in self._buckets:
        bucket.received += 1
    FINISH(self)


def drops_what_it_receives(self: Replicas) -> None:
    BEGIN(self)
    for bucket in self._buckets:
        if bucket.buffer is not None:
            bucket.received = torch.empty_like(bucket.buffer)


def arrives_at_once(self: Snapshot, tensors: Any) -> Any:
    return TAKE(self, tensors)[0], nothing


def reaches_no_neighbour(receiver: Action, *others: Any) -> set[tuple[int, int]]:
    return {(receiver.stage, receiver.micro_batch)}


def reuses_events(self: StreamClock) -> None:
    BEGIN_CLOCK(self)
    self._events, self._events_before = self._events_before, self._events


def synchronizes_in_threads(self: Event) -> None:
    if threading.current_thread() is not threading.main_thread():
        SYNCHRONIZE(self)


BEGIN_STEP, SEND, FINISH, BEGIN = (
    P2PTransport.begin_step,
    P2PTransport.send,
    Replicas.finish,
    Replicas._launch_ready_sums,
)
TAKE, SYNCHRONIZE, BEGIN_CLOCK = Snapshot.copy_to_host, Event.synchronize, StreamClock.begin_step

# The fault: whose method is replaced, by what; what runs; and which race is to be found, as there may be others.
PLANTED: dict[str, tuple[Any, str, Any, str, str]] = {
    "a receive between devices does not wait for the copy":
        (LocalTransport, "receive_from", without_wait, "local", r"compute .* reads .* that aten::_to_copy has written"),
    "a sent tensor's memory is not kept for the copy":
        (transport, "record_use", keeps_copies_only, "local", r"of compute .* is freed while aten::_to_copy uses it"),
    "a copy's memory is not kept for the stage that reads it":
        (transport, "record_use", keeps_sources_only, "local", r"of stream .* is freed while .* uses it on compute"),
    "a receive does not wait for the last reader of its buffer":
        (P2PTransport, "after_action", forgets_readers, "p2p", r"^receive .* writes .* has read on compute"),
    "a buffer is overwritten while its content is sent on":
        (P2PTransport, "_wait_for_aliasing_sends", nothing, "p2p", r"^receive .* writes .* that send has read on link"),
    "what is sent is dropped before it has left":
        (P2PTransport, "send", drops_what_it_sends, "p2p", r"of compute .* is freed while send uses it on link"),
    "a stream does not wait for a receive":
        (Work, "wait", waits_on_host_only, "p2p", r"compute .* reads .* that receive has written on link"),
    "receives of a step do not wait for the step before":
        (P2PTransport, "begin_step", begins_at_once, "p2p", r"^receive .* writes .* has read on compute"),
    "gradients are summed before they have come":
        (Replicas, "finish", sums_early, "sums", r"compute .* writes .* that sum has written on replicas"),
    "a stream does not wait for sums":
        (Work, "wait", waits_on_host_only, "sums", r"compute .* reads .* that sum has written on replicas"),
    "a receive does not wait for the neighbour to which its buffer is sent":
        (prefetched_receives, "_readers_of", reaches_no_neighbour, "neighbours", r" reads .* that receive has written"),
    "the host reads marks that have not come":
        (Event, "synchronize", nothing, "recorded", r"^the host reads the time of an event"),
    "marks are made again before they are read":
        (StreamClock, "begin_step", reuses_events, "recorded", r"^marks have been made again"),
    "a buffer is dropped before its sums have come":
        (Replicas, "_launch_ready_sums", drops_what_it_receives, "sums", r"of compute .* is freed while sum uses it"),
    "a thread writes a checkpoint that has not arrived":
        (Snapshot, "copy_to_host", arrives_at_once, "copied", r"^the host .* reads .* that aten::copy_ has written"),
    "a checkpoint is overwritten while it is written":
        (None, "", None, "overwritten", r"^aten::copy_ .* writes .* that the host has read on thread"),
    "the host reads what has not arrived":
        (Event, "synchronize", synchronizes_in_threads, "copied", r"^the host .* reads .* \(4, 4\) that aten::clone"),
}  # fmt: skip


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_race_is_found(fault: str, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, instead, where, expected = PLANTED[fault]
    if owner is not None:
        monkeypatch.setattr(owner, name, instead)
    case = Case(partitions=4, micro_batches=4, schedule="1f1b", samples=(7, 10))
    match where:
        case "local":
            in_one_process(world, replace(case, stages_per_process=2))
        case "p2p":
            in_processes(world, replace(case, recompute="always"))
        case "sums":  # without batch norms, whose sums wait for all others
            in_replicas(world, replace(case, model="plain", partitions=3), 2)
        case "neighbours":
            in_processes(world, PAIRS, (0, 0, 1, 1))
        case "recorded":
            recorded(world)
        case _:
            copied_and_written(world, waits=where != "overwritten")
    found = [race for race in world.races if re.search(expected, race)]
    assert found, world.races[:5] or "no race was found"
    print(f"{fault}: {found[0]}")
