import base64
import io
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from reporting_runs import shares, timeline

from gpipe_cli.reporting.plots import timeline_page
from gpipe_cli.reporting.plots.timeline_page import MOST_PICTURES, write_page
from gpipe_cli.reporting.plots.timeline_values import ACTIONS, StepPicture, axis_ticks, axis_unit

VOID = {"meta", "img"}
BOTH = StepPicture(3, 12, timeline(), timeline(0.005, kind="predicted", breakdown=shares(0.12)))


class Page(HTMLParser):
    """Every element with its attributes, the elements around it and its text; all must be closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, Any], list[int]]] = []
        self.texts: dict[int, str] = {}
        self._open: list[int] = []
        self.feed(text)
        self.close()
        assert not self._open, [self.elements[n][0] for n in self._open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), list(self._open)))
        if tag not in VOID:
            self._open.append(len(self.elements) - 1)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), list(self._open)))

    def handle_endtag(self, tag: str) -> None:
        assert self.elements[self._open.pop()][0] == tag

    def handle_data(self, data: str) -> None:
        for number in self._open:
            self.texts[number] = self.texts.get(number, "") + data

    def all(self, tag: str, inside: int | None = None, **attributes: str) -> list[int]:
        wanted = {name.rstrip("_"): value for name, value in attributes.items()}
        return [
            number
            for number, (name, found, around) in enumerate(self.elements)
            if name == tag and wanted.items() <= found.items() and (inside is None or inside in around)
        ]


def page(folder: Path, *pictures: StepPicture) -> tuple[Page, str]:
    write_page(folder / "timeline.html", "amoebanet-d on digits", pictures)
    text = (folder / "timeline.html").read_text(encoding="utf-8")
    assert [path.name for path in folder.iterdir()] == ["timeline.html"]
    return Page(text), text


def test_every_bar_is_a_rectangle_in_the_row_of_its_stage_and_says_what_it_is(tmp_path: Path) -> None:
    found, text = page(tmp_path, BOTH)
    figures = found.all("figure")
    assert [found.elements[n][1]["class"] for n in figures] == ["measured", "predicted"]
    room = timeline_page.WIDTH - timeline_page.LEFT - timeline_page.RIGHT
    scale = room / 0.13  # of both: they share the axis
    for figure, view in zip(figures, (BOTH.measured, BOTH.predicted), strict=True):
        assert view is not None
        rows = found.all("g", figure, class_="stage")
        assert len(rows) == len(view.stages)
        for row, bars in zip(rows, view.stages, strict=True):
            rectangles = found.all("rect", row)
            assert len(rectangles) == len(bars)
            for number, bar in zip(rectangles, bars, strict=True):
                attributes = found.elements[number][1]
                expected = f"{bar.what} {bar.name}" if bar.what in ACTIONS else bar.what
                assert attributes["class"] == expected
                assert float(attributes["x"]) == pytest.approx(bar.start_seconds * scale, abs=0.006)
                length = (bar.end_seconds - bar.start_seconds) * scale
                assert float(attributes["width"]) == pytest.approx(length, abs=0.006)
    tips = [found.texts[number] for number in found.all("title")[1:]]
    assert tips[:3] == [
        "F0 forward|starts at 0.0 ms, takes 10.0 ms",
        "F1 forward|starts at 10.0 ms, takes 10.0 ms",
        "waiting for micro-batch 1|starts at 20.0 ms, takes 40.0 ms",
    ]
    assert "weight update|starts at 110.0 ms, takes 20.0 ms" in tips
    assert ".F0{" in text, "its colour"


def test_the_page_loads_nothing(tmp_path: Path) -> None:
    found, text = page(tmp_path, replace(BOTH, measured=timeline(title="<b>&")))
    assert "&lt;b&gt;&amp;" in text
    assert not re.search(r"https?:|//[a-z]|@import|<link|fetch\(|XMLHttp", text)
    assert all("src" not in attributes and "href" not in attributes for _, attributes, _ in found.elements)
    assert set(re.findall(r"url\(([^)]*)\)", text)) == {"#idle", "#waiting", "#transfer"}
    assert {"idle", "waiting", "transfer"} <= {attributes.get("id") for _, attributes, _ in found.elements}


def test_measured_and_predicted_shares_have_columns_of_their_own(tmp_path: Path) -> None:
    found, _ = page(tmp_path, BOTH)
    (table,) = found.all("table")
    assert [found.texts.get(n, "") for n in found.all("th", table)][:3] == ["", "measured", "predicted"]
    rows = {
        found.texts[found.all("th", row)[0]]: [found.texts[cell] for cell in found.all("td", row)]
        for row in found.all("tr", table)[1:]
    }
    assert rows["step"] == ["130.0 ms", "65.0 ms"]
    assert rows["idle"] == ["23.0 %", "20.0 %"]  # of it these four
    assert rows["of it bubble"] == ["15.0 %", "12.0 %"]
    assert rows["of it set-up"] == ["4.0 %", "4.0 %"]
    assert len(rows) == 9
    assert [found.texts[number] for number in found.all("span")][:2] == [
        "step 130.0 ms, idle 23.0 %", "step 65.0 ms, idle 20.0 %",
    ]  # fmt: skip


def test_the_newest_epochs_can_be_chosen_and_the_newest_is_seen(tmp_path: Path) -> None:
    pictures = [StepPicture(epoch, 4 * epoch, timeline(title=f"title {epoch}")) for epoch in range(1, 16)]
    found, _ = page(tmp_path, *pictures)
    assert len(found.all("figure")) == MOST_PICTURES, "nothing was predicted"
    assert {found.texts[cell] for cell in found.all("td")[1::2]} == {"-"}
    options = [found.texts[number] for number in found.all("option")]
    assert options[0] == "epoch 15, step 60"
    assert options[-1] == "epoch 4, step 16"
    assert len(options) == MOST_PICTURES
    sections = found.all("section")
    assert ["hidden" in found.elements[number][1] for number in sections] == [False] + [True] * (MOST_PICTURES - 1)
    assert "title 15" in found.texts[sections[0]]


def test_more_bars_than_a_browser_likes_become_an_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline_page, "MOST_BARS", 10)
    found, _ = page(tmp_path, BOTH)
    assert not found.all("rect")
    (image,) = found.all("img")
    kind, _, data = found.elements[image][1]["src"].partition(",")
    assert kind == "data:image/png;base64"
    with Image.open(io.BytesIO(base64.b64decode(data))) as picture:
        assert picture.width > 1000


@pytest.mark.parametrize("end", [3e-6, 0.0013, 0.9999, 86_400.0])
def test_axes_have_five_to_eleven_round_times(end: float) -> None:
    ticks = axis_ticks(end)
    assert 5 <= len(ticks) <= 11
    assert ticks[0] == 0
    assert ticks[-1] <= end * (1 + 1e-6)
    assert f"{ticks[1]:.0e}"[0] in "125"
    name, seconds = axis_unit(end)
    assert (name, seconds) in {("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)}
