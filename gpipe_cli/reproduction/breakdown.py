"""Where the time of a step goes with two partitions: the pie chart of the NeurIPS version (section 3.1).

Each share of stage time has three values: measured by `gpipe bench`, simulated by `gpipe plan` from layers timed here,
and the paper's, measured on TPUs with a model that the paper does not name.
"""

from dataclasses import asdict, dataclass
from typing import Self

from gpipe_cli.reporting.plots.timeline_values import SHARES, idle
from gpipe_cli.reporting.run.step_breakdown import share_word
from gpipe_cli.reporting.run.summary import speed_kind
from gpipe_cli.reporting.tables.table import NONE, Column, Origin, Table
from gpipe_cli.reproduction.runner import CommandFailedError, Findings, Runner, difference
from gpipe_cli.units import percent


@dataclass(frozen=True, slots=True)
class Breakdown:
    """The paper's shares of a step, 0 to 1; its pie chart has no slice for transfers."""

    compute: float
    recompute: float
    bubble: float
    imbalance: float
    update: float  # the unlabelled slice, by subtraction
    set_up: float

    def reproduce(self, runner: Runner) -> Findings:
        from gpipe_cli.reporting.plots.picture import write_picture  # here, as matplotlib takes half a second to import
        from gpipe_cli.reporting.plots.recipes import draw_shares

        (row,) = runner.bench("measured")["rows"]
        if row["breakdown"] is None:
            raise CommandFailedError(row["reason"] or "no step was recorded")
        planned = runner.without("cost").plan("simulated", "cost=measured")
        measured, simulated, paper = row["breakdown"], planned["breakdown"], asdict(self)
        # comparable even at a desk, as the paper does not name its model
        comparable = not runner.changed() and runner.scale != "smoke"
        off = [
            difference(100 * measured[name], 100 * paper[name], comparable, 1) if name in paper else NONE
            for name in SHARES
        ]
        numbers: tuple[tuple[str, Origin, dict[str, float]], ...] = (
            ("paper", "paper", paper),
            ("here", "measured", measured),
            ("layers here", "simulated", simulated),
        )
        columns = (
            Column("share of a step", cells=[share_word(name) for name in SHARES]),
            *(
                Column.of("", heading, [shares.get(name) for name in SHARES], percent, origin=origin, quantity="share")
                for heading, origin, shares in numbers
            ),
            Column("here - paper, points", "difference", off, minuend="here"),
        )
        stages = f"K = {len(planned['stages'])}, M = {planned['micro_batches']}"
        table = Table(f"Where the time of a step goes, {planned['model_name']}, {stages}", columns)
        picture = runner.folder / "breakdown.png"
        drawn = [("paper (TPU)", paper), ("measured here", measured), ("simulated, layers timed here", simulated)]
        write_picture(picture, draw_shares(drawn))
        recomputed, theirs = (shares["recompute"] / shares["compute"] for shares in (measured, paper))
        notes = [
            ("paper", "no slice for transfers, which its TPUs hide; K and the shares are given, model and M are not"),
            ("simulated", f"from {planned['hardware']['source']}"),
            (
                "found",
                f"recompute / compute is {recomputed:.2f} measured, {theirs:.2f} in the paper, 0.33 if a backward "
                "takes as long as two forwards",
            ),
            (
                "found",
                f"idle {percent(idle(measured))} measured, {percent(idle(simulated))} simulated; "
                f"{percent(row['ideal_bubble'])}, (K-1)/(M+K-1), for equal stages that only compute",
            ),
        ]
        if row["kind"] != "measured":
            notes.append(("measured", f"{speed_kind(row['kind'])}; not the shares of a pipeline"))
        return Findings((table,), tuple(notes), (("picture", str(picture)),), comparable)

    def smallest(self) -> Self:
        return self
