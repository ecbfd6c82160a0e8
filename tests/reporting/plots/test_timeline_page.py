import base64
import io
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image
from reporting_runs import shares, timeline

from gpipe_cli.reporting.plots import timeline_page
from gpipe_cli.reporting.plots.timeline_page import MOST_PICTURES, write_page
from gpipe_cli.reporting.plots.timeline_values import ACTIONS, StepPicture, axis_ticks, axis_unit

BOTH = StepPicture(3, 12, (timeline(), timeline(0.005, kind="predicted", breakdown=shares(0.12))))


def page(folder: Path, *pictures: StepPicture) -> tuple[ElementTree.Element, str]:
    """The page, which is XML, too: one element that is not closed would be an error."""
    write_page(folder / "timeline.html", "amoebanet-d on digits", pictures)
    text = (folder / "timeline.html").read_text(encoding="utf-8")
    assert [path.name for path in folder.iterdir()] == ["timeline.html"]
    return ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>\n")), text


def texts(root: ElementTree.Element, path: str) -> list[str]:
    return ["".join(element.itertext()) for element in root.findall(path)]


def test_every_bar_is_a_rectangle_in_the_row_of_its_stage_and_says_what_it_is(tmp_path: Path) -> None:
    found, text = page(tmp_path, BOTH)
    figures = found.findall(".//figure")
    assert [figure.get("class") for figure in figures] == ["measured", "predicted"]
    room = timeline_page.WIDTH - timeline_page.LEFT - timeline_page.RIGHT
    scale = room / 0.13  # of both: they share the axis
    for figure, view in zip(figures, BOTH.views, strict=True):
        for row, bars in zip(figure.findall(".//g[@class='stage']"), view.stages, strict=True):
            for rectangle, bar in zip(row.findall("rect"), bars, strict=True):
                assert rectangle.get("class") == (f"{bar.what} {bar.name}" if bar.what in ACTIONS else bar.what)
                length = (bar.end_seconds - bar.start_seconds) * scale
                assert float(rectangle.get("x", "")) == pytest.approx(bar.start_seconds * scale, abs=0.006)
                assert float(rectangle.get("width", "")) == pytest.approx(length, abs=0.006)
    assert {
        "F1 forward|starts at 10.0 ms, takes 10.0 ms",
        "waiting for micro-batch 1|starts at 20.0 ms, takes 40.0 ms",
        "weight update|starts at 110.0 ms, takes 20.0 ms",
    } < set(texts(found, ".//rect/title"))
    assert ".F0{" in text, "its colour"


def test_the_page_loads_nothing_and_has_measured_and_predicted_shares_in_columns(tmp_path: Path) -> None:
    found, text = page(tmp_path, replace(BOTH, views=(timeline(title="<b>&"), BOTH.views[1])))
    assert "&lt;b&gt;&amp;" in text
    assert not re.search(r"https?:|//[a-z]|@import|<link|fetch\(|XMLHttp", text)
    assert not any({"src", "href"} & set(element.keys()) for element in found.iter())
    patterns = set(re.findall(r"url\(#([^)]*)\)", text))
    assert patterns == {"idle", "waiting", "transfer"} == {element.get("id") for element in found.findall(".//pattern")}
    assert texts(found, ".//table/thead//th") == ["", "measured", "predicted"]
    rows = {texts(row, "th")[0]: texts(row, "td") for row in found.findall(".//table/tbody/tr")}
    assert rows["step"] == ["130.0 ms", "65.0 ms"]
    assert rows["idle"] == ["23.0 %", "20.0 %"]  # of it these four
    assert rows["of it bubble"] == ["15.0 %", "12.0 %"]
    assert rows["of it set-up"] == ["4.0 %", "4.0 %"]
    assert texts(found, ".//figcaption/span") == ["step 130.0 ms, idle 23.0 %", "step 65.0 ms, idle 20.0 %"]


def test_the_newest_epochs_can_be_chosen_and_the_newest_is_seen(tmp_path: Path) -> None:
    pictures = [StepPicture(epoch, 4 * epoch, (timeline(title=f"title {epoch}"),)) for epoch in range(1, 16)]
    found, _ = page(tmp_path, *pictures)
    assert len(found.findall(".//figure")) == MOST_PICTURES, "nothing was predicted"
    assert set(texts(found, ".//td[2]")) == {"-"}
    options = texts(found, ".//option")
    assert (len(options), options[0], options[-1]) == (MOST_PICTURES, "epoch 15, step 60", "epoch 4, step 16")
    sections = found.findall(".//section")
    assert [section.get("hidden") == "hidden" for section in sections] == [False] + [True] * (MOST_PICTURES - 1)
    assert "title 15" in "".join(sections[0].itertext())


def test_more_bars_than_a_browser_likes_become_an_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline_page, "MOST_BARS", 10)
    found, _ = page(tmp_path, BOTH)
    assert not found.findall(".//rect")
    (image,) = found.findall(".//img")
    kind, _, data = image.get("src", "").partition(",")
    assert kind == "data:image/png;base64"
    with Image.open(io.BytesIO(base64.b64decode(data))) as picture:
        assert picture.width > 1000


def test_axes_have_five_to_eleven_round_times() -> None:
    for end, unit in ((3e-6, "µs"), (0.0013, "µs"), (0.9999, "ms"), (86_400.0, "s")):
        ticks = axis_ticks(end)
        assert 5 <= len(ticks) <= 11
        assert (ticks[0], ticks[-1] <= end * (1 + 1e-6)) == (0, True)
        assert f"{ticks[1]:.0e}"[0] in "125"
        assert axis_unit(end)[0] == unit
