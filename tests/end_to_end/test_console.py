"""The console in a real browser, against the whole pipeline: normal use, and attacks by
strangers.
"""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from infra.local.stack import Stack
from tests.browser import needs_chromium, running_browser
from tests.end_to_end.conftest import EMBEDDER, KEY
from tests.limits import WAIT_LIMIT_S

pytestmark = [pytest.mark.slow, needs_chromium]
IMAGES = "stable-diffusion-tiny"
REFUSED = re.compile("status of 40[13]")
MARKER = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"


@dataclass
class Told:
    """Errors from the browser, and the URLs it requested.

    Our pages must not cause any unexpected ones.
    """

    errors: list[str] = field(default_factory=list)
    urls: list[str] = field(default_factory=list)


@pytest.fixture
def seen() -> Told:
    return Told()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with running_browser() as browser:
        yield browser


@pytest.fixture
def page(browser: Browser, stack: Stack, seen: Told) -> Iterator[Page]:
    """The console's login page. At the end, the browser must not have reported any errors."""
    context = browser.new_context(viewport={"width": 360, "height": 740})
    context.set_default_timeout(WAIT_LIMIT_S * 1000)
    expect.set_options(timeout=WAIT_LIMIT_S * 1000)
    page = context.new_page()
    page.on("pageerror", lambda error: seen.errors.append(str(error)))
    page.on(
        "console",
        lambda message: seen.errors.append(message.text) if message.type == "error" else None,
    )
    page.on("request", lambda request: seen.urls.append(request.url))
    page.goto(f"{stack.api_url}/console")
    yield page
    foreign = [url for url in seen.urls if not url.startswith(("data:", "blob:", stack.api_url))]
    assert not foreign, {urlsplit(url).netloc for url in foreign}
    # Chromium logs each rejected API call. A missing key or scope may cause rejections.
    assert [text for text in seen.errors if not REFUSED.search(text)] == []
    context.close()


def log_in(page: Page, key: str = KEY) -> None:
    page.get_by_label("API key").fill(key)
    page.get_by_role("button", name="Log in").click()


def run(page: Page) -> None:
    page.get_by_role("button", name="Run").click()
    expect(page.get_by_role("heading", name="Result")).to_be_visible()


def choose(page: Page, model: str) -> None:
    page.get_by_label("Model").select_option(model)


def fits(page: Page) -> bool:
    """True if nothing is wider than a phone's screen."""
    return bool(page.evaluate("document.documentElement.scrollWidth <= innerWidth"))


def test_a_wrong_key_is_told_in_the_words_of_the_api(page: Page) -> None:
    log_in(page, "pk_live_wrong")
    expect(page.get_by_role("alert")).to_have_text("the API key is invalid")
    assert page.evaluate("sessionStorage.length") == 0
    assert page.get_by_role("link", name="Try").count() == 0


def test_a_key_stays_in_its_tab_and_out_of_urls(page: Page, seen: Told) -> None:
    log_in(page)
    expect(page.get_by_role("heading", name="Try a model")).to_be_visible()
    page.reload()
    expect(page.get_by_role("heading", name="Try a model")).to_be_visible()
    assert page.evaluate("localStorage.length + document.cookie.length") == 0
    assert not [url for url in seen.urls if KEY in url]
    page.get_by_role("button", name="Log out").click()
    expect(page.get_by_label("API key")).to_be_focused()
    assert page.evaluate("sessionStorage.length") == 0


def test_an_image_is_drawn_and_shown_with_its_seed(page: Page) -> None:
    log_in(page)
    choose(page, IMAGES)
    page.get_by_label("Prompt (required)").fill("a red circle")
    page.get_by_text("More options").click()
    page.get_by_label("Seed").fill("41")
    page.get_by_label("Num Outputs").fill("2")
    run(page)
    images = page.get_by_role("figure").get_by_role("img")
    expect(images).to_have_count(2)
    for number in range(2):
        expect(images.nth(number)).to_have_js_property("naturalWidth", 64)
    expect(page.get_by_text("Seed 42")).to_be_visible()
    expect(page.get_by_role("img", name="Total")).to_be_visible()
    with page.expect_download() as saved:
        page.get_by_role("link", name="Download").first.click()
    assert saved.value.path().read_bytes().startswith(b"\x89PNG")
    assert fits(page)


