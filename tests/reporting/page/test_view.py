"""What a person sees and touches of the page, in a real browser: lanes, controls, sentences, an order made by hand."""

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from browser import NEEDED, opened_page
from plan_runs import EVEN, HOURGLASS, plan_of, traced
from training_runs import configure

from gpipe_cli.pipeline.schedule.named_schedules import build
from gpipe_cli.pipeline.schedule.schedule_file import read_schedule
from gpipe_cli.planner.simulation_data import simulation_data
from gpipe_cli.reporting.page.page import write_page
from gpipe_cli.reporting.plots import palette
from gpipe_cli.reporting.plots.timeline_values import Bar, StepPicture, timeline_view

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = NEEDED
SETTINGS = (*EVEN, "hardware=v100", "batch_size=16", "partitions=2", "micro_batches=4")
BALANCE = "partition.balance=[4,6,4,3]"  # of the hourglass: images go to stage 3, high to 2, low from 1 to 2
COMMANDS = (
    "gpipe train -m hydra.sweep.dir=swept hardware=v100 'seed=choice(1,2)' batch_size=32 partitions=2 replicas=auto",
    "gpipe train resume=outputs/run batch_size=16 recompute=auto",
)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run with two recorded steps, of which stage 1 has waited since before they began."""
    config, profile = configure(*SETTINGS), traced(*SETTINGS)
    plan = plan_of(config, profile)
    view = timeline_view("", "measured", plan.timeline, plan.breakdown, plan.step_seconds, 0.0)
    first, (waited, *others) = view.stages
    assert waited.what == "waiting"
    early = Bar("waiting", 0, -plan.step_seconds, waited.end_seconds)
    view = replace(view, stages=(first, (early, *others)))
    path = tmp_path_factory.mktemp("page") / "pipeline.html"
    data = simulation_data(config, profile, plan)
    write_page(path, "AmoebaNet-D on digits", data, [StepPicture(1, n, (view,)) for n in (5, 10)], commands=COMMANDS)
    return path


@pytest.fixture(scope="module")
def crowded(written: Path) -> Path:
    """The page of the same run, had both of its devices been processes on one core that others used, too."""
    text, path = written.read_text(encoding="utf-8"), written.with_name("crowded.html")
    alone, shared = '"at_once":null,"cores":null', '"at_once":1,"cores":1'
    assert text.count(alone) == text.count('"run":null,"contended":null') == 1
    text = text.replace('"run":null,"contended":null', '"run":"outputs/run","contended":0.312')
    path.write_text(text.replace(alone, shared), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def browser_page() -> "Iterator[Page]":
    yield from opened_page()


@pytest.fixture
def page(browser_page: "Page", written: Path) -> "Iterator[Page]":
    """The page as it is opened first. Nothing is loaded but the file, and no script fails."""
    wrong: list[str] = []
    asked: list[str] = []
    browser_page.on("pageerror", lambda error: wrong.append(str(error)))
    browser_page.on("request", lambda request: asked.append(request.url))
    open_at(browser_page, written, "")
    yield browser_page
    assert wrong == []
    assert [url for url in asked if not url.startswith(("file:", "blob:", "about:"))] == []
    browser_page.set_viewport_size({"width": 1600, "height": 1000})


def open_at(page: "Page", written: Path, address: str) -> None:
    page.goto("about:blank")  # another address of the same page would not load it anew
    page.goto(f"file://{written}{address}")
    page.locator(".simulated .action").first.wait_for()


def resize(page: "Page", width: int) -> None:
    """Returns once the lanes are drawn for the new width, which is later than the page is laid out for it: on a loaded
    machine, labels of the wider picture were once found outside the narrow one.
    """
    page.set_viewport_size({"width": width, "height": 1000})
    page.wait_for_function("width => innerWidth === width", arg=width)
    page.evaluate("new Promise(drawn => requestAnimationFrame(() => requestAnimationFrame(drawn)))")


def action(page: "Page", key: str) -> "Locator":
    return page.locator(f'.simulated .action[data-key="{key}"]')


def shown_order(page: "Page", stage: int) -> list[str]:
    """The actions of a stage of the simulated step, from left to right."""
    return page.evaluate(
        """stage => [...document.querySelectorAll(`.simulated .action[data-key^="${stage}"]`)]
          .sort((a, b) => a.getAttribute("x") - b.getAttribute("x")).map(bar => bar.dataset.key)""",
        stage,
    )


def drag(page: "Page", key: str, over: str, to: Callable[[Any], float]) -> None:
    """Drag an action over another one of its stage, to `to` of the box of that."""
    moved, target = action(page, key).bounding_box(), action(page, over).bounding_box()
    assert moved
    y = moved["y"] + moved["height"] / 2
    page.mouse.move(moved["x"] + 3, y)
    page.mouse.down()
    page.mouse.move(to(target), y, steps=4)


def configured(page: "Page", controls: dict[str, Any]) -> tuple[float, list[float]]:
    """Seconds of a step, and the most bytes that each stage holds at once, by the page's engine, which its own test
    holds against Python's."""
    ask = """controls => {
      const data = JSON.parse(document.getElementById("data").textContent);
      const {step_seconds, memory} = gpipe.configured(data, {...gpipe.ownControls(data), ...controls});
      return [step_seconds, memory.map(
        ({held, ...stored}) => Object.values(stored).reduce((sum, bytes) => sum + bytes, Math.max(...held)))];
    }"""
    return tuple(page.evaluate(ask, controls))


