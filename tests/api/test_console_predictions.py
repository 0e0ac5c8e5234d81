"""The console's "Predictions" view in a browser."""

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Page, Route, expect

from tests.api.harness import ApiUnderTest, api_with_redis, running_api, settings_for
from tests.api.test_masks import SOURCE, uri
from tests.browser import needs_chromium, opened_page
from tests.keys import bearer, key_for, keys_url

pytestmark = [pytest.mark.slow(about_s=20), pytest.mark.anyio, needs_chromium]
WAIT = {"prefer": "wait=60"}
SHORT_WAITS = """
window.waitsMs = [];
const wait = window.setTimeout;
window.setTimeout = (work, ms, ...given) => {
  window.waitsMs.push(ms);
  return wait(work, Math.min(ms, 20), ...given);
};
"""

CLOCK_AHEAD = "const now = Date.now; Date.now = () => now() + 10 * 60 * 1000;"

api = api_with_redis(secret="s")


@pytest.fixture
async def page(api: ApiUnderTest) -> AsyncIterator[Page]:
    # Chromium logs requests that fail.
    url, failure = f"{api.url}/console#live", "Failed to load resource"
    async with opened_page(url, ignored=failure, timezone_id="America/New_York") as page:
        yield page


async def predict(api: ApiUnderTest, prompt: str, headers: dict[str, str] = WAIT) -> dict[str, Any]:
    body = {"version": "writer", "input": {"prompt": prompt}}
    response = await api.http.post("/v1/predictions", json=body, headers=headers)
    assert response.status_code == 201
    created: dict[str, Any] = response.json()
    return created


async def test_a_key_in_the_list_filters_it(redis_url: str, tmp_path: Path) -> None:
    keys = keys_url(tmp_path, a="acme", b="acme")
    settings = settings_for(tmp_path, redis_url=redis_url, secret="s", keys_url=keys)
    async with running_api(settings) as api:
        for number, key in enumerate("aab"):
            await predict(api, f"say {number}", WAIT | bearer(key))
        async with opened_page(f"{api.url}/console#predictions") as page:
            await page.get_by_label("API key").fill(key_for("a"))
            await page.get_by_role("button", name="Log in").click()
            rows = page.get_by_role("region", name="Predictions").locator("tbody tr")
            await expect(rows).to_have_count(3)
            await rows.get_by_role("link", name=key_for("b").split("_")[2][:12]).click()
            await expect(page).to_have_url(re.compile(r"\?api_key_id="))
            await expect(rows).to_have_count(1)


async def test_a_prompt_is_retried(api: ApiUnderTest, page: Page) -> None:
    done = await predict(api, "say hello")
    await page.goto(f"{api.url}/console#predictions/{done['id']}")
    await expect(
        page.get_by_text("Retry sends this input again, without a webhook")
    ).to_be_visible()
    api.worker.written = asyncio.Semaphore(0)
    await page.get_by_role("button", name=f"Retry {done['id']}").click()
    await expect(page.get_by_text(re.compile("Waits for a worker|Runs"))).to_be_visible()
    await expect(page.get_by_role("status")).to_have_text("The prediction was created.")
    for _ in range(5):
        api.worker.written.release()
    await expect(page.get_by_role("heading", name="Result")).to_be_visible()
    await expect(page.get_by_role("status")).to_have_text(
        re.compile("The prediction (was created|ended)")
    )
    await expect(page.get_by_role("heading", level=1)).not_to_have_text(done["id"])
    await expect(page.get_by_text("say hello").first).to_be_visible()


async def test_a_chat_is_not_retried_as_a_prediction(api: ApiUnderTest, page: Page) -> None:
    chat = {"messages": [{"role": "user", "content": "say hello"}], "store": True}
    assert (await api.http.post("/v1/chat/completions", json=chat)).status_code == 200
    await page.goto(f"{api.url}/console#predictions")
    row = page.get_by_role("region", name="Predictions").locator("tbody tr")
    reason = "Can't be retried: it was sent to /v1/chat/completions, not to /v1/predictions."
    await expect(row).to_contain_text(reason)
    await expect(row.get_by_role("button")).to_have_count(0)
    await row.get_by_role("link").first.click()
    await expect(page.get_by_role("heading", name="Result")).to_be_visible()
    await expect(page.get_by_text(reason)).to_be_visible()
    await expect(page.get_by_text("This request as code")).to_have_count(0)