def test_an_image_is_previewed_and_its_drawing_canceled(page: Page) -> None:
    log_in(page)
    choose(page, IMAGES)
    page.get_by_label("Prompt (required)").fill("a blue square")
    page.get_by_text("More options").click()
    page.get_by_label("Num Inference Steps").fill("100")
    page.get_by_label("Size").fill("256x256")
    page.get_by_role("button", name="Run").click()
    preview = page.get_by_role("img", name="Preview")
    expect(preview).to_be_visible()
    assert preview.get_attribute("src").startswith("data:image/webp;base64,")  # type: ignore[union-attr]
    page.get_by_role("link", name="Predictions", exact=True).click()
    page.get_by_role("row").filter(has_text="a blue square").first.get_by_role("link").first.click()
    expect(preview).to_be_visible()
    page.get_by_role("button", name="Cancel").click()
    expect(page.get_by_text("The prediction was canceled.")).to_be_visible()


def test_similar_texts_are_similar_on_the_map(page: Page) -> None:
    texts = ["The cat sleeps on the sofa.", "A kitten naps on the couch.", "Interest rates rose."]
    log_in(page)
    choose(page, EMBEDDER)
    page.get_by_label("Texts").fill("\n".join(texts))
    run(page)
    rows = page.get_by_role("region", name="Cosine similarities").locator("tbody tr")
    cosines = [
        [float(text) for text in rows.nth(number).locator("td").all_inner_texts()]
        for number in range(len(texts))
    ]
    assert [cosines[number][number] for number in range(3)] == [1, 1, 1]
    assert cosines[0][1] == cosines[1][0] > 0.3 > max(cosines[0][2], cosines[1][2])
    page.get_by_text("This request as code").click()
    expect(page.get_by_text("$PENSTOCK_API_KEY")).to_be_visible()
    assert fits(page)


def test_what_strangers_write_stays_text(page: Page) -> None:
    log_in(page)
    choose(page, IMAGES)
    page.get_by_label("Prompt (required)").fill(MARKER)
    run(page)
    page.get_by_role("link", name="Open the prediction").click()
    expect(page.get_by_text(MARKER.replace('"', '\\"')).first).to_be_visible()
    page.get_by_role("link", name="Predictions", exact=True).click()
    expect(page.get_by_role("cell").get_by_text("<img src=x").first).to_be_visible()
    assert page.title() != "owned"
    assert page.locator("img[src=x], main script").count() == 0


@pytest.mark.parametrize(
    "hole",
    [
        "document.body.innerHTML = `<img src=x onerror=\"document.title='owned'\">`",
        "document.body.setAttribute('onclick', \"document.title='owned'\")",
        "const made = document.createElement('script'); made.textContent = 'document.title=1'",
    ],
)
def test_a_hole_in_the_page_runs_no_script_of_others(page: Page, seen: Told, hole: str) -> None:
    expect(page.get_by_label("API key")).to_be_visible()
    refused = page.evaluate(f"() => {{ try {{ {hole}; }} catch (error) {{ return error.name; }} }}")
    assert refused == "TypeError"
    assert page.title() != "owned"
    assert seen.errors.pop()
    seen.errors.clear()


def test_batches_and_their_files_are_listed(page: Page, client: openai.OpenAI) -> None:
    line = (
        '{"custom_id": "a", "method": "POST", "url": "/v1/embeddings", '
        f'"body": {{"model": "{EMBEDDER}", "input": "river"}}}}'
    )
    name = "<b>lines</b>.jsonl"
    file = client.files.create(file=(name, line.encode()), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h"
    )
    log_in(page)
    page.get_by_role("link", name="Batches").click()
    row = page.get_by_role("row").filter(has_text=batch.id)
    expect(row).to_be_visible()
    with page.expect_download() as saved:
        row.get_by_role("button", name=f"Download input of {batch.id}").click()
    assert saved.value.path().read_text() == line
    assert fits(page)


