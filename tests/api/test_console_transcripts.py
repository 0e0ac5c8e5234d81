"""The console's transcripts, with a player for the recording, and the history of runs."""

from __future__ import annotations

import struct
import wave
from collections.abc import AsyncIterator
from io import BytesIO
from pathlib import Path

import pytest
from playwright.async_api import FilePayload, Page, expect

from tests.api.harness import ApiUnderTest
from tests.api.serving_classes import served_class
from tests.browser import needs_chromium, opened_page

pytestmark = [pytest.mark.anyio, pytest.mark.slow(about_s=20), needs_chromium]
CLASS = """
class Predictor(BasePredictor):
    def predict(
        self,
        file: Path = Input(description="A recording."),
        token: Secret | None = Input(default=None),
    ) -> list[dict]:
        words = [(" The", 0.0), (" mill", 1.0), (" turns.", 2.0)]
        timed = [{"word": word, "start": start, "end": start + 1} for word, start in words]
        return [
            {"start": 0.0, "end": 3.0, "text": " The mill turns.", "words": timed},
            {"start": 3.0, "end": 5.0, "text": " It rains.", "words": []},
        ]
"""


@pytest.fixture
async def api(tmp_path: Path, redis_url: str) -> AsyncIterator[ApiUnderTest]:
    async with served_class(tmp_path, redis_url, CLASS) as running:
        yield running


@pytest.fixture
async def page(api: ApiUnderTest) -> AsyncIterator[Page]:
    async with opened_page(f"{api.url}/console#try/mine") as page:
        await page.get_by_label("File (required)").set_input_files(recording())
        await page.get_by_role("button", name="Run").click()
        await expect(page.get_by_role("heading", name="Result")).to_be_visible()
        yield page


def recording() -> FilePayload:
    data = BytesIO()
    with wave.open(data, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(struct.pack("<h", 7) * 8000 * 5)
    return {"name": "in.wav", "mimeType": "audio/wav", "buffer": data.getvalue()}


async def test_the_word_that_is_said_is_highlighted(page: Page) -> None:
    await expect(page.locator(".transcript")).to_have_text("The mill turns. It rains.")
    player = page.get_by_label("Recording")
    await expect(player).to_have_js_property("duration", 5)
    for seconds, said in ((1.2, " mill"), (2.9, " turns."), (4.0, " It rains.")):
        await player.evaluate("(player, seconds) => { player.currentTime = seconds; }", seconds)
        await expect(page.locator(".said")).to_have_text(said)
    await page.get_by_text("With times").click()
    await page.get_by_role("button", name="Play from 0:03").focus()
    await page.keyboard.press("Enter")
    await expect(page.locator(".said")).to_have_text(" It rains.")
    await expect(player).to_have_js_property("currentSrc", await player.get_attribute("src"))


async def test_long_transcripts_are_whole_and_words_may_be_null(page: Page) -> None:
    length = await page.evaluate(
        """async () => {
            const { transcriptOf } = await import("./console/assets/js/documents.js");
            const words = Array.from({ length: 12_000 }, (_, at) => ({ word: " la", start: at }));
            const text = words.map(({ word }) => word).join("");
            const last = { start: 1, end: 2, text: "end", words: null };
            const segments = [{ start: 0, end: 1, text, words }, last];
            const shown = transcriptOf(segments, { url: "data:audio/wav,", type: "audio/wav" });
            return shown.querySelector(".transcript").textContent.length;
        }"""
    )
    assert length == len(" la") * 12_000 + len(" end")


async def test_secrets_are_not_in_the_history(page: Page) -> None:
    await page.get_by_text("More options").click()
    await page.get_by_label("Token").fill("open sesame")
    await page.get_by_role("button", name="Run").click()
    await expect(page.get_by_text("Your tries in this tab (2)")).to_be_visible()
    assert "sesame" not in await page.evaluate("sessionStorage.getItem('penstock.tries')")


async def test_tries_are_listed_until_they_are_cleared(api: ApiUnderTest, page: Page) -> None:
    (created,) = (await api.http.get("/v1/predictions")).json()["results"]
    await page.reload()
    await page.get_by_text("Your tries in this tab (1)").click()
    link = page.get_by_role("listitem").get_by_role("link").first
    await expect(link).to_have_attribute("href", f"#predictions/{created['id']}")
    assert "base64" not in await page.evaluate("sessionStorage.getItem('penstock.tries')")
    await page.get_by_role("button", name="Clear").click()
    await expect(page.get_by_text("Your tries in this tab")).to_be_hidden()
    await expect(page.locator("#main")).to_be_focused()
    await page.reload()
    await expect(page.get_by_role("heading", name="Try a model")).to_be_visible()
    await expect(page.get_by_text("Your tries in this tab")).to_be_hidden()
