"""The page of `gpipe compare` in a real browser."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from browser import NEEDED, opened_page
from reporting_runs import evaluation, plan, reporter_in, step

from gpipe_cli.reporting.compare.comparison import compare
from gpipe_cli.reporting.compare.page import write_page
from gpipe_cli.reporting.compare.run_record import read_run
from gpipe_cli.results.files import read_result, write_result

if TYPE_CHECKING:
    from playwright.sync_api import Page

K = (1, 2, 4)

pytestmark = NEEDED


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Page]":
    """The page about K = 1, 2, 4, in a narrow window; at the end it has loaded nothing from elsewhere."""
    folder = tmp_path_factory.mktemp("compared")
    for k in K:
        places = (f"output='{folder}'", f"run_folder='{folder / str(k)}'")
        reporter, _ = reporter_in(folder / str(k), *places, f"partitions={k}", plan=plan())
        for number in range(1, 9):
            reporter.step(step(number, loss=10.0 - number - k / 10, seconds=0.25 / k))
        reporter.evaluated(evaluation(8, top1=k / 8))
        reporter.finish("completed")
        stages = [{"process": number, "device": "cpu"} for number in range(k)]
        write_result(folder / str(k), read_result(folder / str(k)) | {"partitions": stages})
    (folder / "1" / "pipeline.html").write_text("the page of the first run", encoding="utf-8")
    comparison = compare([read_run(folder / str(k)) for k in K])
    write_page(folder / "comparison.html", comparison, [], ["train/loss", "test/top1"])
    pages = opened_page()
    page = next(pages)
    page.set_viewport_size({"width": 480, "height": 900})
    asked: list[str] = []
    wrong: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto(f"file://{folder}/comparison.html")
    yield page
    assert next(pages, None) is None  # it closes
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    assert wrong == []


PAINTED = """(canvas => canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.filter(
  (part, at) => at % 4 === 3 && part).length)(document.querySelector("#curves canvas"))"""  # pixels that are not empty


def test_runs_are_sorted_hidden_and_told_at_the_cursor(page: "Page") -> None:
    assert page.evaluate("document.documentElement.scrollWidth") == 480, "nothing is wider than a narrow window"
    speed = page.locator("thead th", has_text="speed-")
    speed.focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    assert page.locator("tbody th").all_inner_texts() == [f"partitions={k}" for k in K[::-1]]

    chart = page.locator("#curves figure").first
    chart.scroll_into_view_if_needed()
    chart.locator(".u-over").hover(position={"x": 2, "y": 20})  # over the first step
    entries = page.locator("#tip div")
    assert page.locator("#tip b").inner_text() == "step 1"
    assert entries.all_inner_texts() == ["partitions=1\n8.9", "partitions=2\n8.8", "partitions=4\n8.6"]
    before = page.evaluate(PAINTED)
    chip = page.locator(".chip", has_text="partitions=2")
    chip.click()
    assert chip.get_attribute("aria-pressed") == "false"
    page.wait_for_function(f"before => {PAINTED} < before", arg=before)
    chart.locator(".u-over").hover(position={"x": 2, "y": 20})
    assert entries.count() == 2
    assert "partitions=4 ends at 1.6" in str(chart.get_by_role("img").get_attribute("aria-label"))


CUT_OFF = """() => [...document.querySelectorAll("table th, table td")].filter(cell => {
  const {left, right, width} = cell.getBoundingClientRect();
  return width === 0 || left < 0 || right > innerWidth || cell.scrollWidth > cell.clientWidth + 1;
}).map(cell => cell.textContent)"""


def test_nothing_of_the_table_is_cut_off(page: "Page") -> None:
    """Two runs have some thirty columns; what they took, and how fast they were, stood beyond the right edge."""
    page.wait_for_function("document.querySelector('.turned') !== null")
    assert page.evaluate(CUT_OFF) == []
    tops = page.locator("tbody th").evaluate_all("heads => heads.map(head => head.getBoundingClientRect().top)")
    assert len(set(tops)) == 1, "runs stand side by side"
    assert page.locator("#scrolled").is_hidden()
    page.set_viewport_size({"width": 250, "height": 900})
    page.locator("#scrolled").wait_for()
    page.set_viewport_size({"width": 6000, "height": 900})
    page.evaluate("document.body.style.maxWidth = 'none'")
    page.wait_for_function("document.querySelector('.turned') === null")
    assert page.evaluate(CUT_OFF) == []
    page.evaluate("document.body.style.maxWidth = ''")
    page.set_viewport_size({"width": 480, "height": 900})


def test_speed_up_is_drawn_and_light_and_dark_are_the_readers_choice(page: "Page") -> None:
    titles = page.locator("#scaling figcaption").all_inner_texts()
    assert [title.split()[0] for title in titles] == ["speed-up", "efficiency"]
    page.locator("#scaling .u-over").first.hover()
    assert page.locator("#tip b").inner_text() == "K = 2"
    assert "measured\n2" in page.locator("#tip").inner_text()
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.locator("#theme").click()
    assert page.evaluate(ground) != light
    assert page.locator("#theme").inner_text() == "light"


def test_links_lead_to_runs_and_their_pages(page: "Page") -> None:
    links = page.locator("tbody tr", has_text="partitions=1").locator("a")
    assert links.all_inner_texts() == ["pipeline", "folder"]
    links.first.click()
    assert page.locator("body").inner_text() == "the page of the first run"