def simulated(page: "Page", **controls: Any) -> float:
    return configured(page, controls)[0]


def in_mebibytes(size: float) -> str:
    return f"{size / 2**20:.1f} MiB" if size >= 2**20 else f"{size / 2**10:.1f} KiB"


def tiles(page: "Page") -> str:
    return page.locator("#numbers").inner_text()


def shown_step(page: "Page") -> str:
    return page.locator("#numbers b").first.inner_text()


AXIS = "[...document.querySelectorAll('#lanes .time')].map(text => text.textContent).join()"


def in_words(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} µs" if seconds < 1e-4 else f"{seconds * 1e3:.1f} ms"


OUTSIDE = """() => {
  const found = [], box = node => node.getBoundingClientRect(), all = box(document.getElementById("lanes"));
  const labels = [...document.querySelectorAll("#lanes .name")].map(box);
  const tell = (what, node) => found.push(`${what}: ${node.getAttribute("class")} ${node.textContent}`);
  const touch = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
  for (const text of document.querySelectorAll("#lanes text")) {
    const {left, right, width} = box(text);
    if (width && (left < all.left - 1 || right > all.right + 1)) tell("cut off", text);
  }
  const plot = all.left + Number(document.querySelector("#plot rect").getAttribute("x"));
  for (const bar of document.querySelectorAll("#lanes rect")) {
    if (!bar.closest('[clip-path="url(#plot)"], clipPath, pattern')) tell("not clipped", bar);
    const {left, right, top, bottom} = box(bar);
    const seen = {left: Math.max(left, plot), right, top, bottom};
    if (!bar.closest("clipPath") && labels.some(label => touch(seen, label))) tell("covers a label", bar);
  }
  if (document.documentElement.scrollWidth > innerWidth) found.push("wider than the window");
  return found;
}"""


@pytest.mark.parametrize("width", [1600, 480])
def test_every_label_is_seen_and_nothing_is_drawn_left_of_the_lanes(page: "Page", width: int) -> None:
    """A stage that had waited since before the step was once drawn over its own name."""
    resize(page, width)
    assert page.locator(".measured .name").all_text_contents() == ["stage 0", "stage 1"]
    for kind in "FRB":  # as in the pictures
        assert action(page, f"1{kind}2").get_attribute("fill") == palette.colour(kind, 2, 4)  # type: ignore[arg-type]
    assert page.evaluate(OUTSIDE) == []
    page.locator("#closer").click()
    page.keyboard.press("d")
    assert page.evaluate(OUTSIDE) == []


