"""A simulated device that serves links under NCCL's rule of order: a training's executor runs on it stages that compute
nothing, and either ends or is stuck.

The rule: operations of a process in one process group run one after another, and a send ends only when its receive
runs. There is a group for each edge and direction. Receives are posted in the order of
`schedule/prefetched_receives.py`, as on GPUs, or early, as on CPUs. Kernels are launched immediately or, as when a
kernel is first used, each when the device is idle.
"""

import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import product
from typing import Any

import torch

from gpipe_cli.pipeline.runtime.boundary import BoundaryTensor, Tensors
from gpipe_cli.pipeline.runtime.deferred_batch_norm import AllGather
from gpipe_cli.pipeline.runtime.executor import Executor
from gpipe_cli.pipeline.runtime.link import Edge, Links
from gpipe_cli.pipeline.runtime.p2p_transport import P2PTransport
from gpipe_cli.pipeline.runtime.replicas import Replicas
from gpipe_cli.pipeline.runtime.routes import Boundaries, routes
from gpipe_cli.schedule.schedule import Action, Kind, Schedule

CPU = torch.device("cpu")
BOUNDARY = (BoundaryTensor((1,), (0,), torch.float32, True),)


class StuckError(RuntimeError):
    """Every process waits, and nothing can move."""


@dataclass(eq=False)
class Operation:
    """A send, a receive or a collective in the queue that a process has for a group."""

    what: Any  # the same for all that must meet: edge and number of the message
    tensors: Sequence[torch.Tensor]
    members: tuple[int, ...]  # the processes that must meet
    device: "Device"
    sends: bool = False
    done: bool = False

    def wait(self, timeout: timedelta = timedelta(0)) -> None:
        self.device.wait(lambda: self.done)

    def is_completed(self) -> bool:
        return self.done


@dataclass
class Device:
    """The simulated device: a queue for each process and group, and the threads that wait for queued operations."""

    processes: int
    changed: threading.Condition = field(default_factory=threading.Condition)
    queues: dict[tuple[int, Any], deque[Operation]] = field(default_factory=dict)
    waiting: dict[int, Callable[[], bool]] = field(default_factory=dict)
    stuck: bool = False

    def put(self, process: int, group: Any, operation: Operation) -> None:
        with self.changed:
            self.queues.setdefault((process, group), deque()).append(operation)
            self._move(process, group)

    def _move(self, process: int, group: Any) -> None:
        """Complete operations as long as the heads of all members' queues are the same one."""
        while queue := self.queues.get((process, group)):
            queues = [self.queues.get((member, group)) for member in queue[0].members]
            if not all(one and one[0].what == queue[0].what for one in queues):
                return
            heads = [one.popleft() for one in queues if one]
            senders = [head for head in heads if head.sends]
            for head in heads:
                for sender in senders if not head.sends else ():
                    for sent, received in zip(sender.tensors, head.tensors, strict=True):
                        received.copy_(sent)
                head.done = True
            self.changed.notify_all()
            for member in heads[0].members:
                self._move(member, group)

    def wait(self, done: Callable[[], bool]) -> None:
        with self.changed:
            self.waiting[threading.get_ident()] = done
            while not done():
                self._look()
                if self.stuck:
                    raise StuckError("every process waits")
                self.changed.wait()
            del self.waiting[threading.get_ident()]

    def idle(self, process: int) -> bool:
        return not any(queue for (owner, _), queue in self.queues.items() if owner == process)

    def leave(self) -> None:
        with self.changed:
            self.processes -= 1
            self._look()

    def _look(self) -> None:
        if len(self.waiting) == self.processes and not any(done() for done in self.waiting.values()):
            self.stuck = True
            self.changed.notify_all()


@dataclass
class OrderedLink:
    """One end of an edge."""

    device: Device
    process: int
    peer: int
    edge: Edge
    group: Any  # operations of a group run one after another
    numbers: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})

    def send(self, tensors: Sequence[torch.Tensor]) -> Sequence[Operation]:
        return self._put(tensors, sends=True)

    def receive(self, tensors: Sequence[torch.Tensor]) -> Sequence[Operation]:
        return self._put(tensors, sends=False)

    def _put(self, tensors: Sequence[torch.Tensor], *, sends: bool) -> Sequence[Operation]:
        number = self.numbers[sends]
        self.numbers[sends] += 1
        members = (self.process, self.peer)
        operation = Operation((self.edge, number), tensors, members, self.device, sends)
        self.device.put(self.process, self.group, operation)
        return [operation]


