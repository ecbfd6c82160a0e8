"""Chromium for tests of what people look at."""

import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Page

CHROMIUM = shutil.which("chromium")
PATIENCE_SECONDS = 60
NEEDED = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium in PATH"),
    pytest.mark.skipif(find_spec("playwright") is None, reason="no playwright: pip install -e '.[browser]'"),
]


def opened_page() -> "Iterator[Page]":
    """One page for all tests of a module: what takes time is to start the browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1600, "height": 1000})
        page.set_default_timeout(1000 * PATIENCE_SECONDS)
        yield page
        browser.close()
