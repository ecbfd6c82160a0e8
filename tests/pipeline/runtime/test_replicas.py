"""How a process sums its gradients with its replicas, of which there is only one here: the sums are its own."""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine_runs import CPU, SumOfSquares, local_transport
from tape import Memory, TapeMaker
from torch import nn
from training_runs import TINY, configure, pipeline_of

from gpipe_cli.errors import InputError
from gpipe_cli.pipeline.runtime import replicas as module
from gpipe_cli.pipeline.runtime.boundary import BoundaryTensor
from gpipe_cli.pipeline.runtime.executor import Executor
from gpipe_cli.pipeline.runtime.known_layers import layers_of
from gpipe_cli.pipeline.runtime.replicas import Replicas
from gpipe_cli.pipeline.runtime.stage import Stage
from gpipe_cli.planner.model_profile import LayerWeights
from gpipe_cli.planner.stage_memory import buffers_bytes
from gpipe_cli.schedule.named_schedules import build
from gpipe_cli.training.step import _check_gradients_agree


class Odd(nn.Module):
    """Uses one of its weights in two ways, and another one never."""

    def __init__(self) -> None:
        super().__init__()
        self.product, self.unused = nn.Linear(8, 8), nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.product(x) @ self.product.weight.tanh()


def stages(**settings: Any) -> dict[int, Stage]:
    torch.manual_seed(0)
    parts = (
        OrderedDict(convolution=nn.Conv2d(3, 8, 3, padding=1), norm=nn.BatchNorm2d(8), mean=nn.AdaptiveAvgPool2d(1)),
        OrderedDict(flat=nn.Flatten(), odd=Odd(), last=nn.Linear(8, 4)),
    )
    made = {}
    for index, layers in enumerate(parts):
        layer = nn.Sequential(layers).to(memory_format=torch.channels_last)
        inputs = (BoundaryTensor((0, 8, 1, 1), (1, 0, 0, 0), torch.float32, True),) if index else ()
        made[index] = Stage(index, layer, first_layer=3 * index, inputs=inputs, device=CPU, run_seed=0,
                            memory_format=torch.channels_last)  # fmt: skip
    for stage in made.values():
        stage.set_training(True)
    return made


