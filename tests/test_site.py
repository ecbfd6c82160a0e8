"""The site of `gpipe site`: what its pages need, show and say, in a real browser."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from browser import NEEDED, opened_page
from training_runs import command

if TYPE_CHECKING:
    from playwright.sync_api import Page

PLAN = ["hardware=v100", "partitions=2", "model.normal_cells=3", "model.filters=4"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site") / "public"
    assert command("site", str(folder), *PLAN) == 0
    assert command("site", str(folder), *PLAN) == 0, "in place of the one before"
    return folder


def test_a_page_of_the_user_stays(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """index.html of any folder was replaced."""
    (tmp_path / "index.html").write_text("<h1>about gpipe</h1>")
    assert command("site", str(tmp_path), *PLAN) == 2
    assert f"gpipe site: {tmp_path}/index.html: is not a page of gpipe's" in capfd.readouterr().err
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("index.html", "<h1>about gpipe</h1>")]


def test_the_page_of_a_plan_stays(tmp_path: Path, site: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Or that of a run, whose measured steps cannot be had again."""
    page = (site / "pipeline.html").read_bytes()
    (tmp_path / "pipeline.html").write_bytes(page)
    assert command("site", str(tmp_path), *PLAN, "partitions=1") == 2
    assert f"{tmp_path}/pipeline.html: is the page of a run or a plan" in capfd.readouterr().err
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("pipeline.html", page)]


def test_the_site_is_two_files_of_one_plan(site: Path) -> None:
    assert {file.name for file in site.iterdir()} == {"index.html", "pipeline.html"}
    front = (site / "index.html").read_text(encoding="utf-8")
    assert 'href="pipeline.html"' in front
    assert f"gpipe plan {' '.join(PLAN)}" in front


@pytest.fixture(scope="module")
def page() -> "Iterator[Page]":
    yield from opened_page()


class TestInABrowser:
    pytestmark = NEEDED

    @pytest.mark.parametrize("name", ["index.html", "pipeline.html"])
    def test_a_page_loads_nothing_and_is_for_all_readers(self, name: str, site: Path, page: "Page") -> None:
        """Contrast, names of controls, landmarks and more, in light and dark colours; and a narrow window."""
        axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
        address = (site / name).as_uri()
        loaded: list[str] = []
        said: list[str] = []
        page.on("request", lambda request: loaded.append(request.url))
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        for colours in ("light", "dark"):
            page.emulate_media(color_scheme=colours)  # type: ignore[arg-type]
            page.goto(address)
            page.locator("#lanes .action").first.wait_for(state="attached")
            violations = axe.run(page).response["violations"]
            assert [(one["help"], [node["html"] for node in one["nodes"]]) for one in violations] == []
        page.set_viewport_size({"width": 480, "height": 900})
        page.wait_for_function("innerWidth === 480")
        assert page.evaluate("document.documentElement.scrollWidth") <= 480
        page.set_viewport_size({"width": 1366, "height": 768})
        assert [url for url in loaded if url.partition("#")[0] != address] == []
        assert said == []

    def test_each_press_of_the_right_arrow_draws_another_scene(self, site: Path, page: "Page") -> None:
        page.emulate_media(reduced_motion="reduce")  # at once
        page.goto((site / "index.html").as_uri())
        about = page.locator("#lanes .about").first
        seen = [about.text_content()]
        for _ in range(page.locator(".beat").count() - 1):
            page.keyboard.press("ArrowRight")
            page.wait_for_function("seen => document.querySelector('#lanes .about').textContent !== seen", arg=seen[-1])
            seen.append(about.text_content())
        assert len(seen) > 7
        page.locator("#schedule").select_option("1f1b")
        assert "1f1b" in str(about.text_content())
