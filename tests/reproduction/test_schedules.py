"""Schedules side by side: planned for 2, 4 and 8 devices, measured on those that are here."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipe_runs import answering, column, experiment

from gpipe_cli.reporting.plots.timeline_values import SHARES

SHARED = {**dict.fromkeys(SHARES, 0.0), "compute": 0.9, "bubble": 0.1}


def told(command: str, settings: Mapping[str, str], folder: Path) -> tuple[str, dict[str, Any]]:
    """zero_bubble is twice as fast as the others; each stage holds a MiB."""
    stages = int(settings["partitions"])
    schedules = settings["schedule"].split(",")
    seconds = {name: 1.0 if name == "zero_bubble" else 2.0 for name in schedules}
    if command == "plan":
        each = int(settings.get("stages_per_process", 1))
        held = [{"process": k // each, "memory": {"activations_bytes": 2**20}} for k in range(stages)]
        (name,) = schedules
        return "plan.json", {
            "stages": held, "micro_batches": 8, "step_seconds": seconds[name], "breakdown": SHARED,
            "schedule": "auto (1f1b)" if name == "auto" else name, "hardware": {"source": "hardware=cpu figures"},
        }  # fmt: skip
    rows = [
        {"settings": {"schedule": name}, "samples_per_second": 1 / seconds[name], "breakdown": SHARED,
         "activation_bytes": [2**20] * stages, "kind": "measured"}
        for name in schedules
    ]  # fmt: skip
    return "bench.json", {"rows": rows}


def test_every_schedule_has_a_row_for_each_number_of_devices(tmp_path: Path) -> None:
    found = experiment("schedules", devices=[2, 4])(answering(tmp_path, told))
    two, four = found.tables
    assert column(two, "K") == ["2"] * 4 + ["4"] * 8
    assert column(two, "speed", "simulated") == column(two, "speed", "measured") == [
        "1.00", "1.00", "2.00", "1.00", "1.00", "1.00", "1.00", "2.00", "1.00", "1.00", "1.00", "1.00",
    ]  # fmt: skip
    assert column(two, "activations", "measured") == ["1.0 MiB"] * 4 + ["2.0 MiB"] * 8
    # 3 (M + P - 1) ticks of gpipe over 3 M + P - 1 of zero bubble
    assert column(four, "unit clock", "simulated")[:4] == ["1.00", "1.00", f"{33 / 27:.2f}", "-"]
    # 6 (M + P - 1) over 6 M + P - 1, and memory as the schedules promise
    assert column(four, "unit clock", "simulated")[-4:] == [f"{66 / 51:.2f}", f"{66 / 54:.2f}", f"{66 / 59:.2f}", "-"]
    assert column(four, "graphs", "simulated")[4:] == ["8.0", "7.5", "5.5", "8.0", "4.0", "3.0", "2.0", "-"]
    assert ("auto", "4 devices of 2 stages: 1f1b") in found.notes
