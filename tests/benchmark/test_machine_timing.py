"""Layers are timed by workers like a run's, in segments if need be, and what was found is remembered."""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from plan_runs import traced
from tape import TapeMaker
from training_runs import SMALL, TINY, configure

from gpipe_cli.benchmark import machine_timing as timing
from gpipe_cli.benchmark.layer_benchmark import TimingJob, TimingResult, measure, slowest_copies
from gpipe_cli.benchmark.machine_timing import step_costs
from gpipe_cli.commands.prepare_run import prepare
from gpipe_cli.config.settings import TrainConfig
from gpipe_cli.distributed.control_group import ControlGroup
from gpipe_cli.distributed.rendezvous import broadcast_text, store
from gpipe_cli.planner import data_sheet
from gpipe_cli.planner.cost_model import MeasuredCosts, StepCosts
from gpipe_cli.planner.model_profile import ModelProfile, profile_model
from gpipe_cli.planner.pipeline_spec import PipelineSpec, make_pipeline_spec
from gpipe_cli.planner.process_layout import layout_of
from gpipe_cli.system.gpus import Gpu
from gpipe_cli.training import pipeline_part
from gpipe_cli.training.engine import WorkerProcess


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(timing, "_SECONDS", 0.0)
    monkeypatch.setattr(timing, "_costs_of_command", {})
    return tmp_path / "gpipe" / "costs"


@pytest.fixture(autouse=True)
def machine_is_not_timed() -> None:
    """Here it is timed."""


def timed(config: TrainConfig, profile: ModelProfile) -> tuple[StepCosts, list[str]]:
    """The costs for a command that has timed nothing yet, and what it logs."""
    timing._costs_of_command.clear()
    lines: list[str] = []
    return step_costs(config, profile, layout_of(config), lines.append), lines


def test_every_layer_is_timed_once_for_all_micro_batches(cache: Path) -> None:
    settings = [*SMALL, "ema_decay=0.9", "freeze=['0']"]
    config, profile = configure(*settings, "partitions=2"), traced(*settings)
    costs, lines = timed(config, profile)
    assert costs.cost_source == "timed_layers"
    assert costs.source == "layers timed on this machine, 2 and 4 samples at a time"
    assert len(costs.layers) == len(costs.updates) == len(profile.costs)
    assert all(min(s.forward_seconds, s.graph_seconds) > 0 for s in costs.layers)
    assert [s.backward_seconds > 0 for s in costs.layers] == [False] + [True] * 7
    assert costs.updates[0] > 0, "also of the frozen layer: its moving averages are updated"
    assert costs.set_up > 0
    assert costs.slowdown == () or 1.0 == costs.slowdown[0] <= costs.slowdown[1]
    assert min(edge.forward_seconds for edge in costs.edges) > 0
    assert lines == [f"timing {len(profile.costs)} layers on this machine, to cut them evenly ..."]
    (file,) = cache.iterdir()
    # what layers do not depend on changes nothing; neither does a number of epochs
    assert timed(replace(config, epochs=99, recompute="never"), profile) == (costs, [])
    other, lines = timed(replace(config, micro_batches=2), profile)
    assert (other.rates, lines) == (costs.rates, [])
    linked, lines = timed(replace(config, hardware=replace(config.hardware, link_microseconds=5e6)), profile)
    assert linked.edges[0].forward_seconds > 5
    assert lines == []
    # a file that was damaged is measured again
    whole = file.read_text(encoding="utf-8")
    assert whole.count("0.0")
    for damaged in ("{", whole.replace("0.0", "0.1", 1)):
        file.write_text(damaged, encoding="utf-8")
        assert timing._read_cache(file) is None
    # being told to, once for each command
    again = replace(config, cost="reprofile")
    assert len(timed(again, profile)[1]) == 1
    step_costs(again, profile, layout_of(again), pytest.fail)


