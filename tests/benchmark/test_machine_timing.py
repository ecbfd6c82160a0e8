"""Layers are timed by workers like those of a run, in segments if need be, and what was found is remembered."""

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from plan_runs import plan_of, traced
from training_runs import TINY, configure, spec_of

from gpipe_cli.benchmark import machine_timing as timing
from gpipe_cli.benchmark.layer_benchmark import slowest_copies
from gpipe_cli.benchmark.machine_timing import remember_run, step_costs
from gpipe_cli.commands.prepare import _fewest_threads, prepare
from gpipe_cli.config.settings import TrainConfig, load_hardware
from gpipe_cli.distributed.torchrun import torchrun
from gpipe_cli.errors import InputError
from gpipe_cli.pipeline.profile.layer_cost import OperationKind
from gpipe_cli.planner import data_sheet
from gpipe_cli.planner.cost_model import LayerTimes, StepCosts
from gpipe_cli.planner.device_rates import Figures, Rates
from gpipe_cli.planner.layout import layout_of
from gpipe_cli.planner.mfu import step_flops
from gpipe_cli.planner.model_profile import ModelProfile, profile_model
from gpipe_cli.planner.pipeline_spec import PipelineSpec
from gpipe_cli.planner.plan import make_plan
from gpipe_cli.system.gpus import Gpu
from gpipe_cli.system.machine import usable_cores


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(timing, "_probe", lambda: 1.0)  # remembered whatever else the machine of the tests does
    monkeypatch.setattr(timing, "_LAYER_SECONDS", 0.1)
    monkeypatch.setattr(timing, "_REFERENCE_SECONDS", 0.0)
    return tmp_path / "gpipe" / "costs"


@pytest.fixture(autouse=True)
def machine_is_not_timed() -> None:
    """Here it is timed."""


def timed(config: TrainConfig, profile: ModelProfile) -> tuple[StepCosts, list[str]]:
    lines: list[str] = []
    return step_costs(config, profile, layout_of(config, torchrun()), lines.append), lines


def test_every_layer_is_timed_and_remembered_until_something_changes(cache: Path) -> None:
    """8 samples in 3 micro-batches: the largest has 3 and is what is timed; a plan takes their mean."""
    settings = [*TINY, "ema_decay=0.9", "freeze=[stem]"]
    config, profile = configure(*settings, "cost=measured", "partitions=2"), traced(*settings)
    costs, lines = timed(config, profile)
    assert costs.basis == "timed_layers"
    assert len(costs.layers) == len(costs.updates) == len(profile.costs)
    assert all(min(s.forward, s.graph) > 0 for s in costs.layers)
    assert [s.backward > 0 for s in costs.layers] == [False] + [True] * 6
    assert min(costs.updates) > 0, "also of the frozen layer: that of its moving averages"
    assert costs.set_up > 0
    assert 1.0 == costs.slowdown[0] <= costs.slowdown[1]
    assert min(edge.forward_seconds for edge in costs.edges) > 0
    assert lines == [f"timing {len(profile.costs)} layers on micro-batches of 3, to cut evenly (cost=measured) ..."]
    (file,) = cache.iterdir()
    raw = json.loads(file.read_text(encoding="utf-8"))[0]["found"]
    assert costs.layers[1].backward == pytest.approx(raw["alone"][1][2] * 8 / 9)
    # what layers do not depend on changes nothing; neither does a number of epochs
    assert timed(replace(config, epochs=99, recompute="never"), profile) == (costs, [])
    # a file that was damaged is measured again
    whole = file.read_text(encoding="utf-8")
    assert whole.count("0.0")
    for damaged in ("{", whole.replace("0.0", "0.1", 1)):
        file.write_text(damaged, encoding="utf-8")
        assert timing._remembered(file) is None
    # other partitions, and being told to
    assert len(timed(replace(config, cost="measured_anew"), profile)[1]) == 1
    facts = [timing._layer_facts(one, profile, layout_of(one), 3) for one in (config, replace(config, partitions=1))]
    assert [key for key in facts[0] if facts[0][key] != facts[1][key]] == ["processes"]


def test_both_halves_of_a_backward_are_timed_where_it_is_split() -> None:
    split = configure(*TINY, "freeze=[stem]", "cost=measured", "executor=in_process", "schedule=zero_bubble")
    costs, _ = timed(split, profile_model(split))
    assert [(s.inputs > 0, s.weights > 0) for s in costs.layers] == [(False, False)] + [(True, True)] * 6


