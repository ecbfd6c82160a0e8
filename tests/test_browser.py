"""What people look at, in a real browser: TensorBoard's own page over real event files, and the page of timelines."""

import json
import shutil
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.request import urlopen

import pytest
from reporting_runs import description, evaluation, log, plan, shares, step, timeline

from gpipe_cli.reporting.plots.timeline_page import write_page
from gpipe_cli.reporting.plots.timeline_values import StepPicture
from gpipe_cli.reporting.run.reporter import Reporter

if TYPE_CHECKING:
    from playwright.sync_api import Page

CHROMIUM = shutil.which("chromium")
PATIENCE_SECONDS = 60
TOP1 = {1: 0.875, 4: 0.625}  # by micro-batches
RUNS = [f"sweep/micro_batches={micro_batches}" for micro_batches in TOP1]

pytestmark = [
    pytest.mark.browser,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of what TensorBoard brings along
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium in PATH"),
    pytest.mark.skipif(find_spec("playwright") is None, reason="no playwright: pip install -e '.[browser]'"),
]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of a TensorBoard over two runs of a sweep, each a training of four steps."""
    from tensorboard import program

    logs = tmp_path_factory.mktemp("outputs")
    for micro_batches, top1 in TOP1.items():
        name = f"micro_batches={micro_batches}"
        reporter = Reporter(logs / "sweep" / name, description(name, plan=plan()), log()[0])
        for number in range(1, 5):
            reporter.step(step(number))
            reporter.recorded(number, shares(0.1))
        reporter.evaluated(evaluation(4, top1=top1))
        reporter.finish("completed")
    board = program.TensorBoard()
    board.configure(argv=["tensorboard", "--logdir", str(logs), "--host", "127.0.0.1", "--port", "0"])
    address: str = board.launch()  # a thread of this process
    end = time.monotonic() + PATIENCE_SECONDS
    while True:
        with urlopen(f"{address}data/runs") as answer:
            if sorted(json.load(answer)) == RUNS:
                return address
        assert time.monotonic() < end
        time.sleep(0.2)


@pytest.fixture(scope="module")
def page() -> "Iterator[Page]":
    """One page for all tests: what takes time is to start the browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1600, "height": 1000})
        page.set_default_timeout(1000 * PATIENCE_SECONDS)
        yield page
        browser.close()


def test_settings_and_final_metrics_are_a_table(page: "Page", address: str) -> None:
    page.goto(f"{address}#hparams")
    table = page.locator("tf-hparams-table-view")
    for run in RUNS:
        table.get_by_text(run, exact=True).first.wait_for()
    for column in ("micro_batches", "model.name", "final/top1", "final/samples_per_second"):
        table.get_by_text(column, exact=True).first.wait_for()
    for shown in ("amoebanet", *(f"{top1:#.5g}" for top1 in TOP1.values()), "512.00"):
        table.get_by_text(shown, exact=True).first.wait_for()
    pane = page.locator("tf-hparams-query-pane")
    pane.get_by_text("final/memory_gib", exact=True).first.wait_for()
    for curve in ("train/loss", "bubble/measured", "memory/stage_0_gib", "memory/fullest_gib"):
        assert pane.get_by_text(curve).count() == 0, f"{curve} is taken for a metric"
    # A line for each run: TensorBoard leaves out one that lacks something of what is shown at first.
    page.get_by_text("Parallel Coordinates View").first.click()
    lines = page.locator("tf-hparams-parallel-coords-plot g.foreground path")
    lines.nth(len(RUNS) - 1).wait_for()
    assert lines.count() == len(RUNS)


OUTSIDE = """() => {
  const found = [], box = e => e.getBoundingClientRect();
  const tell = (what, e) => found.push(`${what}: ${e.getAttribute('class')} ${e.textContent}`);
  const within = (a, b) => a.left > b.left - 1 && a.right < b.right + 1 && a.top > b.top - 1 && a.bottom < b.bottom + 1;
  const touch = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
  for (const svg of document.querySelectorAll('section:not([hidden]) figure svg')) {
    const all = box(svg), bars = [...svg.querySelectorAll('rect')];
    svg.querySelectorAll('text').forEach(text => within(box(text), all) || tell('cut off', text));
    for (const lane of svg.querySelectorAll('g.stage')) {
      const idle = box(lane.querySelector('path.idle')), label = lane.querySelector('text.name');
      const room = new DOMRect(idle.left, idle.top, all.right - idle.left, idle.height);
      lane.querySelectorAll('rect').forEach(bar => within(box(bar), room) || tell('outside', bar));
      bars.forEach(bar => touch(box(bar), box(label)) && tell('covered', label));
    }
  }
  return found;
}"""


def test_no_bar_leaves_its_lane_and_every_label_is_seen(page: "Page", tmp_path: Path) -> None:
    """A stage that had waited since before the step was drawn over its own name."""
    early, *others = timeline().stages[1]
    waited = timeline(stages=(timeline().stages[0], (early._replace(start_seconds=-0.1), *others)))
    write_page(tmp_path / "timeline.html", "AmoebaNet-D", [StepPicture(1, 5, (waited, timeline(kind="predicted")))])
    page.goto(f"file://{tmp_path}/timeline.html")
    assert page.locator("figure").count() == 2
    assert page.locator("figure.measured rect.waiting").count() == 2
    assert page.evaluate(OUTSIDE) == []
