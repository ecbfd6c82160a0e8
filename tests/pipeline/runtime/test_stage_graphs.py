"""What would make replays wrong is found: when they are verified before their first use, at the next step, or here."""

import copy
import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import tape
import torch
from custom_models import Tracking
from torch import nn
from training_runs import assert_same_tensors

from gpipe_cli import Pipeline
from gpipe_cli.pipeline.runtime import boundary, stage, stage_graphs
from gpipe_cli.pipeline.runtime.capture_guards import Guards
from gpipe_cli.pipeline.runtime.executor import ActionFailedError
from gpipe_cli.pipeline.runtime.stage import Stage
from gpipe_cli.pipeline.runtime.static_memory import StaticMemory
from gpipe_cli.schedule.schedule import RecomputeMode
from gpipe_cli.training import pipeline_part

Change = Callable[[nn.Sequential, int], None]  # what a program does to the layers before a step


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.scale = nn.Parameter(torch.ones(6)), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight * self.scale


class Counting(nn.Module):
    """Counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * 2


class CountingInside(nn.Module):
    """Counts its calls where no attribute is replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = {"calls": 0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.counts["calls"] += 1
        return x * 2


class Opaque:
    """As an object of a library in another language."""

    def __deepcopy__(self, copies: dict[int, Any]) -> "Opaque":
        return self

    def __reduce__(self) -> str:
        raise TypeError("cannot be pickled")


class Holding(nn.Module):
    def __init__(self, held: object) -> None:
        super().__init__()
        self.held = {held: held}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class Waiting(nn.Module):
    """Asks the device for a value."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.is_meta or x.sum() > 0 else x


class Guessing(nn.Module):
    """Draws from a generator that no stage seeds, though it makes no difference."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (2 if random.random() < 2 else 3)


class Reading(nn.Module):
    """Reads a value of its input in a way that the capturer does not see."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.is_meta else x * x.detach().view(-1).tolist()[0]


class Heads(nn.Module):
    """Two results, of which the loss uses the first."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.used(x), self.unused(x)


def nothing(layers: nn.Sequential, step: int) -> None:
    pass


def trained(
    change: Change = nothing, *more: nn.Module, graphs: bool, recompute: RecomputeMode = "always", steps: int = 5
) -> tuple[dict[str, torch.Tensor], list[str], int]:
    """The weights and buffers after `steps` steps of a small pipeline; why stages were not replayed; and how often.
    Never recomputed, its first stage has two micro-batches in flight."""
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Linear(5, 6),
        nn.BatchNorm1d(6),
        nn.Dropout(0.4),
        Scaled(),
        *more,
        nn.Linear(6, 6),
        nn.Tanh(),
        nn.Linear(6, 3),
    )
    makers: list[tape.TapeMaker] = []

    def maker(device: torch.device) -> tape.TapeMaker:
        makers.append(tape.TapeMaker())
        return makers[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline_part, "graph_maker", maker)
        cut = {"partitions": 2, "balance": [2, len(layers) - 2]}
        pipeline = Pipeline(layers, **cut, micro_batches=4, schedule="1f1b", recompute=recompute, graphs=graphs)
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1, momentum=0.9)
        draw = torch.Generator().manual_seed(1)
        for step in range(steps):
            images, classes = torch.randn(10, 5, generator=draw), torch.randint(3, (10,), generator=draw)
            change(pipeline._module, step)
            pipeline.step(images, classes, nn.functional.cross_entropy)
            optimizer.step()
            optimizer.zero_grad()
    assert pipeline._part is not None
    used = [stage.cuda_graphs for stage in pipeline._part.stages.values() if stage.cuda_graphs is not None]
    causes = [one.fallback_reason for one in used if one.fallback_reason]
    return pipeline.state_dict(), causes, sum(one.replays for maker in makers for one in maker.tapes)


def moves_weights(layers: nn.Sequential, step: int) -> None:
    """As a program that loads weights by assigning them."""
    for parameter in layers.parameters():
        parameter.data = parameter.data.clone() * 0.9