def test_text_is_timed_and_a_model_that_no_device_holds_in_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    config = configure(
        "model=transformer_lm", "model.layers=2", "model.width=16", "model.hidden=32", "model.heads=2",
        "model.length=8", "dataset=synthetic_text", "dataset.vocabulary=50", "batch_tokens=null",
        "batch_size=8", "micro_batches=2", "threads=1", "cost=measured", "partitions=1",
    )  # fmt: skip
    profile = profile_model(config)
    monkeypatch.setattr(timing, "usable_memory_bytes", lambda: 10**5)
    spec = spec_of(replace(config, cost="figures"), profile)
    segments = timing._segments(config, profile, 4, spec)
    assert (len(segments) > 1, sum(segments)) == (True, len(profile.costs))
    costs, _ = timed(config, profile)
    assert len(costs.layers) == len(costs.updates) == len(profile.costs)
    assert all(min(s.forward, s.graph, s.backward) > 0 for s in costs.layers[1:])
    assert max(edge.forward_seconds for edge in costs.edges) == 0


def test_runs_calibrate_later_predictions_of_their_model(cache: Path) -> None:
    """Every prediction on a shared machine was short, by a fifth to a third: what was timed for seconds is not what a
    step meets. One factor for all K and M, so that it tips no choice."""
    settings = [*TINY, "cost=measured"]
    profile = traced(*TINY)
    config, other = (configure(*settings, f"partitions={k}") for k in (1, 2))
    costs, _ = timed(config, profile)
    assert costs.spread[0] <= 1 <= costs.spread[1]
    for at, factor in enumerate((3.0, 2.0, 1.0), 1):
        now, _ = timed(config, profile)
        plan = make_plan(config, profile, now, layout_of(config))
        remember_run(config, plan, factor * plan.step_seconds / now.calibration)
        known = [3.0, 2.0, 1.0][:at]
        assert timed(config, profile)[0].calibration == pytest.approx(median(known))
    again, _ = timed(config, profile)
    assert again.calibration == pytest.approx(2.0)
    assert again == replace(costs.calibrated(again.calibration), source=again.source, spread=again.spread)
    assert "calibrated by 3 runs" in again.source
    assert again.spread == pytest.approx((0.5, 1.5))
    before, after = (make_plan(config, profile, of, layout_of(config)) for of in (costs, again))
    assert after.step_range == pytest.approx((before.step_seconds, 3 * before.step_seconds))
    (file,) = (cache.parent / "calibration").glob("*.json")
    assert timing._calibration_file(other, layout_of(other)) == file
    another = replace(config, label_smoothing=0.3)
    assert timing._calibration_file(another, layout_of(another)) != file, "other work"
    file.write_text("[", encoding="utf-8")
    assert timed(config, profile)[0].calibration == 1.0, "it was damaged"


@pytest.mark.skipif(usable_cores() < 2, reason="a process has one thread on one core")
@pytest.mark.parametrize(("longer", "threads"), [(1.2, 1), (1.4, None)])
def test_threads_that_gain_little_are_not_used(longer: float, threads: int | None) -> None:
    """One process on two cores took two threads and gained nothing by it, and beside busy programs a step took five
    times as long: threads of small operations wait for each other."""
    config, profile = configure(*(one for one in TINY if "threads" not in one), "partitions=1"), traced(*TINY)
    config = replace(config, threads=None, hardware=load_hardware("auto"), dry_run=False)
    plan = plan_of(config, profile)
    alone = replace(plan, step_seconds=longer * plan.step_seconds)
    chosen, its_plan, _, notes = _fewest_threads(config, plan, (), lambda one: (one, alone, ()))
    assert chosen.threads == threads
    assert its_plan is (plan if threads is None else alone)
    assert len(notes) == (threads or 0)
    given = replace(config, threads=2)
    assert _fewest_threads(given, plan, (), lambda one: (one, alone, ()))[0] is given


def test_torchruns_processes_must_agree_so_they_do_not_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost")):
        monkeypatch.setenv(name, value)
    config = configure(*TINY, "cost=measured", "partitions=2")
    with pytest.raises(InputError, match="cost=measured: layers are not timed under torchrun"):
        timed(config, traced(*TINY))


def test_the_machine_is_timed_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """hardware=auto; of a user without a home it is remembered for as long as the command runs."""
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 5)
    config, profile = configure(*TINY, "partitions=2"), traced(*TINY)
    costs, lines = timed(config, profile)
    assert costs.source.startswith("hardware=auto: this machine, timed just now")
    assert all(min(s.forward, s.graph, s.backward) > 0 for s in costs.layers)
    assert costs.basis == "timed_machine"
    assert costs.figures is not None
    assert min(asdict(costs.figures).values()) > 0
    assert min(edge.forward_seconds for edge in costs.edges) > 0
    assert len(lines) == 1
    assert timed(replace(config, micro_batches=1), profile)[1] == []
    assert not cache.parent.exists()


