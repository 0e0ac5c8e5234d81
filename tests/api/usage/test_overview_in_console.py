"""The console's "Overview" view in a browser, for a tenant and an administrator."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Locator, Page, Request, Route, expect

from api.usage import service
from shared.usage.writer import fields_of
from tests.api.usage.test_reports import traffic
from tests.api.usage.world import DAY_S, World
from tests.browser import needs_chromium, opened_page
from tests.keys import key_for
from tests.workers.worker_harness import MODEL

pytestmark = [pytest.mark.slow, pytest.mark.anyio, needs_chromium]


@pytest.fixture
async def page(world: World) -> AsyncIterator[Page]:
    url, viewport = f"{world.apis[0].url}/console#overview", {"width": 390, "height": 900}
    # A key without the `usage` scope is rejected, and so are reports with too many rows.
    async with opened_page(
        url, ignored="status of 40", viewport=viewport, timezone_id="UTC"
    ) as page:
        yield page


async def log_in(page: Page, key: str) -> None:
    await page.get_by_label("API key").fill(key_for(key))
    await page.get_by_role("button", name="Log in").click()


def tile(page: Page, name: str) -> Locator:
    return page.locator(".tile").filter(has=page.get_by_text(name, exact=True))


async def serious_barriers(page: Page) -> list[str]:
    violations = (await Axe().run(page)).response["violations"]
    return [rule["id"] for rule in violations if rule["impact"] in ("serious", "critical")]


async def store_rows_of_last_week(world: World, copies: int) -> None:
    """Stores a second copy of the rows for all requests so far, dated seven days earlier."""
    rows: list[dict[str, Any]] = []
    for row in world.rows():
        for copy in range(copies):
            fields = fields_of(row) | {"row_id": f"{row.row_id}-{copy}"}
            fields |= {"request_id": f"{row.request_id}-{copy}"}
            moments = {name: fields[name] - 7 * DAY_S for name in fields if name.endswith("_at")}
            rows.append(fields | moments)
    place = f"{world.settings.dataset}.rows"
    assert not world.client.insert_rows_json(place, rows, row_ids=[None] * len(rows))


async def test_a_tenant_sees_its_own_figures_and_the_week_before(world: World, page: Page) -> None:
    await traffic(world)
    await store_rows_of_last_week(world, 2)
    await log_in(page, "a")
    await expect(page.get_by_text("Only tenant acme, to which this key belongs")).to_be_visible()
    await expect(tile(page, "Requests")).to_contain_text("1down 50 % from 2")
    await expect(tile(page, "Spend")).to_contain_text("down 50 % from $")
    await expect(tile(page, "Errors")).to_contain_text("0none in the previous range")
    await expect(tile(page, "Budget this month")).to_contain_text("no limit is set")
    table = page.get_by_role("region", name="Requests, errors, latency and spend by model")
    await expect(table.get_by_role("row").filter(has_text=MODEL.name)).to_have_count(1)
    now = page.get_by_role("region", name="Queue and workers now")
    await expect(now.get_by_role("columnheader", name="Workers")).to_have_count(0)
    await expect(page.get_by_text("Only keys with the admin scope see")).to_be_visible()
    await expect(now.get_by_role("columnheader", name="Expected wait (estimate)")).to_be_visible()
    await expect(now.get_by_title("not measured recently")).to_have_text("–")


@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_an_administrator_sees_all_tenants_and_workers(
    world: World, page: Page, width: int, scheme: Any
) -> None:
    await page.emulate_media(color_scheme=scheme)
    await page.set_viewport_size({"width": width, "height": 900})
    await traffic(world)
    await log_in(page, "boss")
    await expect(
        page.get_by_text("All tenants, because this key has the admin scope")
    ).to_be_visible()
    await expect(tile(page, "Requests").locator("b")).to_have_text("2")
    now = page.get_by_role("region", name="Queue and workers now")
    await expect(now.get_by_role("row").filter(has_text=MODEL.name)).to_contain_text("1")
    budgets = page.get_by_role("region", name="Budgets this month")
    await expect(budgets.get_by_text("acme")).to_be_visible()
    assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert await serious_barriers(page) == []


async def test_the_range_is_in_the_address(world: World, page: Page) -> None:
    await traffic(world)
    await log_in(page, "a")
    await expect(tile(page, "Requests").locator("b")).to_have_text("1")
    await page.get_by_label("From").fill("2026-01-01")
    await page.get_by_label("To", exact=True).fill("2026-01-07")
    await page.get_by_role("button", name="Show").click()
    await expect(page.get_by_text("There were no requests in either range.")).to_be_visible()
    assert page.url.endswith("#overview/2026-01-01..2026-01-07")
    await expect(page.get_by_text("compared with Dec 25 – 31, 2025")).to_be_visible()


async def test_a_key_without_usage_sees_the_queue(page: Page) -> None:
    await log_in(page, "narrow")
    now = page.get_by_role("region", name="Queue and workers now")
    await expect(now.get_by_text(MODEL.name)).to_be_visible()
    await expect(page.get_by_role("alert")).to_contain_text("scope 'usage'")


async def test_budgets_are_read_from_the_first_of_the_month(world: World, page: Page) -> None:
    async with page.expect_request("**/v1/reports/budgets**") as reading:
        await log_in(page, "boss")
    month = await page.evaluate("new Date().toISOString().slice(0, 7)")
    assert parse_qs(urlsplit((await reading.value).url).query) == {"from": [f"{month}-01"]}


async def test_a_report_with_too_many_rows_hides_only_its_section(
    world: World, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MAX_ROWS", 8)
    await traffic(world)
    rows = [
        fields_of(row) | {"tenant": f"tenant-{number}", "row_id": f"{row.row_id}-{number}"}
        for row in world.rows()[:1]
        for number in range(9)
    ]
    assert not world.client.insert_rows_json(
        f"{world.settings.dataset}.rows", rows, row_ids=[None] * len(rows)
    )
    await log_in(page, "boss")
    start = "This section can't be shown: "
    reasons = (
        "from: exceeds the maximum of 8 rows; use a shorter range",
        "it has too many rows; choose a tenant in Reports",
    )
    await expect(page.get_by_role("alert")).to_have_text([start + reason for reason in reasons])
    await expect(tile(page, "Requests").locator("b")).not_to_have_text("0")
    await expect(page.get_by_text("There were no errors in this range.")).to_be_visible()


async def test_workers_are_counted_for_any_range(world: World, page: Page) -> None:
    await traffic(world)
    held = asyncio.Event()

    async def hold(route: Route) -> None:
        await held.wait()
        await route.continue_()

    await page.route("**/v1/reports/batches?*", hold)
    await page.goto(f"{world.apis[0].url}/console#overview/2026-01-01..2026-01-07")
    await log_in(page, "boss")
    now = page.get_by_role("region", name="Queue and workers now")
    workers = now.get_by_role("row").filter(has_text=MODEL.name).get_by_role("cell").nth(3)
    await expect(page.get_by_text("There were no requests in either range.")).to_be_visible()
    await expect(workers).to_have_text("–")
    held.set()
    await expect(workers).to_have_text("1")


async def count_print_listeners(page: Page) -> int:
    session = await page.context.new_cdp_session(page)
    window = await session.send("Runtime.evaluate", {"expression": "window"})
    found = await session.send(
        "DOMDebugger.getEventListeners", {"objectId": window["result"]["objectId"]}
    )
    return [listener["type"] for listener in found["listeners"]].count("beforeprint")


async def test_a_refresh_reads_only_what_changes(world: World, page: Page) -> None:
    await traffic(world)
    requests: list[str] = []

    def remember(request: Request) -> None:
        if "/v1/reports/daily?" in request.url:
            requests.append(request.url)

    page.on("request", remember)
    await page.clock.install()
    await page.reload()
    async with page.expect_response("**/v1/reports/budgets?*"):
        await log_in(page, "boss")
    await expect(tile(page, "Requests").locator("b")).to_have_text("2")
    listeners = await count_print_listeners(page)
    for number in range(2):
        async with page.expect_response("**/v1/reports/budgets?*"):
            await page.clock.run_for(60_000)
        await expect(page.get_by_text("every minute. The previous range is as of")).to_be_visible()
        assert len(requests) == 3 + number
    assert listeners == 2
    assert await count_print_listeners(page) <= 2 * listeners
    async with page.expect_response("**/v1/reports/budgets?*"):
        await page.get_by_role("link", name="30 days").click()
    await expect(page.get_by_text("every 5 minutes")).to_be_visible()
    before = len(requests)
    await page.clock.run_for(240_000)
    assert len(requests) == before
    async with page.expect_response("**/v1/reports/budgets?*"):
        await page.clock.run_for(60_000)
    assert len(requests) == before + 1
