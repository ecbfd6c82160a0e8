"""Comparisons of runs that a real reporter wrote: what differs, what is the same, what cannot be compared."""

import csv
import io
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reporting_runs import LANGUAGE_MODEL, evaluation, log, plan, reporter_in, shares, step

from gpipe_cli.errors import InputError
from gpipe_cli.reporting.compare.comparison import Comparison, compare, differing, names
from gpipe_cli.reporting.compare.report import all_columns, notes, same_curve_notes, show_comparison
from gpipe_cli.reporting.compare.run_record import Curve, RunRecord, find_runs, read_run, same_curves
from gpipe_cli.reporting.compare.scaling import Scaling, devices, scalings
from gpipe_cli.reporting.tables.table import to_csv
from gpipe_cli.results.run import BubbleShares, Partition, RunResult, read_run_result, write_run


def ran(folder: Path, losses: list[float], *settings: str, status: Any = "completed", scale: int = 1) -> None:
    """A run in `folder` with these training losses and steps of `scale` times 62.5 ms, left by a reporter."""
    text = "model=transformer_lm" in settings
    places = (f"output='{folder.parent}'", f"run_folder='{folder}'")
    reporter, _ = reporter_in(folder, *places, *settings, plan=plan())
    (folder / "config.yaml").write_text("", encoding="utf-8")
    for number, loss in enumerate(losses, start=1):
        reporter.step(step(number, text, loss=loss, seconds=0.0625 * scale))
        reporter.recorded(number, shares(0.1))
    reporter.evaluated(evaluation(len(losses), text))
    reporter.finish(status, "boom\n\x1b[31min 1F0 [red]" if status == "failed" else None)
    result = read_run_result(folder)
    write_run(folder, replace(result, partitions=stages_in(*range(result.config["partitions"]))))


def stages_in(*processes: int) -> tuple[Partition, ...]:
    """Stages as a result has them, as far as it says where they were."""
    return tuple(Partition(process, "cpu") for process in processes)


def changed(run: RunRecord, **result: Any) -> RunRecord:
    """A run as `run`, with other entries in its result.json."""
    return replace(run, result=replace(run.result, **result))


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """K = 1, 2 with the same bits, 4 with another last one, 16 that failed; and a run of text beside them."""
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


def table(comparison: Comparison, width: int = 80) -> str:
    console, file = log(width=width)
    show_comparison(console, comparison)
    return file.getvalue()


def rows(comparison: Comparison) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(to_csv(all_columns(comparison)))))


def test_runs_are_found_in_the_order_in_which_people_count(sweep: Path) -> None:
    assert [folder.name for folder in find_runs(sweep)] == [f"partitions={k}" for k in (1, 2, 4, 16)]
    assert find_runs(sweep / "partitions=2") == [sweep / "partitions=2"]
    assert len(find_runs(sweep.parent)) == 5  # one and two levels below
    with pytest.raises(InputError, match=r"result\.json: is a file"):
        find_runs(sweep / "partitions=2" / "result.json")


def test_rows_are_named_by_the_few_settings_that_differ(runs: list[RunRecord], text: RunRecord) -> None:
    assert differing(runs) == ["partitions"]  # though output, run_folder and names of files differ too
    assert names(runs) == compare(runs).labels == [f"partitions={k}" for k in (1, 2, 4, 16)]
    assert names([*runs[:2], runs[1]]) == ["partitions=1", "partitions=2 #2", "partitions=2 #3"]
    assert names([runs[1], runs[1]]) == ["partitions=2 #1", "partitions=2 #2"]  # the folder's name: nothing differs
    settings = {key: value for key, value in runs[1].settings.items() if not key.startswith(("model.", "dataset."))}
    other = replace(text, settings={**settings, "model.name": "transformer_lm", "model.layers": 4, "dataset.name": "x"})
    assert differing([runs[1], other]) == ["model.name", "dataset.name"]  # a setting of one model is told by the model
    assert names([runs[1], other]) == ["model=amoebanet, dataset=digits", "model=transformer_lm, dataset=x"]