def test_what_was_timed_holds_until_the_machine_is_slower_and_for_as_many_processes(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "_PROBES_APART_SECONDS", 0)
    lines: list[str] = []

    def found(partitions: int) -> int:
        config = configure(*TINY, f"partitions={partitions}")
        facts = timing._machine_facts(config, layout_of(config))
        number = len(lines)
        return timing._timed("hardware", facts, "timing", lines.append, lambda: {"number": number})[0]["number"]

    assert [found(1), found(1), found(2), found(1)] == [0, 0, 1, 0]
    monkeypatch.setattr(timing, "_probe", lambda: 1.5)
    assert [found(1), found(1)] == [2, 2]
    assert "speed has changed" in lines[-1]
    assert len(list((cache.parent / "hardware").iterdir())) == 2


@pytest.mark.parametrize("settings", ["hardware=cpu", "hardware.operation_microseconds=0", "dry_run=true"])
def test_figures_that_are_given_are_not_timed(settings: str, cache: Path) -> None:
    config = configure(*TINY, settings)
    _, lines = timed(config, traced(*TINY))
    assert lines == []
    assert not cache.parent.exists()


def test_copies_within_a_process_are_links() -> None:
    """Of two devices from one to the other; of one, through the host."""
    latency, bandwidth = slowest_copies([torch.device("cpu")])
    assert latency >= 0
    assert bandwidth > 0


# What stands in for GPUs: their names and memory, and the figures that workers on them would report.
H100 = Gpu("NVIDIA H100 80GB HBM3", 85_520_809_984)
OTHER = Gpu("NVIDIA of another day", 15_828_320_256)
FIGURES = {H100: Figures(6e14, 4e14, 2.8e12, 4e-6), OTHER: Figures(6e13, 4e13, 2.8e11, 6e-6)}
BOUNDARY = 48 * 2**20  # NCCL's buffers between two processes
GPU_SETTINGS = [*(setting for setting in TINY if not setting.startswith("device=")), "device=auto"]


def rates_of(gpu: Gpu) -> Rates:
    figures = FIGURES[gpu]
    return Rates(
        2e-5,
        dict.fromkeys(OperationKind, 1.3 * figures.launch_seconds),
        dict.fromkeys(OperationKind, 1.3 / figures.convolution_flops_per_second),
        dict.fromkeys(OperationKind, 1.3 / figures.copied_bytes_per_second),
        launched=True,
    )


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[Gpu]:
    """GPUs that there are not: only what workers on them would report is made up, by known rates."""
    here = [H100, H100]

    def report(task: Any, spec: PipelineSpec, timeout_seconds: float, on_message: Callable[[object], None]) -> None:
        one, placed = task.args
        samples = one.samples
        assert one.apart
        assert not one.splits
        assert placed == spec
        profile, gpu = profile_model(one.config), data_sheet.gpu_of(spec.layout.devices[0])
        assert gpu is not None
        assert sum(map(len, one.segments.layer_names)) == len(profile.costs)
        forward = [rates_of(gpu).seconds(cost.forward, samples) + 1e-5 for cost in profile.costs]
        backward = [rates_of(gpu).seconds(cost.backward, samples) + 1e-5 for cost in profile.costs]
        alone = list(zip(forward, forward, backward, strict=True))
        on_message(LayerTimes(alone, alone, [1e-4] * len(alone), 1e-3, (1e-5, 3e11), FIGURES[gpu]))

    monkeypatch.setattr(data_sheet, "torch_is_built_for", lambda: True)
    monkeypatch.setattr(data_sheet, "usable_gpus", lambda: here)
    monkeypatch.setattr(timing, "driver_version", lambda: "600.1")
    monkeypatch.setattr(timing, "busy_share", lambda number: 0.0)
    monkeypatch.setattr(timing, "run_task", report)
    return here


