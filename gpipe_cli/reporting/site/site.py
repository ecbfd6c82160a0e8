"""The site that `gpipe site` writes: a front page in scenes, and the explorer with presets. Both are files that load
nothing: they work from a disk as from any host of static files.
"""

import base64
import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from gpipe_cli.reporting.page.page import ENGINE, LANES, assembled, explorer, in_script, page_values, part, shared
from gpipe_cli.reporting.plots.moving_timeline import moving_timeline
from gpipe_cli.system.files import write_whole

FRONT, EXPLORER, MOVING = "index.html", "explorer.html", "timeline.svg"
_SCRIPTS = ("../theme.js", *ENGINE, *LANES, "challenge.js", "../site/scenes.js")
_STYLES = ("../style.css", "lanes.css", "../site/front.css")
_CHALLENGE = {"faster": 2.3, "gib": 3, "devices": 4}  # of the last scene: 1f1b meets it, with M = 16


@dataclass(frozen=True)
class SitePreset:
    """A plan that the explorer offers."""

    name: str  # in addresses
    group: str
    title: str
    note: str  # one sentence, or ""
    facts: str  # its step in one line
    command: str
    data: Mapping[str, Any]  # simulation_data, and the challenge


def write_site(folder: Path, presets: Sequence[SitePreset]) -> None:
    """Write the site into `folder`. Raises OSError."""
    values = {**shared(), "presets": [_packed(one) for one in presets]}
    front = {**shared(), "skips": [], "challenge": _CHALLENGE, "than": "one device"}
    page = assembled(
        "../site/front.html", data=in_script(front), presets="\n".join(_listed(presets)),
        css="".join(map(part, _STYLES)), script="\n".join(map(part, _SCRIPTS)),
    )  # fmt: skip
    write_whole(folder / EXPLORER, explorer(values))
    write_whole(folder / MOVING, moving_timeline())
    write_whole(folder / FRONT, page)


def _packed(one: SitePreset) -> dict[str, str]:
    text = json.dumps(page_values(one.title, one.data, commands=[one.command]), separators=(",", ":"), allow_nan=False)
    packed = gzip.compress(text.encode(), mtime=0)  # no time of writing: the same plans are the same bytes
    about = {"name": one.name, "group": one.group, "title": one.title, "note": one.note}
    return about | {"packed": base64.b64encode(packed).decode()}


def _listed(presets: Sequence[SitePreset]) -> Iterator[str]:
    for group, members in groupby(presets, attrgetter("group")):
        folded = group.startswith("Table")  # there are many of these
        yield f"<details><summary>{escape(group)}</summary>" if folded else f"<h3>{escape(group)}</h3>"
        yield '<ul class="presets">'
        for one in members:
            link = f"{EXPLORER}#{urlencode({'preset': one.name})}"
            note = f"<small>{escape(one.note)}</small>" if one.note else ""
            yield f'<li><a href="{escape(link)}">{escape(one.title)}</a><small>{escape(one.facts)}</small>{note}'
            yield f"<details><summary>command</summary><pre>{escape(one.command)}</pre></details></li>"
        yield "</ul></details>" if folded else "</ul>"