async def test_an_edit_without_a_model_is_not_retried_without_its_image(
    api: ApiUnderTest, page: Page
) -> None:
    edit = {"prompt": "a circle", "images": [{"image_url": uri(SOURCE)}], "stream": True}
    async with api.http.stream("POST", "/v1/images/edits", json=edit) as answer:
        await answer.aread()
    (listed,) = (await api.http.get("/v1/predictions")).json()["results"]
    assert listed["endpoint"] == "/v1/images/edits"
    assert not {"image", "images"} & listed["input"].keys()
    await page.goto(f"{api.url}/console#predictions")
    row = page.get_by_role("region", name="Predictions").locator("tbody tr")
    await expect(row).to_contain_text("Can't be retried: it was sent to /v1/images/edits")
    await expect(row.get_by_role("button")).to_have_count(0)


async def test_a_lost_stream_is_reopened_and_finally_replaced_by_polls(
    api: ApiUnderTest, page: Page
) -> None:
    api.worker.written = asyncio.Semaphore(0)
    running = await predict(api, "say hello", {})
    lost = list[str]()

    async def lose(route: Route) -> None:
        lost.append(route.request.url)
        await route.abort()

    await page.route("**/stream?*", lose)
    await page.goto("about:blank")
    await page.add_init_script(SHORT_WAITS)
    await page.goto(f"{api.url}/console#predictions/{running['id']}")
    await expect(page.get_by_text("The connection for live progress was lost")).to_be_visible()
    assert len(lost) == 5
    assert await page.evaluate("window.waitsMs.slice(0, 4)") == [1000, 2000, 4000, 8000]
    for _ in range(5):
        api.worker.written.release()
    await expect(page.get_by_role("heading", name="Result")).to_be_visible()
    await expect(page.get_by_role("status")).to_have_text("The prediction ended.")


async def test_polls_go_on_if_the_clock_of_the_browser_is_ahead(
    api: ApiUnderTest, page: Page
) -> None:
    api.worker.written = asyncio.Semaphore(0)
    running = await predict(api, "say hello", {})
    await page.route("**/stream?*", lambda route: route.abort())
    await page.goto("about:blank")
    await page.add_init_script(SHORT_WAITS + CLOCK_AHEAD)
    await page.goto(f"{api.url}/console#predictions/{running['id']}")
    await expect(page.get_by_text("The connection for live progress was lost")).to_be_visible()
    for _ in range(5):
        api.worker.written.release()
    await expect(page.get_by_role("heading", name="Result")).to_be_visible()


async def test_a_prediction_is_changed_and_sent_again(api: ApiUnderTest, page: Page) -> None:
    done = await predict(api, "say hello")
    await page.goto(f"{api.url}/console#predictions/{done['id']}")
    await page.get_by_role("link", name="Change and retry").click()
    prompt = page.get_by_label("Prompt", exact=True)
    await expect(prompt).to_have_value("say hello")
    await prompt.fill("say goodbye")
    await page.get_by_role("button", name="Run", exact=True).click()
    await expect(page.get_by_role("heading", name="Result")).to_be_visible()
    newest = (await api.http.get("/v1/predictions")).json()["results"][0]
    assert newest["input"]["prompt"] == "say goodbye"


async def test_a_stream_that_fails_once_continues(api: ApiUnderTest, page: Page) -> None:
    api.worker.written = asyncio.Semaphore(0)
    running = await predict(api, "say hello", {})
    tries = list[str]()

    async def fail_first(route: Route) -> None:
        tries.append(route.request.url)
        if len(tries) == 1:
            await route.fulfill(status=503, json={"detail": "Redis is unreachable"})
        else:
            await route.continue_()

    await page.route("**/stream?*", fail_first)
    await page.goto("about:blank")
    await page.add_init_script(SHORT_WAITS)
    await page.goto(f"{api.url}/console#predictions/{running['id']}")
    async with page.expect_response(lambda response: "/stream?" in response.url and response.ok):
        pass
    for _ in range(5):
        api.worker.written.release()
    await expect(page.get_by_role("heading", name="Result")).to_be_visible()
    assert len(tries) == 2


