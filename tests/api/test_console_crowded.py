"""The console for a tenant with 10,000 predictions and 50 models: requests and bytes per view."""

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.async_api import Page, Response, Route, expect

from tests.api.crowd import CROWD, MODELS, PREDICTIONS, store_predictions
from tests.api.harness import ApiUnderTest, running_api, settings_for
from tests.browser import needs_chromium, opened_page

pytestmark = [pytest.mark.slow(about_s=60), pytest.mark.anyio, needs_chromium]
MAX_BYTES = 1024 * 1024
MAX_REQUESTS = 30
"""Maximum number of API requests per view: each model of the 20 predictions has a schema."""
OLDEST = CROWD.models[(PREDICTIONS - 4) % MODELS].name
"""Model of the oldest prediction. Three more are the newest ones."""


@pytest.fixture
async def api(tmp_path: Path, redis_url: str) -> AsyncIterator[ApiUnderTest]:
    settings = settings_for(tmp_path, redis_url=redis_url, secret="s")
    async with running_api(settings, catalog=CROWD) as api:
        tenant = (await api.http.get("/v1/account")).json()["username"]
        await store_predictions(api, redis_url, tenant)
        yield api


@pytest.fixture
async def page(api: ApiUnderTest) -> AsyncIterator[Page]:
    # There is no BigQuery, so views that show rows report an error.
    async with opened_page(f"{api.url}/console#live", ignored="Failed to load") as page:
        await page.wait_for_load_state("networkidle")
        yield page


class Traffic:
    """The responses that a page receives."""

    def __init__(self, page: Page) -> None:
        self._responses = list[Response]()
        page.on("response", lambda response: self._responses.append(response))

    @property
    def paths(self) -> list[str]:
        return [urlsplit(response.url).path for response in self._responses]

    async def size_bytes(self) -> int:
        bodies = await asyncio.gather(*(response.body() for response in self._responses))
        return sum(map(len, bodies))

    def asked(self, prefix: str = "/v1/") -> int:
        return sum(path.startswith(prefix) for path in self.paths)


async def open_view(page: Page, address: str) -> Traffic:
    """Opens a view as if in a new tab, and waits until it makes no more requests."""
    await page.goto("about:blank")
    traffic = Traffic(page)
    await page.goto(address)
    await expect(page.locator("main h1")).to_be_visible()
    await expect(page.locator(".loading")).to_have_count(0)
    await page.wait_for_load_state("networkidle")
    return traffic


async def test_each_view_stays_small(api: ApiUnderTest, page: Page) -> None:
    for view in ("try", "predictions", "batches", "live", "keys", "overview", "usage", "reports"):
        traffic = await open_view(page, f"{api.url}/console#{view}")
        assert await traffic.size_bytes() < MAX_BYTES, view
        assert traffic.asked() <= MAX_REQUESTS, (view, traffic.paths)


async def test_rows_come_before_the_schemas_of_their_models(api: ApiUnderTest, page: Page) -> None:
    go = asyncio.Event()

    async def hold(route: Route) -> None:
        await go.wait()
        await route.continue_()

    await page.route("**/versions", hold)
    await page.goto(f"{api.url}/console#predictions")
    rows = page.get_by_role("region", name="Predictions").locator("tbody tr")
    await expect(rows).to_have_count(20)
    go.set()
    await expect(page.get_by_role("button", name=re.compile("^Retry"))).to_have_count(20)


async def test_a_search_without_a_match_reads_all_pages_once(api: ApiUnderTest, page: Page) -> None:
    traffic = await open_view(page, f"{api.url}/console#predictions?status=failed")
    await expect(page.get_by_text("No prediction matches these filters.")).to_be_visible()
    assert traffic.asked("/v1/predictions") == 11
    assert await traffic.size_bytes() < MAX_BYTES


async def test_pages_of_one_model_reach_the_oldest_prediction(
    api: ApiUnderTest, page: Page
) -> None:
    traffic = await open_view(page, f"{api.url}/console#predictions?model={OLDEST}")
    seen = 0
    rows = page.get_by_role("region", name="Predictions").locator("tbody tr")
    older = page.get_by_role("link", name="Older")
    while True:
        await page.wait_for_load_state("networkidle")
        seen += await rows.count()
        if not await older.count():
            break
        # The response arrives after the page has replaced the rows with "Loading".
        async with page.expect_response("**/v1/predictions?*"):
            await older.click()
        await expect(page.locator(".loading")).to_have_count(0)
    assert seen == PREDICTIONS // MODELS
    assert traffic.asked("/v1/predictions") < 40


async def test_live_finds_a_model_by_a_part_of_its_name(api: ApiUnderTest, page: Page) -> None:
    models = page.get_by_role("heading", level=2)
    await expect(models).to_have_count(MODELS)
    async with page.expect_response("**/v1/status"):
        await page.get_by_label("Search: Model").fill("TEAM-07")
    await expect(models).to_have_text([CROWD.models[3 + 7].name])
    async with page.expect_response("**/v1/status"):
        pass
    await expect(models).to_have_text([CROWD.models[3 + 7].name])


async def test_the_overview_does_not_wait_for_the_count_of_predictions(
    api: ApiUnderTest, page: Page
) -> None:
    go = asyncio.Event()

    async def hold(route: Route) -> None:
        await go.wait()
        await route.continue_()

    await page.route("**/v1/predictions?status=starting", hold)
    await page.goto(f"{api.url}/console#overview")
    now = page.get_by_role("region", name="Queue and workers now").locator("tbody tr")
    await expect(now).to_have_count(15)
    await expect(page.get_by_text("Loading")).to_have_count(0)
    go.set()


async def test_the_overview_lists_every_model_on_request(api: ApiUnderTest, page: Page) -> None:
    await page.goto(f"{api.url}/console#overview")
    now = page.get_by_role("region", name="Queue and workers now").locator("tbody tr")
    await expect(page.get_by_text(f"15 of {MODELS} models")).to_be_visible()
    await page.get_by_role("button", name="Show all").click()
    await expect(now).to_have_count(MODELS)
    async with page.expect_response("**/v1/status"):
        pass
    await expect(now).to_have_count(MODELS)
    await page.get_by_role("button", name="Show 15").click()
    await expect(now).to_have_count(15)


async def test_a_model_is_found_by_a_part_of_its_name(api: ApiUnderTest, page: Page) -> None:
    await page.goto(f"{api.url}/console#try")
    models = page.get_by_label("Model", exact=True)
    search = page.get_by_label("Search: Model")
    await expect(models.locator("option")).to_have_count(MODELS)
    first = await models.input_value()
    await search.fill("TEAM-07")
    wanted = CROWD.models[3 + 7].name
    await expect(models.locator("option")).to_have_text([first, wanted])
    await expect(models).to_have_value(first)
    await search.press("Enter")
    await expect(page).to_have_url(f"{api.url}/console#try/{wanted}")
    await expect(page.get_by_label("Model", exact=True)).to_have_value(wanted)
    await page.goto(f"{api.url}/console#predictions")
    await page.get_by_label("Search: Model").fill("team-07")
    await page.get_by_label("Search: Model").press("Enter")
    await page.get_by_role("button", name="Filter").click()
    await expect(page).to_have_url(f"{api.url}/console#predictions?model={wanted}")
    row = page.get_by_role("region", name="Predictions").locator("tbody tr").first
    await expect(row).to_contain_text(wanted)