def test_a_setting_is_simulated_at_once_and_the_address_keeps_it(page: "Page", written: Path) -> None:
    own = simulated(page)
    assert shown_step(page) == in_words(own)
    page.locator("#micro_batches").focus()
    for _ in range(4):
        page.keyboard.press("ArrowRight")
    more = simulated(page, micro_batches=8)
    assert shown_step(page) == in_words(more) != in_words(own)
    assert "(2\u22121)/(8+2\u22121)" in page.locator("#ideal").inner_text()
    assert "11.1 %" in page.locator("#ideal").inner_text()
    assert "M 4 → 8" in page.locator("#changed").inner_text()
    page.locator("#schedule").select_option("1f1b")
    page.locator("#link_factor").fill("-4")
    expected = in_words(simulated(page, micro_batches=8, schedule="1f1b", link_factor=2))
    assert shown_step(page) == expected
    open_at(page, written, page.url[page.url.index("#") :])
    assert shown_step(page) == expected
    page.locator("#own").click()
    assert shown_step(page) == in_words(own)
    page.locator("#undo").click()
    assert shown_step(page) == expected
    open_at(page, written, "#K=99&M=x&stages=0&schedule=none&layers=1-1&order=0F0.F~1B&transfers=-1")
    assert shown_step(page) == in_words(own)
    assert page.locator("#own_devices").is_hidden(), "where nothing is shared"
    open_at(page, written, "#layers=1-6")
    page.locator("#move").wait_for()
    assert "from stage 1 to stage 0" in page.locator("#move-text").inner_text()
    page.locator("#move").click()
    assert shown_step(page) == in_words(simulated(page, balance=[2, 5]))


def test_whoever_explores_gets_a_device_for_each_stage(page: "Page", crowded: Path) -> None:
    """On a laptop the page of a run said that K = 8 is slower than K = 1: its devices shared two cores."""
    open_at(page, crowded, "")
    switch, explained = page.locator("#own_devices"), page.locator("#explained")
    own, own_alone = simulated(page), simulated(page, own_devices=True)
    assert own_alone < 0.8 * own
    assert (switch.is_checked(), shown_step(page)) == (False, in_words(own))
    assert "its 2 devices share the run's 1 core" in tiles(page)
    page.locator("#partitions").fill("4")
    alone, shared = (simulated(page, partitions=4, own_devices=which) for which in (True, False))
    assert (switch.is_checked(), shown_step(page)) == (True, in_words(alone))
    assert "each stage has a device of its own" in tiles(page)
    # with the run's own setting on as many devices as it has stages: else the devices would pass for a merit of K
    assert f"takes {in_words(alone)} instead of {in_words(own_alone)}" in explained.inner_text()
    assert page.url.endswith("#K=4&devices=own")
    switch.uncheck()
    assert shown_step(page) == in_words(shared)
    assert "its 4 devices share the run's 1 core" in tiles(page)
    assert "each takes 4 \u00d7 as long" in page.locator("#devices-meaning").inner_text()
    page.locator("#schedule").select_option("1f1b")
    assert not switch.is_checked(), "it stays as it was set"
    open_at(page, crowded, page.url[page.url.index("#") :])
    assert shown_step(page) == in_words(simulated(page, partitions=4, schedule="1f1b"))
    page.locator("#own").click()
    assert (switch.is_checked(), shown_step(page), "#" in page.url) == (False, in_words(own), False)


def test_what_keeps_the_bubble_from_its_formula_is_said(page: "Page", crowded: Path) -> None:
    for address, causes in (
        ("#M=16&recompute=never&devices=shared", ["devices share cores"]),
        ("#recompute=always", ["recomputation fills waits"]),
        ("#recompute=never&layers=1-6", ["stages are unequal"]),
        ("#recompute=never&schedule=zero_bubble", ["the order is neither gpipe nor 1f1b"]),
    ):
        open_at(page, crowded, address)
        said = page.locator("#ideal").inner_text()
        assert all(cause in said for cause in causes), said
    open_at(page, crowded, "#K=1")
    assert "here:" not in page.locator("#ideal").inner_text()
    assert "31.2 % of the time" in page.locator("#contended").inner_text(), "other programs used the cores"


def test_hints_say_what_the_numbers_say(page: "Page", crowded: Path) -> None:
    """Of 1f1b it was said that its bubble is as large, beside 8.7 % that became 3.5 %."""
    open_at(page, crowded, "#K=3&M=8")
    for id, choices in (("schedule", ("gpipe", "1f1b", "zero_bubble")), ("recompute", ("never", "always"))):
        for choice in choices:
            page.locator(f"#{id}").select_option(choice)
            hint, numbers = page.locator(f"#{id}-meaning").inner_text(), tiles(page)
            said = re.findall(r"(?:step|bubble|fullest stage) ([\d.]+ \S+) \u2192", hint)
            assert said, hint
            assert all(now in numbers for now in said), (choice, hint)