def scales(layers: nn.Sequential, step: int) -> None:
    """As a schedule of dropout."""
    next(one for one in layers.modules() if isinstance(one, Scaled)).scale = 1 + step


def tempers(layers: nn.Sequential, step: int) -> None:
    """As a temperature that is a tensor."""
    vars(next(one for one in layers.modules() if isinstance(one, Scaled)))["scale"] = torch.tensor(1.0 + step)


def drops_gradients(layers: nn.Sequential, step: int) -> None:
    """As a program that clips by assigning; the next step adds to what is there."""
    for parameter in layers.parameters():
        parameter.grad = torch.ones_like(parameter)


@pytest.mark.parametrize("change", [nothing, moves_weights, scales, tempers, drops_gradients])
def test_a_program_may_change_the_layers_between_steps(change: Change) -> None:
    steps = 12 if change in (scales, tempers) else 5
    expected, _, none = trained(change, graphs=False, steps=steps)
    found, causes, replays = trained(change, graphs=True, steps=steps)
    assert_same_tensors(found, expected)
    assert none == 0
    assert replays > 0
    assert causes == (["layer 3: scale changes between steps"] if change in (scales, tempers) else [])


@pytest.mark.parametrize(
    ("layer", "cause"),
    [
        (Counting(), "layer 4: calls changes whenever it runs"),
        (CountingInside(), "layer 4: counts changes whenever it runs"),
        (Holding(Opaque()), "layer 4: held cannot be compared from step to step"),
        (Holding(bytes(1 << 20)), "layer 4: held is too large to be compared in each step"),
        (Waiting(), "layer 4: RuntimeError: the host would wait for the device"),
        (Guessing(), "a layer draws from Python's random module or numpy.random"),
        (Tracking(), "layer 4: seen changes whenever it runs"),
        (Tracking(counted=False), "layer 4: seen changes whenever it runs"),
    ],
)
def test_what_cannot_be_replayed_runs_as_it_is(layer: nn.Module, cause: str) -> None:
    """A buffer that a layer changes would count twice: in the forward, and in its recomputation."""
    expected, _, _ = trained(nothing, copy.deepcopy(layer), graphs=False)
    found, causes, replays = trained(nothing, copy.deepcopy(layer), graphs=True)
    assert_same_tensors(found, expected)
    assert causes == [cause]
    assert replays > 0, "of the other stage"


def recompute_and_track(own: Stage, micro_batch: int) -> None:
    """A recomputation writes moments, of no values."""
    UNCHANGED_RECOMPUTE(own, micro_batch)
    own.statistics.moments_of(micro_batch).flat.zero_()


UNCHANGED_RECOMPUTE, ONE_POOL = Stage.recompute, tape.Pool()
# the fault: whose function is replaced, by what; and what the program changes between steps
FAULTS: dict[str, tuple[Any, str, Callable[..., Any], Change]] = {
    "one pool for two micro-batches": (tape.TapeMaker, "new_pool", lambda maker: ONE_POOL, nothing),
    "a number is frozen": (Guards, "find_change", lambda guards: "", scales),
    "weights are read where they were": (Guards, "find_change", lambda guards: "", moves_weights),
    "a seed is not set": (tape.RngState, "manual_seed", lambda rng, seed: None, nothing),
    "an output is not copied": (stage, "_copies", lambda tensors: tensors, nothing),
    "gradients are added up elsewhere": (StaticMemory, "use_gradients", lambda memory, parameters: None, nothing),
    "recomputations write moments": (Stage, "recompute", recompute_and_track, nothing),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault: str) -> None:
    recompute: RecomputeMode = "never" if fault == "one pool for two micro-batches" else "always"
    with pytest.MonkeyPatch.context() as patch:
        *replaced, change = FAULTS[fault]
        patch.setattr(*replaced)
        found, causes, _ = trained(change, graphs=True, recompute=recompute)
    expected, _, _ = trained(change, graphs=False, recompute=recompute)
    differing = [name for name, value in expected.items() if not torch.equal(found[name], value)]
    assert causes or differing
    print(f"{fault}: {causes[0] if causes else f'other bits in {len(differing)} of {len(expected)} tensors'}")