def test_threads_have_a_column_only_where_they_were_chosen(runs: list[RunRecord]) -> None:
    def with_threads(*threads: int) -> list[RunRecord]:
        return [replace(run, settings={**run.settings, "threads": n}) for run, n in zip(runs, threads, strict=False)]

    assert differing(with_threads(4, 2, 1)) == ["partitions"]
    assert differing([*with_threads(4, 2, 1), *with_threads(1)]) == ["partitions", "threads"]
    assert names([*with_threads(4), *with_threads(1)]) == ["threads=4", "threads=1"]


def test_runs_of_which_many_settings_differ_are_named_by_their_folders_and_referred_to_by_numbers() -> None:
    for folders, expected in (
        ("2026-01-31_12-00-00_resnet_K2 2026-01-31_12-30-00_amoebanet_K8", "resnet_K2 amoebanet_K8"),
        ("2026-01-31_12-00-00_x_K2 2026-01-31_12-30-00_x_K2", "12-00-00_x_K2 12-30-00_x_K2"),
        ("a/micro_batches=4 b/micro_batches=4", "a/micro_batches=4 b/micro_batches=4"),
    ):
        found = [
            RunRecord(Path("/o") / one, dict.fromkeys("abcd", n), RunResult("completed"))
            for n, one in enumerate(folders.split())
        ]
        assert names(found) == expected.split()
    many = Comparison((), [f"r{n}" for n in range(9)], False, (), ())
    assert (many.labels[2], many.referred([0, 1, 2, 3, 6]), many.referred([4])) == ("3: r2", "runs 1 to 4, 7", "run 5")


def test_same_curves_are_the_same_to_the_last_bit(runs: list[RunRecord]) -> None:
    one = Curve((1,), (1.0,))
    assert same_curves([one, replace(one, complete=False), one, None, None]) == [[0, 2]], "one is only a sample"
    assert same_curves([Curve((1,), (0.0,)), Curve((1,), (-0.0,))]) == []
    # NaN included; K = 4 differs in one bit, K = 16 is shorter
    (note,) = same_curve_notes(compare(runs))
    assert note == "train/loss is identical to the last bit: partitions=1, partitions=2"
    (note,) = same_curve_notes(compare(runs[1:3]))
    assert note == "train/loss differs from step 5 on"


def test_the_table_has_what_differs_and_what_came_of_it(runs: list[RunRecord]) -> None:
    lines = table(compare(runs)).splitlines()
    (head,) = (number for number, line in enumerate(lines) if line.startswith("run  K M status"))
    assert "micro" not in " ".join(lines[: head + 1])
    assert lines[head + 2].split()[:6] == ["1", "1", "4", "completed", "87.5", "87.5"]
    assert lines[head + 4].split()[:8] == ["3", "4", "4", "completed", "87.5", "87.5", "128.0", "0.25"]
    assert "note         partitions=16 failed: boom\\n\\x1b[31min 1F0 [red]" in lines


def test_csv_has_all_digits_and_what_was_measured_predicted_and_ideal_apart(
    runs: list[RunRecord], text: RunRecord
) -> None:
    dry = changed(runs[0], samples_per_second_kind=None, step_seconds=None, bubble=BubbleShares())
    first, _, _, failed, sentences, unmeasured = rows(compare([*runs, text, dry]))
    expected = {
        "partitions": "1", "samples_per_second": "512.0", "memory_bytes_fullest": str(2**29),
        "step_seconds": "0.0625", "step_seconds_predicted": "0.06", "bubble_predicted": "0.12", "bubble_ideal": "0.2",
        "test_perplexity": "", "speed_kind": "measured",
    }  # fmt: skip
    assert {key: first[key] for key in expected} == expected
    assert float(first["bubble_measured"]) == pytest.approx(0.1)
    assert (failed["status"], failed["error"]) == ("failed", "boom\\n\\x1b[31min 1F0 [red]")
    assert (sentences["test_top1"], sentences["tokens_per_second"]) == ("", "16000.0")
    assert float(sentences["test_perplexity"]) == pytest.approx(41.3)
    assert [unmeasured[key] for key in ("bubble_measured", "step_seconds", "speed_kind")] == ["", "", ""]
    (alone,) = rows(compare([dry]))
    assert not {"bubble_measured", "step_seconds"} & set(alone)


