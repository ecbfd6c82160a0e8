"""`gpipe reproduce` as its users type it."""

import json
import os
import re
import shlex
import signal
from html import unescape
from pathlib import Path

import pytest
from recipe_runs import column
from training_runs import children, command, start_program, wait_until

from gpipe_cli.benchmark import machine_timing
from gpipe_cli.reporting.plots.timeline_values import SHARES
from gpipe_cli.reporting.tables.recipe import read_reproduction
from gpipe_cli.reproduction.recipe import recipe_names

# The breakdown: one measurement and one plan
TINY = [
    "model.normal_cells=3", "model.filters=16", "dataset.image_size=16", "dataset.num_classes=4",
    "dataset.train_samples=32", "batch_size=8", "micro_batches=4", "warm_up_steps=1", "hardware=cpu",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(machine_timing, "_SECONDS", 0.1)


def test_without_a_name_the_recipes_are_listed_in_the_order_of_the_paper(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("reproduce") == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line[:1].isalpha()]
    assert [name for name in listed if name in recipe_names()] == recipe_names()
    assert recipe_names()[:2] == ["table1_amoebanet", "table1_transformer"]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("breakdwon", "did you mean breakdown?"),
        ("breakdown run_folder=x", "run_folder=x: one recipe makes its own folder; give output=FOLDER"),
        ("breakdown seed=1,2", "seed=1,2: all commands share one value; run the recipe once for each"),
        ("imagenet_amoebanet_b scale=paper output=out", "give dataset.root=FOLDER"),
        # refused by the command that the recipe runs, a process
        ("breakdown batch_size=8", "or batch_size=16 or more (a setting of this recipe)"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    capsys: pytest.CaptureFixture[str], arguments: str, line: str
) -> None:
    assert command("reproduce", *arguments.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("gpipe reproduce: ")
    assert line in error
    assert error.count("\n") == 1
    assert not list(Path(".").glob("outputs/*"))


def test_a_recipe_is_reproduced(capsys: pytest.CaptureFixture[str]) -> None:
    given = [*TINY, "steps=2", "executor=in_process"]
    assert command("reproduce", "breakdown", "scale=small", "output=out", *given) == 0
    shown = " ".join(capsys.readouterr().out.split())
    (folder,) = Path("out").iterdir()
    assert "_reproduce_breakdown" in folder.name
    found = json.loads((folder / "reproduction.json").read_text(encoding="utf-8"))
    (table,) = found["tables"]
    rows = {row[0].replace("-", "_"): row[1:] for row in table["rows"]}
    assert list(rows) == list(SHARES)
    for at in (1, 2):  # measured, simulated
        assert sum(float(row[at].removesuffix(" %")) for row in rows.values()) == pytest.approx(100, abs=0.5)
    assert float(rows["recompute"][1].removesuffix(" %")) > 0
    written = (folder / "reproduction.md").read_text(encoding="utf-8")
    assert "| share of a step | paper | here, measured | layers here, simulated |" in written
    assert "recompute 22.5 %" in shown
    assert f"* given: {' '.join(given)}: in every command; other statements about models and sizes" in written
    assert {row[-1] for row in rows.values()} == {"-"}
    # as a user can type them
    assert [line.split()[:2] for line in found["commands"]] == [["gpipe", "bench"], ["gpipe", "plan"]]
    assert all("-cn breakdown" in line and "model.filters=16" in line for line in found["commands"])


MY_TABLE = """
defaults: [plan, override model: transformer_lm, override dataset: synthetic_text,
           override hardware: tpu_v2, _self_]
batch_size: 8
model: {layers: 4, width: 16, hidden: 32, heads: 2, length: 8}
dataset: {vocabulary: 64}
recipe:
  title: My table
  claim: Two stages are faster than one
  source: Table 9
  hardware: TPUs
  needs: {gpus: 0, memory_gib: 0}
  small: {settings: {}, scaled: nothing, minutes: 0.1}
  smoke: {}
  choices: ["N = 8"]
  experiment: my_runs
  values: {shares: {1: 1.0, 2: null}}
"""
MY_RUNS = """
from gpipe_cli.reproduction.comparison import Difference, Shown, make_table
from gpipe_cli.reproduction.runner import Findings

def reproduce(runner, shares):
    runner.check_not_given({"partitions": "the rows differ in it"})
    rows = []
    for k, share in shares.items():
        plan = runner.simulate_plan(f"partitions={k}", f"micro_batches={k * k}")
        rows.append({"K": k, "paper": share, "ours": plan.samples})
    ours = Shown("share", "ours", ".1%", "simulated")
    columns = [Shown("K", "K"), Shown("share", "paper", ".1%", "paper"), ours, Difference("off", ours, "paper")]
    return Findings([make_table("Speed of mine", columns, rows)], [("found", f"{len(rows)} rows")])
"""


def test_a_table_of_the_paper_is_two_files_in_a_folder_of_the_user(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine").mkdir()
    asked = ["reproduce", "-cd", "mine", "-cn", "my_table", "output=out"]
    assert command(*asked) == 2
    assert "mine/my_table.yaml: cannot be read" in capsys.readouterr().err
    recipe, experiment = Path("mine/my_table.yaml"), Path("mine/my_runs.py")
    recipe.write_text(MY_TABLE, encoding="utf-8")
    assert command(*asked) == 2
    assert "experiment=my_runs: there is no mine/my_runs.py; add it, or use breakdown, " in capsys.readouterr().err
    experiment.write_text(MY_RUNS.replace("shares):", "share):"), encoding="utf-8")
    assert command(*asked) == 2
    assert "values of my_table: my_runs.reproduce: missing a required argument: 'share'" in capsys.readouterr().err
    experiment.write_text(MY_RUNS, encoding="utf-8")
    assert command(*asked, "partitions=2") == 2
    assert "partitions=2: the rows differ in it; remove it" in capsys.readouterr().err
    assert command(*asked) == 0
    (folder,) = Path("out").glob("*_reproduce_my_table")
    found = read_reproduction(folder)
    (table,) = found.tables
    assert table.title == "Speed of mine"
    assert column(table, "share", "simulated") == ["800.0 %", "800.0 %"]
    assert column(table, "off", "difference") == ["+700.00", "-"]
    assert [*found.notes[-1]] == ["found", "2 rows"]
    assert found.commands[0].startswith("gpipe plan -cd mine -cn my_table partitions=1 micro_batches=1")


def descendants(process: int) -> list[int]:
    found = children(process)
    return [*found, *(one for child in found for one in descendants(child))]


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_several_go_on_where_they_were_and_one_that_fails_stops_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    """The recipe `consistency` refuses a seed, in no time."""
    asked = ["reproduce", "consistency", "breakdown", "scale=smoke", "run_folder=out", "executor=in_process", "seed=1"]
    broken = Path("out/consistency/of_a_run_that_was_interrupted")
    for is_done in (False, True):
        assert command(*asked) == 1
        shown = capsys.readouterr().out
        assert ("breakdown: is done" in shown) == is_done
        assert shown.count("runs ") == (0 if is_done else 2)
        assert "consistency failed: seed=1: this recipe compares seed=0, 1; remove it" in shown
        assert f"gpipe {shlex.join(asked[:4])} executor=in_process seed=1 run_folder=out" in shown
        assert not broken.exists()
        broken.mkdir(parents=True, exist_ok=True)
    found = read_reproduction(Path("out/breakdown"))
    assert found.scale == "smoke"
    (table,) = found.tables
    assert set(column(table, "here - paper, points", "difference")) == {"-"}
    page = Path("out/report.html").read_text(encoding="utf-8")
    body = page.partition('id="breakdown"')[2].partition("<tbody>")[2]
    cells = map(unescape, re.findall(r"<t[dh][^>]*>([^<]*)</t[dh]>", body))
    assert list(cells) == [cell for row in table.rows for cell in row]
    assert "<code>consistency</code> failed: seed=1" in page
    assert not Path("out/README.md").exists()  # it is of all recipes
    (broken / "notes.txt").write_text("mine")  # and there is no log beside it: no recipe has left this
    assert command(*asked) == 1
    assert "consistency failed: out/consistency: has no log.txt" in capsys.readouterr().out
    assert (broken / "notes.txt").read_text() == "mine"


def test_an_interruption_ends_all_of_it(tmp_path: Path) -> None:
    process = start_program("reproduce", "breakdown", "schedules", "scale=small", *TINY, "steps=10000")
    try:
        # the sweep, which leads its own session, and below it the run of a cell
        wait_until(
            lambda: any(children(sweep) for sweep in children(process.pid, "reproduce")), 60, "the run of a cell"
        )
        started = descendants(process.pid)
        os.kill(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=20)
    finally:
        if process.poll() is None:
            process.kill()
    assert process.returncode == 130, err
    assert " run_folder=outputs/" in out
    (log,) = tmp_path.glob("outputs/*_reproduce_2_recipes/breakdown/log.txt")  # it was removed once, with what it says
    assert "gpipe bench" in log.read_text()
    assert "Traceback" not in out + err
    wait_until(lambda: not any(map(alive, started)), 10, "the end of all that was started")
