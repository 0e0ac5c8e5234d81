"""The console's views "Reports" and "Usage" in a browser, for a tenant and an administrator."""

import re
import shutil
from collections.abc import AsyncIterator

import pytest
from playwright.async_api import Page, async_playwright, expect

from tests.api.usage.test_reports import FOR_TENANTS, traffic
from tests.api.usage.world import World
from tests.keys import key_for
from tests.limits import WAIT_LIMIT_S

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.anyio,
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium"),
]


@pytest.fixture
async def page(world: World) -> AsyncIterator[Page]:
    told: list[str] = []
    async with async_playwright() as playwright:
        # The sandbox needs rights that containers lack. The only page is our own.
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = await browser.new_page(viewport={"width": 360, "height": 740})
        page.on("pageerror", lambda error: told.append(str(error)))
        page.on("console", lambda message: told.append(message.text))
        expect.set_options(timeout=WAIT_LIMIT_S * 1000)
        await page.goto(f"{world.apis[0].url}/console#reports")
        yield page
        await browser.close()
    # Chromium tells of each refusal of the API. One is wanted.
    assert [text for text in told if "status of 400" not in text] == []


async def log_in(page: Page, key: str) -> None:
    await page.get_by_label("API key").fill(key_for(key))
    await page.get_by_role("button", name="Log in").click()


async def test_a_tenant_reads_its_reports_on_a_phone(world: World, page: Page) -> None:
    await traffic(world)
    await log_in(page, "a")
    await expect(page.get_by_role("row")).to_have_count(1 + len(FOR_TENANTS))
    await page.get_by_role("link", name="Usage keys").click()
    await expect(page.get_by_role("heading", name="Usage keys")).to_be_visible()
    await expect(page.get_by_role("cell", name="acme").first).to_be_visible()
    await expect(page.get_by_role("cell", name="other", exact=True)).to_have_count(0)
    await expect(page.get_by_role("img", name="Cost by day")).to_be_visible()
    assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    async with page.expect_download() as saved:
        await page.get_by_role("button", name="Save as CSV").click()
    download = await saved.value
    assert download.suggested_filename == "usage_keys.csv"


@pytest.mark.parametrize("name", ["capacity", "slo", "latency", "data_quality"])
async def test_an_administrator_reads_all(world: World, page: Page, name: str) -> None:
    await traffic(world)
    await log_in(page, "boss")
    await page.evaluate(f"location.hash = '#reports/{name}'")
    await expect(page.get_by_role("table")).to_be_visible()
    await expect(page.get_by_text("What the columns mean")).to_be_visible()


async def test_a_wrong_question_is_told(world: World, page: Page) -> None:
    await log_in(page, "a")
    await page.get_by_role("link", name="Daily").click()
    await expect(page.get_by_role("img", name="Requests by day")).to_be_visible()
    await page.get_by_label("From").fill("2031-01-01")
    async with page.expect_console_message():
        await page.get_by_role("button", name="Show").click()
    await expect(page.get_by_role("alert")).to_contain_text("must be before the end")


async def test_totals_and_plots_of_an_administrator_are_of_the_same_tenant(
    world: World, page: Page
) -> None:
    await traffic(world)
    assert (await world.embed("boss", "four")).status_code == 200
    await world.store_rows(5)
    await log_in(page, "boss")
    await page.evaluate("location.hash = '#usage'")
    await expect(page.get_by_role("heading", name="Usage of house")).to_be_visible()
    month = page.locator(".tile", has_text="This month")
    await expect(month).to_contain_text("1 request")
    spent = await month.locator("b").inner_text()
    cost = page.locator("figure", has=page.get_by_role("heading", name="Cost"))
    assert await cost.locator("figcaption b").inner_text() == spent
    assert re.fullmatch(r"\$0\.0000\d+", spent), "neither an exponent nor nothing"


async def test_report_of_budgets_is_of_this_month(world: World, page: Page) -> None:
    await traffic(world)
    await log_in(page, "boss")
    await page.evaluate("location.hash = '#reports/budgets'")
    await expect(page.get_by_role("table")).to_be_visible()
    await expect(page.get_by_text(re.compile(r"^From \d{4}-\d{2}-01 00:00 UTC to"))).to_be_visible()