def test_both_halves_of_a_backward_are_timed_where_it_is_split() -> None:
    split = configure(*SMALL, "freeze=['0']", "executor=in_process", "schedule=zero_bubble")
    costs, _ = timed(split, profile_model(split))
    halves = [(cost.inputs_seconds > 0, cost.weights_seconds > 0) for cost in costs.layers]
    frozen, *without_weights, linear = halves
    assert (frozen, {*without_weights}, linear) == ((False, False), {(True, False)}, (True, True))


def test_where_stages_are_replayed_layers_are_timed_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a stage: its forwards, B, I and W are replayed, and no timed pass records any of them, as those of the
    last cell once did, which seemed to take twenty times as long as its like."""
    config = configure(*TINY, "freeze=[stem]", "partitions=1", "schedule=zero_bubble")
    profile = profile_model(config)
    whole, layers = (
        make_pipeline_spec(replace(config, partitions=k, executor="in_process"), profile)
        for k in (1, len(profile.costs))
    )
    maker, found = TapeMaker(), list[Any]()
    monkeypatch.setattr(pipeline_part, "graph_maker", lambda device: maker)
    process = WorkerProcess(0, lambda: (ControlGroup(0, 1), None), found.append)
    measure(TimingJob(config, whole, layers, (2, 4), 0.0, True, layers.layout.threads), whole, process)
    (of_layers,) = found
    for seconds in of_layers.seconds:
        assert [all(value > 0 for value in layer) for layer in seconds] == [False] + [True] * 6
        assert {len(layer) for layer in seconds} == {5}
    assert len(of_layers.updates) == len(layers.layer_names)
    # Of the frozen layer a forward; of others also F and B, and F, I and W: these five again for the last cell, as its
    # second output gets no gradient.
    assert len(maker.tapes) == 2 * (1 + 6 * (1 + 2 + 3) + 5)
    # Of the others, the proof replays each once, then passes that record it, that record nothing, and that are timed.
    assert sum(tape.replays < 4 for tape in maker.tapes) == 2 * 5


def test_text_is_timed_and_a_model_that_no_device_holds_in_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a user without a home it is remembered for as long as the command runs."""
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 5)
    config = configure(
        "model=transformer_lm", "model.layers=2", "model.width=16", "model.hidden=32", "model.heads=2",
        "model.length=8", "dataset=synthetic_text", "dataset.vocabulary=50", "batch_tokens=null",
        "batch_size=8", "micro_batches=2", "threads=1", "partitions=1",
    )  # fmt: skip
    profile = profile_model(config)
    available = max(timing._bytes_of_layers(profile, 4)) + 1
    segments = timing._segments(profile, 4, available)
    assert (len(segments) > 1, sum(segments)) == (True, len(profile.costs))
    monkeypatch.setattr(timing, "usable_memory_bytes", lambda: 2 * available)
    costs, _ = timed(config, profile)
    assert len(costs.layers) == len(costs.updates) == len(profile.costs)
    assert all(min(s.forward_seconds, s.graph_seconds, s.backward_seconds) > 0 for s in costs.layers[1:])
    assert max(edge.forward_seconds for edge in costs.edges) == 0


