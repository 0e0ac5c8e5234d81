"""The console's form for a class, generated from its schema, and the output it displays."""

from __future__ import annotations

import struct
import wave
from collections.abc import AsyncIterator
from io import BytesIO
from pathlib import Path

import pytest
from playwright.async_api import FilePayload, Page, expect

from tests.api.file_server import FileServer, serving_files
from tests.api.harness import ApiUnderTest
from tests.api.serving_classes import predict, served_class
from tests.browser import needs_chromium, opened_page

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.slow(about_s=20),
    needs_chromium,
]
CLASS = """
import struct, wave, zlib

class Answer(BaseModel):
    sound: Path
    image: Path
    notes: Path
    words: list[dict]
    said: str

def image(path):
    def part(kind, data):
        whole = kind + data
        return struct.pack(">I", len(data)) + whole + struct.pack(">I", zlib.crc32(whole))
    head = struct.pack(">2I5B", 8, 8, 8, 2, 0, 0, 0)
    rows = (b"\\0" + b"\\xff\\0\\0" * 8) * 8
    path.write_bytes(
        b"\\x89PNG\\r\\n\\x1a\\n" + part(b"IHDR", head) + part(b"IDAT", zlib.compress(rows))
        + part(b"IEND", b"")
    )

def sound(path):
    with wave.open(str(path), "wb") as made:
        made.setnchannels(1), made.setsampwidth(2), made.setframerate(8000)
        made.writeframes(b"\\0\\1" * 40_000)

class Predictor(BasePredictor):
    def predict(
        self,
        text: str = Input(description="What is said.", min_length=2),
        recording: Path = Input(description="A recording, to be cut."),
        parts: list[Path] = Input(default=[], description="Further ones."),
        times: int = Input(default=2, ge=1, le=5),
        level: float = Input(default=0.5, ge=0, le=1),
        size: int = Input(default=20, choices=[10, 20, 30]),
        loud: bool = Input(default=False),
        token: Secret | None = Input(default=None),
        words: list[str] = Input(default=[]),
    ) -> Answer:
        print("begins with", recording.name)
        out = Path(os.environ["TMPDIR"])
        sound(out / "a.wav"), image(out / "b.png"), (out / "c.txt").write_text("c" * 60_000)
        words = [
            {"word": text, "times": times, "part": len(parts)},
            {"word": str(size), "loud": loud, "bytes": recording.stat().st_size},
        ]
        return Answer(
            sound=out / "a.wav", image=out / "b.png", notes=out / "c.txt", words=words,
            said=f"{level} {token.get_secret_value() if token else ''}",
        )
"""


@pytest.fixture
async def files(tmp_path: Path) -> AsyncIterator[FileServer]:
    async with serving_files(tmp_path) as server:
        yield server


@pytest.fixture
async def api(tmp_path: Path, redis_url: str, files: FileServer) -> AsyncIterator[ApiUnderTest]:
    async with served_class(tmp_path, redis_url, CLASS, files.settings) as running:
        yield running


@pytest.fixture
async def page(api: ApiUnderTest) -> AsyncIterator[Page]:
    """The form. By the end of the test, the browser must not have reported any problems."""
    viewport = {"width": 1200, "height": 1500}
    async with opened_page(f"{api.url}/console#try/mine", viewport=viewport) as page:
        yield page


def recording() -> FilePayload:
    data = BytesIO()
    with wave.open(data, "wb") as made:
        made.setnchannels(1)
        made.setsampwidth(2)
        made.setframerate(8000)
        made.writeframes(struct.pack("<h", 7) * 800)
    return {"name": "in.wav", "mimeType": "audio/wav", "buffer": data.getvalue()}


