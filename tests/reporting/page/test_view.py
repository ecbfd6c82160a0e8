"""What a person sees and touches of the page, in a real browser: lanes, controls, sentences, an order made by hand."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from browser import NEEDED, opened_page
from plan_runs import EVEN, plan_of, traced
from training_runs import configure

from gpipe_cli.planner.simulation_data import simulation_data
from gpipe_cli.reporting.page.page import PageContext, write_page
from gpipe_cli.reporting.plots import palette
from gpipe_cli.reporting.plots.timeline_values import StepPicture, TimelineView
from gpipe_cli.schedule.named_schedules import build
from gpipe_cli.schedule.schedule_file import read_schedule

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

pytestmark = NEEDED
SETTINGS = (*EVEN, "hardware=v100", "batch_size=16", "partitions=2", "micro_batches=4")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run with two recorded steps, of which stage 1 has waited since before they began."""
    config, profile = configure(*SETTINGS), traced(*SETTINGS)
    plan = plan_of(config, profile)
    first, (waited, *others) = plan.timeline.events
    assert waited.what == "waiting"
    early = waited._replace(start_seconds=-plan.step_seconds)
    timeline = replace(plan.timeline, events=(first, (early, *others)))
    view = TimelineView("", "measured", timeline, 0.0, plan.step_seconds, plan.breakdown._asdict())
    path = tmp_path_factory.mktemp("page") / "pipeline.html"
    data = simulation_data(plan)
    write_page(path, "AmoebaNet-D on digits", data, [StepPicture(1, n, (view,)) for n in (5, 10)], PageContext())
    return path


