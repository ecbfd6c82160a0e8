"""Comparisons of runs that a real reporter wrote: what differs, what is the same, what cannot be compared."""

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reporting_runs import LANGUAGE_MODEL, evaluation, plan, reporter_in, shares, step

from gpipe_cli.errors import InputError
from gpipe_cli.reporting.compare.comparison import compare, differing_settings
from gpipe_cli.reporting.compare.report import notes, same_curve_notes
from gpipe_cli.reporting.compare.run_record import Curve, RunRecord, find_runs, read_run, same_curves
from gpipe_cli.reporting.compare.scaling import Scaling, count_devices, scalings
from gpipe_cli.results.run import Partition, read_run_result, write_run


def ran(folder: Path, losses: list[float], *settings: str, status: Any = "completed", scale: int = 1) -> None:
    """A run in `folder` with these training losses and steps of `scale` times 62.5 ms, left by a reporter."""
    text = "model=transformer_lm" in settings
    places = (f"output='{folder.parent}'", f"run_folder='{folder}'")
    reporter, _ = reporter_in(folder, *places, *settings, plan=plan())
    (folder / "config.yaml").write_text("", encoding="utf-8")
    for number, loss in enumerate(losses, start=1):
        reporter.on_message(step(number, text, loss=loss, seconds=0.0625 * scale))
        reporter.add_breakdown(number, shares(0.1))
    reporter.on_message(evaluation(len(losses), text))
    reporter.finish(status, "boom\n\x1b[31min 1F0 [red]" if status == "failed" else None)
    result = read_run_result(folder)
    write_run(folder, replace(result, partitions=stages_in(*range(result.config["partitions"]))))


def stages_in(*processes: int) -> tuple[Partition, ...]:
    """Stages in a result's form, only with their places."""
    return tuple(Partition(process, "cpu") for process in processes)


def changed(run: RunRecord, **result: Any) -> RunRecord:
    """A run as `run`, with other entries in its result.json."""
    return replace(run, result=replace(run.result, **result))


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """K = 1, 2 with the same bits, 4 with another last one, 16 that failed; and a run of text."""
    folder = tmp_path_factory.mktemp("compared") / "sweep"
    same = [3.0, math.nan, 1.5, 1.25, 1.0]
    beyond = float(np.nextafter(np.float32(1.0), np.float32(2.0)))
    ran(folder / "partitions=1", same, "partitions=1")
    ran(folder / "partitions=2", same, scale=2)
    ran(folder / "partitions=4", [*same[:-1], beyond], "partitions=4", scale=4)
    ran(folder / "partitions=16", [3.0], "partitions=16", status="failed")
    ran(folder.parent / "2026-01-31_12-00-00_transformer_lm_python_docs_K2_M4", [3.0] * 5, *LANGUAGE_MODEL)
    return folder


@pytest.fixture(scope="module")
def runs(sweep: Path) -> list[RunRecord]:
    return [read_run(folder) for folder in find_runs(sweep)]


@pytest.fixture(scope="module")
def text(sweep: Path) -> RunRecord:
    return read_run(next(sweep.parent.glob("*transformer*")))


def test_runs_are_found_in_the_order_in_which_people_count(sweep: Path) -> None:
    assert [folder.name for folder in find_runs(sweep)] == [f"partitions={k}" for k in (1, 2, 4, 16)]
    assert find_runs(sweep / "partitions=2") == [sweep / "partitions=2"]
    assert len(find_runs(sweep.parent)) == 5  # one and two levels below
    with pytest.raises(InputError, match=r"result\.json: is a file"):
        find_runs(sweep / "partitions=2" / "result.json")


def test_rows_are_named_by_the_few_settings_that_differ(runs: list[RunRecord], text: RunRecord) -> None:
    assert differing_settings(runs) == ["partitions"]  # though output, run_folder and names of files differ too
    assert compare(runs).names == [f"partitions={k}" for k in (1, 2, 4, 16)]
    assert compare([*runs[:2], runs[1]]).names == ["partitions=1", "partitions=2 #2", "partitions=2 #3"]
    twice = compare([runs[1], runs[1]])  # the folder's name: nothing differs
    assert twice.names == ["partitions=2 #1", "partitions=2 #2"]