def test_pointing_lights_up_a_micro_batch_and_says_what_is_waited_for(page: "Page") -> None:
    action(page, "1F2").hover()
    lit = page.locator(".action.lit").evaluate_all("bars => bars.map(bar => bar.dataset.key)")
    assert sorted(lit) == sorted(f"{k}{kind}2" for k in (0, 1) for kind in "FRB")
    assert page.locator(".pointed .arrow").count() == 2  # into the action, and further on its way back
    said = page.locator("#explained").inner_text()
    assert "1F2 is the forward of micro-batch 2 on stage 1" in said
    page.locator(".simulated .stage").nth(1).locator(".region.bubble").first.hover()
    said = page.locator("#explained").inner_text()
    assert "stage 1 waits for 0F0" in said
    assert "stage 0 computes it until" in said
    page.locator("#critical").check()
    assert page.locator(".pointed .path").count() == 1


def test_skips_are_arrows_past_other_stages(page: "Page", tmp_path: Path) -> None:
    """Of the images no gradient returns, and the skip between neighbours is one with what the next layer gets."""
    config, profile = configure(*HOURGLASS, "hardware=v100", "partitions=4", BALANCE), traced(*HOURGLASS)
    path = tmp_path / "skips.html"
    data = simulation_data(config, profile, plan_of(config, profile))
    write_page(path, "hourglass", data, [])
    open_at(page, path, "")
    assert page.locator(".pointed .arrow.skip").count() == 3  # of micro-batch 0: images, high, and its gradient
    for key, said in (
        ("3F1", "It takes up the skip images from stage 0, 6.0 KiB."),
        ("2F1", "It takes up the skips high from stage 0, 8.0 KiB; low from stage 1, 4.0 KiB."),
        ("0B1", "It gets the gradient of the skip high from stage 2, 8.0 KiB."),
        ("1B1", "It gets the gradient of the skip low from stage 2, 4.0 KiB."),
    ):
        action(page, key).hover()
        page.evaluate("() => new Promise(requestAnimationFrame)")  # arrows are placed in the next frame
        assert page.locator("#explained").inner_text().endswith(said)
        assert page.locator(".pointed .arrow.skip").count() == 3
        assert page.locator(".pointed .arrow.skip:not(.before)").count() == (key != "1B1")
    action(page, "2F1").hover()
    places = [
        float(n) for n in re.findall(r"[\d.]+", page.locator(".pointed .skip:not(.before)").get_attribute("d") or "")
    ]
    (begin, width), (target, _) = (
        [float(action(page, key).get_attribute(name) or "") for name in ("x", "width")] for key in ("0F1", "2F1")
    )
    assert (places[0], places[-2]) == (pytest.approx(begin + width, abs=3), pytest.approx(target, abs=3))
    action(page, "3B1").hover()
    assert "skip" not in page.locator("#explained").inner_text()
    data["costs"]["of"]["4"]["skips"][0][0] = 1e-3  # seconds in which the images are on their way
    write_page(path, "hourglass", data, [])
    open_at(page, path, "")
    action(page, "3F0").hover()
    assert (
        "for 0F0: stage 0 computes it until 10.0 µs, and it is 1.0 ms on its way"
        in page.locator("#explained").inner_text()
    )
    page.locator("#critical").check()
    assert " and 4." in page.locator("#explained").inner_text()  # ms of transfers: of each of 4 micro-batches
    assert page.locator(".pointed .path").count() == 1


def test_an_order_that_cannot_run_is_explained_and_undone(page: "Page", written: Path) -> None:
    """Stage 0 wants the gradient of micro-batch 0 before it sends 1, and stage 1 wants 1 before it sends that back."""
    open_at(page, written, "#schedule=1f1b&recompute=never")
    before = shown_order(page, 0), shown_order(page, 1)
    assert before == tuple([str(a) for a in row] for row in build("1f1b", 2, 4, "never"))
    action(page, "0B0").focus()
    page.keyboard.press("Alt+ArrowLeft")
    assert shown_order(page, 0)[:3] == ["0F0", "0B0", "0F1"]
    assert page.locator("#problem").is_hidden()
    assert "order by hand" in page.locator("#changed").inner_text()
    drag(page, "1F1", "1B0", lambda target: target["x"] + 2)
    page.mouse.up()
    assert "0B0 waits for 1B0" in page.locator("#problem").inner_text()
    assert sorted(page.locator(".marked").evaluate_all("bars => bars.map(bar => bar.dataset.key)")) == ["0B0", "1F1"]
    assert page.locator("#csv").is_disabled()
    page.locator("#problem button").click()
    assert page.locator("#problem").is_hidden()
    page.keyboard.press("Control+z")
    assert (shown_order(page, 0), shown_order(page, 1)) == before


