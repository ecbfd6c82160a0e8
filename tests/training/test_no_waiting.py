"""In a step the host waits for nothing that the step has launched on a GPU.

Shown without one: the step runs on forged GPUs, and whatever would make the host wait is an error.
"""

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forged_gpu import Event, Watched, forge
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from training_runs import LIVELY, SMALL, TINY, configure, spec_of

from gpipe_cli.assembly.build import build_model, open_data
from gpipe_cli.assembly.optimizer import build_optimizer, set_learning_rate
from gpipe_cli.distributed.control_group import Awaited, ControlGroup
from gpipe_cli.training import data_feed
from gpipe_cli.training import engine as engines
from gpipe_cli.training.data_feed import mini_batches
from gpipe_cli.training.milestones import starting_point
from gpipe_cli.training.step import StepNumbers, compute_gradients, evaluate, gather_metrics, update_weights

GPU = "cuda:0"
TEXT = [
    "model=transformer_lm", "dataset=synthetic_text", "dataset.vocabulary=300", "model.layers=2", "model.width=16",
    "model.hidden=16", "model.heads=2", "model.length=8", "batch_size=8", "optimizer=adafactor", "device=cpu",
    "threads=1",
]  # fmt: skip


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    forge(monkeypatch)


@pytest.mark.skipif(torch.__version__ < (2, 11), reason="torch 2.9 records such a graph only with a CUDA driver")
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("settings", [[*TINY, *LIVELY, "micro_batches=1"], TEXT], ids=["images", "text"])
def test_a_step_waits_for_nothing_of_its_own(settings: list[str]) -> None:
    """Batch norms with and without momentum, clipping, averages; the numbers of the step before are read meanwhile."""
    config = configure(*settings, "partitions=2", "executor=in_process")
    spec = spec_of(config).on(((GPU, GPU),))
    train, _ = open_data(config)
    batches = mini_batches(config, train.catalogue, training=True)
    inputs, targets = train.inputs(0, list(range(8)), batches.lengths(0, 0)), train.targets_of(0, torch.arange(8), ())
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
    config = configure(*SMALL, "micro_batches=1", "partitions=2", "executor=in_process")
    spec = spec_of(config).on(((GPU, GPU),))
    _, split = open_data(config)
    inputs, targets = split.inputs(0, list(range(8)), ()), split.targets_of(0, torch.arange(8), ())
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
    config = configure(*SMALL, "data_workers=1")
    spec = spec_of(config).on(((GPU, GPU),))
    data = data_feed.Data(config, spec, 0, starting_point(config, None), None)
    assert len(multiprocessing.active_children()) == 2
    for reading in data._readings.values():
        assert reading.loaded is not None
        next(reading.loaded)
        reading.close()
    assert asked == []
