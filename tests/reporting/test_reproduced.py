"""The page of `gpipe reproduce all` and the results in recipes/README.md: their numbers are those of the tables."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from browser import NEEDED, opened_page

from gpipe_cli.reporting.reproduced.page import write_report
from gpipe_cli.reporting.reproduced.readme import BEGIN, END, insert_results
from gpipe_cli.reporting.reproduced.verdict import Verdict, judge_columns
from gpipe_cli.reporting.tables.recipe import Reproduction, markdown, read_reproduction, write_reproduction
from gpipe_cli.reporting.tables.table import Column, Origin, Table
from gpipe_cli.units import count

if TYPE_CHECKING:
    from playwright.sync_api import Page


def numbers(heading: str, origin: Origin, values: Sequence[float | None], form: str, quantity: str = "") -> Column:
    return replace(Column.of("", heading, values, form.format), origin=origin, quantity=quantity)


SPEEDS = Table(
    "Speed <of> all",
    [
        Column("K", cells=["2", "2", "4", "4"]),
        Column("M", cells=["1", "4", "1", "4"]),
        numbers("paper", "paper", [1.0, 1.07, 1.13, 1.26], "{:.2f}", "speed"),
        numbers("N", "simulated", [32, 128, 47, 128], "{:.0f}"),
        numbers("here", "measured", [1.0, 1.45, None, None], "{:.2f}", "speed"),
        Column(
            "full size",
            "simulated",
            ["1.00", "1.35", "1.06", "no fit"],
            values=[1.0, 1.35, 1.06, None],
            quantity="speed",
        ),
        Column("here - paper", "difference", ["-", "-", "-", "-"], minuend="here"),
        Column("full size - paper", "difference", ["+0.00", "+0.28", "-0.07", "-"], minuend="full size"),
    ],
)
SIZES = Table(
    "Sizes",
    [
        Column("", cells=["Naive-1", "Pipeline-8"]),
        replace(Column.of("", "parameters", [82_000_000, 1_800_000_000], count), origin="paper"),
        replace(Column.of("", "parameters", [81_100_000, 1_840_000_000], count), origin="planned"),
        Column("planned - paper, %", "difference", ["-1.1", "+2.4"], minuend="parameters"),
    ],
)
SCORES = Table.of_rows(
    "Scores",
    [Column(""), Column("", "paper"), Column("", "measured"), Column("", "difference", minuend="")],
    [("top-1", "84.4 %", "100.00 %", "-"), ("loss", "-", "0.0628", "-")],
)
FOUND = Reproduction(
    name="a_recipe", title="Title", claim="K < 8 is slow", source="Table 2", needs="2 GPUs", scale="small",
    machine="2 cores", tables=(SPEEDS, SIZES, SCORES), notes=(("found", "a & b"),), commands=("gpipe plan",),
    files=(), seconds=90.0,
)  # fmt: skip


def test_what_is_written_is_read(tmp_path: Path) -> None:
    write_reproduction(FOUND, tmp_path)
    assert markdown(read_reproduction(tmp_path)) == markdown(FOUND)
    read = read_reproduction(tmp_path).tables
    assert [list(judge_columns(table)) for table in read] == [list(judge_columns(table)) for table in FOUND.tables]


def test_the_number_that_stands_for_a_claim_is_the_largest_model_or_the_first_quantity() -> None:
    run, simulated = judge_columns(SPEEDS)
    assert run == Verdict("K = 2, M = 4", "1.07", "1.45", "measured", "-", "not comparable")
    apart = "differs in 1 of 3 rows, most in K = 2, M = 4: 1.35 for 1.07"
    assert simulated == Verdict("K = 4, M = 1", "1.13", "1.06", "simulated", "-0.07", apart)  # the last row has none
    agrees = Verdict("parameters, Pipeline-8", "1.80 B", "1.84 B", "planned", "+2.4 %", "agrees")
    assert list(judge_columns(SIZES)) == [agrees]
    fits = [Column("", cells=["Naive-1"]), Column("fits", "paper", ["yes"]), Column("fits", "planned", ["no"])]
    assert [one.words for one in judge_columns(Table("", fits))] == [
        "differs in 1 of 1 row, most in Naive-1: no for yes"
    ]


def test_the_page_has_names_as_text(tmp_path: Path) -> None:
    """Of a recipe of the user's own, too."""
    write_report(tmp_path, [replace(FOUND, name='<i>"name', scale="<i>scale")], {})
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<i>" not in page
    assert 'id="&lt;i&gt;&quot;name"' in page


@pytest.fixture(scope="module")
def page() -> "Iterator[Page]":
    yield from opened_page()


class TestInABrowser:
    pytestmark = NEEDED

    @pytest.mark.parametrize("width", [1400, 800, 480])
    def test_the_claims_are_read_without_scrolling(self, width: int, page: "Page", tmp_path: Path) -> None:
        """The verdict, the last column, was cut at the table's edge; a claim about eight partitions stood above rows
        about one, without a word."""
        claim = "Eight partitions make room for a model with 22 times as many parameters as one accelerator without any"
        notes = (("left out", "no rows of Pipeline-8 at scale=smoke"), *FOUND.notes)
        named = replace(FOUND, name="table3_no_fast_interconnect", claim=claim, notes=notes)
        write_report(tmp_path, [named, FOUND], {})
        page.set_viewport_size({"width": width, "height": 1000})
        page.goto((tmp_path / "report.html").as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        groups = page.locator(".claims tbody")
        assert "as one accelerator without any; no rows of Pipeline-8 at" in groups.nth(0).inner_text()
        verdicts_right = (
            "[...document.querySelectorAll('.claims td:last-child')].map(cell => cell.getBoundingClientRect().right)"
        )
        rights = page.evaluate(verdicts_right)
        assert len(rights) == 2 * groups.nth(1).locator("td:last-child").count() > 0
        assert max(rights) <= width
        rows = groups.nth(1).locator("td:last-child").all_inner_texts()
        assert rows == sorted(rows, key="not comparable".__eq__), "what can be compared comes first"


def test_the_results_in_the_readme_are_written_anew_between_its_marks() -> None:
    readme = (Path(__file__).parent.parent.parent / "recipes" / "README.md").read_text(encoding="utf-8")
    before, _, rest = readme.partition(BEGIN)
    after = rest.partition(END)[2]
    trained = replace(FOUND, name="trained", tables=(SCORES,))
    mine = replace(FOUND, name="mine", tables=(replace(SPEEDS, columns=[*SPEEDS.columns[:2], *SPEEDS.columns[3:]]),))
    all_three = [replace(FOUND, notes=(*FOUND.notes, ("our choice", "M = 4"))), trained, mine]
    renewed = insert_results(readme, all_three)
    assert renewed.startswith(f"{before}{BEGIN}")
    assert renewed.endswith(f"{END}{after}")
    assert "| 4 | 1 | 1.13 | 47 | - | 1.06 | - | -0.07 |" in renewed
    assert (
        "| [trained](trained.yaml) | K < 8 is slow | top-1 | 84.4 % | 100.00 % | measured | - | not comparable"
        in renewed
    )
    assert "### trained" not in renewed, "its claim says all"
    assert "| [mine](mine.yaml) | K < 8 is slow | a & b |" in renewed
    assert "### mine" not in renewed, "no number of the paper"
    assert "our choice" not in renewed.partition(BEGIN)[2].partition(END)[0]
    assert insert_results(renewed, all_three) == renewed