def two_steps(layers: nn.Sequential, loss: Callable[[Any, torch.Tensor], torch.Tensor], *, graphs: bool) -> Any:
    """The gradients that three pairs of steps have added up, and the pipeline."""
    pipeline = Pipeline(layers, partitions=2, micro_batches=2, graphs=graphs, balance=[1, len(layers) - 1])
    draw = torch.Generator().manual_seed(1)
    found: list[dict[str, torch.Tensor | None]] = []
    for _ in range(3):
        for _ in range(2):
            images, classes = torch.randn(6, 3, generator=draw), torch.randint(3, (6,), generator=draw)
            pipeline.step(images, classes, loss)
        gradients = {name: one.grad for name, one in pipeline.named_parameters()}
        found.append({name: None if one is None else one.clone() for name, one in gradients.items()})
        for parameter in pipeline.parameters():
            parameter.grad = None
    return found, pipeline


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_of_several_steps_add_up(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tied weight once got twice the last step's; a loss that changes its input in place was refused; and a result
    that the loss leaves out gave zeros to parameters that have no gradient."""
    monkeypatch.setattr(pipeline_part, "graph_maker", lambda device: tape.TapeMaker())

    def loss(outputs: Any, classes: torch.Tensor) -> torch.Tensor:
        logits = outputs if isinstance(outputs, torch.Tensor) else outputs[0]
        logits /= 2
        return nn.functional.cross_entropy(logits, classes)

    results = []
    for graphs in (False, True):
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3) if tied else Heads())
        if tied:
            layers[2].weight = layers[0].weight
        results.append(two_steps(layers, loss, graphs=graphs))
    (expected, _), (found, pipeline) = results
    for own, other in zip(expected, found, strict=True):
        assert own.keys() == other.keys()
        for name, value in own.items():
            same = other[name]
            assert (value is None) == (same is None), name
            assert value is None or (same is not None and torch.equal(value, same)), name
    causes = [stage.cuda_graphs.fallback_reason for stage in pipeline._part.stages.values()]
    assert causes == ["", ""]


def test_a_step_that_failed_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline_part, "graph_maker", lambda device: tape.TapeMaker())
    pipeline = Pipeline(nn.Sequential(nn.Linear(3, 3)), partitions=1, micro_batches=2, recompute="never")
    images, classes = torch.randn(4, 3), torch.zeros(4, dtype=torch.int64)

    def fails(outputs: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("no loss")

    for loss in (nn.functional.cross_entropy, nn.functional.cross_entropy, fails, nn.functional.cross_entropy):
        with pytest.raises(ActionFailedError, match="no loss") if loss is fails else nullcontext():
            pipeline.step(images, classes, loss)


def steps_of(
    samples: Sequence[int], *, graphs: bool, keeps_graph: Sequence[int] = ()
) -> tuple[list[list[torch.Tensor]], list[int], tape.TapeMaker, Pipeline]:
    """The gradients of each step, of `samples[step]` samples, how often graphs were replayed in it, what captured them,
    and the pipeline. Before the steps `keeps_graph` the program computes a penalty on all weights, and keeps its
    graph."""
    torch.manual_seed(0)
    maker = tape.TapeMaker()
    layers = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    found, replays, draw = list[list[torch.Tensor]](), list[int](), torch.Generator().manual_seed(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline_part, "graph_maker", lambda device: maker)
        pipeline = Pipeline(layers, partitions=2, balance=[1, 2], micro_batches=4, recompute="never", graphs=graphs)
        maker.parameters = tuple(pipeline.parameters())
        for step, number in enumerate(samples):
            before = sum(one.replays for one in maker.tapes)
            penalty = sum(one.square().sum() for one in maker.parameters) if step in keeps_graph else None
            images, classes = torch.randn(number, 5, generator=draw), torch.randint(3, (number,), generator=draw)
            pipeline.step(images, classes, nn.functional.cross_entropy)
            found.append([one.grad.clone() for one in maker.parameters if one.grad is not None])
            for parameter in maker.parameters:
                parameter.grad = None
            replays.append(sum(one.replays for one in maker.tapes) - before)
            del penalty
    return found, replays, maker, pipeline


@pytest.mark.parametrize(
    ("samples", "keeps_graph", "replays_begin", "failures"),
    [
        ([12, 14, 12, 14], (), 2, 0),  # micro-batches of 4 run kernel by kernel before the first of 3 could be captured
        ([12] * 12, range(1, 5), 8, 6),
        ([12] * 40, range(40), 40, 12),
    ],
)
def test_a_capture_that_fails_is_tried_again(
    samples: Sequence[int], keeps_graph: Sequence[int], replays_begin: int, failures: int
) -> None:
    """The stage once ran kernel by kernel for good. What fails again and again is tried in steps 1, 2, 4, 8, ..."""
    expected, _, _, _ = steps_of(samples, graphs=False)
    found, replays, maker, pipeline = steps_of(samples, graphs=True, keeps_graph=keeps_graph)
    for own, other in zip(found, expected, strict=True):
        assert_same_tensors(dict(enumerate(own)), dict(enumerate(other)))
    assert [*map(bool, replays)] == [step >= replays_begin for step in range(len(samples))]
    assert maker.failed == failures
    assert pipeline._part is not None
    causes = [one.cuda_graphs.fallback_reason for one in pipeline._part.stages.values() if one.cuda_graphs is not None]
    reason = "RuntimeError: a node of autograd belongs to another stream"
    assert causes == [reason if replays_begin == len(samples) else ""] * 2


@pytest.mark.parametrize("samples", [(8, 8, 8), (8, 6, 6), (8, 8, 10, 10)])
def test_a_capture_needs_no_second_set_of_gradients(samples: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """There were three once. Captured for the second step, before any gradient; after gradients of layers that have
    run; and, for micro-batches of three samples in the last step, after gradients of graphs."""
    peaks = list[int]()
    for graphs in (False, True):
        maker = tape.TapeMaker()
        monkeypatch.setattr(pipeline_part, "graph_maker", lambda device, maker=maker: maker)
        layers = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8)))
        pipeline = Pipeline(layers, partitions=1, balance=[8], micro_batches=4, recompute="always", graphs=graphs)
        memory = tape.Memory(maker)
        for number in samples:
            images = torch.randn(number, 1024)
            with memory:
                pipeline.step(images, images, nn.functional.mse_loss)
                for parameter in pipeline.parameters():
                    parameter.grad = None
        peaks.append(memory.peak_bytes)
        assert graphs is bool(maker.tapes)
    print("Peak bytes of layers, and of graphs:", peaks)
    assert peaks[1] < peaks[0] + 64 * boundary._HASHED, "two words of 8 bytes, and three temporary results"


def test_a_capture_without_memory_frees_what_it_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """With memory for one graph, the first micro-batch has none for its backward; with memory for five, the third.
    These run kernel by kernel, the others still with graphs. When there is more memory, all have graphs."""
    found: list[tuple[list[int], list[int], list[str]]] = []
    for room, micro_batches in ((100, 2), (1, 4), (5, 4)):
        maker = tape.Full(room)
        monkeypatch.setattr(pipeline_part, "graph_maker", lambda device, maker=maker: maker)
        layers = nn.Sequential(nn.Linear(64, 64), nn.Tanh())
        pipeline = Pipeline(layers, partitions=1, balance=[2], micro_batches=micro_batches, recompute="never")
        images, targets = torch.randn(2, 2 * micro_batches, 64)
        held, captures, causes = list[int](), list[int](), list[str]()
        with tape.Memory(maker) as memory:
            for step in range(5):
                maker.left += 100 if step == 3 else 0
                pipeline.step(images, targets, nn.functional.mse_loss)
                for parameter in pipeline.parameters():
                    parameter.grad = None
                maker.tapes.clear()
                assert pipeline._part is not None
                graphs = pipeline._part.stages[0].cuda_graphs
                assert graphs is not None
                held.append(memory.bytes)
                captures.append(graphs.captures)
                causes.append(graphs.fallback_reason)
        found.append((held, captures, causes))
    (two, *_), (none, *of_none), (third, *of_third) = found
    failed = "OutOfMemoryError: no memory is left"
    assert of_none == [[0, 0, 0, 0, 4], ["", *[failed] * 3, ""]]
    assert of_third == [[0, 2, 2, 2, 4], ["", *[failed] * 3, ""]]
    assert none[1] == none[0]
    assert third[1] == two[1]


def test_what_is_read_of_a_single_sample_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was once captured with the values for verification: there is no other sample to take others from."""
    monkeypatch.setattr(pipeline_part, "graph_maker", lambda device: tape.TapeMaker())
    pipeline = Pipeline(nn.Sequential(nn.Linear(3, 3), Reading()), partitions=2, balance=[1, 1], micro_batches=2)
    for _ in range(2):
        pipeline.step(torch.randn(2, 3), torch.randn(2, 3), nn.functional.mse_loss)
    assert pipeline._part is not None
    causes = [one.cuda_graphs.fallback_reason for one in pipeline._part.stages.values() if one.cuda_graphs is not None]
    assert causes == ["", "output 0 has other bits when the layers are replayed"]


OPTIONS, TEMPERATURE = {"scales": [1.0]}, 1.0


class Settings:
    """As a configuration of a library."""

    def __init__(self) -> None:
        self.scale = 1.0


def _closed_over() -> tuple[type[nn.Module], Callable[[float], None]]:
    enclosed = 1.0

    class Enclosed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * enclosed

    def assign(scale: float) -> None:
        nonlocal enclosed
        enclosed = scale

    return Enclosed, assign


Enclosed, assign_enclosed = _closed_over()


class Configured(nn.Module):
    """Reads numbers that are not its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.options, self.settings = {"scales": [1.0]}, Settings()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.options["scales"][0] * self.settings.scale * OPTIONS["scales"][0] * TEMPERATURE


VARIABLE = "a variable that its forward reads"
SETTERS: dict[str, Callable[[Any, float], None]] = {
    "layer 4: options": lambda layer, scale: layer.options.update(scales=[scale]),
    "layer 4: settings": lambda layer, scale: setattr(layer.settings, "scale", scale),
    f"layer 4: {VARIABLE}": lambda layer, scale: globals().update(TEMPERATURE=scale),
    f"layer 4: {VARIABLE}, in it": lambda layer, scale: OPTIONS.update(scales=[scale]),
    f"layer 5: {VARIABLE}": lambda layer, scale: assign_enclosed(scale),
}


@pytest.mark.parametrize("name", SETTERS)
def test_what_layers_read_elsewhere_may_change(name: str) -> None:
    """Once in a training, so that the stage is captured again, or in each of many steps. Graphs kept the first
    value."""

    def once(layers: nn.Sequential, step: int) -> None:
        SETTERS[name](next(one for one in layers.modules() if isinstance(one, Configured)), 0.5 if step > 2 else 1.0)

    def always(layers: nn.Sequential, step: int) -> None:
        SETTERS[name](next(one for one in layers.modules() if isinstance(one, Configured)), 1 / (1 + step))

    for change, steps in ((once, 6), (always, 12)):
        expected, _, _ = trained(change, Configured(), Enclosed(), graphs=False, steps=steps)
        found, causes, _ = trained(change, Configured(), Enclosed(), graphs=True, steps=steps)
        assert_same_tensors(found, expected)
        assert causes == ([f"{name.partition(',')[0]} changes between steps"] if change is always else [])


@pytest.mark.parametrize("change", [nothing, moves_weights])
def test_graphs_are_dropped_when_the_device_has_run_them(change: Change, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host may be ahead of the device, which never waits otherwise."""
    waits: list[torch.device] = []
    monkeypatch.setattr(stage_graphs, "wait_for_device", waits.append)
    trained(change, graphs=True)
    assert bool(waits) is (change is moves_weights)
