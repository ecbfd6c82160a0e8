"""The front page of the site of `gpipe site`: GPipe in scenes, and the way to the explorer. It loads nothing."""

from html import escape
from pathlib import Path

from gpipe_cli.reporting.page.page import ENGINE, LANES, PAGE, assembled, in_script, part, shared
from gpipe_cli.system.files import write_whole

FRONT = "index.html"
_SCRIPTS = ("../theme.js", *ENGINE, *LANES, "../site/scenes.js")
_STYLES = ("../style.css", "lanes.css", "../site/front.css")


def write_front(folder: Path, title: str, command: str) -> None:
    """Write the front page into `folder`, beside the page of the plan `title`. Raises OSError."""
    page = assembled(
        "../site/front.html", data=in_script({**shared(), "skips": []}), explorer=PAGE, title=escape(title),
        command=escape(command), css="".join(map(part, _STYLES)), script="\n".join(map(part, _SCRIPTS)),
    )  # fmt: skip
    write_whole(folder / FRONT, page)
