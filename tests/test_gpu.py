"""The laws on a CUDA device, the memory that recomputation saves, and a tiny run of the command."""

import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count, product
from pathlib import Path
from typing import Any

import library_runs
import pytest
import torch
from engine_runs import Case, SumOfSquares, local_transport, run_in_process
from torch import nn
from training_runs import LIVELY, TINY, assert_same_tensors, command, configure, final_tensors, of_type, train_here

from gpipe_cli.benchmark import machine_timing
from gpipe_cli.benchmark.machine_timing import step_costs
from gpipe_cli.data.micro_batches import micro_batch_sizes
from gpipe_cli.pipeline.runtime.executor import Executor
from gpipe_cli.pipeline.runtime.stage import Stage
from gpipe_cli.planner.model_profile import profile_model
from gpipe_cli.planner.process_layout import layout_of
from gpipe_cli.results.files import read_result
from gpipe_cli.schedule.named_schedules import SCHEDULES, build
from gpipe_cli.schedule.schedule import RECOMPUTE_MODES
from gpipe_cli.training import train_loop
from gpipe_cli.training.checkpoint.background_writer import Snapshot
from gpipe_cli.training.events import StepDone

SETTINGS = [*(setting for setting in TINY if not setting.startswith("device=")), "device=cuda"]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As the workers of a run are set: the same bits again, and no algorithm chosen by timing."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    cudnn = torch.backends.cudnn
    before = cudnn.deterministic, cudnn.benchmark
    cudnn.deterministic, cudnn.benchmark = True, False
    yield
    cudnn.deterministic, cudnn.benchmark = before


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_neither_partitions_nor_graphs_matter(schedule: str, channels_last: bool) -> None:
    whole = Case(device="cuda:0", schedule=schedule, channels_last=channels_last)
    expected = run_in_process(whole)
    for partitions, recompute, graphs in product((1, 2, 4), RECOMPUTE_MODES, (False, True)):
        case = replace(whole, partitions=partitions, recompute=recompute, stages_per_process=2, graphs=graphs)
        assert_same_tensors(run_in_process(case), expected)


def test_partitions_do_not_matter_in_a_loop_of_ones_own() -> None:
    expected = library_runs.train(partitions=1, recompute="never", devices=["cuda:0"])
    for partitions, recompute in product((2, 4), RECOMPUTE_MODES):
        devices = ["cuda:0"] * partitions
        assert_same_tensors(library_runs.train(partitions=partitions, recompute=recompute, devices=devices), expected)


def peak_bytes(recompute: str) -> int:
    """Of one step of 16 wide layers that keep an activation of 4 MiB each per micro-batch."""
    device = torch.device("cuda:0")
    layers = OrderedDict((f"layer_{n}", nn.Sequential(nn.Conv2d(16, 16, 1), nn.Tanh())) for n in range(16))
    stage = Stage(0, nn.Sequential(layers).to(device), first_layer=0, inputs=(), device=device, run_seed=0)
    executor = Executor({0: stage}, [0], local_transport({0: stage}))
    images = torch.randn(8, 16, 128, 128, device=device)
    schedule, sizes = build("gpipe", 1, 4, recompute), micro_batch_sizes(8, 4)
    for step in range(2):  # the first allocates gradients and workspaces
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats(device)
        executor.run(schedule, step, sizes, (images,), SumOfSquares())
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated(device)


def test_recomputation_lowers_the_peak() -> None:
    """Kept graphs of 4 micro-batches of 16 layers against one: more than two thirds of the activations go."""
    torch.cuda.empty_cache()
    never, always = peak_bytes("never"), peak_bytes("always")
    activations = 4 * 16 * 2 * 16 * 128 * 128 * 4  # bytes: micro-batches x layers x (samples, channels, side, side)
    assert never > activations
    assert always < never - activations / 2


def test_the_largest_mini_batch_fits_and_four_times_as_many_samples_run_out_of_memory(tmp_path: Path) -> None:
    """The allocator has the memory that the plan was given, and a quarter more for cuDNN's workspaces and fragments. As
    the backward of a cell needs less than all of its activations again, for which there is room in the plan, real peaks
    of this model on a CPU are 0.7 of the planned ones."""
    limit_gib = 0.5
    share = 1.25 * limit_gib * 2**30 / torch.cuda.get_device_properties(0).total_memory
    script = tmp_path / "limited.py"  # torchrun's process is the one that trains
    script.write_text(
        f"import sys, torch\ntorch.cuda.set_per_process_memory_fraction({share})\n"
        "from gpipe_cli.cli import main\nsys.exit(main(sys.argv[1:]))\n"
    )
    changed = "batch_size=", "dataset.train_samples="
    settings = [*(one for one in SETTINGS if not one.startswith(changed)), "dataset.train_samples=100000"]

    def train(name: str, *more: str) -> subprocess.CompletedProcess[str]:
        # torchrun would look up the name of the machine, which without a network may be in no table
        alone = "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=1"
        torchrun = [sys.executable, "-m", "torch.distributed.run", *alone, str(script)]
        arguments = ["train", *settings, "max_steps=2", f"run_folder={tmp_path / name}", *more]
        return subprocess.run([*torchrun, *arguments], capture_output=True, text=True, timeout=300, check=False)

    fitting = train("fits", "batch_size=auto", f"hardware.memory_gib={limit_gib}")
    assert fitting.returncode == 0, fitting.stderr
    samples = read_result(tmp_path / "fits")["config"]["batch_size"]
    too_large = train("too_large", f"batch_size={4 * samples}")
    assert too_large.returncode == 1
    assert "out of memory" in too_large.stdout + too_large.stderr


