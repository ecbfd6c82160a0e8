"""`Pipeline` in a user's own loop: the laws, in one process and under torchrun; state, evaluation, and refusals."""

import copy
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import library_runs
import pytest
import torch
from library_runs import lively_layers, mini_batch, train
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from training_runs import assert_same_tensors

import gpipe_cli
from gpipe_cli import Pipeline
from gpipe_cli.config.schema import parse_config
from gpipe_cli.distributed.torchrun_env import Torchrun
from gpipe_cli.errors import InputError
from gpipe_cli.library import setup
from gpipe_cli.pipeline.runtime.executor import ActionFailedError

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]


@cache
def whole(
    schedule: str, lengths: tuple[int, ...] = (5, 5, 5), precision: str = "float32", micro_batches: int = 4
) -> dict[str, torch.Tensor]:
    """One partition, nothing recomputed; 1f1b adds up gradients in the order of all schedules but gpipe."""
    order = "gpipe" if schedule == "gpipe" else "1f1b"
    return train(
        lengths, partitions=1, schedule=order, recompute="never", precision=precision, micro_batches=micro_batches
    )


LINKED = {"schedule": "1f1b", "linked": True, "recompute": "always"}
CASES: list[dict[str, Any]] = [
    {"partitions": 2},
    {"partitions": 4, "schedule": "interleaved", "recompute": "always", "ends_only": True},
    {"partitions": 4, "schedule": "zero_bubble", "balance": [1, 2, 2, 1]},
    {"partitions": 4, "schedule": "zbv"},
    {"partitions": 2, "schedule": "1f1b", "recompute": "never", "lengths": [5, 9, 3]},
    {"partitions": 2, "precision": "bfloat16"},
    {"partitions": 2, "autocast": True},
    *({"partitions": k, **LINKED} for k in (2, 4)),
]
REPLICAS = {"partitions": 2, "replicas": 2, "schedule": "1f1b"}


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """All that is run under torchrun, in one start, of two processes: their folder, and how they ended."""
    folder = tmp_path_factory.mktemp("started")
    paths = os.pathsep.join([str(Path(library_runs.__file__).parent), str(Path(gpipe_cli.__file__).parents[1])])
    command = [*TORCHRUN, "--nproc-per-node=2", library_runs.__file__, str(folder), json.dumps([*CASES, REPLICAS])]
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    return folder, subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
    )


