"""Document OCR, in the format of Mistral's API."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared.errors import BadInput, InputTooLarge
from shared.models.catalog import Catalog
from shared.models.tasks.custom import CustomInput
from tests.api.harness import TEXT_MODEL, ApiUnderTest, running_api, settings_for
from tests.api.test_audio import SPEAKS, entry, interface
from tests.keys import bearer, keys_url

pytestmark = pytest.mark.anyio

READS = interface(
    {
        "document": {"type": "string", "format": "uri"},
        "pages": {"type": "string", "default": ""},
        "table_format": {"type": "string", "enum": ["", "markdown", "html"], "default": ""},
        "include_image_base64": {"type": "boolean", "default": False},
        "image_limit": {"type": "integer", "default": 10000, "minimum": 0},
        "include_blocks": {"type": "boolean", "default": False},
    },
    {"type": "array", "items": {"type": "object"}},
    streams="items",
)
READS_PAGES = interface(
    {"document": {"type": "string", "format": "uri"}},
    {"type": "array", "items": {"type": "object"}},
    streams="items",
)
CATALOG = Catalog(
    (
        TEXT_MODEL,
        entry("eyes", "ocr", READS, deterministic=True),
        entry("one-eye", "ocr", READS_PAGES),
    )
)
TEXT = b"first\nsecond\nimage\nfourth"
TEXT_URI = f"data:application/pdf;base64,{base64.b64encode(TEXT).decode()}"
DOCUMENT = {"type": "document_url", "document_url": TEXT_URI}


@pytest.fixture
async def api(tmp_path: Path, redis_url: str) -> AsyncIterator[ApiUnderTest]:
    keys = keys_url(tmp_path, one="acme", two="brick")
    settings = settings_for(tmp_path, redis_url=redis_url, keys_url=keys)
    async with running_api(settings, catalog=CATALOG) as running:
        yield running


async def asked(api: ApiUnderTest, key: str = "one", **fields: Any) -> httpx.Response:
    body = {"model": "eyes", "document": DOCUMENT} | fields
    return await api.http.post("/v1/ocr", json=body, headers=bearer(key))


async def test_all_pages_with_their_price(api: ApiUnderTest) -> None:
    answer = await asked(api)
    reply = answer.json()
    first, second, third, fourth = (page["markdown"] for page in reply["pages"])
    assert (first, second, fourth) == ("first", "second", "fourth")
    assert third == "![img-0.jpeg](img-0.jpeg) below"
    assert reply["pages"][0]["dimensions"] == {"dpi": 150, "height": 1650, "width": 1275}
    assert (reply["model"], reply["document_annotation"]) == ("eyes", None)
    assert reply["usage_info"] == {"pages_processed": 4, "doc_size_bytes": len(TEXT)}
    assert float(answer.headers["x-penstock-cost-usd"]) == 4 * 0.5
    (item,) = api.worker.items
    assert isinstance(item.input, CustomInput)
    assert item.input.values == {"document": None}
    assert not item.input.is_streamed


async def test_the_same_document_is_a_hit_whatever_it_is_called_and_for_its_tenant_only(
    api: ApiUnderTest,
) -> None:
    assert (await asked(api)).headers["x-penstock-cache"] == "miss"
    form = {"content": ("report.pdf", TEXT, "application/pdf")}
    file = (await api.http.post("/v1/files", files=form, headers=bearer("one"))).json()
    uploaded = {"type": "file", "file_id": file["id"]}
    as_image = {"type": "image_url", "image_url": {"url": TEXT_URI.replace("pdf", "png")}}
    for document in (DOCUMENT, uploaded, as_image):
        again = await asked(api, document=document, include_blocks=False, pages=[])
        assert again.headers["x-penstock-cache"] == "hit", document["type"]
        assert again.headers["x-penstock-cost-usd"] == "0"
        assert again.json()["usage_info"]["pages_processed"] == 4
    assert (await asked(api, key="two")).headers["x-penstock-cache"] == "miss"
    theirs = await asked(api, key="two", document=uploaded)
    assert theirs.status_code == 422
    assert theirs.json()["param"] == "document"


async def uploaded_as(api: ApiUnderTest, purpose: str, data: bytes) -> httpx.Response:
    files = {"file": ("a.pdf", data)}
    fields = {"purpose": purpose, "expiry": "2", "visibility": "workspace"}
    return await api.http.post("/v1/files", files=files, data=fields, headers=bearer("one"))


async def test_a_document_is_uploaded_as_mistrals_client_does(api: ApiUnderTest) -> None:
    made = (await uploaded_as(api, "ocr", TEXT)).json()
    facts = (made["purpose"], made["sample_type"], made["source"], made["bytes"])
    assert facts == ("ocr", "ocr_input", "upload", len(TEXT))
    assert made["expires_at"] - made["created_at"] == 2 * 3600
    document = {"type": "file", "file_id": made["id"]}
    assert (await asked(api, document=document)).json()["usage_info"]["pages_processed"] == 4
    content = await api.http.get(f"/v1/files/{made['id']}/content", headers=bearer("one"))
    assert (content.content, content.headers["content-type"]) == (TEXT, "application/octet-stream")
    theirs = await asked(api, key="two", document=document)
    assert (theirs.status_code, theirs.json()["param"]) == (422, "document")
    lines = (await uploaded_as(api, "batch", b"{}")).json()
    refused = await asked(api, document={"type": "file", "file_id": lines["id"]})
    assert "is batch; upload inputs with purpose user_data or ocr" in refused.json()["message"]
    answer = await uploaded_as(api, "batch", TEXT)
    assert "must be JSONL" in answer.json()["error"]["message"]


async def test_pages_are_chosen_by_numbers_and_ranges(api: ApiUnderTest) -> None:
    for pages in ("0-1,3", " 3, 0-1,1", [3, 1, 0, 1]):
        answer = await asked(api, pages=pages)
        assert [page["index"] for page in answer.json()["pages"]] == [0, 1, 3], pages
        assert answer.json()["usage_info"]["pages_processed"] == 3
    (item,) = api.worker.items
    assert item.input.values["pages"] == "0-1,3"  # type: ignore[union-attr]


async def test_images_are_in_the_answer_only_if_they_are_asked_for(api: ApiUnderTest) -> None:
    (image,) = (await asked(api)).json()["pages"][2]["images"]
    assert (image["id"], image["bottom_right_y"], image["image_base64"]) == ("img-0.jpeg", 4, None)
    (image,) = (await asked(api, include_image_base64=True)).json()["pages"][2]["images"]
    assert image["image_base64"] == f"data:image/jpeg;base64,{base64.b64encode(b'jpeg').decode()}"


async def test_images_are_numbered_from_page_to_page(api: ApiUnderTest) -> None:
    many = base64.b64encode(b"\n".join([b"image"] * 12)).decode()
    document = {"document_url": f"data:application/pdf;base64,{many}"}
    pages = (await asked(api, document=document)).json()["pages"]
    assert [page["images"][0]["id"] for page in pages] == [f"img-{n}.jpeg" for n in range(12)]
    for page in (pages[1], pages[11]):
        name = page["images"][0]["id"]
        assert page["markdown"] == f"![{name}]({name}) below"
        (word,) = page["confidence_scores"]["word_confidence_scores"]
        assert page["markdown"][word["start_index"] :] == "below"


async def test_a_page_with_many_references_and_words_takes_little_time(api: ApiUnderTest) -> None:
    data = base64.b64encode(b"\n".join([b"image"] * 10 + [b"crowded"])).decode()
    document = {"document_url": f"data:application/pdf;base64,{data}"}
    # Searching all references for each word would take a minute instead of 0.1 s.
    before_s = time.process_time()
    page = (await asked(api, document=document)).json()["pages"][-1]
    assert time.process_time() - before_s < 5, "all other callers of this API wait meanwhile"
    words = page["confidence_scores"]["word_confidence_scores"]
    assert len(words) == 20_000
    assert {page["markdown"][word["start_index"] :][:6] for word in words} == {"[a](a)"}


async def test_as_a_prediction_each_page_is_an_event(api: ApiUnderTest) -> None:
    body = {"version": "eyes", "input": {"document": TEXT_URI, "pages": "0-1"}}
    created = await api.http.post("/v1/predictions", json=body, headers=bearer("one"))
    stream = await api.http.get(
        f"/v1/predictions/{created.json()['id']}/stream", headers=bearer("one")
    )
    events = [block.split("\ndata: ") for block in stream.text.split("\n\n")]
    pages = [json.loads(one[1]) for one in events if "event: output" in one[0]]
    assert [page["markdown"] for page in pages] == ["first", "second"], stream.text


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"pages": "3-"}, "pages", "as 0-3,5"),
        ({"pages": [-1]}, "pages", "greater than or equal to 0"),
        ({"pages": "1,2,"}, "pages", "as 0-3,5"),
        ({"pages": ",".join(["1"] * 1001)}, "pages", "as 0-3,5"),
        ({"document": {"type": "ftp"}}, "document", "document_url, image_url or file"),
        ({"document": {"document_url": "ftp://a/b"}}, "document", "https URL"),
        (
            {"document": {"document_url": "http://127.0.0.1/a"}},
            "document",
            "does not fetch other URLs",
        ),
        ({"document": {"file_id": "file-unknown"}}, "document", "file-unknown"),
        ({"document": {"document_url": TEXT_URI, "size": 1}}, "document", "unknown parameter"),
        ({"document": {"document_url": "data:application/pdf;base64,%"}}, "document", "base64"),
        ({"table_format": "csv"}, "table_format", "'markdown' or 'html'"),
        ({"image_limit": -1}, "image_limit", "greater than or equal to 0"),
        ({"confidence_scores_granularity": "letter"}, "confidence_scores_granularity", "'page'"),
        (
            {"document_annotation_format": {"type": "json_schema"}},
            "document_annotation_format",
            "annotations require a language model",
        ),
        ({"bbox_annotation_format": {}}, "bbox_annotation_format", "which this API does not serve"),
        ({"document_annotation_prompt": "a"}, "document_annotation_prompt", "omit this field"),
        ({"language": "en"}, "language", "unknown parameter"),
        ({"model": "one-eye", "pages": "0"}, "pages", "pages: is not supported by one-eye"),
        ({"extract_header": True}, "extract_header", "extract_header: is not supported by eyes"),
    ],
)
async def test_wrong_fields_are_named_as_mistrals_client_reads_them(
    api: ApiUnderTest, fields: dict[str, Any], param: str, reason: str
) -> None:
    answer = await asked(api, **fields)
    error = answer.json()
    assert answer.status_code == 422, error
    assert error["param"] == param
    assert reason in error["message"]
    (detail,) = error["detail"]
    assert detail == {"loc": ["body", param], "msg": error["message"], "type": error["code"]}
    assert not api.worker.jobs


async def test_other_errors_have_the_same_shape(api: ApiUnderTest) -> None:
    unknown = await asked(api, model="nobody")
    assert unknown.status_code == 404
    assert unknown.json()["code"] == "model_not_found"
    assert "detail" not in unknown.json()
    other = (await asked(api, model=TEXT_MODEL.name)).json()
    assert other["message"] == f"model {TEXT_MODEL.name!r} does not serve ocr"
    no_key = await asked(api, key="nobody")
    assert (no_key.status_code, no_key.json()["code"]) == (401, "invalid_api_key")
    broken = await api.http.post("/v1/ocr", content=b"{", headers=bearer("one"))
    assert (broken.status_code, broken.json()["detail"][0]["loc"]) == (422, ["body"])
    no_pages = {"document_url": f"data:;base64,{base64.b64encode(b'no pages').decode()}"}
    answer = await asked(api, document=no_pages)
    assert answer.status_code == 500
    assert "did not return valid pages" in answer.json()["message"]


async def test_what_a_class_finds_wrong_is_about_the_document(api: ApiUnderTest) -> None:
    api.worker.refusal = BadInput("document: page 3: it is broken", field="document")
    broken = (await asked(api)).json()
    assert (broken["param"], broken["message"]) == ("document", "document: page 3: it is broken")
    api.worker.refusal = InputTooLarge("it weighs 61, and at most 60 is allowed", field="input")
    long = await asked(api)
    assert long.status_code == 422
    assert long.json()["message"] == "document: exceeds the maximum of 60 pages for eyes"


async def test_a_keyed_error_is_replayed_in_the_same_shape(api: ApiUnderTest) -> None:
    keyed = bearer("one") | {"idempotency-key": "k"}
    body = {"model": "eyes", "document": DOCUMENT, "pages": "x"}
    first = await api.http.post("/v1/ocr", json=body, headers=keyed)
    again = await api.http.post("/v1/ocr", json=body, headers=keyed)
    assert (first.status_code, first.json()["detail"][0]["loc"]) == (422, ["body", "pages"])
    assert (again.status_code, again.json()) == (422, first.json())
    assert again.headers["idempotent-replayed"] == "true"
    other = await api.http.post("/v1/ocr", json=body | {"pages": "0"}, headers=keyed)
    assert (other.status_code, other.json()["code"]) == (422, "idempotency_key_reused")


def test_an_entry_whose_class_gives_no_pages_is_refused() -> None:
    with pytest.raises(ValueError, match="the class must have an input named 'document'"):
        entry("mine", "ocr", SPEAKS)
    with pytest.raises(ValueError, match="its pages"):
        entry("mine", "ocr", READS.model_copy(update={"streams": ""}))