async def test_a_form_has_what_the_schema_says(page: Page) -> None:
    await page.get_by_text("More options").click()
    times = page.get_by_label("Times")
    for name, value in (("min", "1"), ("max", "5"), ("step", "1"), ("placeholder", "2")):
        await expect(times).to_have_attribute(name, value)
    await expect(page.get_by_text("0 to 1.")).to_be_visible()
    await expect(page.get_by_label("Size")).to_have_value("20")
    await expect(page.get_by_label("Token")).to_have_attribute("type", "password")
    await expect(page.get_by_label("Parts")).to_have_attribute("multiple", "")
    assert await page.get_by_label("Recording (required)").get_attribute("accept") is None
    labels = await page.locator("form label").all_inner_texts()
    assert labels == [
        *("Text (required)", "Recording (required)", "Parts", "Times", "Level", "Size", "Loud"),
        *("Token", "Words"),
    ]


async def test_what_comes_is_played_shown_and_listed(page: Page, api: ApiUnderTest) -> None:
    await page.get_by_label("Text (required)").fill("hello")
    await page.get_by_label("Recording (required)").set_input_files(recording())
    await page.get_by_text("More options").click()
    await page.get_by_label("Size").select_option("30")
    await page.get_by_label("Token").fill("open sesame")
    large: FilePayload = {
        "name": "large.bin",
        "mimeType": "application/octet-stream",
        "buffer": bytes(2**21),
    }
    await page.get_by_label("Parts").set_input_files([recording(), large])
    await expect(page.get_by_label("Preview of in.wav")).to_have_count(2)
    await page.get_by_role("button", name="Run").click()
    await expect(page.get_by_role("heading", name="Result")).to_be_visible()
    rows = page.get_by_role("region", name="words").locator("tbody tr")
    await expect(rows).to_have_count(2)
    await expect(rows.nth(1)).to_contain_text("30")
    await expect(page.locator("dt")).to_have_text(["sound", "image", "notes", "words", "said"])
    await expect(page.locator("dl audio")).to_have_js_property("duration", 5)
    await expect(page.locator("dl img")).to_have_js_property("naturalWidth", 8)
    async with page.expect_download() as saved:
        await page.locator("dd").nth(2).get_by_role("link", name="Download").click()
    assert (await (await saved.value).path()).read_text() == "c" * 60_000
    await page.get_by_text("Logs").click()
    await expect(page.get_by_text("begins with file.wav")).to_be_visible()
    listed = (await api.http.get("/v1/predictions")).json()["results"][0]["input"]
    assert (listed["size"], listed["token"], len(listed["parts"])) == (30, "**********", 2)


async def test_a_file_may_be_named_by_its_url(page: Page, files: FileServer) -> None:
    await page.get_by_label("Text (required)").fill("hello")
    await page.get_by_role("button", name="Run").click()
    await expect(page.get_by_role("alert")).to_have_text(
        "recording: choose a file, or give its URL."
    )
    url = files.add("/far.wav", recording()["buffer"], "audio/wav")
    await page.get_by_label("URL of recording").fill(url)
    await page.get_by_role("button", name="Run").click()
    await page.get_by_text("Logs").click()
    await expect(page.get_by_text("begins with far.wav")).to_be_visible()


async def test_an_input_with_a_hidden_secret_is_not_retried(
    page: Page, api: ApiUnderTest, files: FileServer
) -> None:
    url = files.add("/far.wav", recording()["buffer"], "audio/wav")
    whole = await predict(api, text="hello", recording=url)
    hidden = await predict(api, text="hello", recording=url, token="open sesame")
    large = await predict(api, text="hello", recording=url, words=["word" * 150_000] * 2)
    await page.goto(f"{api.url}/console#predictions")
    for prediction, reason in ((hidden, "the secret token is not shown"), (large, "words is too")):
        row = page.get_by_role("row").filter(has_text=prediction["id"])
        await expect(row).to_contain_text(f"Can't be retried: {reason}")
        await expect(row.get_by_role("button")).to_have_count(0)
    await page.get_by_role("button", name=f"Retry {whole['id']}").click()
    await expect(page.get_by_role("heading", name="Result")).to_be_visible()
    await expect(page.get_by_role("heading", level=1)).not_to_have_text(whole["id"])