def test_stages_of_a_v_share_lanes_and_are_told_apart(page: "Page", written: Path, tmp_path: Path) -> None:
    open_at(page, written, "#K=4&M=3&schedule=1f1b&recompute=never")
    placement, commands = page.locator("#placement"), page.locator("#commands")
    setting = {"partitions": 4, "micro_batches": 3, "schedule": "1f1b", "recompute": "never"}
    assert placement.is_disabled(), "of one stage a device"
    page.locator("#stages_per_process").fill("2")
    assert page.locator(".simulated .name").all_text_contents() == [f"stage {k}" for k in range(4)]
    assert "placement" not in commands.inner_text()
    placement.select_option("v")
    setting |= {"stages_per_process": 2, "placement": "v"}
    assert shown_step(page) == in_words(simulated(page, **setting))
    assert page.locator(".simulated .name").all_text_contents() == ["device 0", "device 1"]
    assert "schedule=1f1b placement=v stages_per_process=2 recompute=never" in commands.inner_text()
    first, last = (action(page, key).bounding_box() for key in ("0F0", "3F0"))
    assert first
    assert last
    assert first["y"] < last["y"] < first["y"] + first["height"], "lower in the same lane"

    action(page, "2F1").focus()
    said = page.locator("#explained").inner_text()
    assert "on stage 2 of device 1" in said
    assert "What 1F1 gives it stays on the device" in said
    lane = page.evaluate("""() => ["0", "3"].flatMap(stage =>
      [...document.querySelectorAll(`.simulated .action[data-key^="${stage}"]`)])
      .sort((a, b) => a.getAttribute("x") - b.getAttribute("x")).map(bar => bar.dataset.key)""")
    action(page, "0F0").focus()
    for key in lane:
        assert page.evaluate("document.activeElement.dataset.key") == key
        page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.dataset.key")[0] in "12"

    with page.expect_download() as download:
        page.locator("#csv").click()
    download.value.save_as(tmp_path / "my_schedule.csv")
    schedule = read_schedule(str(tmp_path / "my_schedule.csv"), 4, 3)
    assert schedule.row_of_stage == (0, 1, 1, 0)
    assert [str(a) for a in schedule[0]] == lane

    action(page, "3F0").focus()
    page.keyboard.press("Alt+Home")
    problem = page.locator("#problem").inner_text()
    assert "3F0 waits for 2F0" in problem
    assert "Stage 3 of device 0 waits in 3F0 for 2F0, which stage 2 of device 1 would do after 1F0" in problem
    assert "stage 1 of device 1 waits in 1F0 for 0F0, which stage 0 of device 0 would do after 3F0" in problem
    assert page.locator(".pointed .waits").count() == 2
    page.locator("#problem button").click()

    page.locator("#schedule").select_option("zbv")
    assert (placement.input_value(), placement.is_disabled()) == ("v", True)
    assert "schedule=zbv recompute=never" in commands.inner_text()
    resize(page, 480)
    assert page.evaluate(OUTSIDE) == []


