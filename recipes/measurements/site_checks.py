"""Checks the site that `gpipe site` writes, in chromium: what Lighthouse would, and the challenges of all presets.

  requests    what the page loads besides itself: nothing
  console     warnings and errors of the page's scripts: none
  axe         violations by axe-core: contrast, names of controls, landmarks and more, in light and dark colours
  480 px      whether the page is wider than such a window
  frames      per second, while the step of the digits preset is played and while its M is dragged
  keys        whether the right arrow goes on to the next scene
  challenge   whether a preset's own setting does not meet its challenge, and its answer does

Usage: python recipes/measurements/site_checks.py [--presets=digits,gpt-7b] [--folder=FOLDER with a site]
       2 minutes on 2 CPU cores; needs chromium and the extra `browser`; exit code 1 if a check failed
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, sync_playwright

from gpipe_cli.cli import main as gpipe
from gpipe_cli.reporting.site.site import EXPLORER, FRONT
from gpipe_cli.units import plural

DIGITS = "preset=digits"
FRAMES = """async busy => {
  let frames = 0, n = 0;
  const slider = document.getElementById("micro_batches"), begin = performance.now();
  if (!busy) document.getElementById("play").click();
  while (performance.now() - begin < 2000) {
    await new Promise(requestAnimationFrame);
    frames++;
    if (busy) {
      slider.value = n++ % 8;
      slider.dispatchEvent(new Event("input"));
    }
  }
  return 1000 * frames / (performance.now() - begin);
}"""
Row = tuple[str, str, str, bool]  # page, check, result, whether it passed


def checked(page: Page, address: str, name: str) -> Iterator[Row]:
    """What holds for any page, in light and dark colours."""
    loaded: list[str] = []
    said: list[str] = []
    page.on("request", lambda request: loaded.append(request.url))
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    for colours in ("light", "dark"):
        page.emulate_media(color_scheme=colours)
        page.goto(address)
        page.reload()  # an address that differs in its fragment alone opens nothing anew
        page.wait_for_timeout(1000)
        found = Axe().run(page).response["violations"]
        yield name, f"axe, {colours}", "; ".join(one["help"] for one in found) or "no violation", not found
    more = [url for url in loaded if url.partition("#")[0] != address.partition("#")[0]]
    yield name, "requests", ", ".join(more) or "none", not more
    yield name, "console", "; ".join(said) or "silent", not said
    page.set_viewport_size({"width": 480, "height": 900})
    page.wait_for_timeout(300)
    wide = page.evaluate("document.documentElement.scrollWidth")
    yield name, "480 px", f"{wide} px wide", wide <= 480
    page.set_viewport_size({"width": 1366, "height": 768})


def keys(page: Page, address: str) -> Iterator[Row]:
    """Each press of the right arrow draws another scene, up to the last one."""
    page.emulate_media(reduced_motion="reduce")  # at once
    page.goto(address)
    seen = [page.locator("#lanes .about").first.text_content()]
    for _ in range(page.locator(".beat").count() - 1):
        page.keyboard.press("ArrowRight")
        page.wait_for_function("seen => document.querySelector('#lanes .about').textContent !== seen", arg=seen[-1])
        seen.append(page.locator("#lanes .about").first.text_content())
    yield FRONT, "keys", plural(len(seen), "picture"), len(seen) == page.locator(".beat").count()
    page.emulate_media(reduced_motion="no-preference")


def frames(page: Page, address: str) -> Iterator[Row]:
    page.goto(address)
    page.reload()
    for what, busy in (("played", False), ("M dragged", True)):
        rate = page.evaluate(FRAMES, busy)
        yield EXPLORER, f"frames, {what}", f"{rate:.0f} a second", True  # the machine's matter, too


def challenges(page: Page, address: str) -> Iterator[Row]:
    page.goto(address)
    choice = page.locator("#preset")
    for name, title in choice.locator("option").evaluate_all("all => all.map(one => [one.value, one.text])"):
        choice.select_option(name)
        page.wait_for_function("title => document.title.startsWith(title)", arg=title)  # it opens the page anew
        met = page.locator("#challenge-met")
        before = met.inner_text()
        page.locator("#challenge summary").click()
        page.locator("#answer").click()
        met.filter(has_text="met").wait_for()
        yield name, "challenge", f"met by {page.locator('#answer').inner_text()}", not before


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(usage=(__doc__ or "").partition("Usage: ")[2])
    parser.add_argument("--presets", default="*")
    parser.add_argument("--folder")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as new, sync_playwright() as playwright:
        folder = Path(options.folder or new)
        if options.folder is None and (code := gpipe(["site", new, f"presets={options.presets}"])):
            return code
        front, explorer = ((folder / name).resolve().as_uri() for name in (FRONT, EXPLORER))
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1366, "height": 768})
        parts = [
            partial(checked, page, front, FRONT), partial(checked, page, f"{explorer}#{DIGITS}", EXPLORER),
            partial(keys, page, front), partial(frames, page, f"{explorer}#{DIGITS}"),
            partial(challenges, page, explorer),
        ]  # fmt: skip
        rows = []
        for part in parts:
            for row in part():
                rows.append(row)
                print(f"| {' | '.join(row[:3])} | {'yes' if row[3] else 'NO'} |", flush=True)
        browser.close()
    return 0 if all(passed for *_, passed in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
