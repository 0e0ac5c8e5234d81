"""A browser, if this machine has one."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")


@contextmanager
def running_browser() -> Iterator[Browser]:
    """Chromium until the end of the context. Use it only for pages of this project."""
    with sync_playwright() as playwright:
        # The sandbox needs rights that containers lack.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()