@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16"])
def test_the_command_trains_on_the_device(precision: str, tmp_path: Path) -> None:
    """All stages on one device, K = 1 and K = 2: equal checkpoints, an honest name for the speed, and, though nobody
    waits for an event, a breakdown and a timeline."""
    for partitions in (1, 2):
        folder = tmp_path / str(partitions)
        common = [*SETTINGS, *LIVELY, "executor=in_process", "epochs=2", f"precision={precision}"]
        arguments = [*common, f"partitions={partitions}"]
        assert command("train", *arguments, f"run_folder={folder}") == 0
        result = read_result(folder)
        assert result["status"] == "completed"
        assert all(part["device"].startswith("cuda:") for part in result["partitions"])
        assert all(peak > 0 for peak in result["memory_bytes"])
        assert result["hardware"]["gpus"]
    if torch.cuda.device_count() == 1:
        assert read_result(tmp_path / "2")["samples_per_second_kind"] == "measured_one_device"
    assert_same_tensors(final_tensors(tmp_path / "1"), final_tensors(tmp_path / "2"))
    shares = result["breakdown"]["measured"]
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["compute"] > 0
    assert 0 <= result["bubble"]["measured"] < 1
    assert (folder / "pipeline.html").is_file()


def test_compiled_layers_are_replayed(tmp_path: Path) -> None:
    for graphs in ("auto", "false"):
        settings = [*SETTINGS, "compile=true", "executor=in_process", "epochs=2", "partitions=2", f"graphs={graphs}"]
        assert command("train", *settings, f"run_folder={tmp_path / graphs}") == 0
    assert read_result(tmp_path / "auto")["graphs"]["fallback_reasons"] == []
    assert_same_tensors(final_tensors(tmp_path / "auto"), final_tensors(tmp_path / "false"))


@pytest.mark.parametrize("graphs", ["auto", "false"])
def test_no_step_waits_for_the_device(graphs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA raises where the host would wait, in every step but the first two, in which libraries set themselves up."""

    def refusing(work: Callable[..., Any]) -> Callable[..., Any]:
        steps = count()

        def run(*arguments: Any, **more: Any) -> Any:
            torch.cuda.set_sync_debug_mode("error" if next(steps) >= 2 else "default")
            try:
                return work(*arguments, **more)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return run

    for name in ("compute_gradients", "update_weights"):
        monkeypatch.setattr(train_loop, name, refusing(getattr(train_loop, name)))
    whole = "dataset.train_samples=24", "epochs=2"  # mini-batches of other sizes would be recorded later
    config = configure(*SETTINGS, *LIVELY, *whole, "executor=in_process", "partitions=2", f"graphs={graphs}")
    assert len(of_type(train_here(config, tmp_path), StepDone)) > 2


@pytest.mark.parametrize("machine_is_not_timed", [None], ids=["timed"])  # instead of the fixture of all tests
def test_layers_are_timed_once_for_each_precision(
    machine_is_not_timed: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    lines: list[str] = []
    for precision in ("float32", "bfloat16", "bfloat16"):
        monkeypatch.setattr(machine_timing, "_costs_of_command", {})
        config = configure(*SETTINGS, f"precision={precision}", "partitions=1")
        profile = profile_model(config)
        costs = step_costs(config, profile, layout_of(config), lines.append)
        assert costs.cost_source == "timed_layers"
        assert all(min(layer[:3]) > 0 for layer in costs.layers)
    assert len(lines) == 2


def test_a_snapshot_has_what_was_there_before_later_kernels() -> None:
    """Taken while the GPU is still busy with earlier ones, without waiting for it."""
    weight = torch.ones(64, 64, 32, 32, device="cuda").to(memory_format=torch.channels_last)
    factor = torch.randn(4096, 4096, device="cuda")
    snapshot = Snapshot()
    for expected in (1.0, 2.0):  # the second into the same memory: to take page-locked memory may wait for the GPU
        for _ in range(20):
            factor = factor @ factor
        copies, wait_for_copies = snapshot.copy_to_host({"weight": weight, "step": torch.tensor(3)})
        assert expected == 1.0 or not torch.cuda.current_stream().query()
        weight += 1
        wait_for_copies()
        assert copies["weight"].is_pinned()
        assert (copies["weight"] == expected).all()