def test_a_measurement_shows_what_only_it_has(runs: list[RunRecord]) -> None:
    bench = changed(
        runs[0], command="bench", samples_per_second_quartiles=(500.0, 525.5), model_flops_per_second=2.5e9, mfu=0.25,
        test=None, best=None, samples_per_second_kind="measured_one_device",
    )  # fmt: skip
    both = compare([bench, runs[1], runs[1]])
    printed = table(both, 160)
    assert "500.0 525.5 one device" in printed
    assert "2.5 G 25.0" in printed
    assert "runs of gpipe bench are not evaluated" in printed
    assert "not the speed of a pipeline: partitions=1" in printed
    assert "one device" not in table(compare(runs[:2]))


def test_what_a_measurement_sets_by_itself_is_no_difference(runs: list[RunRecord], tmp_path: Path) -> None:
    """`epochs` and `max_steps` of a bench are its own; its users cannot give them."""
    ran(tmp_path, [3.0], "epochs=8", "max_steps=8", "checkpoint.keep=1")
    write_run(tmp_path, replace(read_run_result(tmp_path), command="bench"))
    bench = read_run(tmp_path)
    short, long = (replace(bench, settings={**bench.settings, "epochs": n, "max_steps": None}) for n in (2, 5))
    assert differing([bench, short]) == []
    comparison = compare([bench, short, long])
    assert [row["epochs"] for row in rows(comparison)] == ["", "2", "5"], "of a training it is"


def test_what_cannot_be_compared_is_noted(runs: list[RunRecord], text: RunRecord) -> None:
    def noted(*others: RunRecord) -> str:
        return "\n".join(notes(compare([runs[0], *others])))

    assert noted(runs[1]) == ""
    assert "different tasks (classification: " in noted(text)
    assert "different models (AmoebaNet-D (6, 16): " in noted(text)
    hardware = runs[1].result.hardware
    changes: dict[str, dict[str, Any]] = {
        r"different data sets \(digits: partitions=1; cifar10: ": {"dataset": "cifar10"},
        r"machines \(.*2 x NVIDIA H200, .*: partitions=2\)": {"hardware": {**hardware, "gpus": ["NVIDIA H200"] * 2}},
        r"threads per process \(1: partitions=1; 64: ": {"hardware": {**hardware, "threads_per_process": 64}},
        "running: still at work, or killed": {"status": "running"},
        "of warm-up steps is shown: partitions=2": {"speed_includes_warm_up": True},
        "time is that since then: partitions=2": {"resumed_from": "outputs/x"},
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
    assert devices(replace(interleaved, settings={**interleaved.settings, "replicas": 2})) == 4, "of each pipeline two"
    in_turns = changed(runs[2], partitions=stages_in(0, 0, 0), samples_per_second_kind="measured_one_device")
    assert devices(in_turns) == 3

    # What is no speed of a pipeline, or one of other work.
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


def test_speed_up_and_efficiency_stand_in_tables(runs: list[RunRecord]) -> None:
    assert [row["speed_up"] for row in rows(compare(runs))] == ["1.0", "0.5", "0.25", ""]
    assert [row["efficiency"] for row in rows(compare(runs))] == ["1.0", "0.25", "0.0625", ""]
    shared = [changed(run, samples_per_second_kind="measured_one_device") for run in runs]
    assert {row.get("efficiency") for row in rows(compare(shared))} == {None}