async def test_the_overview_counts_predictions_that_wait(api: ApiUnderTest, page: Page) -> None:
    api.worker.is_silent = True
    await predict(api, "say hello", {})
    await page.goto(f"{api.url}/console#overview")
    now = page.get_by_role("region", name="Queue and workers now")
    row = now.get_by_role("row").filter(has_text="writer")
    await expect(row).to_contain_text("busy")
    await row.get_by_role("link", name="1").click()
    await expect(page).to_have_url(f"{api.url}/console#predictions?model=writer&status=starting")


async def test_reload_and_cancel_keep_the_focus(api: ApiUnderTest, page: Page) -> None:
    api.worker.written = asyncio.Semaphore(0)
    running = await predict(api, "say hello", {})
    await page.goto(f"{api.url}/console#predictions")
    cancel = page.get_by_role("button", name=f"Cancel {running['id']}")
    await expect(cancel).to_be_visible()
    reload = page.get_by_role("button", name="Reload")
    await reload.focus()
    async with page.expect_response("**/v1/predictions?*"):
        await page.keyboard.press("Enter")
    await expect(reload).to_be_enabled()
    await expect(reload).to_be_focused()
    await cancel.focus()
    await page.keyboard.press("Enter")
    await expect(page.get_by_role("status")).to_have_text("The prediction was canceled.")
    await expect(page.get_by_role("region").get_by_role("link").first).to_be_focused()
    api.worker.written.release()


async def test_a_whole_key_stays_out_of_the_address(api: ApiUnderTest, page: Page) -> None:
    await page.goto(f"{api.url}/console#predictions")
    for label, button in (("Key ID", "Filter"), ("Prediction ID", "Find")):
        field = page.get_by_label(label)
        await field.fill(key_for("a"))
        await page.get_by_role("button", name=button).click()
        assert await field.evaluate("field => field.validity.patternMismatch")
    assert page.url == f"{api.url}/console#predictions"
    await page.get_by_label("Key ID").fill("4fJ0aQz81LmN")
    await page.get_by_role("button", name="Filter").click()
    await expect(page).to_have_url(f"{api.url}/console#predictions?api_key_id=4fJ0aQz81LmN")


async def test_an_expired_page_is_not_called_the_first(api: ApiUnderTest, page: Page) -> None:
    await page.goto(f"{api.url}/console#predictions?cursor=1.0")
    await expect(page.get_by_text("There are no older predictions")).to_be_visible()
    await page.get_by_role("link", name="Newest").click()
    await expect(page.get_by_text("There are no predictions yet.")).to_be_visible()
    await expect(page.get_by_role("navigation", name="Pages")).to_have_count(0)


async def test_a_link_opens_for_other_keys_of_the_tenant_only(
    tmp_path: Path, redis_url: str
) -> None:
    keys = keys_url(tmp_path, a="acme", b="acme", u="umbrella")
    settings = settings_for(tmp_path, redis_url=redis_url, secret="s", keys_url=keys)
    async with running_api(settings) as api:
        done = await predict(api, "say hello", WAIT | bearer("a"))
        given: dict[str, Any] = {
            "ignored": "Failed to load",
            "permissions": ["clipboard-read", "clipboard-write"],
        }
        async with opened_page(f"{api.url}/console#predictions/{done['id']}", **given) as page:
            await log_in(page, "a")
            await page.get_by_role("button", name="Copy link").click()
            await expect(page.get_by_role("status")).to_contain_text("The link was copied.")
            link = await page.evaluate("navigator.clipboard.readText()")
            for key, text in (("b", "say hello"), ("u", "does not exist")):
                await page.evaluate("sessionStorage.clear()")
                await page.goto("about:blank")
                await page.goto(link)
                await log_in(page, key)
                await expect(page.get_by_text(text).first).to_be_visible()


async def log_in(page: Page, key: str) -> None:
    await page.get_by_label("API key").fill(key_for(key))
    await page.get_by_role("button", name="Log in").click()


@pytest.mark.parametrize(
    "text", ["2026-01-01T12:00", "2026-01-01T12:00Z", "2026-01-01T11:00-01:00"]
)
async def test_a_time_in_the_address_is_in_utc(api: ApiUnderTest, page: Page, text: str) -> None:
    await page.goto(f"{api.url}/console#predictions?created_after={text}")
    await expect(page.get_by_label("From")).to_have_value("2026-01-01T07:00")
