"""The console in a real browser, against the whole pipeline: normal use, and attacks by
strangers.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

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
    """Browser errors and requested URLs. Our pages must not cause unexpected ones."""

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
    # Chromium logs each refused API call. A missing key or scope may cause refusals.
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
    expect(page.get_by_role("alert")).to_have_text("the API key is not valid")
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
    page.get_by_role("row").filter(has_text="a blue square").first.get_by_role("link").click()
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
    assert page.title() == "Penstock console"
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
    assert page.title() == "Penstock console"
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


def test_every_view_opens_by_its_address(page: Page, stack: Stack) -> None:
    log_in(page)
    expect(page.get_by_role("heading", name="Try a model")).to_be_visible()
    for name in ("Predictions", "Batches", "Usage", "Reports", "Invoices", "Keys", "Live"):
        page.goto(f"{stack.api_url}/console#{name.lower()}")
        expect(page.get_by_role("heading", name=name, exact=True)).to_be_visible()
        expect(page.get_by_role("link", name=name, exact=True)).to_have_attribute(
            "aria-current", "page"
        )
        assert fits(page)
    expect(page.get_by_text("Throughput of the workers").first).to_be_visible()


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
    browser: Browser, stack: Stack, width: int, scheme: Literal["light", "dark"]
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
        violations = Axe().run(page).response["violations"]
        serious = [rule["id"] for rule in violations if rule["impact"] in ("serious", "critical")]
        assert serious == [], view
    context.close()