def test_same_curves_are_the_same_to_the_last_bit(runs: list[RunRecord]) -> None:
    one = Curve((1,), (1.0,))
    assert same_curves([one, one._replace(complete=False), one, None, None]) == [[0, 2]], "one is only a sample"
    assert same_curves([Curve((1,), (0.0,)), Curve((1,), (-0.0,))]) == []
    # NaN included; K = 4 differs in one bit, K = 16 is shorter
    (note,) = same_curve_notes(compare(runs))
    assert note == "train/loss is identical to the last bit: partitions=1, partitions=2"
    (note,) = same_curve_notes(compare(runs[1:3]))
    assert note == "train/loss differs from step 5 on"


def test_what_cannot_be_compared_is_noted(runs: list[RunRecord], text: RunRecord) -> None:
    def noted(*others: RunRecord) -> str:
        return "\n".join(notes(compare([runs[0], *others])))

    assert noted(runs[1]) == ""
    assert "different tasks (classification: " in noted(text)
    assert "different models (AmoebaNet-D (6, 16): " in noted(text)
    threads = {**runs[1].result.hardware, "threads_per_process": 99}
    changes: dict[str, dict[str, Any]] = {
        r"different data sets \(digits: partitions=1; cifar10: ": {"dataset": "cifar10"},
        "running: .*: partitions=2": {"status": "running"},
        "warm-up steps is shown: partitions=2": {"speed_includes_warm_up": True},
        "threads .*: results differ .* threads=1": {"hardware": threads},
        "threads .*: speeds depend": {"hardware": threads, "partitions": (Partition(0, "cuda:0"),)},
    }
    for note, change in changes.items():
        assert re.search(note, noted(changed(runs[1], **change))), note


def test_speed_up_is_over_the_run_with_the_fewest_devices_that_is_most_alike(runs: list[RunRecord]) -> None:
    """The runs are twice and four times as slow with K = 2 and 4; the fourth failed."""
    expected = [Scaling(1.0, 1.0, 0), Scaling(0.5, 0.25, 0), Scaling(0.25, 0.0625, 0), None]
    assert scalings(runs) == expected
    assert scalings(runs[:1]) == [None], "there is nothing to compare it with"
    more = replace(runs[0], settings={**runs[0].settings, "micro_batches": 8})
    same = replace(runs[1], settings={**runs[1].settings, "micro_batches": 8})
    assert [one and one.base for one in scalings([*runs[:2], more, same])] == [0, 0, 2, 2]
    interleaved = changed(runs[2], partitions=stages_in(0, 1, 0, 1))
    assert scalings([runs[0], interleaved])[1] == Scaling(0.25, 0.125, 0), "of two devices"
    assert count_devices(replace(interleaved, settings={**interleaved.settings, "replicas": 2})) == 4, (
        "of each pipeline two"
    )
    in_turns = changed(runs[2], partitions=stages_in(0, 0, 0), samples_per_second_kind="measured_one_device")
    assert count_devices(in_turns) == 3

    # What is not a pipeline's speed, or a speed of other work.
    alone = {"samples_per_second_kind": "measured_one_device"}
    assert scalings([runs[0], changed(runs[1], **alone)])[1] == Scaling(0.5, None, 0)
    hardware = {**runs[1].result.hardware, "cores": 64}
    for other in (
        changed(runs[1], samples_per_second_kind="measured_contended"),
        changed(runs[1], speed_includes_warm_up=True),
        changed(runs[1], hardware=hardware),
        replace(runs[1], settings={**runs[1].settings, "batch_size": 64}),
        replace(runs[1], settings={**runs[1].settings, "model.filters": 32}),
    ):
        assert scalings([runs[0], other]) == [None, None]
