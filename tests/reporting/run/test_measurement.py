import subprocess
import sys
from dataclasses import replace

import pytest
from reporting_runs import description

from gpipe_cli.planner.stage_memory import StageMemory
from gpipe_cli.reporting.run.console import EpochMeans
from gpipe_cli.reporting.run.measurement import StepSpeeds, memory_result, process_seconds


def test_with_nothing_else_the_warm_up_counts_and_this_is_said() -> None:
    speed = StepSpeeds(warm_up_steps=3)
    assert speed.median("samples_per_second") is None
    assert not speed.includes_warm_up
    speed.add(8, 2.0)
    assert speed.includes_warm_up
    assert speed.median("samples_per_second") == 4.0


def test_tokens_have_a_speed_of_their_own() -> None:
    speed = StepSpeeds(warm_up_steps=1)
    for tokens, seconds in ((5, 100.0), (1000, 1.0), (600, 2.0), (1200, 2.0)):
        speed.add(8, seconds, tokens)
    assert speed.median("tokens_per_second") == 600.0  # of 1000, 300, 600
    assert speed.median("samples_per_second") == 4.0  # of 8, 4, 4
    assert speed.recent("tokens_per_second", 2) == 450.0
    assert speed.recent("samples_per_second", 2) == 4.0
    assert (speed.counted_steps, speed.quartiles("tokens_per_second")) == (3, [450.0, 800.0])
    assert StepSpeeds(warm_up_steps=0).quartiles("tokens_per_second") is None


def test_means_weigh_samples_not_mini_batches() -> None:
    means = EpochMeans()
    assert means.loss is None
    assert means.top1 is None
    means.add(30, 1.0, 0.5)
    means.add(10, 3.0, 0.1)
    assert means.loss == pytest.approx(1.5)
    assert means.top1 == pytest.approx(0.4)


def test_a_speed_is_a_pipelines_only_where_every_stage_had_its_cores() -> None:
    """Of each step the stage counts that was worst off; of all steps the median, as of the speed beside it."""
    speed = StepSpeeds(warm_up_steps=1)
    assert speed.kind("measured") is None
    for one, other in ((0.9, 0.9), (0.01, 0.04), (0.02, 0.0), (0.5, 0.0)):
        speed.add(8, 1.0, without_core=[one, other])
    assert speed.median("without_core") == 0.04
    assert speed.kind("measured") == "measured"
    for _ in range(3):
        speed.add(8, 1.0, without_core=[0.0, 0.3])
    assert (speed.median("without_core"), speed.kind("measured")) == (0.3, "measured_contended")
    assert speed.kind("measured_one_device") == "measured_one_device"


def test_parts_of_the_memory_add_up_to_the_peak() -> None:
    memory = StageMemory(10, 20, 30, 400, 7)
    partitions = [replace(partition, memory=memory) for partition in description().partitions]
    apart = memory_result(partitions, True, [1500, 460], [401, 402], [1000, 0])
    parts = {"weights": 10, "gradients": 20, "optimizer": 30}
    assert apart == [
        {"stage": 0, "libraries": 1000, **parts, "activations": 401, "other": 39, "peak": 1500},
        {"stage": 1, "libraries": 0, **parts, "activations": 402, "other": -2, "peak": 460},  # not all of it at once
    ]
    (together,) = memory_result(partitions, False, [2000, 2000], None, [1000, 1000])
    assert (together["stage"], together["weights"], together["activations"]) == (None, 20, 800)
    assert together["peak"] == 2000 == sum(v or 0 for k, v in together.items() if k not in ("stage", "peak"))
    assert memory_result(description().partitions, True, [1500, 460], None, None) == []
    assert memory_result(partitions, True, [], None, None) == []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_process_counts_from_its_first_moment() -> None:
    """And not from when a reporter was made, seconds of imports and of starting workers later."""
    script = "import time, sys; time.sleep(0.3); from gpipe_cli.reporting.run.measurement import process_seconds as p; "
    said = subprocess.run([sys.executable, "-c", script + "print(p())"], capture_output=True, text=True, check=True)
    assert 0.3 < float(said.stdout) < process_seconds()
