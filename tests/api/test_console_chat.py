"""The console's chat in a browser: the text streams, can be stopped, and is never treated as
markup.
"""

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from playwright.async_api import Page, Route, expect

from tests.api.harness import ApiUnderTest, api_with_redis, running_api, settings_for
from tests.browser import needs_chromium, opened_page
from tests.keys import key_for, keys_url

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.slow,
    needs_chromium,
]
api = api_with_redis(secret="s")
HOSTILE = (
    "say <img src=x onerror=\"document.title='owned'\">"
    "<script>document.title='owned'</script>[link](javascript:document.title='owned')"
)


@pytest.fixture
async def page(api: ApiUnderTest) -> AsyncIterator[Page]:
    viewport = {"width": 390, "height": 844}
    async with opened_page(f"{api.url}/console#try/writer", viewport=viewport) as page:
        yield page


async def ask(page: Page, text: str) -> None:
    await page.get_by_label("Message", exact=True).fill(text)
    await page.keyboard.press("Enter")


async def test_tries_outlive_the_tab_if_the_reader_wants_it(page: Page) -> None:
    await page.get_by_label("System prompt").fill("You are a miller.")
    await ask(page, "say hello")
    await page.get_by_text("Your tries in this tab (1)").click()
    await page.get_by_label("Keep my tries in this browser").check()
    await page.evaluate("sessionStorage.clear()")
    await page.reload()
    await page.get_by_text("Your tries in this browser (1)").click()
    await page.get_by_role("link", name="Try again: say hello").click()
    await expect(page.get_by_label("Message", exact=True)).to_have_value("say hello")
    await expect(page.get_by_label("System prompt")).to_have_value("You are a miller.")
    await page.get_by_text("Your tries in this browser (1)").click()
    await page.get_by_label("Keep my tries in this browser").uncheck()
    await page.get_by_role("button", name="Clear").click()
    assert await page.evaluate("localStorage.length") == 0


async def test_an_input_that_the_chat_has_no_fields_for_opens_the_form(
    api: ApiUnderTest, page: Page
) -> None:
    body = {"version": "writer", "input": {"prompt": "say hello", "top_p": 0.5}}
    created = (await api.http.post("/v1/predictions", json=body, headers={"prefer": "wait"})).json()
    await page.goto(f"{api.url}/console#try/writer?again={created['id']}")
    await expect(page.get_by_role("button", name="Run", exact=True)).to_be_visible()
    await expect(page.get_by_label("Top P")).to_have_value("0.5")


async def test_an_answer_streams_and_has_its_facts(api: ApiUnderTest, page: Page) -> None:
    api.worker.written = asyncio.Semaphore(0)
    await page.get_by_label("System prompt").fill("You are a miller.")
    await ask(page, "say the mill turns")
    answer = page.get_by_role("article", name="Answer")
    await expect(page.get_by_role("button", name="Stop")).to_be_visible()
    api.worker.written.release()
    await expect(answer).to_have_text("the")
    for _ in range(8):
        api.worker.written.release()
    await expect(answer).to_contain_text("the mill turns")
    await expect(answer.locator(".hint")).to_contain_text("tokens")
    await expect(answer.locator(".hint")).to_contain_text("$")
    await expect(page.get_by_label("Message", exact=True)).to_be_focused()
    listed = (await api.http.get("/v1/predictions")).json()["results"][0]["input"]
    assert [message["role"] for message in listed["messages"]] == ["system", "user"]
    await page.get_by_text("This request as code").click()
    for words in ("v1/chat/completions", "from openai import OpenAI", "new OpenAI({"):
        await expect(page.get_by_text(words).first).to_be_visible()
    assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")


async def test_an_answer_can_be_stopped_and_the_next_one_knows_it(
    api: ApiUnderTest, page: Page
) -> None:
    api.worker.written = asyncio.Semaphore(1)
    await ask(page, "say one two three")
    answer = page.get_by_role("article", name="Answer")
    await expect(answer).to_contain_text("one")
    await page.get_by_role("button", name="Stop").click()
    await expect(answer.locator(".hint")).to_contain_text("stopped")
    await expect(page.get_by_role("button", name="Send")).to_be_visible()
    for _ in range(20):
        api.worker.written.release()
    await ask(page, "say four")
    await expect(answer).to_have_count(2)
    await expect(answer.nth(1)).to_contain_text("four")
    listed = (await api.http.get("/v1/predictions")).json()["results"][0]["input"]
    assert [message["role"] for message in listed["messages"]] == ["user", "assistant", "user"]
    await page.get_by_role("button", name="New chat").click()
    await expect(page.get_by_role("button", name="Write a short story")).to_be_visible()