class Stage:
    """Adds its index to the value of a micro-batch, and passes gradients on unchanged; each B or W gives its weight a
    gradient. `skips`: pairs of stages, of which the first also sends the value that it was given to the second."""

    device, layer_name, needs_backward = CPU, "", True

    def __init__(self, index: int, skips: Sequence[tuple[int, int]] = ()) -> None:
        self.index = index
        self.senders = [sender for sender, receiver in skips if receiver == index]
        self.receivers = [receiver for sender, receiver in skips if sender == index]
        self.values: dict[int, float] = {}
        self.module = torch.nn.Linear(1 + 64 * index, 1, bias=False)

    def forward(self, micro_batch: int, inputs: Tensors, keep: object) -> Tensors:
        self.values[micro_batch] = float(inputs[0])
        for sender, skip in zip(self.senders, inputs[1:], strict=True):
            assert float(skip) == micro_batch + sum(range(sender)), "the skip of another micro-batch arrived"
        return (inputs[0] + self.index, *(inputs[0].clone() for _ in self.receivers))

    def backward(self, micro_batch: int, gradients: Sequence[torch.Tensor | None], *, split: bool = False) -> Tensors:
        if not split:
            self.backward_weights(micro_batch)
        for gradient in gradients:
            assert gradient is not None
            assert float(gradient) == micro_batch, "the gradient of another micro-batch"
        return tuple(torch.tensor([float(micro_batch)]) for _ in (0, *self.senders))

    def backward_weights(self, micro_batch: int) -> None:
        self.module.weight.sum().backward()

    def recompute(self, micro_batch: int) -> None: ...

    def begin_step(self, step: int, objective: object, first_micro_batch: int, actions: object) -> None: ...

    def finish_step(self, all_gather: AllGather) -> None:
        all_gather(torch.zeros(1))


Sums = Callable[[Device, int, int], Replicas]  # the replicas of a process, by replica and number in its pipeline


def finishes(
    schedules: Sequence[Schedule],
    rank_of_stage: Sequence[int],
    *,
    post_eagerly: bool,
    idle: float,
    sums: Sums | None = None,
    group_of: Callable[[Edge], object] = lambda edge: edge,
    skips: Sequence[tuple[int, int]] = (),
) -> bool:
    """Whether two steps end without a deadlock, of pipelines that each have a schedule, which sum their gradients by
    `sums`. Processes are threads; received values are checked. Operations of one `group_of` an edge wait for another.
    `idle`: the share of actions that wait for an idle device, chosen at random. `skips` as in `Stage`.
    """
    skips = sorted(skips)
    boundaries = [
        (*BOUNDARY, *(replace(BOUNDARY[0], skip=f"{one}") for one in skips if one[0] <= cut < one[1]))
        for cut in range(len(rank_of_stage) - 1)
    ]
    partitions, processes = len(rank_of_stage), 1 + max(rank_of_stage)
    device = Device(processes * len(schedules))
    failed: list[BaseException] = []

    def links_of(replica: int, process: int) -> dict[Edge, OrderedLink]:
        links, first = {}, replica * processes
        forward = [(Kind.F, route.sender, route.receiver) for route in routes(boundaries)]
        for kind, sender, receiver in forward + [(Kind.B, receiver, sender) for _, sender, receiver in forward]:
            ends = rank_of_stage[sender], rank_of_stage[receiver]
            if process in ends and ends[0] != ends[1]:
                edge = kind, sender, receiver
                peer = ends[0] if process == ends[1] else ends[1]
                group = replica, group_of(edge)
                links[edge] = OrderedLink(device, first + process, first + peer, edge, group)
        return links

    def run(replica: int, process: int) -> None:
        schedule = schedules[replica]
        micro_batches, number = schedule.micro_batches, replica * processes + process
        chance = random.Random(number)

        def watch(action: Action, samples: int, lengths: Sequence[int]) -> None:
            if chance.random() < idle:
                device.wait(lambda: device.idle(number))

        try:
            transport = P2PTransport(
                process, rank_of_stage, Links(links_of(replica, process), 1, 1),
                Boundaries(boundaries, boundaries), CPU, post_eagerly=post_eagerly,
            )  # fmt: skip
            stages: dict[int, Any] = {k: Stage(k, skips) for k in range(partitions) if rank_of_stage[k] == process}
            executor = Executor(stages, rank_of_stage, transport, watch)
            replicas = None if sums is None else sums(device, replica, process)
            values = torch.arange(float(micro_batches))
            for step in range(2):
                executor.run(schedule, step, [1] * micro_batches, (values,), None, replicas=replicas)
                if replicas is not None:
                    replicas.finish()
                for k, stage in stages.items():
                    passed = sum(range(k))
                    assert stage.values == {m: m + passed for m in range(micro_batches)}, "another micro-batch arrived"
            executor.drain_sends()
        except BaseException as error:
            failed.append(error)
        finally:
            device.leave()

    places = product(range(len(schedules)), range(processes))
    threads = [threading.Thread(target=run, args=place) for place in places]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if unexpected := [e for e in failed if not isinstance(e, StuckError) and not isinstance(e.__cause__, StuckError)]:
        raise unexpected[0]
    return not failed
