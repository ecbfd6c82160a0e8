"""In a step the host waits for nothing that the step has launched on a GPU.

Shown without one: the step runs on tensors without values that claim to be on a GPU (torch's own, made for its
compiler), and whatever would make the host wait is an error. Two things are stand-ins, as torch's need a GPU: events,
and the autograd engine, in whose place every parameter gets a gradient.
"""

import multiprocessing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import GradientEdge
from torch.utils._python_dispatch import TorchDispatchMode
from training_runs import LIVELY, TINY, configure, spec_of

from gpipe_cli.assembly.build import build_model, open_data
from gpipe_cli.assembly.optimizer import build_optimizer, set_learning_rate
from gpipe_cli.distributed.control_group import Awaited, ControlGroup
from gpipe_cli.training import data_feed
from gpipe_cli.training import engine as engines
from gpipe_cli.training.data_feed import mini_batches
from gpipe_cli.training.milestones import starting_point
from gpipe_cli.training.step import StepNumbers, compute_gradients, evaluate, gather_metrics, update_weights

aten = torch.ops.aten
GPU = "cuda:0"
TEXT = [
    "model=transformer_lm", "dataset=synthetic_text", "dataset.vocabulary=300", "model.layers=2", "model.width=16",
    "model.hidden=16", "model.heads=2", "model.length=8", "batch_size=8", "optimizer=adafactor", "device=cpu",
    "threads=1",
]  # fmt: skip