def test_gpus_are_timed_and_remembered(cache: Path, gpus: list[Gpu], monkeypatch: pytest.MonkeyPatch) -> None:
    remembered, settings = cache.parent / "hardware", [*GPU_SETTINGS, "precision=bfloat16", "recompute=auto"]
    config, profile = configure(*settings, "partitions=2"), profile_model(configure(*settings, "partitions=2"))
    costs, lines = timed(config, profile)
    assert (len(lines), costs.basis, costs.figures) == (1, "timed_machine", FIGURES[H100])
    assert costs.source == f"hardware=auto: {H100.name}, timed just now"
    true = sum(rates_of(H100).seconds(cost.backward, 8 / 3) for cost in profile.costs)
    assert sum(layer.backward for layer in costs.layers) == pytest.approx(true, rel=0.1)
    sent = sum(tensor.bytes(3) for tensor in profile.costs[0].outputs) / 3 * 8 / 3
    assert costs.edges[0].forward_seconds == pytest.approx(1e-5 + sent / 3e11)
    assert layout_of(config).limit_bytes == H100.memory_bytes - 2**30 - BOUNDARY
    # from the file; a probe of the CPU says nothing of them
    timing._timed_machine.cache_clear()
    monkeypatch.setattr(timing, "_probe", lambda: 1.5)
    assert timed(config, profile) == (costs, [])
    assert len(list(remembered.iterdir())) == 1
    # another precision has figures of its own; while another program uses a GPU nothing is remembered
    before, facts = (timing._machine_facts(one, layout_of(one)) for one in (config, replace(config, precision="tf32")))
    assert [key for key in facts if facts[key] != before[key]] == ["precision"]
    slept: list[float] = []
    monkeypatch.setattr(timing.time, "sleep", slept.append)
    monkeypatch.setattr(timing, "busy_share", lambda number: 0.9 * number)
    assert timing._timed("hardware", facts, "timing", lines.append, lambda: {"found": 1})[0] == {"found": 1}
    assert "another program kept a GPU busy (90.0 % of the time)" in lines[-1]
    assert len(list(remembered.iterdir())) == 1
    # what the driver shows is up to a second old: the timing before this one
    slept.clear()
    monkeypatch.setattr(timing, "busy_share", lambda number: 0.9 if sum(slept) <= 1 else 0.0)
    timing._timed("hardware", facts, "timing", lines.append, lambda: {"found": 1})
    assert lines[-1] == "timing ..."
    assert len(list(remembered.iterdir())) == 2


@pytest.mark.parametrize(("slower", "factor", "chosen"), [
    ("channels_last", 2, "contiguous"), ("contiguous", 2, "channels_last"), ("channels_last", 1.02, "channels_last"),
])  # fmt: skip
def test_on_a_gpu_a_timing_chooses_the_memory_format_of_float32(
    slower: str, factor: float, chosen: str, gpus: list[Gpu], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was channels last without a reason. The run keeps it, whatever K is; nearly equal times change nothing."""
    report, asked = timing.run_task, list[str]()

    def slow(task: Any, spec: PipelineSpec, timeout_seconds: float, on_message: Callable[[Any], None]) -> None:
        asked.append(spec.memory_format)
        by = factor if spec.memory_format == slower else 1

        def pass_on(times: LayerTimes) -> None:
            alone = [tuple(by * seconds for seconds in layer) for layer in times.alone]
            on_message(replace(times, alone=alone, together=alone))

        report(task, spec, timeout_seconds, pass_on)

    monkeypatch.setattr(timing, "run_task", slow)
    timing._timed_machine.cache_clear()
    for partitions in (1, 2):
        prepared = prepare(configure(*GPU_SETTINGS, f"partitions={partitions}"), [], str)
        assert (prepared.config.memory_format, prepared.spec.memory_format) == (chosen, chosen)
        assert [text.partition(":")[0] for label, text in prepared.notes if label == "memory format"] == [chosen]
        assert {"contiguous", "channels_last"} == set(asked[:2])
    assert set(asked[2:]) <= {chosen}, "both are timed once"
    asked.clear()
    kept = prepare(prepared.config, [], str)
    assert kept.spec.memory_format == chosen
    for given in ("precision=bfloat16", "memory_format=contiguous", "hardware=h100"):
        config = configure(*GPU_SETTINGS, given)
        assert prepare(config, [], str).config.memory_format == config.memory_format


def test_of_different_gpus_the_slowest_counts(gpus: list[Gpu]) -> None:
    """Also where there is no data sheet for it: its products are what the MFU is a share of."""
    gpus[1] = OTHER
    config = configure(*GPU_SETTINGS, "partitions=2", "recompute=auto")
    profile = profile_model(config)
    costs, _ = timed(config, profile)
    assert costs.figures == FIGURES[OTHER]
    assert costs.source.startswith(f"hardware=auto: the slowest of {H100.name}, {OTHER.name}, timed")
    assert layout_of(config).limit_bytes == OTHER.memory_bytes - 2**30 - BOUNDARY
    flops = step_flops(config, profile, spec_of(config, profile), costs)
    assert flops.peak_per_second == 2 * 6e13
    assert flops.peak_source == "2 x 60 TFLOP/s (the measured product rate)"