def test_a_point_of_the_curve_is_a_click_away_from_its_lanes_and_its_command(page: "Page", tmp_path: Path) -> None:
    profile, points = traced(*SETTINGS, "schedule=zero_bubble"), []
    own = configure(*SETTINGS)
    for settings in (
        ("schedule=gpipe", "recompute=never"), ("schedule=1f1b", "recompute=always", "micro_batches=8"),
        ("schedule=auto", "recompute=never", "partitions=4", "stages_per_process=2", "placement=v"),
        ("schedule=zbv", "recompute=never", "partitions=4", "micro_batches=8"),
    ):  # fmt: skip
        config = configure(*SETTINGS, *settings)
        plan = plan_of(config, profile)
        setting = simulation_data(config, profile, plan)["setting"] | {"balance": plan.balance}
        rows = {"rows": [list(map(str, row)) for row in plan.schedule]} if config.schedule == "auto" else {}
        points.append({"command": f"gpipe plan {' '.join(settings)}", "setting": setting, **rows, "dominated": False,
                       "step_seconds": plan.step_seconds, "memory_bytes": max(plan.device_bytes)})  # fmt: skip
    points[0]["dominated"] = True
    data = simulation_data(own, profile, plan_of(own, profile), [8])
    assert page.locator("#curve").is_hidden()
    bound = 0.9 * min(point["step_seconds"] for point in points)
    path = tmp_path / "curve.html"
    write_page(path, "curve", {**data, "curve": {"points": points, "lower_bound_seconds": bound}}, [])
    open_at(page, path, "")
    assert page.locator("#chosen").is_hidden(), "the plan is none of the points"
    assert page.locator("#curve circle").count() == 4
    assert f"No step can be shorter than {in_words(bound)}" in page.locator("#curve-text").inner_text()
    page.locator("#curve summary").first.click()
    for point in sorted(points[1:], key=lambda point: point["memory_bytes"]):
        memory, schedule = in_mebibytes(point["memory_bytes"]), point["setting"]["schedule"]
        text = f"{memory}, {in_words(point['step_seconds'])}: {schedule}"
        link = page.locator("#front a").filter(has_text=text)
        link.focus()
        page.keyboard.press("Enter")
        assert link.get_attribute("aria-current") == "true"
        assert shown_step(page) == in_words(point["step_seconds"])
        assert memory in tiles(page)
        assert page.locator("#chosen-command").inner_text() == point["command"]
        open_at(page, path, link.get_attribute("href") or "")
        assert page.locator("#chosen-command").inner_text() == point["command"], "its address is a way to it, too"
        page.locator("#curve summary").first.click()
    page.locator("#curve circle.dominated").click()
    assert page.locator("#chosen-command").inner_text() == points[0]["command"]
    assert page.evaluate(OUTSIDE) == []


def test_what_is_dragged_says_what_it_costs_in_memory(page: "Page", written: Path) -> None:
    """It said how much time the new order saves, and not that stage 0 holds one micro-batch more for it."""
    open_at(page, written, "#schedule=1f1b&recompute=never")
    schedule = page.locator("#schedule")
    asked = {"schedule": "1f1b", "recompute": "never"}
    rows = [shown_order(page, stage) for stage in (0, 1)]
    assert rows[0][:4] == ["0F0", "0F1", "0B0", "0F2"]
    action(page, "0F2").focus()
    page.keyboard.press("Alt+ArrowLeft")
    said = page.locator("#explained").inner_text()
    moved = [["0F0", "0F1", "0F2", "0B0", *rows[0][4:]], rows[1]]
    before, after = (configured(page, one)[1] for one in (asked, asked | {"rows": moved}))
    assert after[0] > before[0]
    holds = f"holds up to {in_mebibytes(after[0])}, {in_mebibytes(after[0] - before[0])} more than before"
    assert holds in said
    assert schedule.input_value() == "by hand"
    hint = f"fullest stage {in_mebibytes(max(after))} \u2192 {in_mebibytes(max(before))}"
    assert hint in page.locator("#schedule-meaning").inner_text()

    drag(page, "0F2", "0B0", lambda target: target["x"] + target["width"] - 5)
    less = f"holds up to {in_mebibytes(before[0])}, {in_mebibytes(after[0] - before[0])} less than before"
    assert f"0F2 here: a step of {in_words(simulated(page, **asked))}" in page.locator("#explained").inner_text()
    assert less in page.locator("#explained").inner_text()
    page.mouse.up()
    page.locator("#undo").click()
    assert schedule.input_value() == "by hand"
    page.locator("#micro_batches").fill("5")
    assert schedule.input_value() == "1f1b", "another M has no such order"


