"""The console's lists at phone, tablet and laptop widths."""

import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Page, expect

from shared.models.catalog import Catalog
from tests.api.harness import TEXT_MODEL, WRITER, ApiUnderTest, running_api, settings_for
from tests.browser import needs_chromium, opened_page
from tests.keys import bearer, key_for, keys_url

pytestmark = [pytest.mark.slow(about_s=30), pytest.mark.anyio, needs_chromium]
LONG = "meta-llama-3.1-405b-instruct-fp8-dynamic-for-customer-support-in-emea"
TENANT = "the-international-society-of-very-long-names-and-subsidiaries"
MODELS = Catalog(
    tuple(
        model.model_copy(update={"name": name, "aliases": ()})
        for model, name in ((WRITER, LONG), (TEXT_MODEL, f"{TEXT_MODEL.name}-{LONG}"))
    )
)
WAIT = {"prefer": "wait=60"}
SIZES = [(390, 844), (768, 1024), (1440, 900)]


@pytest.fixture
async def api(tmp_path: Path, redis_url: str) -> AsyncIterator[ApiUnderTest]:
    keys = keys_url(tmp_path, a=TENANT)
    settings = settings_for(tmp_path, redis_url=redis_url, secret="s", keys_url=keys)
    async with running_api(settings, catalog=MODELS) as api:
        for number in range(3):
            await predict(api, LONG, {"prompt": f"{number} Summarize the call. " * 20})
        await predict(api, MODELS.models[1].name, {"texts": ["x" * 90]})
        api.worker.is_silent = True
        await predict(api, LONG, {"prompt": "wait"}, {})
        yield api


async def predict(
    api: ApiUnderTest, model: str, given: dict[str, Any], headers: dict[str, str] = WAIT
) -> None:
    body = {"version": model, "input": given}
    response = await api.http.post("/v1/predictions", json=body, headers=headers | bearer("a"))
    assert response.status_code == 201, response.text


async def overflow_px(page: Page) -> list[int]:
    """How much wider each table is than its frame, and the page than the window."""
    widths: list[int] = await page.evaluate(
        "[...document.querySelectorAll('main .scroll'), document.documentElement]"
        ".map(element => element.scrollWidth - element.clientWidth)"
    )
    return widths


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), SIZES)
async def test_a_list_of_predictions_fits(
    api: ApiUnderTest, width: int, height: int, scheme: Any
) -> None:
    url = f"{api.url}/console#predictions"
    async with opened_page(url, color_scheme=scheme) as page:
        await page.set_viewport_size({"width": width, "height": height})
        await page.get_by_label("API key").fill(key_for("a"))
        await page.get_by_role("button", name="Log in").click()
        rows = page.get_by_role("region", name="Predictions").locator("tbody tr")
        await expect(rows).to_have_count(5)
        retries = page.get_by_role("button", name=re.compile("^Retry"))
        await expect(retries).to_have_count(4)
        assert await overflow_px(page) == [0, 0]
        for button in await retries.all():
            box = await button.bounding_box()
            assert box is not None
            assert box["x"] + box["width"] <= width
            assert box["height"] < 40, "its label is in one line"
        identity = rows.first.locator(".id")
        assert await identity.get_attribute("title") == await identity.text_content()