class Watched(TorchDispatchMode):
    """Refuses operations for which the host would wait for a GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default:
            assert args[0].device.type == "cpu", "a value is read from the GPU"
            return 8.0 if args[0].is_floating_point() else 8
        if func is aten._pin_memory.default:
            pinned = args[0].clone()
            pinned.page_locked = True
            return pinned
        if func in (aten._to_copy.default, aten.copy_.default):
            source = args[1] if func is aten.copy_.default else args[0]
            target = args[0].device if func is aten.copy_.default else torch.device(kwargs.get("device", source.device))
            if source.device.type != target.type:
                assert kwargs.get("non_blocking") or True in args[2:], (
                    f"waits for a copy from {source.device} to {target}"
                )
                assert source.is_cuda or hasattr(source, "page_locked"), "waits for a copy from pageable memory"
        if func is aten._fused_sgd_.default:  # torch does not have it for tensors without values
            return None
        return func(*args, **kwargs)  # one whose shape depends on values raises: a GPU's would have to be read


class Event:
    """Of a GPU that has done everything but the step that is being launched."""

    step = made = waited = 0

    def __init__(self, device: object = None, enable_timing: bool = False) -> None:
        Event.made += 1

    def record(self, stream: object = None) -> "Event":
        self.of = 0 if stream == "beside" else Event.step
        return self

    def synchronize(self) -> None:
        assert self.of < Event.step, "the host waits for the step that it launches"
        Event.waited += 1

    def elapsed_time(self, other: "Event") -> float:
        return 0.0


STREAM = SimpleNamespace(record_event=lambda: Event().record())


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def backward(roots: Sequence[GradientEdge], gradients: object) -> None:
        nodes, seen = [root.node for root in roots], set()
        while nodes:
            node = nodes.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            nodes += [before for before, _ in node.next_functions]
            if hasattr(node, "variable"):
                node.variable.grad = torch.empty_like(node.variable)

    monkeypatch.setattr(torch.autograd, "backward", backward)
    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch, "Stream", lambda device: "beside")
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: STREAM)
    monkeypatch.setattr(torch.cuda, "default_generators", [torch.Generator()])
    monkeypatch.setattr(engines, "materialize", materialize)


class Made(nn.Sequential):
    def to(self, *arguments: Any, **changes: Any) -> "Made":  # type: ignore[override]
        return self


def materialize(model: nn.Sequential, first: int, layers: int, **others: Any) -> nn.Sequential:
    """The layers with tensors without values on the GPU."""
    made = Made()
    for name, layer in list(model.named_children())[first : first + layers]:
        for module in layer.modules():
            for key, tensor in module._parameters.items():
                if tensor is not None:
                    module._parameters[key] = nn.Parameter(torch.empty(tensor.shape, device=GPU))
            for key, tensor in module._buffers.items():
                if tensor is not None:
                    module._buffers[key] = torch.empty(tensor.shape, dtype=tensor.dtype, device=GPU)
        made.add_module(name, layer)
    return made


@pytest.mark.skipif(torch.__version__ < (2, 11), reason="torch 2.9 records such a graph only with a CUDA driver")
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("settings", [[*TINY, *LIVELY, "micro_batches=1"], TEXT], ids=["images", "text"])
def test_a_step_waits_for_nothing_of_its_own(settings: list[str]) -> None:
    """Batch norms with and without momentum, clipping, averages; the numbers of the step before are read meanwhile."""
    config = configure(*settings, "partitions=2", "executor=in_process")
    spec = spec_of(config).on(((GPU, GPU),))
    train, _ = open_data(config)
    batches = mini_batches(config, train.catalogue, training=True)
    inputs, targets = train.inputs(0, list(range(8)), batches.lengths(0, 0)), train.targets_of(torch.arange(8), ())
    model = build_model(config)
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms[::2]:
        norm.momentum = None
    control, made = ControlGroup(0, 1), []
    before: StepNumbers | None = None
    with FakeTensorMode(allow_non_fake_inputs=True), Watched():
        engine = engines.build_engine(config, spec, control)
        mini_batch: Any = SimpleNamespace(
            share=batches.share(0, 0),
            lengths=batches.lengths(0, 0),
            inputs=lambda: tuple(torch.empty(one.shape, dtype=one.dtype) for one in inputs),
            targets=lambda: (torch.empty(targets.shape, dtype=targets.dtype), len(targets)),
        )
        for step in range(3):
            Event.step, Event.made, Event.waited = step + 1, 0, 0
            numbers = compute_gradients(engine, mini_batch, step)
            if before is not None:
                gather_metrics(engine, before)
            update_weights(engine, numbers, 0.1)
            before = replace(numbers, totals=None)  # there are no values to make Python's numbers of
            made.append(Event.made)
    assert len(engine.optimizers) == 2
    assert Event.waited == 2 + 1 + 1, "for the last event of each stage, the step's first, and the norms"
    assert made[2] == 1 + 2, "the step's first event, totals and norms; those of the actions are used again"


@pytest.mark.skipif(torch.__version__ < (2, 11), reason="torch 2.9 records such a graph only with a CUDA driver")
@pytest.mark.usefixtures("gpu")
def test_an_evaluation_waits_at_its_end_only() -> None:
    """The host waited for the sums of each mini-batch before it launched the next one."""
    config = configure(*TINY, "micro_batches=1", "partitions=2", "executor=in_process")
    spec = spec_of(config).on(((GPU, GPU),))
    _, split = open_data(config)
    inputs, targets = split.inputs(0, list(range(8)), ()), split.targets_of(torch.arange(8), ())
    waited: list[int] = []

    class Batches(SimpleNamespace):
        steps_per_epoch = 3

        def share(self, epoch: int, position: int) -> Any:
            Event.step = position + 1
            return SimpleNamespace(sizes=(8,), samples=slice(0, 8), first_micro_batch=0)

        def lengths(self, epoch: int, position: int) -> tuple[int, ...]:
            waited.append(Event.waited)
            return ()

        def indices(self, epoch: int, position: int) -> range:
            return range(8)

    class Loaded(SimpleNamespace):
        def __next__(self) -> Any:
            return tuple(torch.empty(one.shape, dtype=one.dtype) for one in inputs)

    @contextmanager
    def waits(what: Awaited) -> Iterator[None]:
        if what is Awaited.PROCESS:
            Event.step += 1  # what has been launched may be waited for
        yield

    with FakeTensorMode(allow_non_fake_inputs=True), Watched():
        engine = engines.build_engine(config, spec, ControlGroup(0, 1, waits=waits))
        empty = SimpleNamespace(targets_of=lambda *what: torch.empty(targets.shape, dtype=targets.dtype))
        test: Any = SimpleNamespace(batches=Batches(), loaded=Loaded(), split=empty)
        Event.waited = 0
        with engine.evaluating(averages=False):
            evaluate(engine, test)
    anchor = 1  # with which the clock begins
    assert set(waited) <= {0, anchor}
    assert Event.waited == anchor + 3


@pytest.mark.parametrize("name", ["adafactor", "adam", "rmsprop", "sgd"])
def test_an_optimizer_reads_nothing(name: str) -> None:
    with FakeTensorMode(), Watched():
        parameters = {str(at): nn.Parameter(torch.empty(of, device=GPU)) for at, of in enumerate([(), (3,), (4, 5)])}
        optimizer = build_optimizer(configure(f"optimizer={name}").optimizer, parameters)
        assert optimizer is not None
        for _ in range(2):
            for parameter in parameters.values():
                parameter.grad = torch.empty_like(parameter)
            set_learning_rate(optimizer, 0.1)
            optimizer.step()


def test_loaders_do_not_touch_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that pinned memory opened a context on GPU 0, wherever the first stage was; and the loader that had this
    thread asked CUDA for its GPUs before it forked. Now a batch is pinned when it is copied, on the stage's own GPU."""
    asked: list[str] = []
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", lambda: asked.append("count") or 1, raising=False)
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: asked.append("open"))
    config = configure(*TINY, "data_workers=1")
    spec = spec_of(config).on(((GPU, GPU),))
    data = data_feed.Data(config, spec, 0, starting_point(config, None), None)
    assert len(multiprocessing.active_children()) == 2
    for reading in data._readings.values():
        assert reading.loaded is not None
        next(reading.loaded)
        reading.close()
    assert asked == []