def test_processes_do_not_matter(started: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    """Two processes with one stage each, or two, chosen or given: each has the gradients of its own layers, and all
    else. Sentences may be longer from one mini-batch to the next; a weight of three layers and a skip over all."""
    folder, done = started
    assert (folder / "1.pt").exists(), done.stderr
    of_first, of_last = (torch.load(folder / f"{rank}.pt")[:-2] for rank in range(2))
    for case, first, last in zip(CASES, of_first, of_last, strict=True):
        if "linked" in case:
            expected = train(linked=True, partitions=1, schedule="1f1b", recompute="never")
        else:
            lengths = case.get("lengths", (5, 5, 5))
            precision = "bfloat16" if "autocast" in case else case.get("precision", "float32")
            expected = whole(case.get("schedule", "gpipe"), tuple(lengths), precision)
        shared = {name for name in expected if name.startswith(("loss", "norm", "final"))}
        for results in (first, last):
            assert_same_tensors({name: results[name] for name in shared}, {name: expected[name] for name in shared})
        if "linked" not in case:
            assert first.keys() & last.keys() == shared
            assert_same_tensors(first | last, expected)


def test_replicas_are_one_pipeline_with_all_micro_batches(
    started: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    """The same bits in both; as with R M micro-batches, except for the order of sums."""
    first, second = (torch.load(started[0] / f"{rank}.pt")[-2] for rank in range(2))
    del first["outputs"], second["outputs"]  # of other samples
    assert_same_tensors(first, second)
    expected = whole("1f1b", micro_batches=8)
    # the gradient of a bias before a batch norm is rounding alone, which Adam makes a step of
    of_biases = {f"final {k}.{name}" for k in range(1, 5) for name in ("linear.bias", "norm.running_mean")}
    for name, tensor in first.items():
        if name not in of_biases:
            torch.testing.assert_close(tensor, expected[name], rtol=1e-3, atol=1e-5)


def test_replicas_that_would_drift_apart_are_refused(started: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    for rank in range(2):
        weights, buffers = torch.load(started[0] / f"{rank}.pt")[-1]
        assert weights.startswith("replicas=2: 0.weight")
        assert buffers.startswith("replicas=2: 0.running_mean")
        assert "use replicas=1" in buffers


def test_closed_pipelines_leave_nothing(started: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    """Of each there were 15 descriptors, 9 threads and 3 process groups."""
    for rank in range(2):
        before, *after = json.loads((started[0] / f"closed_{rank}.json").read_text())
        assert after == [before] * 3


def test_a_closed_pipeline_runs_no_more_and_leaves_its_layers() -> None:
    layers, (inputs, targets) = lively_layers(), mini_batch(0, 5)
    with Pipeline(layers, inputs, partitions=2, micro_batches=4) as pipeline:
        pipeline.step(inputs, targets, F.cross_entropy)
    pipeline.close()
    with pytest.raises(InputError, match=r"^step: the pipeline is closed; .*make another"):
        pipeline.step(inputs, targets, F.cross_entropy)
    assert all(parameter.grad is not None for parameter in pipeline.parameters())
    error = KeyError("of the program")
    with pytest.raises(KeyError) as raised, Pipeline(layers, inputs, partitions=2, micro_batches=4) as pipeline:
        raise error
    assert raised.value is error


class Recurrent(nn.Module):
    """Torch has another LSTM where gradients are not recorded, on CPUs that can."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(8, 128, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.cell(x)[0]
        return outputs[:, -1]


def test_recurrent_layers_may_be_recomputed() -> None:
    results = []
    for recompute in ("never", "always"):
        torch.manual_seed(0)
        pipeline = small(Recurrent(), nn.Linear(128, 2), recompute=recompute)
        loss = pipeline.step(torch.randn(4, 5, 8), ONES, F.mse_loss)
        gradients = [parameter.grad for parameter in pipeline.parameters() if parameter.grad is not None]
        results.append({str(number): tensor for number, tensor in enumerate((loss, *gradients))})
    assert_same_tensors(*results)


class Switch(nn.Module):
    """Has a branch that takes part once it is `on`, and an output that is used then."""

    on = False

    def __init__(self, branch: bool) -> None:
        super().__init__()
        self.frozen, self.branch = nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2) if branch else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.frozen(x)
        return outputs + self.branch(x) if self.branch is not None and Switch.on else outputs


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.left(x), self.right(x)


class First(nn.Module):
    def forward(self, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return inputs[0] + inputs[1] if Switch.on else inputs[0]


def test_what_changes_after_the_first_step_is_right_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients were lost without a word: of a branch that is switched on, and of layers that are trained later."""
    branch = small(Switch(branch=True), nn.Linear(2, 2))
    unused = small(Both(), First())
    layers = Switch(branch=False), nn.Linear(2, 2)
    unfrozen = small(*layers)
    last = nn.Linear(2, 2)
    last.weight.requires_grad_(False)
    unfrozen_last = small(nn.Linear(2, 2), last)
    for pipeline in (branch, unused, unfrozen, unfrozen_last):
        pipeline.step(ONES, ONES, F.mse_loss)
    monkeypatch.setattr(Switch, "on", True)
    layers[0].requires_grad_(True)
    with pytest.raises(InputError, match="layer 0"):
        branch.step(ONES, ONES, F.mse_loss)
    with pytest.raises(InputError, match=r"0\.frozen\.weight"):
        unfrozen.step(ONES, ONES, F.mse_loss)
    last.weight.requires_grad_(True)
    for pipeline in (unused, unfrozen_last):
        pipeline.step(ONES, ONES, F.mse_loss)
        assert all(parameter.grad is not None for parameter in pipeline.parameters())


def test_compiled_layers_do_not_depend_on_the_cut() -> None:
    """Every micro-batch has one sample, as each number of samples would be compiled."""
    same = {"lengths": (5, 5), "compile": True, "micro_batches": max(library_runs.SAMPLES)}
    expected = train(partitions=1, schedule="1f1b", recompute="never", **same)
    assert_same_tensors(train(partitions=2, schedule="1f1b", **same), expected)


def test_compiling_leaves_gradients_and_buffers_as_they_are() -> None:
    """A rehearsal on zeros, before the first step with a size, once dropped what earlier steps had accumulated."""
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        norm = nn.InstanceNorm1d(2, affine=True, track_running_stats=True)
        pipeline = small(nn.Linear(2, 2), norm, compile=compiled)
        for samples in (4, 3):
            inputs = torch.linspace(-1, 1, samples * 4).reshape(samples, 2, 2)
            pipeline.step(inputs, inputs, lambda outputs, targets: F.mse_loss(outputs, targets))
        gradients = {name: parameter.grad for name, parameter in pipeline.named_parameters()}
        found.append(gradients | {name: value for name, value in pipeline.state_dict().items() if "running" in name})
    for name, tensor in found[0].items():
        torch.testing.assert_close(found[1][name], tensor)


def test_a_pipeline_goes_on_after_a_step_that_failed() -> None:
    def fail(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        assert targets.sum() < 100, "a wild target"
        return F.mse_loss(outputs, targets)

    layers = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
    layers[2].weight = layers[0].weight
    plain = copy.deepcopy(layers)
    tried, fresh = (Pipeline(made, partitions=2, micro_batches=2) for made in (layers, plain))
    for pipeline in (tried, fresh):
        pipeline.step(ONES, ONES, fail)
    with pytest.raises(ActionFailedError, match="a wild target"):
        tried.step(ONES, torch.cat([ONES[:2], 1000 * ONES[2:]]), fail)
    for pipeline in (tried, fresh):
        pipeline.step(ONES, ONES, fail)
    for ours, expected in zip(tried.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(ours.grad, expected.grad)
    assert_same_tensors(tried.state_dict(), fresh.state_dict())


def test_a_process_that_fails_ends_all_and_says_what_failed(
    started: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    _, done = started
    assert done.returncode == 1
    assert "InputError: layer 1 returns (2, 4)" in done.stderr


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gradients_are_those_of_plain_pytorch(reduction: str) -> None:
    """On the whole mini-batch in float64, with micro-batches of 3, 2, 2 and 2 samples; the layers are a list."""
    layers = [nn.Conv1d(2, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(24, 3)]
    model = nn.Sequential(*layers).double()
    inputs, targets = torch.randn(9, 2, 8, dtype=torch.float64), torch.randint(3, (9,))

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(outputs, targets, reduction=reduction)

    expected_loss = loss(model(inputs), targets)
    expected = torch.autograd.grad(expected_loss, list(model.parameters()))
    pipeline = Pipeline(layers, partitions=3, micro_batches=4)
    found = pipeline.step(inputs, targets, loss, reduction=reduction)
    torch.testing.assert_close(found, expected_loss.detach(), rtol=1e-12, atol=1e-12)
    for one, gradient in zip(pipeline.parameters(), expected, strict=True):
        torch.testing.assert_close(one.grad, gradient, rtol=1e-12, atol=1e-12)
    norm = pipeline.clip_grad_norm_(1e-3)
    torch.testing.assert_close(norm, nn.utils.get_total_norm(expected), rtol=1e-12, atol=1e-12)
    clipped = nn.utils.get_total_norm([one.grad for one in pipeline.parameters() if one.grad is not None])
    torch.testing.assert_close(clipped, torch.tensor(1e-3, dtype=torch.float64))


def test_the_program_keeps_its_random_numbers_and_its_layers() -> None:
    """Seeding the layers must not seed the program's own shuffling. The layers get the trained values, and no hooks."""
    layers = lively_layers()
    inputs, targets = mini_batch(0, 5)
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    pipeline = Pipeline(layers, partitions=2, micro_batches=4)
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
    pipeline.step(inputs, targets, F.cross_entropy)
    optimizer.step()
    assert torch.equal(torch.rand(4), expected)
    pipeline.eval()
    torch.testing.assert_close(layers.eval()(inputs), pipeline(inputs))
    Pipeline(layers, partitions=3, micro_batches=2).step(inputs, targets, F.cross_entropy)


def test_state_goes_to_plain_layers_and_back_and_a_training_continues() -> None:
    expected = whole("gpipe")
    inputs, targets = mini_batch(0, 5)
    first = Pipeline(lively_layers(), partitions=3, micro_batches=4)
    optimizer = torch.optim.Adam(first.parameters(), lr=0.01)
    first.step(inputs, targets, F.cross_entropy)
    first.clip_grad_norm_(0.5)
    optimizer.step()
    plain = lively_layers()
    plain.load_state_dict(first.state_dict())
    second = Pipeline(nn.Sequential(*(type(layer)() for layer in plain)), inputs, partitions=2, micro_batches=4)
    second.load_state_dict(plain.state_dict())
    assert_same_tensors(second.state_dict(), first.state_dict())
    second.steps = first.steps
    assert torch.equal(second.step(*mini_batch(1, 5), F.cross_entropy), expected["loss 1"])
    state = second.state_dict()
    for wrong in (state | {"7.weight": torch.ones(1)}, {**state, "5.linear.bias": torch.ones(4)}, {}):
        with pytest.raises(InputError, match=r"state: (7.weight|5.linear.bias|0.embedding.weight)"):
            second.load_state_dict(wrong)
    assert_same_tensors(second.state_dict(), state)


def test_tuples_go_in_and_come_out() -> None:
    """Two inputs, two outputs and two targets; the loss is called with tuples."""

    class Add(nn.Module):
        def forward(self, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
            return inputs[0] + 2 * inputs[1]

    def loss(outputs: tuple[torch.Tensor, ...], targets: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return F.mse_loss(outputs[0], targets[0]) + F.mse_loss(outputs[1], targets[1])

    layers = nn.Sequential(Add(), Both())
    inputs, targets = (torch.randn(5, 2), torch.randn(5, 2)), (torch.randn(5, 2), torch.randn(5, 2))
    pipeline = Pipeline(layers, inputs, partitions=2, micro_batches=2)
    expected = loss(layers(inputs), targets)
    torch.testing.assert_close(pipeline.step(inputs, targets, loss), expected.detach())
    outputs = pipeline.eval()(inputs)
    assert type(outputs) is tuple
    assert not any(tensor.requires_grad for tensor in outputs)
    for found, plain in zip(outputs, layers(inputs), strict=True):
        torch.testing.assert_close(found, plain)


def test_outputs_are_joined_where_the_samples_lie() -> None:
    """Micro-batches (5, 4, 3) once became (10, 4, 3), not (5, 8, 3)."""

    class LengthFirst(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x.transpose(0, 1), x.mean(1)

    layers, x = nn.Sequential(nn.Linear(3, 3), LengthFirst()), torch.randn(8, 5, 3)
    joined = Pipeline(layers, partitions=2, micro_batches=2).eval()(x)
    for ours, plain in zip(joined, layers(x), strict=True):
        torch.testing.assert_close(ours, plain)


def small(*layers: nn.Module, example: Any = None, **arguments: Any) -> Pipeline:
    given = {"partitions": 2, "micro_batches": 2} | arguments
    return Pipeline(nn.Sequential(*(layers or (nn.Linear(2, 2), nn.Linear(2, 2)))), example, **given)


@pytest.mark.parametrize(
    ("given", "rank", "gpus"),
    [
        ({"partitions": 4}, None, "0 1 2 3"),
        ({"partitions": 2}, None, "0 1"),
        ({"partitions": 4, "devices": ["cuda:2", "cuda:0"]}, None, "2 2 0 0"),
        ({"partitions": 8, "schedule": "interleaved"}, None, "0 1 2 3 0 1 2 3"),
        ({"partitions": 8, "schedule": "zbv"}, None, "0 1 2 3 3 2 1 0"),
        ({"partitions": 4}, 1, "0 1 2 3"),
        ({"partitions": 4, "replicas": 2}, 3, "2 2 3 3"),
        ({"partitions": 4, "devices": ["cuda:3"]}, 1, "3 3 3 3"),
    ],
)
def test_stages_are_placed_on_the_gpus_of_a_program(
    given: dict[str, Any], rank: int | None, gpus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four GPUs, in one process or with a process of torchrun for each."""
    monkeypatch.setattr(setup, "number_of_devices", lambda: 4)
    torchrun = None if rank is None else Torchrun(rank=rank, world_size=4, local_world_size=4, local_rank=rank)
    defaults = {
        "micro_batches": 4, "schedule": "gpipe", "recompute": "never", "balance": None, "devices": None, "seed": 0,
        "graphs": True, "precision": "float32", "executor": "in_process" if rank is None else "distributed",
    }  # fmt: skip
    layout = setup.place_on_devices(parse_config(setup.Arguments, defaults | given), torchrun)
    assert layout.for_rank(rank or 0).devices == tuple(f"cuda:{gpu}" for gpu in gpus.split())


ONES = torch.ones(4, 2)
INPUTS, CLASSES = torch.linspace(-1, 1, 54).view(9, 6).sin(), torch.arange(9) % 3


def normed() -> nn.Sequential:
    """With statistics that are not any mini-batch's."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
    layers[1].running_mean.add_(0.3)
    return layers


def gradients_of_step(pipeline: Pipeline) -> dict[str, torch.Tensor]:
    for parameter in pipeline.parameters():
        parameter.grad = None
    pipeline.step(INPUTS, CLASSES, F.cross_entropy)
    return {name: parameter.grad for name, parameter in pipeline.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_modes_that_layers_are_given_in_hold_until_they_are_set(recompute: Any) -> None:
    """A norm in evaluation mode, as for fine-tuning, was trained: other gradients in all layers."""
    plain = normed()
    plain[1].eval()
    for inputs, classes in zip(INPUTS.split(3), CLASSES.split(3), strict=True):
        (F.cross_entropy(plain(inputs), classes) / 3).backward()
    given = normed()
    given[1].eval()
    pipeline = Pipeline(given, INPUTS, partitions=2, micro_batches=3, recompute=recompute)
    for _ in range(2):
        for name, gradient in gradients_of_step(pipeline).items():
            torch.testing.assert_close(gradient, plain.get_parameter(name).grad)
        assert torch.equal(pipeline.state_dict()["1.running_mean"], plain[1].running_mean)
        pipeline.eval()(INPUTS)
        pipeline.train(in_evaluation=["1"])
    pipeline.step(INPUTS[:1], CLASSES[:1], F.cross_entropy)  # a norm in training would refuse a single sample
    assert_same_tensors(
        gradients_of_step(pipeline.train()), gradients_of_step(Pipeline(normed(), partitions=1, micro_batches=3))
    )


@pytest.mark.parametrize("schedule", ["gpipe", "zero_bubble"])
def test_hooks_that_step_in_the_backward_are_called_once_with_the_whole_gradient(schedule: str) -> None:
    """They were called for each micro-batch, and changed weights that others still needed."""
    trained = []
    for in_backward in (False, True):
        pipeline = Pipeline(normed(), INPUTS, partitions=2, micro_batches=3, schedule=schedule)
        of_parameter = {p: torch.optim.SGD([p], 0.1) for p in pipeline.parameters()}
        calls: list[torch.Tensor] = []

        def update(parameter: torch.Tensor, of_parameter: Any = of_parameter, calls: Any = calls) -> None:
            calls.append(parameter)
            of_parameter[parameter].step()
            of_parameter[parameter].zero_grad()

        for parameter in of_parameter if in_backward else ():
            parameter.register_post_accumulate_grad_hook(update)
        for _ in range(2):
            pipeline.step(INPUTS, CLASSES, F.cross_entropy)
            for parameter in () if in_backward else of_parameter:
                update(parameter)
        assert len(calls) == 2 * len(of_parameter)
        trained.append(pipeline.state_dict())
    assert_same_tensors(*trained)


class Dispatched(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextmanager
def double_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    "switch",
    [
        lambda: torch.autograd.set_detect_anomaly(True), deterministic, double_by_default, torch.no_grad,
        lambda: torch.device("meta"), lambda: torch.autograd.set_multithreading_enabled(False), Dispatched,
        lambda: FlopCounterMode(display=False), torch.profiler.profile, torch.autograd.graph.save_on_cpu,
    ],
    ids=[
        "anomalies", "deterministic", "dtype", "no_grad", "device", "threads", "dispatch", "flops", "profiler",
        "saved_on_cpu",
    ],
)  # fmt: skip
def test_switches_of_torch_change_no_gradient(switch: Callable[[], Any], request: pytest.FixtureRequest) -> None:
    """Around the whole program, and around a step; detection of anomalies once ended a trace."""
    expected = gradients_of_step(Pipeline(normed(), INPUTS, partitions=2, micro_batches=3))
    layers, pipelines = normed(), []
    if "flops" not in request.node.name:  # its hooks take part in every backward, and a traced one is refused
        with warnings.catch_warnings(), switch():
            warnings.simplefilter("ignore")  # torch warns of slow detection
            pipelines.append(Pipeline(layers, INPUTS, partitions=2, micro_batches=3))
            assert_same_tensors(gradients_of_step(pipelines[0]), expected)
    pipelines.append(Pipeline(normed(), INPUTS, partitions=2, micro_batches=3))
    for pipeline in pipelines:
        with warnings.catch_warnings(), switch():
            warnings.simplefilter("ignore")
            assert_same_tensors(gradients_of_step(pipeline), expected)


def test_an_evaluation_in_inference_mode_leaves_a_pipeline_that_can_be_trained() -> None:
    pipeline = Pipeline(normed(), partitions=2, micro_batches=3).eval()
    with torch.inference_mode():
        torch.testing.assert_close(pipeline(INPUTS), normed().eval()(INPUTS))
    expected = gradients_of_step(Pipeline(normed(), partitions=2, micro_batches=3))
    assert_same_tensors(gradients_of_step(pipeline.train()), expected)


def test_a_compiled_training_step_runs_the_engine_as_it_is() -> None:
    """The compiler entered the engine, and compiled its functions again and again: 35 s before the first step."""
    pipeline = Pipeline(normed(), INPUTS, partitions=2, micro_batches=3)

    @torch.compile(backend="eager")
    def step(inputs: torch.Tensor) -> torch.Tensor:
        return 2 * pipeline.step(inputs + 0, CLASSES, F.cross_entropy)

    expected = Pipeline(normed(), INPUTS, partitions=2, micro_batches=3)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(2):
            assert step(INPUTS) == 2 * expected.step(INPUTS, CLASSES, F.cross_entropy)


def step(inputs: Any = ONES, targets: Any = ONES, loss: Any = F.mse_loss, **more: Any) -> object:
    return small().step(inputs, targets, loss, **more)


class Checkpoints(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = checkpoint(self.inside, x, use_reentrant=True)
        return outputs


class Gram(nn.Module):
    """Of N samples, (N, N)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ x.T


WRONG: dict[str, Callable[[], object]] = {
    "partitions=0": lambda: small(partitions=0),
    "partitions=3": lambda: small(partitions=3, example=torch.ones(1, 2)),
    "micro_batches=2": lambda: small(nn.Linear(2, 2), nn.BatchNorm1d(2)).step(ONES[:3], ONES[:3], F.mse_loss),
    "replicas=2": lambda: small(replicas=2),
    "devices=[]": lambda: small(devices=[]),
    "precision=float16": lambda: small(precision="float16"),
    "compile=true": lambda: small(compile=True, schedule="zero_bubble"),
    "schedule=pipedream": lambda: small(schedule="pipedream"),
    "balance=[1,2]": lambda: small(balance=(1, 2)),
    "layers=Linear": lambda: Pipeline(nn.Linear(2, 2), partitions=1, micro_batches=1),
    "layer 1 ": lambda: small(nn.Linear(2, 3), nn.Linear(2, 2), example=torch.ones(1, 2)),
    "layer 1 has a backward": lambda: small(nn.Linear(2, 2), Checkpoints()).step(ONES, ONES, F.mse_loss),
    "layers=Sequential: layer 1 is": lambda: small(nn.Linear(2, 2), torch.jit.script(nn.Linear(2, 2))),
    "targets=": lambda: step(targets=torch.ones(3, 2)),
    "inputs": lambda: step(inputs=nn.Linear(2, 2)(ONES)),  # whose gradients were left out without a word
    "the last layer returns": lambda: small(nn.Linear(2, 2), Gram()).eval()(ONES),
    "loss": lambda: step(loss=lambda outputs, targets: outputs - targets),
    "step: the pipeline": lambda: small().eval().step(ONES, ONES, F.mse_loss),
    "step: called inside torch.inference_mode": lambda: torch.inference_mode()(small().step)(ONES, ONES, F.mse_loss),
    "in_evaluation=2": lambda: small().train(in_evaluation=["2"]),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
@pytest.mark.parametrize("named", WRONG)
def test_what_cannot_be_used_is_refused_in_a_line_that_names_it(named: str) -> None:
    with pytest.raises(InputError) as refused:
        WRONG[named]()
    message = str(refused.value)
    assert message.startswith(named.strip())
    assert "\n" not in message
