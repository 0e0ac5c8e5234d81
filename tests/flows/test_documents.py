"""Documents that a flow reads page by page, in the format of Mistral's OCR API."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.http import connection
from api.predictions.creation import PredictionSnapshot
from api.predictions.service import Predictions
from shared.errors import BadInput, Unavailable
from shared.models.blob import Blob
from tests.flows.models import Compute, catalog_of, class_entry
from tests.flows.world import World, world
from tests.keys import bearer, keys_url, stored
from tests.limits import WAIT_LIMIT_S

pytestmark = pytest.mark.anyio

FILE, STRING = {"type": "string", "format": "uri"}, {"type": "string"}
BOOLEAN, INTEGER = {"type": "boolean"}, {"type": "integer"}
PAGE_USD, CACHED_SHARE = 0.25, 0.5
KNOWN: dict[str, Any] = {
    "deterministic": True,
    "price": {"per_item_usd": PAGE_USD, "cached_share": CACHED_SHARE},
}
PARTS = {"pages": {"type": "array", "items": FILE}, "numbers": {"type": "array", "items": INTEGER}}
CUT = class_entry(
    "cut-pages",
    {"document": FILE, "pages": STRING},
    {"type": "object", "properties": PARTS | {"size_bytes": INTEGER}},
    deterministic=True,
    price={},
)
READ = class_entry(
    "read-page",
    {"document": FILE, "include_image_base64": BOOLEAN, "image_limit": INTEGER},
    {"type": "array", "items": {"type": "object"}},
    **KNOWN,
)
FLOW: dict[str, Any] = {
    "name": "eyes",
    "api": "ocr",
    "input": {
        "document": "file",
        "pages": {"type": "string", "default": ""},
        "include_image_base64": {"type": "boolean", "default": False},
        "image_limit": {"type": "integer", "default": 1000},
    },
    "steps": [
        {
            "id": "cut",
            "model": CUT.name,
            "input": {"document": "$input.document", "pages": "$input.pages"},
        },
        {
            "id": "read",
            "model": READ.name,
            "for_each": "$cut.pages",
            "input": {
                "document": "$item",
                "include_image_base64": "$input.include_image_base64",
                "image_limit": "$input.image_limit",
            },
        },
    ],
    "output": {"pages": "$read", "numbers": "$cut.numbers", "doc_size_bytes": "$cut.size_bytes"},
}


class Reads(Compute):
    """Here, a document is a text with one page per line."""

    def output(self, name: str, values: Mapping[str, Any]) -> Any:
        self.asked.append((name, values))
        data: bytes = values["document"]
        if name == READ.name:
            return self._page(data.decode(), values)
        if data == b"locked":
            raise BadInput("document: it is encrypted", field="document")
        lines = data.split(b"\n")
        first, _, last = (values["pages"] or f"0-{len(lines) - 1}").partition("-")
        numbers = list(range(int(first), int(last or first) + 1))
        if numbers[-1] >= len(lines):
            raise BadInput(f"pages: there is no page {numbers[-1]}", field="pages")
        pages = [Blob("text/plain", data=lines[number]) for number in numbers]
        return {"pages": pages, "numbers": numbers, "size_bytes": len(data)}

    def _page(self, text: str, values: Mapping[str, Any]) -> Any:
        if text == "broken":
            raise BadInput("document: page 0: it is broken", field="document")
        images = list[dict[str, Any]]()
        if "image" in text and values["image_limit"]:
            at = dict.fromkeys(("top_left_x", "top_left_y", "bottom_right_x", "bottom_right_y"), 1)
            images = [{"id": "img-0.jpeg"} | at]
            if values["include_image_base64"]:
                images[0]["image_base64"] = Blob("image/jpeg", data=text.encode())
            text = f"![img-0.jpeg](img-0.jpeg) {text}"
        return [{"index": 0, "markdown": text, "images": images, "dimensions": None}]


@pytest.fixture
async def eyes(tmp_path: Path, redis_url: str) -> AsyncIterator[World]:
    keys = keys_url(tmp_path, one="acme", two="brick")
    models = (CUT, READ)
    async with world(redis_url, FLOW, models=models, computes=Reads, keys_url=keys) as running:
        yield running


async def asked(eyes: World, text: str, key: str = "one", **fields: Any) -> httpx.Response:
    data = base64.b64encode(text.encode()).decode()
    document = {"type": "document_url", "document_url": f"data:application/pdf;base64,{data}"}
    body = {"model": "eyes", "document": document} | fields
    return await eyes.http.post("/v1/ocr", json=body, headers=bearer(key))


def texts(answer: httpx.Response) -> list[str]:
    assert answer.status_code == 200, answer.text
    return [page["markdown"] for page in answer.json()["pages"]]


def told(answer: httpx.Response) -> tuple[str, float]:
    """A response's cache header and cost."""
    headers = answer.headers
    return headers["x-penstock-cache"], float(headers["x-penstock-cost-usd"])


