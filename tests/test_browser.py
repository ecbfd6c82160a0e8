"""What people look at, in a real browser: TensorBoard's own page over real event files."""

import json
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING
from urllib.request import urlopen

import pytest
from browser import NEEDED, PATIENCE_SECONDS, opened_page
from reporting_runs import description, evaluation, log, plan, shares, step

from gpipe_cli.reporting.run.reporter import Reporter

if TYPE_CHECKING:
    from playwright.sync_api import Page

TOP1 = {1: 0.875, 4: 0.625}  # by micro-batches
RUNS = [f"sweep/micro_batches={micro_batches}" for micro_batches in TOP1]

pytestmark = [
    *NEEDED,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of what TensorBoard brings along
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
    yield from opened_page()


def test_settings_and_final_metrics_are_a_table(page: "Page", address: str) -> None:
    page.goto(f"{address}#hparams")
    table = page.locator("tf-hparams-table-view")
    for run in RUNS:
        table.get_by_text(run, exact=True).first.wait_for()
    for column in ("micro_batches", "model.name", "final/top1", "final/samples_per_second"):
        table.get_by_text(column, exact=True).first.wait_for()
    for shown in ("amoebanet", *map(str, TOP1), *(f"{top1:#.5g}" for top1 in TOP1.values()), "512.00"):
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
