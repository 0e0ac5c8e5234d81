"""The console's "Batches" view in a browser."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
from playwright.async_api import FilePayload, Page, Route, expect

from api.batches import service
from tests.api.batches.batching import created, jsonl, line, until, until_completed
from tests.api.harness import ApiUnderTest
from tests.browser import needs_chromium, opened_page

pytestmark = [pytest.mark.slow(about_s=30), pytest.mark.anyio, needs_chromium]
COUNT_LISTENERS = """
window.abortListeners = 0;
for (const [name, by] of [["addEventListener", 1], ["removeEventListener", -1]]) {
  const original = EventTarget.prototype[name];
  EventTarget.prototype[name] = function (...given) {
    if (this instanceof AbortSignal) window.abortListeners += by;
    return original.apply(this, given);
  };
}
"""


@pytest.fixture
async def page(api: ApiUnderTest) -> AsyncIterator[Page]:
    async with opened_page(f"{api.url}/console#live", ignored="Failed to load resource") as page:
        yield page


def payload(data: bytes) -> FilePayload:
    return {"name": "in.jsonl", "mimeType": "application/jsonl", "buffer": data}


async def test_a_failed_poll_does_not_end_following(
    api: ApiUnderTest, page: Page, held_after: Callable[[int], asyncio.Event]
) -> None:
    go, client = held_after(1), api.openai()
    batch = await created(client, jsonl(line(str(number)) for number in range(3)))
    await until_completed(client, batch, 1)
    await page.goto(f"{api.url}/console#batches/{batch.id}")
    await expect(page.get_by_text("in_progress")).to_be_visible()
    await expect(page.locator("dt:text('Tokens read') + dd")).not_to_have_text("–")

    async def fail(route: Route) -> None:
        await route.fulfill(status=503, json={"error": {"message": "Redis is unreachable"}})

    await page.route("**/v1/batches/*", fail)
    await expect(page.get_by_role("alert")).to_have_text(
        "Progress could not be read, trying again: Redis is unreachable"
    )
    go.set()
    await page.unroute("**/v1/batches/*")
    await expect(page.get_by_role("status")).to_have_text("The batch is complete.")
    await expect(page.get_by_role("alert")).to_have_count(0)
    await expect(page.get_by_text("3 of 3")).to_be_visible()
    await expect(page.get_by_text("A retry has no webhook")).to_be_visible()


async def test_tokens_and_listeners_while_a_batch_runs(
    api: ApiUnderTest, page: Page, held_lines: Callable[[Callable[[int], bool]], asyncio.Event]
) -> None:
    await page.add_init_script(COUNT_LISTENERS)
    await page.reload()
    first, rest = held_lines(lambda number: True), held_lines(lambda number: number > 1)
    batch = await created(api.openai(), jsonl(line(str(number)) for number in range(3)))
    await page.goto(f"{api.url}/console#batches/{batch.id}")
    await expect(page.get_by_text("in_progress")).to_be_visible()
    tokens = page.locator("dt:text('Tokens read') + dd")
    await expect(tokens).to_have_text("–")
    first.set()
    await expect(tokens).not_to_have_text("–")
    for _ in range(3):
        async with page.expect_response("**/v1/batches/*"):
            pass
    assert await page.evaluate("window.abortListeners") <= 2
    cancel = page.get_by_role("button", name="Cancel")
    await cancel.focus()
    await page.keyboard.press("Enter")
    await expect(page.locator("#main")).to_be_focused()
    rest.set()
    await expect(page.get_by_role("status")).to_have_text("The batch was canceled.")


async def test_reload_keeps_the_chosen_file(api: ApiUnderTest, page: Page) -> None:
    await page.goto(f"{api.url}/console#batches")
    await page.get_by_text("New batch").click()
    file = page.get_by_label("JSONL file")
    await file.set_input_files(payload(b"\n" + jsonl([line("a")])))
    reload = page.get_by_role("button", name="Reload")
    await reload.focus()
    async with page.expect_response("**/v1/batches?*"):
        await page.keyboard.press("Enter")
    await expect(reload).to_be_enabled()
    await expect(reload).to_be_focused()
    assert await file.evaluate("field => field.files.length") == 1
    await page.get_by_role("button", name="Create batch").click()
    await expect(page.get_by_text("1 of 1")).to_be_visible()


async def test_a_search_continues_after_many_batches_without_a_match(
    api: ApiUnderTest, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "MAX_CHECKED", 1)
    client = api.openai()
    wanted = await until(client, await created(client, jsonl([line("1"), line("1")])))
    await until(client, await created(client, jsonl([line("1")])))
    await page.goto(f"{api.url}/console#batches?status={wanted.status}")
    await expect(page.get_by_text("None of the newest batches in this range")).to_be_visible()
    await page.get_by_role("link", name="Older").click()
    await expect(page.get_by_role("link", name=wanted.id)).to_be_visible()


async def test_a_wrong_line_has_its_number(api: ApiUnderTest, page: Page) -> None:
    await page.goto(f"{api.url}/console#batches")
    await page.get_by_text("New batch").click()
    for data, reason in (
        (b"\n\n{}\n", "line 3 of the file has no url, such as /v1/embeddings"),
        (b"\n \n", "the file has no lines"),
    ):
        await page.get_by_label("JSONL file").set_input_files(payload(data))
        await page.get_by_role("button", name="Create batch").click()
        await expect(page.get_by_role("alert")).to_have_text(reason)