async def test_revoked_key_is_named_even_if_its_run_can_not_be_ended(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def end(self: Predictions, snapshot: PredictionSnapshot) -> PredictionSnapshot:
        raise Unavailable("Redis is down")

    monkeypatch.setattr(Predictions, "end", end)
    monkeypatch.setattr(connection, "CHECK_S", 0.05)
    keys = keys_url(tmp_path, one="acme")
    models = (CUT, READ)
    async with (
        world(
            redis_url, FLOW, models=models, computes=Reads, idle=(READ.name,), keys_url=keys
        ) as eyes,
        asyncio.timeout(WAIT_LIMIT_S),
        asyncio.TaskGroup() as tasks,
    ):
        asking = tasks.create_task(asked(eyes, "one"))
        while not eyes.compute.asked:  # noqa: ASYNC110 - a thread sets it
            await asyncio.sleep(0.02)
        keys_url(tmp_path, keys=[stored("one", "acme", revoked_s=5)])
        answer = await asking
    assert answer.status_code == 401


async def test_pages_come_in_order_with_their_numbers(eyes: World) -> None:
    text = "\n".join(f"page {number}" for number in range(70))
    answer = await asked(eyes, text)
    assert texts(answer) == text.split("\n")
    reply = answer.json()
    assert [page["index"] for page in reply["pages"]] == list(range(70))
    assert (reply["model"], reply["document_annotation"]) == ("eyes", None)
    assert reply["usage_info"] == {"pages_processed": 70, "doc_size_bytes": len(text)}
    assert told(answer) == ("miss", 70 * PAGE_USD)
    some = await asked(eyes, text, pages="3-4")
    assert [page["index"] for page in some.json()["pages"]] == [3, 4]
    assert (texts(some), told(some)[0]) == (["page 3", "page 4"], "partial")
    shown = (await eyes.http.get(answer.headers["location"], headers=bearer("one"))).json()
    assert shown["input"]["document"] == {"type": "document_url"}
    assert [step["items"] for step in shown["metrics"]["steps"]] == [1, 70]


async def test_a_page_is_a_hit_in_each_document_of_its_tenant(eyes: World) -> None:
    assert told(await asked(eyes, "one\ntwo")) == ("miss", 2 * PAGE_USD)
    assert told(await asked(eyes, "one\ntwo")) == ("hit", 2 * PAGE_USD * CACHED_SHARE)
    assert eyes.compute.count(READ.name) == 2
    other = await asked(eyes, "three\ntwo\none")
    assert texts(other) == ["three", "two", "one"]
    assert told(other) == ("partial", PAGE_USD + 2 * PAGE_USD * CACHED_SHARE)
    assert eyes.compute.count(READ.name) == 3
    assert told(await asked(eyes, "one\ntwo", key="two")) == ("miss", 2 * PAGE_USD)
    assert eyes.compute.count(READ.name) == 5
    rows = await eyes.until_rows(3 + 3 + 4 + 3)
    assert sum(row.cost_usd or 0.0 for row in rows) == 5 * PAGE_USD + 4 * PAGE_USD * CACHED_SHARE


async def test_images_are_numbered_and_limited_over_all_pages(eyes: World) -> None:
    text = "image a\nplain\nimage b\nimage c"
    answer = await asked(eyes, text, include_image_base64=True, image_limit=2)
    assert texts(answer) == [
        "![img-0.jpeg](img-0.jpeg) image a",
        "plain",
        "![img-1.jpeg](img-1.jpeg) image b",
        " image c",
    ]
    images = [image for page in answer.json()["pages"] for image in page["images"]]
    expected = [base64.b64encode(f"image {name}".encode()).decode() for name in "ab"]
    assert [one["image_base64"] for one in images] == [
        f"data:image/jpeg;base64,{data}" for data in expected
    ]
    assert texts(await asked(eyes, text, image_limit=0)) == text.split("\n")


@pytest.mark.parametrize(
    ("text", "fields", "field", "reason"),
    [
        ("locked", {}, "document", "document: it is encrypted"),
        ("one", {"pages": "5"}, "pages", "pages: there is no page 5"),
        ("one\ntwo\nbroken", {}, "document", "document: page 2: it is broken"),
        ("one\ntwo\nbroken", {"pages": [1, 2]}, "document", "document: page 2: it is broken"),
        ("one", {"include_blocks": True}, "include_blocks", "is not supported by eyes"),
    ],
)
async def test_what_is_wrong_with_a_document_has_mistrals_shape(
    text: str, fields: dict[str, Any], field: str, reason: str, eyes: World
) -> None:
    answer = await asked(eyes, text, **fields)
    assert answer.status_code == 422, answer.text
    (detail,) = answer.json()["detail"]
    assert detail["loc"] == ["body", field]
    assert reason in detail["msg"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"output": {"pages": "$read"}}, "pages and numbers"),
        ({"output": {"pages": "$cut.pages", "numbers": "$cut.numbers"}}, "pages and numbers"),
        ({"input": FLOW["input"] | {"document": "string"}}, "a string is not a file"),
    ],
)
def test_a_flow_that_gives_no_pages_serves_no_documents(
    changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        catalog_of(FLOW | changes, models=(CUT, READ))
