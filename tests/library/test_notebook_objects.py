"""`gpipe_cli.result` and `gpipe_cli.show`: what a notebook makes of the folder of a run or a plan."""

import html
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from browser import NEEDED, opened_page
from training_runs import SMALL, command

import gpipe_cli
from gpipe_cli.errors import InputError

if TYPE_CHECKING:
    from playwright.sync_api import Page

HERE = (*SMALL, "hardware=cpu", "executor=in_process")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two measurements in one folder, which is itself no run."""
    folder = tmp_path_factory.mktemp("runs")
    for m in (2, 4):
        settings = [f"micro_batches={m}", "steps=1", "warm_up_steps=0", f"run_folder={folder / f'M{m}'}"]
        assert command("bench", *HERE, "partition.balance=[3,5]", *settings) == 0
    return folder


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plan") / "plan"
    assert command("plan", *HERE, f"run_folder={folder}") == 0
    return folder


@pytest.fixture(scope="module")
def page() -> "Iterator[Page]":
    yield from opened_page()


def test_a_result_is_a_row_of_plain_values(runs: Path) -> None:
    rows = [gpipe_cli.result(runs / "M2"), gpipe_cli.result(str(runs / "M4"))]
    assert [(row["run"], row["partitions"], row["micro_batches"]) for row in rows] == [("M2", 2, 2), ("M4", 2, 4)]
    assert [*rows[0]] == [*rows[1]]
    assert all(value is None or isinstance(value, str | int | float) for row in rows for value in row.values())
    assert rows[0]["partition.balance"] == "[3,5]"


def test_a_result_has_the_numbers_of_a_comparison(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("compare", str(runs), "format=json") == 0
    compared = json.loads(capsys.readouterr().out)
    for row, folder in zip(compared, sorted(runs.iterdir()), strict=True):
        found = gpipe_cli.result(folder)
        apart = {"run", "folder", "started", "model", "dataset", "torch", "error"}  # the words of a comparison
        apart |= {"speed_up", "efficiency"}  # which compare runs with each other
        assert {key: value for key, value in row.items() if key not in apart and value is not None}.items() <= (
            found.items()
        )
        measured = json.loads((folder / "result.json").read_text())["breakdown"]["measured"]
        assert {key: found[f"{key}_measured"] for key in measured} == measured


@pytest.mark.parametrize(
    ("folder", "line"),
    [
        ("nowhere", "{}/nowhere: there is no such folder"),
        ("", "{}: holds 2 runs; give the folder of one, such as {}/M2"),
    ],
)
def test_what_is_not_one_run_has_no_result(runs: Path, folder: str, line: str) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(line.replace('{}', str(runs)))}$"):
        gpipe_cli.result(runs / folder)


@pytest.mark.parametrize("folder", ["nowhere", ""])
def test_a_folder_without_a_page_is_refused(runs: Path, folder: str) -> None:
    with pytest.raises(InputError, match=rf"^{re.escape(str(runs / folder))}: .*; give (that|the folder) of [^\n]+$"):
        gpipe_cli.show(runs / folder)


def test_a_frame_holds_the_page_as_it_is(planned: Path) -> None:
    source = (planned / "pipeline.html").read_text()
    frame = gpipe_cli.show(planned, whole=True, height=321)._repr_html_()
    assert re.fullmatch(r'<iframe srcdoc="[^"]*" height="321" [^<>]*></iframe>', frame)
    assert html.unescape(frame.split('"')[1]) == source
    assert gpipe_cli.show(planned / "pipeline.html", whole=True, height=321)._repr_html_() == frame
    assert len(repr(gpipe_cli.show(planned))) < 100  # a notebook saves it beside the frame


class TestInABrowser:
    pytestmark = NEEDED

    @pytest.mark.parametrize("whole", [False, True])
    def test_lanes_are_drawn_and_the_rest_is_left_out(self, page: "Page", runs: Path, whole: bool) -> None:
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.set_content(gpipe_cli.show(runs / "M4", whole=whole)._repr_html_())
        frame = page.frame_locator("iframe")
        frame.locator("#lanes text", has_text="stage 1").first.wait_for()
        assert "measured" in frame.locator("#lanes").text_content()
        for part in ("#controls", "#words", "#order", "#shares", "header"):
            assert frame.locator(part).is_visible() is whole, part
        assert errors == []