def step(made: dict[int, Stage], schedule: str, micro_batches: int, replicas: Replicas | None) -> None:
    executor = Executor(made, [0, 0], local_transport(made))
    images = torch.randn(2 * micro_batches, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    order = build(schedule, 2, micro_batches, "except_last")
    executor.run(order, 0, [2] * micro_batches, (images,), SumOfSquares(), replicas=replicas)


def gradients(made: dict[int, Stage]) -> dict[str, torch.Tensor | None]:
    return {name: one.grad for stage in made.values() for name, one in stage.module.named_parameters()}


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Replicas]:
    """Gloo's group of this process, with a bucket for each parameter."""
    monkeypatch.setattr(module, "_BUCKET_BYTES", 1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    assert group is not None
    yield Replicas({CPU: group}, 1)
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:Full backward hook")  # of the first layer, whose inputs need no gradient
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero_bubble"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_sums_begin_within_the_last_backward(
    schedule: str, micro_batches: int, alone: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order in which a backward gets to the parameters: nothing of K = 1 overlapped before. The gradients are
    those of a step without replicas, bit for bit, with their strides; what has got none has none."""
    expected, made = stages(), stages()
    step(expected, schedule, micro_batches, None)
    names = {id(one): name for stage in made.values() for name, one in stage.module.named_parameters()}
    happened: list[str] = []
    send = dist.all_to_all_single

    def sending(received: torch.Tensor, own: torch.Tensor, **settings: Any) -> Any:
        happened.append(names[id(alone._buckets[alone._launched - 1].parameters[0])])
        return send(received, own, **settings)

    monkeypatch.setattr(dist, "all_to_all_single", sending)
    for name, index, layer in (("stage 1", 1, 1), ("stage 0", 0, 0)):
        made[index].module[layer].register_full_backward_hook(lambda *of, name=name: happened.append(name))
    step(made, schedule, micro_batches, alone)
    alone.finish()
    for name, gradient in gradients(expected).items():
        found = gradients(made)[name]
        assert (gradient is None) == (found is None), name
        if gradient is not None and found is not None:
            assert torch.equal(gradient, found), name
            assert gradient.stride() == found.stride(), name
            assert found.data_ptr() % 64 == 0
    sums = [one for one in happened if not one.startswith("stage")]
    assert sums == [name for index in (1, 0) for name in reversed(dict(made[index].module.named_parameters()))]
    backwards = [at for at, one in enumerate(happened) if one == "stage 1"]
    assert all(happened.index(name) > backwards[-2] for name in sums) if micro_batches > 1 else True
    if schedule != "zero_bubble":  # where weights wait for the end, so do their sums
        assert happened.index("last.weight") < backwards[-1], "while the same backward runs"


def test_a_replica_without_samples_gets_the_sums_and_no_gradient_of_what_nobody_uses(alone: Replicas) -> None:
    made = stages()
    step(made, "gpipe", 1, alone)
    alone.finish()
    for stage in made.values():
        stage.module.zero_grad()
    alone.begin_step({index: stage.module for index, stage in made.items()})
    for index in made:
        with alone.overlapping_last_action(index):
            pass
    alone.finish()
    found = gradients(made)
    assert found.pop("odd.unused") is None
    assert all(gradient is not None and not gradient.any() for gradient in found.values())


class Varies(nn.Module):
    """Uses its weight in another way, or not at all, in micro-batches of some seeds."""

    def __init__(self) -> None:
        super().__init__()
        self.product, self.calls, self.skips = nn.Linear(4, 4), 0, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.skips:
            return x * 2
        return self.product(x) if self.calls % 3 else self.product(x) + self.product.weight.tanh().sum()


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_what_a_layer_uses_may_change(schedule: str, alone: Replicas) -> None:
    """A weight that waits for W in some micro-batches, and not in the last one, counted as final in the last I: its sum
    lacked what came later. And a parameter that nobody uses in a later step has no gradient, as without replicas: the
    optimizer moved it by zeros."""
    both = [stages(), stages()]
    for made in both:
        made[1].module.append(Varies())
        made[1]._layers = layers_of(made[1].module)
        with torch.no_grad():
            made[1].module[3].product.weight.copy_(torch.eye(4))
            made[1].module[3].product.bias.zero_()
    for skips in (False, True):
        for made, replicas in zip(both, (None, alone), strict=True):
            made[1].module[3].skips, made[1].module[3].calls = skips, 0
            for stage in made.values():
                stage.module.zero_grad()
            step(made, schedule, 3, replicas)
            if replicas is not None:
                replicas.finish()
        found = gradients(both[1])
        for name, gradient in gradients(both[0]).items():
            other = found[name]
            assert (gradient is None) == (other is None), name
            assert gradient is None or other is None or torch.equal(gradient, other), name
        assert (found["3.product.weight"] is None) == skips


def test_a_gradient_that_is_added_to_once_more_is_refused(alone: Replicas) -> None:
    """It would be lost without a word."""
    made = stages()
    last = made[1].module.last.weight

    def once_more(gradient: torch.Tensor) -> None:
        with torch.enable_grad():
            last.sum().backward()

    made[1].module.odd.product.weight.register_hook(once_more)
    with pytest.raises(InputError, match="replicas=1: a layer of stage 1 adds to a gradient several times"):
        step(made, "gpipe", 1, alone)


def test_replicas_with_different_gradients_are_refused() -> None:
    """The line said that what a layer uses depends on the samples, also where sums had been lost."""
    images = ["dataset.image_size=8", *TINY[2:3], *TINY[4:]]
    model = ["model=custom", "model.target=custom_models:small", "partitions=2", "partition.balance=[1,7]"]
    engine = pipeline_of(configure(*images, *model, "replicas=2"))
    first, last = torch.tensor([1.0, 2.0, -1.0, -1.0, -1.0]), torch.arange(5.0)
    _check_gradients_agree(engine, [first, last, first, last])
    with pytest.raises(InputError, match=r"^replicas=2: .* the gradient of 0.bias exists in only one.*use replicas=1"):
        _check_gradients_agree(engine, [first, last, torch.tensor([1.0, -1, -1, -1, -1]), last])
    with pytest.raises(
        RuntimeError, match=r"in replicas 0 and 1, the gradient of 2.weight differs after it was summed"
    ):
        _check_gradients_agree(engine, [first, last, first, torch.tensor([0, 2, 2.0, 3, 4])])


@pytest.mark.parametrize("graphs", [False, True])
def test_the_memory_of_gradients_and_their_sums_is_planned(graphs: bool, alone: Replicas) -> None:
    """What is sent takes the place of gradients, but not of those that graphs add to: their set was in no plan."""
    maker = TapeMaker()
    layers = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4)))
    stage = Stage(0, layers, first_layer=0, inputs=(), device=CPU, run_seed=0)
    stage.set_training(True)
    if graphs:
        stage.use_cuda_graphs(maker)
    executor, order = Executor({0: stage}, [0], local_transport({0: stage})), build("gpipe", 1, 2, "always")
    with Memory(maker) as memory:
        for number in range(4):
            memory.peak_bytes = 0
            executor.run(order, number, [1, 1], (torch.ones(2, 256),), SumOfSquares(), replicas=alone)
            alone.finish()
            layers.zero_grad()
    weight = layers[0].weight.nbytes
    weights = LayerWeights(0, 0, 4, 4 * weight, 4 * weight, 0, summed_bytes=4 * weight, saved_bytes=0)
    config = configure(*TINY, "hardware=h100", "replicas=2", f"graphs={'auto' if graphs else 'false'}")
    planned = weights.gradient_bytes + buffers_bytes(config, weights)
    adding = 0 if graphs else weight  # the gradient that autograd adds just then; graphs have it in their pool
    assert 0 <= memory.peak_bytes - planned - adding < weight // 8, "activations"
    assert bool(maker.tapes) is graphs
