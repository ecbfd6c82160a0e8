"""Whatever a step sends, to a neighbouring stage or to a replica, lies on the GPU that its process group is bound to:
NCCL refuses a tensor of another one.

Shown for 8 GPUs that there are not, by the groups of torch's own "fake" backend, in whose place tensors are noted.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forged_gpu import Event, Watched, forge
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from training_runs import SMALL, configure, spec_of

from gpipe_cli.assembly.build import open_data
from gpipe_cli.distributed import process_groups
from gpipe_cli.distributed.process_groups import connect_processes
from gpipe_cli.pipeline.runtime.replicas import Replicas
from gpipe_cli.planner import data_sheet
from gpipe_cli.system.gpus import Gpu
from gpipe_cli.training.data_feed import mini_batches
from gpipe_cli.training.engine import build_engine
from gpipe_cli.training.step import compute_gradients

DONE = SimpleNamespace(wait=lambda *timeout: None, is_completed=lambda: True)


class Noted:
    """How many tensors went over groups bound to their own device, and which went over others."""

    def __init__(self) -> None:
        self.bound: dict[dist.ProcessGroup, torch.device] = {}
        self.right: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.used: set[dist.ProcessGroup] = set()

    def new_group(
        self, members: Sequence[int] = (), timeout: object = None, backend: str = "", options: object = None,
        device_id: torch.device | None = None,
    ) -> dist.ProcessGroup:  # fmt: skip
        group = NEW_GROUP(list(members) or None, backend="fake")
        if device_id is not None:
            self.bound[group] = device_id
        return group

    def collective(self, name: str) -> Callable[..., Any]:
        def note(*tensors: Any, group: dist.ProcessGroup, async_op: bool = False) -> Any:
            for tensor in tensors:
                for one in tensor if isinstance(tensor, list) else [tensor]:
                    self.note(name, one, group)
            return DONE

        return note

    def batch(self, operations: Sequence[dist.P2POp]) -> list[Any]:
        for one in operations:
            assert one.group is not None
            self.note(one.op.__name__, one.tensor, one.group)
        return [DONE]

    def note(self, name: str, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
        if group not in self.bound:  # Gloo's, for a few numbers
            assert tensor.device.type == "cpu", name
        elif tensor.device == self.bound[group]:
            self.right[name] += 1
            self.used.add(group)
        else:
            self.wrong.append(f"{name}: a tensor on {tensor.device}, and its group is bound to {self.bound[group]}")


NEW_GROUP = dist.new_group


def gather_object(values: list[object], value: object, group: object) -> None:
    values[:] = [value] * len(values)


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Noted]:
    noted = Noted()
    forge(monkeypatch)
    monkeypatch.setattr(data_sheet, "usable_gpus", lambda: (Gpu("NVIDIA H100 80GB HBM3", 85_520_809_984),) * 8)
    monkeypatch.setattr(data_sheet, "torch_is_built_for", lambda: True)
    monkeypatch.setattr(process_groups, "use_device", lambda device: None)
    monkeypatch.setattr(dist, "new_group", noted.new_group)
    monkeypatch.setattr(dist, "batch_isend_irecv", noted.batch)
    for name in ("all_to_all_single", "all_gather_into_tensor", "all_gather_single", "all_gather", "barrier"):
        kind = "all_gather" if name.startswith("all_gather") else name  # its name depends on torch's version
        monkeypatch.setattr(dist, name, noted.collective(kind), raising=False)
    monkeypatch.setattr(dist, "all_gather_object", gather_object)
    monkeypatch.setattr(Replicas, "_found_in_any", lambda self: set(self._found))  # reads values, which there are not
    yield noted
    if dist.is_initialized():
        dist.destroy_process_group()


def step(noted: Noted, monkeypatch: pytest.MonkeyPatch, process: int, settings: Sequence[str]) -> None:
    """A step of one process of a run."""
    on_gpus = [*(one for one in SMALL if not one.startswith("device=")), "device=cuda", "hardware=cpu"]
    config = configure(*on_gpus, *settings)
    spec = spec_of(config)
    layout = spec.layout

    def initialize(backend: str, store: object, rank: int, world_size: int, timeout: object) -> None:
        INITIALIZE("fake", store=FakeStore(), rank=rank, world_size=world_size)

    monkeypatch.setattr(dist, "init_process_group", initialize)
    replica = layout.replica_of(process)
    train, _ = open_data(config)
    batches = mini_batches(config, train.catalogue, training=True, replica=replica)
    share = batches.share(0, 0)
    inputs, targets = train.inputs(0, list(range(8))[share.samples], ()), train.targets_of(0, torch.arange(8), ())
    with FakeTensorMode(allow_non_fake_inputs=True), Watched():
        control, groups = connect_processes(
            process, layout.process_of_stage, layout.replicas, [*map(torch.device, layout.devices_of(process))],
            "/dev/null", 1.0, lambda what: nullcontext(), here=True,
        )  # fmt: skip
        engine = build_engine(config, spec, control, groups)
        connected = set(noted.used)
        mini_batch: Any = SimpleNamespace(
            share=share, lengths=(), inputs=lambda: tuple(torch.empty(one.shape, dtype=one.dtype) for one in inputs),
            targets=lambda: (torch.empty(targets.shape, dtype=targets.dtype)[share.samples], len(targets)),
        )  # fmt: skip
        for number in range(2):
            Event.step = number + 1
            compute_gradients(engine, mini_batch, number)
            for stage in engine.stages.values():
                stage.module.zero_grad()
    assert noted.used == connected, "a group's first message connects it, which needs an idle device"


INITIALIZE = dist.init_process_group
RUNS = {
    "K=4 in the process of each of two replicas": ([0, 1], ["partitions=4", "replicas=2", "executor=in_process"]),
    "K=4 in 4 processes of each of two replicas": ([0, 5, 7], ["partitions=4", "replicas=2"]),
    "two stages a process": ([0, 3], ["partitions=4", "replicas=2", "stages_per_process=2", "schedule=interleaved"]),
    "one replica": ([1, 5], ["partitions=6", "replicas=1", "schedule=1f1b"]),
}


@pytest.mark.skipif(torch.__version__ < (2, 11), reason="torch 2.9 records such a graph only with a CUDA driver")
@pytest.mark.parametrize("run", RUNS)
def test_what_is_sent_is_on_the_device_of_its_group(run: str, noted: Noted, monkeypatch: pytest.MonkeyPatch) -> None:
    processes, settings = RUNS[run]
    for process in processes:
        noted.right.clear()
        step(noted, monkeypatch, process, [*settings, "micro_batches=2", "batch_size=8"])
        dist.destroy_process_group()
        assert noted.wrong == []
        kinds = {"isend", "irecv"} if "executor=in_process" not in settings else set[str]()
        kinds |= {"all_to_all_single", "all_gather"} if "replicas=2" in settings else set()
        assert set(noted.right) >= kinds


@pytest.mark.skipif(torch.__version__ < (2, 11), reason="torch 2.9 records such a graph only with a CUDA driver")
def test_a_group_of_another_device_is_found(noted: Noted, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was: the one group of a process for its gradients was bound to the first of its devices."""
    connect = process_groups.connect_processes

    def bound_to_the_first(process: int, of_stage: Any, replicas: int, devices: Sequence[torch.device], *more: Any,
                           **settings: Any) -> Any:  # fmt: skip
        control, groups = connect(process, of_stage, replicas, devices[:1], *more, **settings)
        assert groups is not None
        (group,) = groups.replicas.values()
        return control, replace(groups, replicas=dict.fromkeys(devices, group))

    monkeypatch.setitem(globals(), "connect_processes", bound_to_the_first)
    step(
        noted,
        monkeypatch,
        0,
        [*RUNS["K=4 in the process of each of two replicas"][1], "micro_batches=2", "batch_size=8"],
    )
    assert "all_to_all_single: a tensor on cuda:1, and its group is bound to cuda:0" in noted.wrong
