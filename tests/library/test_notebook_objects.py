"""`gpipe_cli.result` and `gpipe_cli.show`: what a notebook makes of the folder of a run or a plan."""

import html
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


def test_what_is_not_one_run_has_no_result(runs: Path) -> None:
    with pytest.raises(InputError, match=rf"^{re.escape(str(runs))}: contains 2 runs; .* such as .*M2$"):
        gpipe_cli.result(runs)


def test_a_frame_holds_the_page_as_it_is(planned: Path) -> None:
    source = (planned / "pipeline.html").read_text()
    frame = gpipe_cli.show(planned, whole=True, height=321)._repr_html_()
    assert re.fullmatch(r'<iframe srcdoc="[^"]*" height="321" [^<>]*></iframe>', frame)
    assert html.unescape(frame.split('"')[1]) == source
    assert gpipe_cli.show(planned / "pipeline.html", whole=True, height=321)._repr_html_() == frame
    assert len(repr(gpipe_cli.show(planned))) < 100  # a notebook saves it with the frame


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
        if whole:
            with page.expect_download() as download:
                frame.locator("#csv").click()
            assert download.value.path().read_text()
            frame.locator("#micro_batches").fill("8")  # which would be written to the address of a page by itself
            frame.locator("#lanes [data-key='0F7']").wait_for()
        assert errors == []

    def test_scripts_of_a_folder_do_not_reach_the_notebook(self, page: "Page", planned: Path, tmp_path: Path) -> None:
        """They ran in Jupyter's own origin, where they could have run cells and read files."""
        reached = "try {parent.document.title = 'reached'} catch (error) {document.title = error.name}"
        source = (planned / "pipeline.html").read_text().replace("</head>", f"<script>{reached}</script></head>")
        (tmp_path / "pipeline.html").write_text(source)
        page.set_content(f"<title>notebook</title>{gpipe_cli.show(tmp_path)._repr_html_()}")
        page.frame_locator("iframe").locator("#lanes text", has_text="stage 1").first.wait_for()
        assert page.title() == "notebook"