def create(stack: Stack, body: dict[str, Any], wait: str = "wait=60") -> dict[str, Any]:
    """A prediction created outside the console."""
    answer = httpx.post(
        f"{stack.api_url}/v1/predictions",
        json=body,
        headers={"authorization": f"Bearer {KEY}", "prefer": wait},
        timeout=WAIT_LIMIT_S,
    )
    assert answer.status_code == 201, answer.text
    made: dict[str, Any] = answer.json()
    return made


def embed(stack: Stack, text: str) -> dict[str, Any]:
    return create(stack, {"version": EMBEDDER, "input": {"text": text}})


def slow_image(stack: Stack, wait: str = "respond-async") -> dict[str, Any]:
    given = {"prompt": "a slow circle", "num_inference_steps": 100, "width": 512, "height": 512}
    return create(stack, {"version": IMAGES, "input": given}, wait)


def lines(texts: list[str]) -> bytes:
    each = [
        {
            "custom_id": f"line-{number}",
            "method": "POST",
            "url": "/v1/embeddings",
            "body": {"model": EMBEDDER, "input": text},
        }
        for number, text in enumerate(texts)
    ]
    return "\n".join(map(json.dumps, each)).encode()


@pytest.fixture(scope="module")
def failed_batch(client: openai.OpenAI) -> str:
    """A batch of 40 lines, 30 of which fail: more than one page of errors."""
    data = lines(["word " * 1000] * 30 + ["a river"] * 10)
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h"
    ).id


def test_filters_of_predictions_are_in_the_address(page: Page, stack: Stack, text: str) -> None:
    mine = embed(stack, text)
    other = create(stack, {"version": IMAGES, "input": {"prompt": f"a circle {text}"}})
    log_in(page)
    page.get_by_role("link", name="Predictions", exact=True).click()
    listed = page.get_by_role("region", name="Predictions")
    expect(listed.get_by_text(mine["id"])).to_be_visible()
    expect(listed.get_by_text(other["id"])).to_be_visible()
    page.get_by_label("Model").select_option(IMAGES)
    page.get_by_label("State").select_option("succeeded")
    page.get_by_role("button", name="Filter").click()
    expect(page).to_have_url(re.compile(f"#predictions.model={IMAGES}&status=succeeded$"))
    expect(listed.get_by_text(other["id"])).to_be_visible()
    expect(listed.get_by_text(mine["id"])).to_have_count(0)
    page.reload()
    expect(listed.get_by_text(other["id"])).to_be_visible()
    expect(page.get_by_label("State")).to_have_value("succeeded")
    row = listed.get_by_role("row").filter(has_text=other["id"])
    expect(row.get_by_text(re.compile(r"\$0\.\d+"))).to_be_visible()
    row.get_by_role("link").nth(1).click()
    expect(page.get_by_label("Key")).not_to_have_value("")
    expect(listed.get_by_text(other["id"])).to_be_visible()
    page.get_by_label("From").fill("2036-01-01T12:00")
    page.get_by_role("button", name="Filter").click()
    expect(page.get_by_text("No prediction matches these filters.")).to_be_visible()
    expect(page).to_have_url(re.compile("created_after=2036-01-0"))
    page.get_by_role("link", name="Clear").click()
    expect(listed.get_by_text(mine["id"])).to_be_visible()
    page.get_by_label("Prediction ID").fill(mine["id"])
    page.get_by_role("button", name="Find").click()
    expect(page.get_by_role("heading", name=mine["id"])).to_be_visible()
    assert fits(page)


