"""The console's form for image models in a browser: painted masks, and results over sources."""

import base64
import json
from collections.abc import AsyncIterator
from io import BytesIO
from typing import Any

import pytest
from axe_playwright_python.async_playwright import Axe
from PIL import Image
from playwright.async_api import FilePayload, Page, expect

from tests.api.harness import IMAGE_MODEL, ApiUnderTest, api_with_redis
from tests.api.test_images import drawn
from tests.api.test_masks import SOURCE, levels, white
from tests.browser import needs_chromium, opened_page

pytestmark = [pytest.mark.slow(about_s=15), pytest.mark.anyio, needs_chromium]
api = api_with_redis(secret="s")


@pytest.fixture
async def page(api: ApiUnderTest) -> AsyncIterator[Page]:
    async with opened_page(f"{api.url}/console#try/{IMAGE_MODEL.name}") as page:
        await page.get_by_label("Prompt (required)").fill("a circle")
        await page.get_by_text("Edit an image").click()
        await page.get_by_label("Image", exact=True).set_input_files(png("source.png", SOURCE))
        yield page


def png(name: str, data: bytes) -> FilePayload:
    return {"name": name, "mimeType": "image/png", "buffer": data}


async def run(page: Page) -> None:
    await page.get_by_role("button", name="Run").click()
    await expect(page.get_by_role("heading", name="Result")).to_be_visible()


async def paint(page: Page, y: float) -> None:
    """Paints a stroke over the left half of the image."""
    canvas = page.get_by_role("img", name="Painted mask")
    await canvas.scroll_into_view_if_needed()
    box = await canvas.bounding_box()
    assert box is not None
    await page.mouse.move(box["x"] + 4, box["y"] + y * box["height"])
    await page.mouse.down()
    await page.mouse.move(box["x"] + box["width"] / 2, box["y"] + y * box["height"], steps=4)
    await page.mouse.up()


async def test_what_is_painted_is_drawn_anew(api: ApiUnderTest, page: Page) -> None:
    await paint(page, 0.5)
    await paint(page, 0.9)
    await page.get_by_label("Erase").check()
    await paint(page, 0.9)
    await run(page)
    (image,) = drawn(api)
    mask = levels(image.mask)
    assert mask.shape == (image.height, image.width)
    height, width = mask.shape
    assert mask[height // 2, width // 4] == 255
    assert mask[height // 2, width * 3 // 4] == 0
    assert mask[height * 9 // 10, width // 4] < 30


@pytest.mark.parametrize("size", [(32, 32), (1024, 512)])
async def test_the_canvas_covers_exactly_the_image(page: Page, size: tuple[int, int]) -> None:
    data = BytesIO()
    Image.new("RGB", size).save(data, "PNG")
    await page.get_by_label("Image", exact=True).set_input_files(png("wide.png", data.getvalue()))
    canvas = page.get_by_role("img", name="Painted mask")
    await expect(canvas).to_have_js_property("width", size[0])
    boxes = await canvas.evaluate(
        "canvas => [canvas, canvas.previousElementSibling].map(element => {"
        " const { x, y, width, height } = element.getBoundingClientRect();"
        " return [x, y, width, height] })"
    )
    assert boxes[0] == pytest.approx(boxes[1], abs=1)


async def test_a_result_is_edited_without_a_download(api: ApiUnderTest, page: Page) -> None:
    await page.get_by_label("Image", exact=True).set_input_files([])
    await page.get_by_text("Edit an image").click()
    await run(page)
    await page.get_by_role("button", name="Edit output 1").click()
    preview = page.get_by_role("img", name="Preview of")
    await expect(preview).to_have_js_property("complete", True)
    await paint(page, 0.5)
    await page.get_by_role("button", name="Run").click()
    await expect(page.get_by_role("slider", name="Before and after")).to_be_visible()
    edited = [image for image in drawn(api) if image.image is not None]
    assert [image.mask is not None for image in edited] == [True]


async def test_an_earlier_input_fills_the_form(api: ApiUnderTest, page: Page) -> None:
    body = {"prompt": "a blue square", "seed": 7, "num_outputs": 2}
    created = await api.http.post(
        "/v1/predictions", json={"version": IMAGE_MODEL.name, "input": body}
    )
    await page.goto(f"{api.url}/console#try/{IMAGE_MODEL.name}?again={created.json()['id']}")
    await expect(page.get_by_label("Prompt (required)")).to_have_value("a blue square")
    await expect(page.get_by_label("Seed")).to_have_value("7")
    await expect(page.get_by_label("Num Outputs")).to_have_value("2")


async def test_a_mask_file_replaces_the_painting(api: ApiUnderTest, page: Page) -> None:
    await paint(page, 0.5)
    await page.get_by_label("Mask", exact=True).set_input_files(png("mask.png", white()))
    await run(page)
    mask = levels(drawn(api)[0].mask)
    height, width = mask.shape
    assert mask[height // 2, width // 4] == 255
    assert mask[height // 2, 2] == 0


async def test_a_mask_url_replaces_the_painting(page: Page) -> None:
    await paint(page, 0.5)
    url = "https://localhost/mask.png"
    await page.get_by_label("URL of mask").fill(url)
    reply: dict[str, Any] = {
        "id": "a",
        "status": "canceled",
        "input": {},
        "output": None,
        "metrics": {},
    }
    await page.route("**/v1/predictions", lambda route: route.fulfill(status=201, json=reply))
    async with page.expect_request("**/v1/predictions") as sent:
        await page.get_by_role("button", name="Run").click()
    assert json.loads((await sent.value).post_data or "")["input"]["mask"] == url


async def test_a_result_is_compared_with_its_source(api: ApiUnderTest, page: Page) -> None:
    await run(page)
    slider = page.get_by_role("slider", name="Before and after")
    await expect(slider).to_have_value("50")
    before = page.get_by_role("img", name="Before")
    await expect(before).to_have_js_property("naturalWidth", 64)
    await slider.focus()
    await page.keyboard.press("Home")
    clip = "element => getComputedStyle(element).clipPath"
    assert "100%" in await before.evaluate(clip)


async def test_a_result_is_not_compared_with_its_mask(page: Page) -> None:
    await page.get_by_label("Image", exact=True).set_input_files([])
    await page.get_by_label("URL of image").fill("https://localhost/source.png")
    await page.get_by_label("Mask", exact=True).set_input_files(png("mask.png", white()))
    output = f"data:image/png;base64,{base64.b64encode(SOURCE).decode()}"
    reply = {"id": "a", "status": "succeeded", "input": {}, "output": output, "metrics": {}}
    await page.route("**/v1/predictions", lambda route: route.fulfill(status=201, json=reply))
    await run(page)
    await expect(page.get_by_role("figure").get_by_role("img")).to_have_count(1)


@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_it_has_no_serious_barriers(page: Page, width: int, scheme: Any) -> None:
    await page.set_viewport_size({"width": width, "height": 900})
    await page.emulate_media(color_scheme=scheme)
    await paint(page, 0.5)
    await run(page)
    await expect(page.get_by_role("slider", name="Before and after")).to_be_visible()
    violations = (await Axe().run(page)).response["violations"]
    barriers = [rule for rule in violations if rule["impact"] in ("serious", "critical")]
    assert [rule["id"] for rule in barriers] == []
    assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
