import base64
import io
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from reporting_runs import page_data, timeline

from gpipe_cli.reporting.page import page
from gpipe_cli.reporting.plots.timeline_values import StepPicture

BARS = sum(map(len, timeline().stages))


def data_of(folder: Path, *steps: StepPicture, **values: Any) -> dict[str, Any]:
    """What the page was given, as its script reads it."""
    page.write_page(
        folder / "pipeline.html", "</script><!-- AmoebaNet-D", values, steps, page.PageContext(run="outputs/run")
    )
    text = (folder / "pipeline.html").read_text(encoding="utf-8")
    assert [path.name for path in folder.iterdir()] == ["pipeline.html"]
    assert text.count("</script") == 2  # no value ends its element
    assert "{{" not in text.partition("<script")[0]
    return page_data(folder)


def steps(count: int) -> list[StepPicture]:
    return [
        StepPicture(epoch, 4 * epoch, (timeline(), timeline(0.008, kind="predicted")), 30 + epoch)
        for epoch in range(1, count + 1)
    ]


def test_what_was_measured_is_in_the_page_the_newest_step_last(tmp_path: Path) -> None:
    found = data_of(tmp_path, *steps(page.MAX_STEPS + 2), balance=[3, 2])
    assert (found["title"], found["run"], found["commands"]) == ("</script><!-- AmoebaNet-D", "outputs/run", [])
    assert found["balance"] == [3, 2]
    assert [step["epoch"] for step in found["steps"]] == list(range(3, page.MAX_STEPS + 3))
    last = found["steps"][-1]
    newest = page.MAX_STEPS + 2
    assert (last["step"], last["step_seconds"], last["median_of"]) == (4 * newest, 0.13, 30 + newest)
    assert sum(last["breakdown"].values()) == pytest.approx(1)
    assert last["stages"][0][:3] == [["F", 0, 0, 0.01], ["F", 1, 0.01, 0.02], ["B", 1, 0.06, 0.08]]
    assert last["events"][1] == [["waiting", 0, 0, 0.01], ["transfer", 0, 0.01, 0.02], ["update", None, 0.11, 0.13]]
    assert found["steps_left_out"] == 0
    assert found["contended"] is None


def test_older_steps_are_left_out_before_the_page_gets_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "MAX_BARS", 3 * BARS)
    found = data_of(tmp_path, *steps(5))
    assert [step["epoch"] for step in found["steps"]] == [3, 4, 5]
    assert found["steps_left_out"] == 2

    monkeypatch.setattr(page, "MAX_BARS", BARS - 1)
    (step,) = data_of(tmp_path, *steps(5))["steps"]
    assert (step["epoch"], step["stages"], step["events"]) == (5, [], [])
    kind, _, content = step["picture"].partition(",")
    assert kind == "data:image/png;base64"
    with Image.open(io.BytesIO(base64.b64decode(content))) as picture:
        assert picture.width > 1000