def test_pages_of_predictions_are_of_the_server(page: Page, stack: Stack, text: str) -> None:
    made = [embed(stack, f"{text} {number}")["id"] for number in range(25)]
    log_in(page)
    page.goto(f"{stack.api_url}/console#predictions?model={EMBEDDER}")
    rows = page.get_by_role("region", name="Predictions").locator("tbody tr")
    expect(rows).to_have_count(20)
    expect(rows.first).to_contain_text(made[-1])
    page.get_by_role("link", name="Older").click()
    expect(page.get_by_text(made[4], exact=True)).to_be_visible()
    expect(page.get_by_text(made[5], exact=True)).to_have_count(0)
    page.get_by_role("link", name="Newest").click()
    expect(rows.first).to_contain_text(made[-1])


def test_a_prediction_is_retried_under_a_new_id(page: Page, stack: Stack, text: str) -> None:
    done = embed(stack, text)
    log_in(page)
    page.goto(f"{stack.api_url}/console#predictions")
    page.get_by_role("button", name=f"Retry {done['id']}").click()
    expect(page.get_by_role("heading", name="Result")).to_be_visible()
    again = page.get_by_role("heading", level=1).inner_text()
    assert again.startswith("pred_")
    assert again != done["id"]
    expect(page.get_by_text(text).first).to_be_visible()


def test_a_listed_prediction_is_canceled(page: Page, stack: Stack) -> None:
    running = slow_image(stack)
    log_in(page)
    page.goto(f"{stack.api_url}/console#predictions")
    page.get_by_role("button", name=f"Cancel {running['id']}").click()
    expect(page.get_by_role("status")).to_have_text("The prediction was canceled.")
    expect(page.get_by_role("button", name=f"Retry {running['id']}")).to_be_visible()


def test_an_unknown_prediction_is_not_found(page: Page, stack: Stack, seen: Told) -> None:
    log_in(page)
    page.goto(f"{stack.api_url}/console#predictions/pred_unknown")
    expect(page.get_by_role("alert")).to_have_text("prediction 'pred_unknown' does not exist")
    expect(page.get_by_role("link", name="All predictions")).to_be_visible()
    seen.errors[:] = [text for text in seen.errors if "404" not in text]


def test_a_batch_is_created_from_a_file_and_canceled(page: Page, stack: Stack, text: str) -> None:
    log_in(page)
    page.goto(f"{stack.api_url}/console#batches")
    page.get_by_text("New batch").click()
    data = lines([f"{text} {number}" for number in range(4000)])
    page.get_by_label("JSONL file").set_input_files(
        {"name": "in.jsonl", "mimeType": "application/jsonl", "buffer": data}
    )
    page.get_by_role("button", name="Create batch").click()
    heading = page.get_by_role("heading", level=1)
    expect(heading).to_have_text(re.compile("^batch_"))
    page.get_by_role("button", name="Cancel").click()
    expect(page.get_by_text("cancelled", exact=True)).to_be_visible()
    assert fits(page)


def test_a_file_without_lines_creates_no_batch(page: Page, stack: Stack) -> None:
    log_in(page)
    page.goto(f"{stack.api_url}/console#batches")
    page.get_by_text("New batch").click()
    page.get_by_label("JSONL file").set_input_files(
        {"name": "in.jsonl", "mimeType": "application/jsonl", "buffer": b"a river"}
    )
    page.get_by_role("button", name="Create batch").click()
    expect(page.get_by_role("alert")).to_have_text("line 1 of the file is not valid JSON")


def test_all_errors_of_a_batch_are_shown_and_retried(
    page: Page, stack: Stack, failed_batch: str
) -> None:
    log_in(page)
    page.goto(f"{stack.api_url}/console#batches/{failed_batch}")
    failed = page.get_by_role("region", name="Failed lines")
    expect(failed.locator("tbody tr")).to_have_count(25)
    expect(page.get_by_text("30 context_length_exceeded")).to_be_visible()
    page.get_by_role("button", name="Next").click()
    expect(failed.locator("tbody tr")).to_have_count(5)
    assert fits(page)
    page.get_by_role("button", name="Retry failed lines").click()
    expect(page.get_by_role("heading", level=1)).not_to_have_text(failed_batch)
    expect(page.get_by_text("30 of 30, 30 failed")).to_be_visible()
    page.get_by_role("link", name="All batches").click()
    page.get_by_label("State").select_option("completed")
    page.get_by_role("button", name="Filter").click()
    expect(page).to_have_url(re.compile("#batches.status=completed$"))
    expect(page.get_by_role("link", name=failed_batch)).to_be_visible()