def test_an_order_made_by_hand_is_a_schedule_that_gpipe_reads(page: "Page", tmp_path: Path) -> None:
    action(page, "0R2").focus()
    page.keyboard.press("Alt+ArrowLeft")
    rows = shown_order(page, 0), shown_order(page, 1)
    assert rows[0][4:6] == ["0R2", "0B3"]
    with page.expect_download() as download:
        page.locator("#csv").click()
    download.value.save_as(tmp_path / "my_schedule.csv")
    schedule = read_schedule(str(tmp_path / "my_schedule.csv"), 2, 4)
    assert tuple([str(a) for a in row] for row in schedule) == rows
    shown = page.locator("#commands").inner_text().splitlines()
    settings = "hardware=v100 batch_size=16 seed=... partitions=2 micro_batches=4 schedule=my_schedule.csv"
    assert shown == [f"gpipe train {settings}", f"gpipe check {settings}"]


def test_keys_reach_every_action_and_move_in_time(page: "Page") -> None:
    fitted = page.evaluate(AXIS)
    action(page, "0F0").focus()
    focused = "[...document.querySelectorAll('.action[tabindex=\"0\"]')].map(bar => bar.dataset.key).join()"
    assert page.evaluate("document.activeElement.dataset.key") == page.evaluate(focused) == "0F0"
    page.keyboard.press("ArrowRight")
    assert page.evaluate(focused) == "0F1"
    page.keyboard.press("ArrowDown")
    key = page.evaluate("document.activeElement.dataset.key")
    assert key.startswith("1")
    assert page.evaluate(focused) == key
    assert key in page.locator("#live").inner_text()
    width = "document.activeElement.getBoundingClientRect().width"
    before = page.evaluate(width)
    page.keyboard.press("w")
    page.wait_for_function(f"before => {width} > 1.2 * before", arg=before)
    page.locator("#fit").click()
    page.wait_for_function(f"before => {AXIS} === before", arg=fitted)
    page.locator(".simulated .name").first.hover()
    page.keyboard.down("Control")
    page.mouse.wheel(0, -300)
    page.keyboard.up("Control")
    page.wait_for_function(f"before => {AXIS} !== before", arg=fitted)
    page.locator("#recorded").fill("0")
    assert "step 5" in (page.locator(".measured .about").text_content() or "")


def test_the_picture_is_saved_as_a_file_of_its_own(page: "Page", tmp_path: Path) -> None:
    page.locator("#theme").click()
    with page.expect_download() as download:
        page.locator("#svg").click()
    download.value.save_as(tmp_path / "pipeline.svg")
    text = (tmp_path / "pipeline.svg").read_text(encoding="utf-8")
    assert "var(" not in text
    assert "#17181c" in text, "dark, as it was seen"
    bars = ElementTree.fromstring(text).iter("{http://www.w3.org/2000/svg}rect")
    assert sum("action" in node.get("class", "") for node in bars) == page.locator(".action").count()


def test_questions_are_answered_in_a_sentence(page: "Page") -> None:
    ask = page.locator("#questions button")
    ask.filter(has_text="Where is the bubble").click()
    assert page.locator(".region.bubble.lit").count() == 1
    assert "of the step is bubble" in page.locator("#explained").inner_text()
    ask.filter(has_text="recomputed").click()
    own, never = (in_words(simulated(page, recompute=mode)) for mode in ("except_last", "never"))
    assert f"the step takes {never} instead of {own}" in page.locator("#explained").inner_text()
    ask.filter(has_text="M = 16").click()
    assert in_words(simulated(page, micro_batches=16)) in page.locator("#explained").inner_text()
    ask.filter(has_text="Where is the bubble").click()
    assert page.locator("#micro_batches-value").inner_text() == "4", "it is about the run, whatever was tried before"


def test_very_many_actions_are_one_picture_and_still_explained(page: "Page", written: Path, tmp_path: Path) -> None:
    text = written.read_text(encoding="utf-8")
    assert "MOST_BARS = 8000" in text
    path = tmp_path / "pipeline.html"
    path.write_text(text.replace("MOST_BARS = 8000", "MOST_BARS = 10"), encoding="utf-8")
    page.goto(f"file://{path}")
    picture = page.locator(".simulated image")
    assert (picture.get_attribute("href") or "").startswith("data:image/png")
    assert page.locator(".action").count() == 0
    place = picture.bounding_box()
    assert place
    page.mouse.move(place["x"] + 30, place["y"] + 35)
    assert "0F0 is the forward of micro-batch 0" in page.locator("#explained").inner_text()
