"""Where the time of a step goes, in stacked bars, which compare more easily than the pie chart of the paper."""

from collections.abc import Mapping

from gpipe_cli.reporting.plots.timeline_values import SHARES, idle_share
from gpipe_cli.reproduction.comparison import Difference, Shown, describe_speed_kinds, make_table
from gpipe_cli.reproduction.runner import CommandFailedError, Findings, Runner
from gpipe_cli.units import percent

HERE = Shown("here", "ours", ".1%", "measured", quantity="share")
COLUMNS = (
    Shown("share of a step", "share"),
    Shown("paper", "paper", ".1%", "paper", quantity="share"),
    HERE,
    Shown("layers here", "planned", ".1%", "simulated", quantity="share"),
    Difference("here - paper, points", HERE, "paper", digits=1),
)


def reproduce(runner: Runner, shares: Mapping[str, float]) -> Findings:
    """``shares``: the paper's, of a step; compared at small scale too, as the paper does not name its model."""
    from gpipe_cli.reporting.plots.picture import write_picture  # not at the top, as matplotlib takes half a second
    from gpipe_cli.reporting.plots.recipes import draw_shares

    comparable = runner.scale != "smoke" and not runner.incomparable_settings()
    (measured,) = runner.bench("measured")["rows"]
    simulated = runner.without("cost").plan("simulated", "cost=profile")
    if measured["breakdown"] is None:
        raise CommandFailedError(measured["reason"] or "no step was recorded")
    ours, planned = measured["breakdown"], simulated["breakdown"]
    rows = [
        {"share": share.replace("_", "-"), "paper": shares.get(share), "ours": ours[share], "planned": planned[share]}
        for share in SHARES
    ]
    sizes = f"K = {len(simulated['stages'])}, M = {simulated['micro_batches']}"
    title = f"Where the time of a step goes, {simulated['model_name']}, {sizes}"
    recomputed, papers = (each["recompute"] / each["compute"] for each in (ours, shares))
    notes = [
        ("paper", "no slice for transfers, which its TPUs hide; K and the shares are given, model and M are not"),
        ("simulated", f"from {simulated['hardware']['source']}"),
        (
            "found",
            f"recompute / compute is {recomputed:.2f} measured, {papers:.2f} in the paper, 0.33 if a backward takes as "
            "long as two forwards",
        ),
    ]
    if (ideal := measured["ideal_bubble"]) is not None:
        idle = f"idle {percent(idle_share(ours))} measured, {percent(idle_share(planned))} simulated"
        line = f"{idle}; {percent(ideal)}, (K-1)/(M+K-1), for equal stages that only compute"
        notes.append(("found", line))
    notes += [("measured", f"{kind}; not the shares of a pipeline") for kind in describe_speed_kinds([measured])]
    picture = runner.folder / "breakdown.png"
    names = "paper (TPU)", "measured here", "simulated, layers timed here"
    write_picture(picture, draw_shares([*zip(names, (shares, ours, planned), strict=True)]))
    return Findings((make_table(title, COLUMNS, rows, comparable),), notes, (("picture", str(picture)),), comparable)