def test_every_view_opens_by_its_address(page: Page, stack: Stack) -> None:
    log_in(page)
    expect(page.get_by_role("heading", name="Try a model")).to_be_visible()
    page.goto(f"{stack.api_url}/console#overview")
    expect(page.get_by_role("heading", name="By model")).to_be_visible()
    assert fits(page)
    for name in ("Predictions", "Batches", "Usage", "Reports", "Invoices", "Keys", "Live"):
        page.goto(f"{stack.api_url}/console#{name.lower()}")
        expect(page.get_by_role("heading", name=name, exact=True)).to_be_visible()
        expect(page.get_by_role("link", name=name, exact=True)).to_have_attribute(
            "aria-current", "page"
        )
        assert fits(page)
    expect(page.get_by_text("Throughput of the workers").first).to_be_visible()


def test_the_queue_in_the_overview_updates_by_itself(page: Page, stack: Stack) -> None:
    log_in(page)
    page.goto(f"{stack.api_url}/console#overview")
    now = page.get_by_role("region", name="Queue and workers now")
    cell = now.get_by_role("row").filter(has_text=IMAGES).get_by_role("cell").nth(1)
    expect(cell).to_have_text("0")
    with ThreadPoolExecutor(1) as waiting:
        made = waiting.submit(slow_image, stack, "wait=60")
        expect(cell).to_have_text("1")
        made.result(WAIT_LIMIT_S)
    expect(cell).to_have_text("0")
    assert fits(page)


def test_the_keyboard_is_enough(page: Page) -> None:
    expect(page.get_by_label("API key")).to_be_focused()
    page.keyboard.type(KEY)
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Try a model")).to_be_visible()
    page.get_by_label("Texts").focus()
    page.keyboard.type("One text.\nAnother text.")
    for _ in range(10):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent") == "Run":
            break
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Result")).to_be_visible()
    expect(page.get_by_role("status")).to_have_text("The prediction succeeded.")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
def test_no_view_has_serious_barriers(
    browser: Browser,
    stack: Stack,
    failed_batch: str,
    width: int,
    scheme: Literal["light", "dark"],
) -> None:
    """axe-core checks each view's contrast, names, roles and focus."""
    context = browser.new_context(
        viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion="reduce"
    )
    page = context.new_page()
    page.goto(f"{stack.api_url}/console")
    log_in(page)
    for view in ("Try", "Predictions", "Batches", "Usage", "Reports", "Invoices", "Keys", "Live"):
        page.get_by_role("link", name=view, exact=True).click()
        name = "Try a model" if view == "Try" else view
        expect(page.get_by_role("heading", name=name, exact=True)).to_be_visible()
        page.wait_for_load_state("networkidle")
        assert serious_barriers(page) == [], view
    prediction = embed(stack, "a river")["id"]
    for address, text in (
        (f"predictions?model={EMBEDDER}&status=succeeded", prediction),
        (f"predictions/{prediction}", "Result"),
        (f"batches/{failed_batch}", "Failed lines"),
    ):
        page.goto(f"{stack.api_url}/console#{address}")
        expect(page.get_by_text(text).first).to_be_visible()
        page.wait_for_load_state("networkidle")
        assert fits(page), address
        assert serious_barriers(page) == [], address
    page.goto(f"{stack.api_url}/console#batches")
    page.get_by_text("New batch").click()
    assert serious_barriers(page) == []
    page.goto(f"{stack.api_url}/console#overview")
    expect(page.get_by_role("heading", name="By model")).to_be_visible()
    assert fits(page)
    assert serious_barriers(page) == []
    context.close()


def serious_barriers(page: Page) -> list[str]:
    violations = Axe().run(page).response["violations"]
    return [rule["id"] for rule in violations if rule["impact"] in ("serious", "critical")]