def test_what_cannot_be_timed_is_planned_by_the_data_sheet(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that is too large, or a model that fails, as the run then will: with the reason."""
    fails = ("model=custom", "model.target=custom_models:wants_no_values")
    for settings, memory, line in (((), 1000, "a layer needs"), (fails, 2**40, "cannot be timed")):
        monkeypatch.setattr(timing, "usable_memory_bytes", lambda memory=memory: memory)
        config = configure(*(TINY[2:] if settings else TINY), *settings, "partitions=1")
        costs, lines = timed(config, profile_model(config))
        assert costs.source == "hardware=cpu figures"
        assert line in lines[-1]
    assert not cache.exists()


@pytest.mark.parametrize(
    "settings", ["cost=datasheet", "hardware=cpu", "hardware.operation_microseconds=0", "dry_run=true"]
)
def test_figures_that_are_given_are_not_timed(settings: str, cache: Path) -> None:
    costs, lines = timed(configure(*TINY, settings), traced(*TINY))
    assert (costs.cost_source, lines) == ("data_sheet", [])
    assert not cache.exists()


def test_torchruns_first_process_decides_also_for_a_later_start(monkeypatch: pytest.MonkeyPatch) -> None:
    server = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    names = {
        "WORLD_SIZE": 2,
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": server.port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }
    for name, value in names.items():
        monkeypatch.setenv(name, str(value))
    found = []
    for rank, text in ((0, "timed"), (1, "not asked"), (0, "timed again")):
        monkeypatch.setenv("RANK", str(rank))
        store.cache_clear()
        found.append(broadcast_text("costs", lambda text=text: text))
    store.cache_clear()
    assert found == ["timed"] * 3


def test_copies_within_a_process_are_links() -> None:
    """Of two devices from one to the other; of one, through the host."""
    latency, bandwidth = slowest_copies([torch.device("cpu")])
    assert latency >= 0
    assert bandwidth > 0


# What stands in for GPUs: their names and memory, and the seconds that a worker on them would report for every layer.
H100, OTHER = Gpu("NVIDIA H100 80GB HBM3", 85_520_809_984), Gpu("NVIDIA of another day", 15_828_320_256)
SECONDS = {H100: 1e-4, OTHER: 1e-3, None: 1e-2}  # None: a CPU
GPU_SETTINGS = [*(setting for setting in TINY if not setting.startswith("device=")), "device=auto", "partitions=2"]


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[Gpu]:
    """GPUs that there are not: only what workers on them would report is made up."""
    here = [H100, H100]

    def report(task: Any, spec: PipelineSpec, timeout_seconds: float, on_message: Callable[[object], None]) -> None:
        alone = [(SECONDS[data_sheet.gpu_of(spec.layout.devices[0])],) * 3] * sum(
            map(len, task.args[0].segments.layer_names)
        )
        on_message(TimingResult((alone, alone), [1e-4] * len(alone), 1e-3, 1.0, 1.0, (1.0, 1.0), (1e-5, 3e11)))

    monkeypatch.setattr(data_sheet, "torch_supports_accelerator", lambda: True)
    monkeypatch.setattr(data_sheet, "usable_gpus", lambda: here)
    monkeypatch.setattr(timing, "driver_version", lambda: "600.1")
    monkeypatch.setattr(timing, "run_task", report)
    return here


def test_of_different_gpus_the_slowest_counts(cache: Path, gpus: list[Gpu]) -> None:
    gpus[1] = OTHER
    config = configure(*GPU_SETTINGS, "precision=bfloat16")
    profile = profile_model(config)
    costs, lines = timed(config, profile)
    assert [layer.backward_seconds for layer in costs.layers] == pytest.approx([SECONDS[OTHER]] * len(profile.costs))
    assert isinstance(costs.rates, MeasuredCosts)
    assert (costs.rates.link_seconds, costs.rates.link_byte_seconds) == (1e-5, pytest.approx(1 / 3e11))
    assert len(lines) == 1
    assert timed(config, profile) == (costs, [])
    timed(replace(config, precision="tf32"), profile)
    assert len(list(cache.iterdir())) == 2, "another precision has its own seconds"


def test_images_in_float32_are_contiguous_on_gpus(gpus: list[Gpu]) -> None:
    """By a rule, as the memory format decides the bits. The run keeps it, whatever K is and wherever it is resumed."""
    config = configure(*GPU_SETTINGS)
    for one in (config, replace(config, partitions=1)):
        prepared = prepare(one, [], str)
        assert (prepared.config.memory_format, prepared.spec.memory_format) == ("contiguous", "contiguous")
    for given in ("precision=bfloat16", "memory_format=channels_last", "hardware=h100", "device=cpu"):
        prepared = prepare(configure(*GPU_SETTINGS, given), [], str)
        assert prepared.spec.memory_format == "channels_last"