async def test_cost_of_a_stopped_answer_appears_once_it_is_known(
    api: ApiUnderTest, page: Page
) -> None:
    reads = 0

    async def add_cost_later(route: Route) -> None:
        nonlocal reads
        response = await route.fetch()
        body = await response.json()
        reads += body["status"] == "canceled"
        if reads > 1:
            body["metrics"] |= {"output_token_count": 7, "cost_usd": 0.25}
        await route.fulfill(response=response, json=body)

    api.worker.written = asyncio.Semaphore(1)
    await ask(page, "say one two three")
    answer = page.get_by_role("article", name="Answer")
    await expect(answer).to_contain_text("one")
    await page.route(re.compile("/v1/predictions/[^/]+$"), add_cost_later)
    await page.get_by_role("button", name="Stop").click()
    await expect(answer.locator(".hint")).to_contain_text("stopped · 7 tokens")
    await expect(answer.locator(".hint")).to_contain_text("$0.25")


async def test_the_next_message_waits_until_the_first_is_answered(
    api: ApiUnderTest, page: Page
) -> None:
    is_sent = asyncio.Event()

    async def hold(route: Route) -> None:
        await is_sent.wait()
        await route.continue_()

    await page.route(re.compile("/v1/predictions$"), hold)
    await ask(page, "say one")
    await ask(page, "say two")
    is_sent.set()
    answer = page.get_by_role("article", name="Answer")
    await expect(answer.locator(".hint")).to_be_visible()
    await expect(page.get_by_label("Message", exact=True)).to_have_value("say two")
    assert len((await api.http.get("/v1/predictions")).json()["results"]) == 1


async def test_a_new_chat_works_after_the_cost_of_a_stopped_answer(
    api: ApiUnderTest, page: Page
) -> None:
    async def add_cost(route: Route) -> None:
        response = await route.fetch()
        body = await response.json()
        body["metrics"] |= {"cost_usd": 0.25}
        await route.fulfill(response=response, json=body)

    api.worker.written = asyncio.Semaphore(1)
    await ask(page, "say one two three")
    answer = page.get_by_role("article", name="Answer")
    await expect(answer).to_contain_text("one")
    await page.get_by_role("button", name="Stop").click()
    await expect(answer.locator(".hint")).to_contain_text("stopped")
    await page.route(re.compile("/v1/predictions/[^/]+$"), add_cost)
    example = page.get_by_role("button", name="Write a short story")
    async with page.expect_response(re.compile("/v1/predictions/[^/]+$")):
        await page.get_by_role("button", name="New chat").click()
        drawn = await example.element_handle()
    assert drawn is not None
    await drawn.wait_for_element_state("hidden")  # it was drawn again
    for _ in range(20):
        api.worker.written.release()
    await example.click()
    await expect(page.get_by_role("article", name="You")).to_have_text("Write a short story")


async def test_text_that_is_nested_too_deeply_is_shown_as_it_is(page: Page) -> None:
    text = ">" * 10_000
    content = await page.evaluate(
        """async (text) => {
            const { markdown } = await import("./console/assets/js/markdown.js");
            return markdown(text).textContent;
        }""",
        text,
    )
    assert content == text


@pytest.mark.parametrize(
    ("output", "shown"),
    [
        ("data:image/png;base64,!", "This file is not valid Base64."),
        ("http://[/v1/objects/a?signature=b", "http://[/v1/objects/a?signature=b"),
    ],
)
async def test_text_that_is_no_file_does_not_hide_the_result(
    page: Page, output: str, shown: str
) -> None:
    text = await page.evaluate(
        """async (output) => {
            const { resultOf } = await import("./console/assets/js/results.js");
            const prediction = { id: "p", status: "succeeded", input: {}, metrics: {}, output };
            return resultOf(prediction, new AbortController().signal).textContent;
        }""",
        output,
    )
    assert shown in text


async def test_markup_of_a_model_stays_text(page: Page) -> None:
    await ask(page, HOSTILE)
    answer = page.get_by_role("article", name="Answer")
    await expect(answer).to_contain_text("<img src=x")
    await expect(answer.locator(".hint")).to_be_visible()
    assert await page.title() == "Try a model – Penstock"
    assert await page.locator("main img, main script, main a[href^=javascript]").count() == 0


async def test_markdown_of_a_model_is_shown_as_such(page: Page) -> None:
    await ask(page, "say # Title\n\n- **one**\n- `two`\n\n| a | b |\n|---|---|\n| 1 | 2 |")
    answer = page.get_by_role("article", name="Answer")
    await expect(answer.get_by_role("heading", name="Title")).to_be_visible()
    await expect(answer.get_by_role("listitem")).to_have_count(2)
    await expect(answer.get_by_role("cell", name="2")).to_be_visible()


async def test_the_next_reader_does_not_see_the_chats_of_the_last_one(
    tmp_path: Path, redis_url: str
) -> None:
    keys = keys_url(tmp_path, ann="acme", bob="other")
    settings = settings_for(tmp_path, redis_url=redis_url, keys_url=keys)
    async with running_api(settings) as api, opened_page(f"{api.url}/console#try/writer") as page:
        for name in ("ann", "bob"):
            await page.get_by_label("API key").fill(key_for(name))
            await page.get_by_role("button", name="Log in").click()
            await expect(page.get_by_role("button", name="Write a short story")).to_be_visible()
            await ask(page, "say the mill turns")
            await expect(page.get_by_role("article", name="Answer")).to_contain_text("mill turns")
            await page.get_by_role("button", name="Log out").click()