@pytest.fixture(scope="module")
def crowded(written: Path) -> Path:
    """The page of the same run, had both of its devices been processes on one core that others also used."""
    text, path = written.read_text(encoding="utf-8"), written.with_name("crowded.html")
    alone, shared = '"at_once":null,"cores":null', '"at_once":1,"cores":1'
    assert text.count(alone) == text.count('"run":null,"contended":null,"launched":[]') == 1
    text = text.replace(
        '"run":null,"contended":null,"launched":[]',
        '"run":"outputs/run","contended":0.312,"launched":["stage 0: layer stem has a hook"]',
    )
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
    page.goto("about:blank")  # another address of the same page would not reload it
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
    """Seconds of a step, and the peak bytes that each stage holds, by the page's engine, which test_engine.py compares
    with Python's."""
    ask = """controls => {
      const data = JSON.parse(document.getElementById("data").textContent);
      const rows = controls.rows?.map(row => row.map(gpipe.action));
      const {step_seconds, memory} = gpipe.configure(data, {...gpipe.originalControls(data), ...controls, rows});
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
    picture, slider = (page.locator(f"#{name}").bounding_box() for name in ("picture", "partitions"))
    assert picture
    assert slider
    apart = slider["y"] - picture["y"] - picture["height"]
    assert apart < 100, "sliders and what they change are seen together, also on a phone"


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
    open_at(page, written, "#K=99&M=x&stages=0&schedule=none&transfers=-1")
    assert shown_step(page) == in_words(own)
    assert page.locator("#own_devices").is_hidden(), "where nothing is shared"


def test_devices_share_cores_until_a_switch_gives_each_stage_its_own(page: "Page", crowded: Path) -> None:
    """A question that changed M once turned on separate devices silently. Speed-up is over one device with
    the mini-batch whole, so it falls where more micro-batches lengthen the step: it once rose, over K = 1 with the same
    M."""
    open_at(page, crowded, "")
    switch, explained = page.locator("#own_devices"), page.locator("#explained")
    own, own_alone = simulated(page), simulated(page, own_devices=True)
    assert own_alone < 0.8 * own
    assert (switch.is_checked(), shown_step(page)) == (False, in_words(own))
    baseline = page.evaluate(
        """() => gpipe.baselineStep(
          JSON.parse(document.getElementById("data").textContent), {backward_factor: 1}).step_seconds"""
    )
    assert f"{baseline / own:.2f} \u00d7over one device" in tiles(page).replace("\n", "")
    page.locator("#micro_batches").fill("4")
    more = simulated(page, micro_batches=5)
    assert (switch.is_checked(), shown_step(page)) == (False, in_words(more))
    assert f"{baseline / more:.2f} \u00d7" in tiles(page)
    page.locator("#own").click()
    page.locator("#partitions").fill("3")  # the fourth that is offered
    alone, shared = (simulated(page, partitions=4, own_devices=which) for which in (True, False))
    assert (switch.is_checked(), shown_step(page)) == (False, in_words(shared))
    assert "each takes 4 \u00d7 as long" in page.locator("#devices-meaning").inner_text()
    switch.check()
    assert shown_step(page) == in_words(alone)
    assert "separate device for each stage" in page.locator("#changed").inner_text()
    assert f"takes {in_words(alone)} instead of {in_words(own)}" in explained.inner_text()
    assert page.url.endswith("#K=4&devices=own")
    switch.uncheck()
    page.locator("#schedule").select_option("1f1b")
    open_at(page, crowded, page.url[page.url.index("#") :])
    assert shown_step(page) == in_words(simulated(page, partitions=4, schedule="1f1b"))
    page.locator("#own").click()
    assert (switch.is_checked(), shown_step(page), "#" in page.url) == (False, in_words(own), False)
    assert "31.2 % of the time" in page.locator("#contended").inner_text(), "other programs used the cores"
    assert "layer stem has a hook" in page.locator("#launched").inner_text()


def test_hints_say_what_the_numbers_say(page: "Page", crowded: Path) -> None:
    """Of 1f1b it was said that its bubble is as large, next to 8.7 % that became 3.5 %."""
    open_at(page, crowded, "#K=3&M=8")
    for id, choices in (("schedule", ("gpipe", "1f1b", "zero_bubble")), ("recompute", ("never", "always"))):
        for choice in choices:
            page.locator(f"#{id}").select_option(choice)
            hint, numbers = page.locator(f"#{id}-meaning").inner_text(), tiles(page)
            said = re.findall(r"(?:step|bubble|fullest stage) ([\d.]+ \S+) \u2192", hint)
            assert said, hint
            assert all(now in numbers for now in said), (choice, hint)
    # two stages a device, and compared on these devices: of zbv it was said that gpipe is faster, on twice as many
    open_at(page, crowded, "#K=4&M=8&schedule=interleaved")
    assert page.locator("#stages_per_process-value").inner_text() == "2: 2 devices"
    setting = {"partitions": 4, "micro_batches": 8, "stages_per_process": 2, "placement": "looped"}
    gpipe = in_words(simulated(page, **setting))
    assert f"step {shown_step(page)} \u2192 {gpipe}" in page.locator("#schedule-meaning").inner_text()


def test_pointing_lights_up_a_micro_batch_and_explains_its_waits(page: "Page") -> None:
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


def test_an_order_that_cannot_run_is_refused(page: "Page", written: Path) -> None:
    """Stage 0 wants the gradient of micro-batch 0 before it sends 1, and stage 1 wants 1 before it sends that back."""
    open_at(page, written, "#schedule=1f1b&recompute=never")
    before = shown_order(page, 0), shown_order(page, 1)
    assert before == tuple([str(a) for a in row] for row in build("1f1b", 2, 4, "never"))
    action(page, "0B0").focus()
    page.keyboard.press("Alt+ArrowLeft")
    assert shown_order(page, 0)[:3] == ["0F0", "0B0", "0F1"]
    assert page.locator("#problem").is_hidden()
    assert "edited order" in page.locator("#changed").inner_text()
    drag(page, "1F1", "1B0", lambda target: target["x"] + 2)
    said = "this order cannot run: stages would wait for each other in a circle"
    assert said in page.locator("#explained").inner_text()
    page.mouse.up()
    assert "wait for each other in a circle" in page.locator("#problem").inner_text()
    assert shown_order(page, 1) == before[1]
    page.keyboard.press("Control+z")
    assert (shown_order(page, 0), shown_order(page, 1)) == before
    assert page.locator("#problem").is_hidden()


def test_stages_of_a_v_share_lanes_and_are_told_apart(page: "Page", written: Path, tmp_path: Path) -> None:
    open_at(page, written, "#K=4&M=3&schedule=1f1b&recompute=never")
    placement, settings = page.locator("#placement"), page.locator("#settings")
    setting = {"partitions": 4, "micro_batches": 3, "schedule": "1f1b", "recompute": "never"}
    assert placement.is_disabled(), "of one stage a device"
    page.locator("#stages_per_process").fill("2")
    assert page.locator(".simulated .name").all_text_contents() == [f"stage {k}" for k in range(4)]
    placement.select_option("v")
    setting |= {"stages_per_process": 2, "placement": "v"}
    assert shown_step(page) == in_words(simulated(page, **setting))
    assert page.locator(".simulated .name").all_text_contents() == ["device 0", "device 1"]
    assert settings.inner_text() == (
        "partitions=4 micro_batches=3 schedule=1f1b recompute=never stages_per_process=2 placement=v"
    )
    first, last = (action(page, key).bounding_box() for key in ("0F0", "3F0"))
    assert first
    assert last
    assert first["y"] < last["y"] < first["y"] + first["height"], "lower in the same lane"

    action(page, "2F1").focus()
    said = page.locator("#explained").inner_text()
    assert "on stage 2 of device 1" in said
    assert "1F1 stays on the device" in said
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

    page.locator("#schedule").select_option("interleaved")
    assert (placement.input_value(), placement.is_disabled()) == ("looped", True)
    page.locator("#partitions").fill("2")
    assert "use K = 4" in page.locator("#problem").inner_text()
    assert page.locator("#partitions-value").inner_text() == "4"
    resize(page, 480)
    assert page.evaluate(OUTSIDE) == []


def test_dragging_shows_the_cost_in_memory(page: "Page", written: Path) -> None:
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
    assert schedule.input_value() == "edited"

    drag(page, "0F2", "0B0", lambda target: target["x"] + target["width"] - 5)
    less = f"holds up to {in_mebibytes(before[0])}, {in_mebibytes(after[0] - before[0])} less than before"
    assert f"a step of {in_words(simulated(page, **asked))}" in page.locator("#explained").inner_text()
    assert less in page.locator("#explained").inner_text()
    page.mouse.up()
    page.locator("#undo").click()
    assert schedule.input_value() == "edited"
    assert "schedule=my_schedule.csv recompute=never" in page.locator("#settings").inner_text()
    page.locator("#micro_batches").fill("5")
    assert schedule.input_value() == "1f1b", "another M has no such order"


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


def test_very_many_actions_are_not_drawn(page: "Page", written: Path, tmp_path: Path) -> None:
    text = written.read_text(encoding="utf-8")
    assert "MAX_BARS = 8000" in text
    path = tmp_path / "pipeline.html"
    path.write_text(text.replace("MAX_BARS = 8000", "MAX_BARS = 10"), encoding="utf-8")
    page.goto(f"file://{path}")
    assert "22 actions: too many" in str(page.locator(".simulated .about").text_content())
    assert page.locator(".simulated .action").count() == 0
    assert shown_step(page) == in_words(simulated(page))
