"""pipeline.html: one self-contained file, assembled from the parts in this folder, so that it can be sent and archived.

Measured steps are drawn above simulated ones. The page itself simulates, from the data of
`planner/simulation_data.py` and by the rules of `schedule/`; a test checks that both give the same results.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from gpipe_cli.reporting.plots.palette import colour
from gpipe_cli.reporting.plots.timeline_values import ACTIONS, StepPicture, TimelineView
from gpipe_cli.schedule.in_flight_memory import MEMORY_EFFECTS
from gpipe_cli.system.files import write_atomic

PAGE = "pipeline.html"
MAX_STEPS = 12
HUE_STEPS = 241  # colours per kind of action; for up to 16 micro-batches, nearly all equal timeline.png's
MAX_BARS = 8000  # measured bars of all steps together; more bars would make a page of many megabytes

# The scripts are joined, in this order, into one function, and a script uses at load only names of earlier ones. They
# share `gpipe` (the functions of ENGINE), `svg`, `view`, `drawn` and `layers` (lanes.js), `data` and `state` (main.js,
# or scenes.js of the site). ES modules in a single file would need a data: URL for each in an import map, and the lists
# of about 150 imported names.
ENGINE = ("schedules.js", "simulator.js", "model.js")
LANES = ("words.js", "lanes.js", "explain.js")
VIEW = (*LANES, "navigate.js", "edit.js", "controls.js", "main.js")
SCRIPTS = ("../theme.js", *ENGINE, *VIEW)
STYLES = ("../style.css", "page.css", "lanes.css")


class PageContext(NamedTuple):
    """Facts that a page shows in addition to the simulation."""

    commands: Sequence[str] = ()  # the command lines as typed
    run: str | None = None  # the run folder
    contended: float | None = (
        None  # the fraction of time in which other programs used the run's cores, if they slowed it
    )
    launched: Sequence[str] = ()  # stages that could not be replayed as graphs when the run began, each with the reason


@cache
def shared_data() -> dict[str, Any]:
    """Data that the pages of all runs and plans share: colours, and the memory effects of actions."""
    return {
        "colours": {what: [colour(what, n, HUE_STEPS) for n in range(HUE_STEPS)] for what in ACTIONS},
        "holds": {f"{kind} {retain}": around for (kind, retain), around in MEMORY_EFFECTS.items()},
    }


def write_page(
    path: Path, title: str, data: Mapping[str, Any], steps: Sequence[StepPicture], about: PageContext
) -> None:
    """Writes the page of `simulation_data`, with the newest of `steps`, at most MAX_STEPS with at most MAX_BARS bars;
    if the newest step alone has too many, an image of it is shown. Raises OSError."""
    values = {"title": title, **about._asdict(), **data, **_measured_steps(steps)}
    page = fill_template(
        "page.html", data=to_script_json(shared_data() | values), css="".join(map(read_part, STYLES)),
        script="\n".join(map(read_part, SCRIPTS)),
    )  # fmt: skip
    write_atomic(path, page)


def fill_template(template: str, **parts: str) -> str:
    """The document `template` of this folder with `parts` instead of their names: {{css}}."""
    first, *others = read_part(template).split("{{")
    return first + "".join(parts[name] + text for name, _, text in (other.partition("}}") for other in others))


def to_script_json(values: Mapping[str, Any]) -> str:
    """`values` as JSON for a `script` element: without any `<`, it can contain neither an end tag nor a comment."""
    return json.dumps(values, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def read_part(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def _measured_steps(steps: Sequence[StepPicture]) -> dict[str, Any]:
    """The newest steps, the newest last, and how many older ones are left out to limit the size of the page."""
    shown: list[dict[str, Any]] = []
    room = MAX_BARS
    newest = sorted(steps, key=lambda step: step.step, reverse=True)[:MAX_STEPS]
    for step in newest:
        view = next(view for view in step.views if view.kind == "measured")
        room -= sum(map(len, view.stages))
        if room < 0 and shown:
            break
        facts: dict[str, Any] = {"epoch": step.epoch, "step": step.step, "step_seconds": view.step_seconds}
        facts |= {"breakdown": dict(view.breakdown), "median_of": step.median_of}
        shown.append(facts | (_bars(view) if room >= 0 else {"stages": [], "events": [], "picture": _picture(view)}))
    return {"steps": shown[::-1], "steps_left_out": len(newest) - len(shown)}


def _bars(view: TimelineView) -> dict[str, Any]:
    """Per stage, [what, micro-batch, start, end] of its actions and of the events between them; seconds, to 1 ns."""

    def of_stages(actions: bool) -> list[list[list[Any]]]:
        return [
            [
                [bar.what, bar.micro_batch, round(bar.start_seconds, 9), round(bar.end_seconds, 9)]
                for bar in bars
                if (bar.what in ACTIONS) is actions
            ]
            for bars in view.stages
        ]

    return {"stages": of_stages(True), "events": of_stages(False)}


def _picture(view: TimelineView) -> str:
    from gpipe_cli.reporting.plots.picture import png
    from gpipe_cli.reporting.plots.timeline import draw

    return f"data:image/png;base64,{base64.b64encode(png(draw([view]))).decode()}"
