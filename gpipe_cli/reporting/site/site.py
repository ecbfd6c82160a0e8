"""The front page of the site of `gpipe site`: GPipe in scenes, and a link to the explorer. It loads nothing."""

from html import escape
from pathlib import Path

from gpipe_cli.reporting.page.page import ENGINE, LANES, PAGE, fill_template, read_part, shared_data, to_script_json
from gpipe_cli.system.files import write_atomic

FRONT = "index.html"
_SCRIPTS = ("../theme.js", *ENGINE, *LANES, "../site/scenes.js")
_STYLES = ("../style.css", "lanes.css", "../site/front.css")


def write_front(folder: Path, title: str, command: str) -> None:
    """Write the front page into `folder`, next to the page of the plan `title`. Raises OSError."""
    page = fill_template(
        "../site/front.html", data=to_script_json({**shared_data(), "skips": []}), explorer=PAGE, title=escape(title),
        command=escape(command), css="".join(map(read_part, _STYLES)), script="\n".join(map(read_part, _SCRIPTS)),
    )  # fmt: skip
    write_atomic(folder / FRONT, page)
