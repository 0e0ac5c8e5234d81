"""A browser, if this machine has one."""

import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest
from playwright.async_api import Page, async_playwright, expect
from playwright.sync_api import Browser, sync_playwright

from tests.limits import WAIT_LIMIT_S

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")


@contextmanager
def running_browser() -> Iterator[Browser]:
    """Runs Chromium until the end of the context. Use it only for this project's pages."""
    with sync_playwright() as playwright:
        # The sandbox needs permissions that containers lack.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@asynccontextmanager
async def opened_page(url: str, *, ignored: str = "-", **context: Any) -> AsyncIterator[Page]:
    """One of our pages, for tests with an event loop. The browser must not report errors about it.

    Args:
        ignored: parts of the error messages that the test causes.
        context: options for the browser context, such as its viewport.
    """
    told: list[str] = []
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = await browser.new_page(**{"viewport": {"width": 1200, "height": 900}} | context)
        # Playwright's 30 s default is too short for a page on a busy machine.
        page.set_default_timeout(WAIT_LIMIT_S * 1000)
        page.on("pageerror", lambda error: told.append(str(error)))
        page.on("console", lambda message: told.append(message.text))
        expect.set_options(timeout=WAIT_LIMIT_S * 1000)
        await page.goto(url)
        yield page
        await browser.close()
    assert [text for text in told if ignored not in text] == []
