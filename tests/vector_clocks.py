"""Finds races of a program that launches its work on streams, without an accelerator (as torch.cuda._sanitizer does
with one): tensors are on the CPU and are computed immediately, but nothing counts as done before an event says so.

Every stream and every thread of the host has a vector clock (Fidge 1988; Mattern 1989). An operation that reads or
writes memory must come after the last write, a write also after all reads; and memory that is freed must no longer be
in use on another stream than its allocation's, which is where the allocator gives it away again.

Behind `system/accelerator.py`, a device is `cpu:N`; its tensors are those that were made on it.
"""

import itertools
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gpipe_cli.pipeline.runtime import replicas
from gpipe_cli.pipeline.runtime.link import Edge
from gpipe_cli.system import accelerator

Clock = dict[str, int]  # how many operations of each stream and thread have come before
_NO_ACCESS = ("aten::empty_like", "aten::new_empty", "aten::new_empty_strided")


def merge(clock: Clock, other: Clock) -> None:
    for agent, number in other.items():
        clock[agent] = max(clock.get(agent, 0), number)


class Stream(AbstractContextManager["Stream"]):
    def __init__(self, world: "World", device: int, name: str) -> None:
        self.world, self.device, self.name = world, device, name
        self.clock: Clock = {}
        self._before: list[Stream] = []

    def __enter__(self) -> "Stream":
        current = self.world.here.current
        self._before.append(self.world.current(self.device))
        current[self.device] = self
        return self

    def __exit__(self, *raised: object) -> None:
        self.world.here.current[self.device] = self._before.pop()

    def launch(self) -> int:
        """Begin an operation: after all of this stream, and of what the host knows. Returns its number."""
        merge(self.clock, self.world.here.clock)
        self.clock[self.name] = self.clock.get(self.name, 0) + 1
        return self.clock[self.name]

    def record_event(self) -> "Event":
        event = Event(self.world)
        event.record(self)
        return event

    def wait_event(self, event: "Event") -> None:
        merge(self.clock, event.clock)

    def wait_stream(self, stream: "Stream") -> None:
        merge(self.clock, stream.clock)


class Event:
    _moments = itertools.count()

    def __init__(self, world: "World") -> None:
        self.world = world
        self.clock: Clock = {}
        self.moment = 0  # in milliseconds: its place among all events, in the order in which they are recorded

    def record(self, stream: Stream) -> None:
        self.clock, self.moment = dict(stream.clock), next(self._moments)

    def synchronize(self) -> None:
        merge(self.world.here.clock, self.clock)

    def elapsed_time(self, other: "Event") -> float:
        known = self.world.here.clock
        if any(known.get(agent, 0) < number for one in (self, other) for agent, number in one.clock.items()):
            self.world.races.append("the host reads the time of an event that may not have come")
        return float(other.moment - self.moment)


@dataclass
class Memory:
    """A storage: who has read and written it, as agent -> (number of the operation, its name)."""

    device: int | None  # None: memory of the host, or of the device that uses it first
    stream: Stream | None  # of its allocation
    written: dict[str, tuple[int, str]] = field(default_factory=dict)
    read: dict[str, tuple[int, str]] = field(default_factory=dict)
    kept_for: set[str] = field(default_factory=set)
    what: str = ""
    pinned: bool = False  # memory of the host that a device has copied to


class Here(threading.local):
    """What belongs to a thread of the host."""

    _numbers = itertools.count()

    def __init__(self) -> None:
        self.name = f"thread {next(self._numbers)}"  # Python's own number of a thread is used again after its end
        self.clock: Clock = {}
        self.current: dict[int, Stream] = {}
        # the device of a CPU tensor, which torch does not number; None: it has several, and such memory is the host's
        self.home: int | None = None
        self.host_copies = False
        self.device = 0  # that which is current


class World:
    """The clocks of one run. Frees on a device are looked at until its run has `ended`."""

    def __init__(self) -> None:
        self.here = Here()
        self.races: list[str] = []
        self.ended: set[int] = set()  # devices on which nothing more is launched: no memory is given away again
        self._memories: dict[int, Memory] = {}
        self._default: dict[int, Stream] = {}
        self._streams = 0
        self._lock = threading.RLock()

    # --- What the door is asked for ------------------------------------------------------------------------------

    def number(self, device: torch.device) -> int:
        return device.index if device.index is not None else self.here.home or 0

    def new_stream(self, device: torch.device) -> Stream:
        self._streams += 1
        number = self.number(device)
        return Stream(self, number, f"stream {self._streams} of device {number}")

    def current(self, device: int) -> Stream:
        default = self._default.setdefault(device, Stream(self, device, f"compute stream of device {device}"))
        return self.here.current.get(device, default)

    @contextmanager
    def using_device(self, device: torch.device) -> Iterator[None]:
        before, self.here.device = self.here.device, self.number(device)
        yield
        self.here.device = before

    def record_use(self, tensor: torch.Tensor, stream: Stream) -> None:
        self.memory(tensor, stream.device).kept_for.add(stream.name)

    def forged_to(self, tensor: torch.Tensor, device: Any = None, *more: Any, **settings: Any) -> torch.Tensor:
        """`Tensor.to`, which makes no copy from the CPU to the CPU."""
        if device != "cpu":
            return TO(tensor, device, *more, **settings)
        self.here.host_copies = True
        try:
            return tensor.clone()
        finally:
            self.here.host_copies = False

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        patched: dict[str, Any] = {
            "is_accelerator": lambda device: True,
            "new_stream": self.new_stream,
            "current_stream": lambda device: self.current(self.number(device)),
            "record_use": self.record_use,
            "new_timer": lambda device: Event(self),
            "generators": lambda device: [torch.default_generator],
            "using_device": self.using_device,
            "new_pinned_memory": lambda size: torch.empty(size, dtype=torch.uint8),
        }
        real = {name: getattr(accelerator, name) for name in patched}
        for module in [module for name, module in sys.modules.items() if name.startswith("gpipe_cli.")]:
            for name, stand_in in patched.items():
                if vars(module).get(name) is real[name]:
                    monkeypatch.setattr(module, name, stand_in)
        monkeypatch.setattr(
            torch.Tensor, "to", lambda tensor, *given, **settings: self.forged_to(tensor, *given, **settings)
        )
        monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
        monkeypatch.setattr(dist, "all_to_all_single", all_to_all)
        monkeypatch.setattr(dist, "all_gather", all_gather)
        monkeypatch.setattr(replicas, "_all_gather", all_gather)

    # --- Memory and who uses it ----------------------------------------------------------------------------------

    def memory(self, tensor: torch.Tensor, device: int | None, stream: Stream | None = None) -> Memory:
        """The memory of a tensor; what is seen for the first time is on `device`."""
        storage = tensor.untyped_storage()
        with self._lock:
            found = self._memories.get(storage._cdata)
            if found is not None and found.device is None and not found.pinned:
                found.device = device
            if found is None:
                found = self._memories[storage._cdata] = Memory(device, stream, what=f"{tuple(tensor.shape)}")
                weakref.finalize(storage, self._free, storage._cdata)
            return found

    def place(self, tensors: Any, device: int) -> None:
        for tensor in tensors:
            self.memory(tensor, device).device = device

    def access(self, agent: str, clock: Clock, number: int, memory: Memory, name: str, *, writes: bool) -> None:
        with self._lock:
            before = [("written", memory.written)] + ([("read", memory.read)] if writes else [])
            for what, accesses in before:
                for other, (at, by) in accesses.items():
                    if other != agent and clock.get(other, 0) < at:
                        done = "writes" if writes else "reads"
                        self.races.append(
                            f"{name} on {agent} {done} a tensor {memory.what} that {by} has {what} on {other}"
                        )
            if writes:
                memory.written, memory.read = {agent: (number, name)}, {}
            else:
                memory.read[agent] = number, name

    def host_reads(self, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            self.host(tensor, "the host", writes=False)

    def host(self, tensor: torch.Tensor, name: str, *, writes: bool) -> None:
        agent, clock = self.here.name, self.here.clock
        clock[agent] = clock.get(agent, 0) + 1
        self.access(agent, clock, clock[agent], self.memory(tensor, None), name, writes=writes)

    def _free(self, key: int) -> None:
        with self._lock:
            memory = self._memories.pop(key)
        if memory.stream is None or memory.stream.device in self.ended:
            return
        known = dict(memory.stream.clock)
        merge(known, self.here.clock)
        for other, (at, by) in (*memory.written.items(), *memory.read.items()):
            if other != memory.stream.name and other not in memory.kept_for and known.get(other, 0) < at:
                self.races.append(
                    f"a tensor {memory.what} of {memory.stream.name} is freed while {by} uses it on {other}"
                )

    @contextmanager
    def watching(self, home: int | None) -> Iterator[None]:
        """While active, this thread's operations are watched; `home` is its device, None if it has several."""
        self.here.home = home
        with _Watched(self):
            yield


TO = torch.Tensor.to


class _Watched(TorchDispatchMode):
    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Without this torch compiles nothing inside; and, as all threads share the note of it, which they do not leave
        in the order in which they entered, nothing after it in this process, either."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, world, name = kwargs or {}, self._world, func._schema.name
        written: list[torch.Tensor] = []
        read: list[torch.Tensor] = []
        given_by_name = [
            (argument, kwargs[argument.name]) for argument in func._schema.arguments if argument.name in kwargs
        ]
        for argument, value in (*zip(func._schema.arguments, args, strict=False), *given_by_name):
            tensors = [one for one in tree_leaves(value) if isinstance(one, torch.Tensor)]
            (written if argument.alias_info is not None and argument.alias_info.is_write else read).extend(tensors)
        result = func(*args, **kwargs)
        made = [one for one in tree_leaves(result) if isinstance(one, torch.Tensor)]
        given = dict.fromkeys(one.untyped_storage()._cdata for one in (*written, *read))
        fresh = [one for one in made if one.untyped_storage()._cdata not in given]
        if name in _NO_ACCESS:
            read = []
        if not written and not fresh:
            return result  # a view
        target = kwargs.get("device")
        index = target.index if isinstance(target, torch.device) else None
        devices = [world._memories[key].device for key in given if key in world._memories]
        on = next((device for device in devices if device is not None), index)
        if on is None and not read and not written:
            on = world.here.home
        if on is None:  # memory of the host
            for tensor in (*read, *written, *fresh):
                world.host(tensor, name, writes=any(tensor is one for one in (*written, *fresh)))
            return result
        stream = world.current(on)
        other = world.current(index) if index is not None and index != on else None
        if other is not None:  # torch copies on the source's stream, with a barrier of both on either side
            stream.wait_stream(other)
        number = stream.launch()
        for tensor in read:
            world.access(stream.name, stream.clock, number, world.memory(tensor, on), name, writes=False)
        for tensor in written:
            world.access(stream.name, stream.clock, number, world.memory(tensor, on), name, writes=True)
        for tensor in fresh:
            to = stream if other is None else other
            pinned = world.here.host_copies
            own = world.memory(tensor, None if pinned else to.device, None if pinned else to)
            own.pinned = pinned
            world.access(stream.name, stream.clock, number, own, name, writes=True)
        if other is not None:
            other.wait_stream(stream)
        return result


# --- Links between processes, each of which is a thread --------------------------------------------------------------


def content_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():
        return [tensor.clone() for tensor in tensors]


class Target:
    """A tensor that an operation writes to: from the time it is posted, as nobody may ever wait for it. This does not
    keep the tensor alive until its content comes."""

    def __init__(self, world: "World", stream: Stream, number: int, name: str, tensor: torch.Tensor) -> None:
        self._storage, self._dtype = weakref.ref(tensor.untyped_storage()), tensor.dtype
        self._place = tensor.storage_offset(), tensor.shape, tensor.stride()
        world.access(stream.name, stream.clock, number, world.memory(tensor, stream.device), name, writes=True)

    def write(self, content: torch.Tensor) -> None:
        if (storage := self._storage()) is None:
            return  # a race that has been found
        with torch.utils._python_dispatch._disable_current_modes(), torch.no_grad():
            torch.empty(0, dtype=self._dtype).set_(storage, *self._place).copy_(content)


@dataclass(eq=False)
class Message:
    """A send: what it reads, of which it keeps no tensor alive, and the clock of the link's stream that reads them."""

    content: Sequence[torch.Tensor]
    clock: Clock
    taken: bool = False


@dataclass(eq=False)
class Work:
    world: World
    clock: Callable[[], Clock]  # waits until the operation has its counterpart
    ended: Callable[[], bool]
    device: int

    def is_completed(self) -> bool:
        if ended := self.ended():
            merge(self.world.here.clock, self.clock())
        return ended

    def wait(self, timeout: timedelta = timedelta(0)) -> None:
        """As with NCCL: the current stream waits, the host does not."""
        merge(self.world.current(self.device).clock, self.clock())


class WatchedLink:
    """One end of an edge, whose operations run on a separate stream."""

    def __init__(self, world: World, messages: "deque[Message]", device: int, edge: Edge, peer: int) -> None:
        self.peer, self._world, self._messages = peer, world, messages
        self._stream = Stream(world, device, f"link {edge[0].name} to stage {edge[2]} at device {device}")

    def _begin(self) -> int:
        self._stream.wait_stream(self._world.current(self._stream.device))
        return self._stream.launch()

    def send(self, tensors: Sequence[torch.Tensor]) -> Sequence[Work]:
        number, stream = self._begin(), self._stream
        for tensor in tensors:
            memory = self._world.memory(tensor, stream.device)
            self._world.access(stream.name, stream.clock, number, memory, "send", writes=False)
        message = Message(content_of(tensors), dict(stream.clock))
        self._messages.append(message)
        return [Work(self._world, lambda: message.clock, lambda: message.taken, stream.device)]

    def receive(self, tensors: Sequence[torch.Tensor]) -> Sequence[Work]:
        number, stream, found = self._begin(), self._stream, list[Clock]()
        posted = dict(stream.clock)
        targets = [Target(self._world, stream, number, "receive", tensor) for tensor in tensors]

        def arrive() -> Clock:
            if not found:
                until = time.monotonic() + 60
                while not self._messages:
                    assert time.monotonic() < until, "nothing was sent"
                    time.sleep(1e-4)
                message = self._messages.popleft()
                merge(posted, message.clock)
                for target, content in zip(targets, message.content, strict=True):
                    target.write(content)
                message.taken = True
                merge(stream.clock, posted)
                found.append(posted)
            return found[0]

        return [Work(self._world, arrive, lambda: bool(found), stream.device)]


class WatchedGroup:
    """One member's end of a group of replicas, whose collectives run in order on a separate stream."""

    def __init__(self, world: World, calls: dict[int, dict[int, Any]], rank: int, size: int, device: int) -> None:
        self._world, self._calls, self._rank, self._size, self._device = world, calls, rank, size, device
        self._stream = Stream(world, device, f"replicas at device {device}")
        self._begun = 0

    def collective(self, received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor]) -> Work:
        """Begin one in which this member sends `sent[r]` to member r (if it is one tensor, to all), and gets one tensor
        from each."""
        stream, world, at, found = self._stream, self._world, self._begun, list[Clock]()
        self._begun += 1
        stream.wait_stream(world.current(self._device))
        number = stream.launch()
        for tensor in sent:
            world.access(stream.name, stream.clock, number, world.memory(tensor, self._device), "sum", writes=False)
        posted = dict(stream.clock)
        targets = [Target(world, stream, number, "sum", tensor) for tensor in received]
        self._calls.setdefault(at, {})[self._rank] = content_of(sent), posted

        def arrive() -> Clock:
            if not found:
                until = time.monotonic() + 60
                while len(self._calls[at]) < self._size:
                    assert time.monotonic() < until, "another replica did not take part"
                    time.sleep(1e-4)
                for rank, target in enumerate(targets):
                    content, clock = self._calls[at][rank]
                    merge(posted, clock)
                    target.write(content[self._rank if len(content) > 1 else 0])
                merge(stream.clock, posted)
                found.append(posted)
            return found[0]

        return Work(world, arrive, lambda: len(self._calls[at]) == self._size, self._device)


def all_to_all(received: torch.Tensor, sent: torch.Tensor, group: Any, async_op: bool = False) -> Work:
    return group.collective([*received], [*sent])


def all_gather(received: Any, sent: torch.Tensor, group: Any, async_op: bool = False) -> Work | None:
    parts = received if isinstance(received, list) else [*received.view(-1, sent.numel())]
    work = group.collective(parts, [sent])
    if async_op or not isinstance(received, list):
        return work
    work.wait()
    return None
