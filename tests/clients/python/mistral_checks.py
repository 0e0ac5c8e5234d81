"""Mistral's client against a document model: a report, a scan of the report, and errors.

The documents are in the same folder as the file PENSTOCK_CLIENTS_EXPECTED, which describes their
contents (examples/ocr/test_ocr.py).
"""

from __future__ import annotations

import base64
import difflib
import json
import re
import time
from pathlib import Path
from typing import Any

import httpx2
from mistralai.client import Mistral
from mistralai.client.errors import HTTPValidationError, SDKError

from tests.clients.python.checks import (
    EXPECTED,
    KEY,
    LIMIT_S,
    URL,
    Skip,
    check,
    main,
    raises,
)

MIN_RIGHT = 0.98
"""Minimum fraction of a scan's characters that must be read correctly."""
GIVEN: dict[str, Any] = json.loads(Path(EXPECTED).read_text()) if EXPECTED else {}
FOLDER = Path(EXPECTED).parent
MODEL = GIVEN.get("model", "ocr")
"""The class on its own, or a flow that reads each page separately."""
headers: dict[str, str] = {}
"""The last response's headers."""


def _remember(answer: Any) -> None:
    headers.clear()
    headers.update(answer.headers)


def client_of(key: str) -> Any:
    """The client. Untyped, so that checks can inspect any response."""
    http = httpx2.Client(event_hooks={"response": [_remember]}, timeout=LIMIT_S)
    return Mistral(api_key=key, server_url=URL, client=http)


client = client_of(KEY)


def document(name: str) -> dict[str, str]:
    """One of the folder's documents, embedded in the request."""
    data = base64.b64encode((FOLDER / name).read_bytes()).decode()
    return {"type": "document_url", "document_url": f"data:application/pdf;base64,{data}"}


def process(name: str, **fields: Any) -> tuple[Any, float]:
    """The response for a document, and how many seconds it took."""
    sent = document(name)
    began_s = time.perf_counter()
    reply = client.ocr.process(model=MODEL, document=sent, **fields)
    return reply, time.perf_counter() - began_s


def plain(text: str) -> str:
    """A text's words, separated by single spaces."""
    # A line that ends with a hyphen continues on the next one.
    return " ".join(re.sub(r"^#+ ", "", text, flags=re.M).split()).replace("- ", "-")


def right_share(read: str, written: str) -> float:
    """The fraction of characters that were read correctly and in order."""
    blocks = difflib.SequenceMatcher(None, written, read, autojunk=False).get_matching_blocks()
    return sum(block.size for block in blocks) / max(len(written), len(read))


def say(text: str) -> None:
    """Adds a number to figures.txt in the documents' folder."""
    with (FOLDER / "figures.txt").open("a") as file:
        file.write(f"{text}\n")


@check
def a_report_with_a_text_layer() -> None:
    reply, took_s = process("report.pdf")
    pages = GIVEN["report"]
    assert reply.usage_info.pages_processed == len(pages) == len(reply.pages)
    assert reply.usage_info.doc_size_bytes == (FOLDER / "report.pdf").stat().st_size
    for index, (page, lines) in enumerate(zip(reply.pages, pages, strict=True)):
        assert page.index == index
        assert plain(page.markdown) == plain("\n".join(lines)), index
        assert page.markdown.startswith(f"# {lines[0]}\n\n"), page.markdown[:40]
        assert (page.dimensions.width, page.dimensions.height) == (1275, 1650)
    assert headers["x-penstock-cache"] == "miss"
    expected_usd = len(pages) * GIVEN["page_usd"]
    assert abs(float(headers["x-penstock-cost-usd"]) - expected_usd) < 1e-9
    say(f"{len(pages)} pages with a text layer: {took_s:.2f} s")


@check
def a_scan_and_the_same_again() -> None:
    reply, took_s = process("scan.pdf")
    shares = []
    for page, lines in zip(reply.pages, GIVEN["scan"], strict=True):
        shares.append(right_share(plain(page.markdown), plain("\n".join(lines))))
    say(f"{len(shares)} scanned pages: {took_s:.2f} s, {min(shares):.4f} right on the worst page")
    assert headers["x-penstock-cache"] == "miss"
    assert sum(shares) / len(shares) >= MIN_RIGHT, shares
    again, again_s = process("scan.pdf")
    assert again == reply
    assert headers["x-penstock-cache"] == "hit"
    expected_usd = len(shares) * GIVEN["page_usd"] * GIVEN["cached_share"]
    assert abs(float(headers["x-penstock-cost-usd"]) - expected_usd) < 1e-9
    say(f"the same again: {again_s * 1000:.0f} ms, {took_s / again_s:.0f} times faster")


@check
def another_tenant_has_no_hit() -> None:
    other = client_of(GIVEN["other_key"])
    for key, expected in ((other, "miss"), (client, "hit")):
        key.ocr.process(model=MODEL, document=document("report.pdf"))
        assert headers["x-penstock-cache"] == expected


@check
def a_page_of_another_document() -> None:
    if not GIVEN.get("is_flow"):
        raise Skip("the class alone keeps whole documents")
    expected_usd = GIVEN["page_usd"] * (1 + GIVEN["cached_share"])
    reply, _ = process("other.pdf")
    assert [page.index for page in reply.pages] == [0, 1]
    assert headers["x-penstock-cache"] == "partial"
    assert abs(float(headers["x-penstock-cost-usd"]) - expected_usd) < 1e-9
    sent = document("other.pdf")
    client_of(GIVEN["other_key"]).ocr.process(model=MODEL, document=sent)
    assert headers["x-penstock-cache"] == "miss", "another tenant has read it"


@check
def pages_blocks_and_scores() -> None:
    fields = {"include_blocks": True, "confidence_scores_granularity": "word"}
    for pages in ([2, 0], "0,2"):
        reply, _ = process("report.pdf", pages=pages, **fields)
        assert [page.index for page in reply.pages] == [0, 2]
        page = reply.pages[0]
        assert [block.type for block in page.blocks][:2] == ["title", "text"]
        assert all(block.type != "UNKNOWN" for block in page.blocks)
        words = page.confidence_scores.word_confidence_scores
        assert words[0].text == page.markdown[words[0].start_index :].split()[0]
        assert page.confidence_scores.minimum_page_confidence_score == 1.0


@check
def tables_in_the_markdown_and_beside_it() -> None:
    rows = [list(row) for row in GIVEN["table"]]
    (page,) = process("table.pdf")[0].pages
    for row in rows:
        assert f"| {' | '.join(row)} |" in page.markdown, page.markdown
    (page,) = process("table.pdf", table_format="html")[0].pages
    (table,) = page.tables
    assert f"[{table.id}]({table.id})" in page.markdown
    cells = re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", table.content)
    assert cells == [cell for row in rows for cell in row], table.content


@check
def images_of_a_page() -> None:
    (page,) = process("image.pdf", include_image_base64=True)[0].pages
    (image,) = page.images
    assert f"![{image.id}]({image.id})" in page.markdown
    assert image.image_base64.startswith("data:image/jpeg;base64,/9j/")
    assert process("image.pdf", image_limit=0)[0].pages[0].images == []
    assert process("image.pdf", image_min_size=1000)[0].pages[0].images == []


@check
def files_of_each_kind() -> None:
    expected = plain("\n".join(GIVEN["image_lines"]))
    for name in GIVEN["images"]:
        kind = f"image/{name.rpartition('.')[2]}"
        data = base64.b64encode((FOLDER / name).read_bytes()).decode()
        sent = {"type": "image_url", "image_url": f"data:{kind};base64,{data}"}
        reply = client.ocr.process(model=MODEL, document=sent)
        assert len(reply.pages) == (2 if name.endswith("tiff") else 1), name
        for page in reply.pages:
            share = right_share(plain(page.markdown), expected)
            assert share >= MIN_RIGHT, (name, share, page.markdown)


@check
def an_uploaded_file() -> None:
    data = (FOLDER / "table.pdf").read_bytes()
    uploaded = client.files.upload(file={"file_name": "table.pdf", "content": data}, purpose="ocr")
    assert (uploaded.size_bytes, uploaded.filename) == (len(data), "table.pdf")
    assert client.files.retrieve(file_id=uploaded.id).filename == "table.pdf"
    reply = client.ocr.process(model=MODEL, document={"type": "file", "file_id": uploaded.id})
    assert reply.usage_info.doc_size_bytes == len(data)
    assert headers["x-penstock-cache"] == "hit", "the same document inside a request was read"
    assert client.files.delete(file_id=uploaded.id).deleted
    with raises(HTTPValidationError) as caught:
        client.ocr.process(model=MODEL, document={"type": "file", "file_id": uploaded.id})
    assert caught.error.data.detail[0].loc == ["body", "document"]


@check
def wrong_requests_are_named() -> None:
    with raises(HTTPValidationError) as caught:
        process("report.pdf", pages=[10_000])
    (detail,) = caught.error.data.detail
    assert detail.loc == ["body", "pages"]
    assert "counted from 0" in detail.msg
    with raises(HTTPValidationError) as caught:
        process("report.pdf", document_annotation_prompt="a")
    assert caught.error.data.detail[0].loc == ["body", "document_annotation_prompt"]
    for name, said in GIVEN["hostile"].items():
        with raises(HTTPValidationError) as caught:
            process(name)
        (detail,) = caught.error.data.detail
        assert detail.loc == ["body", "document"], (name, detail)
        assert said in detail.msg, (name, detail.msg)
    with raises(SDKError) as other:
        client.ocr.process(model="nobody", document=document("table.pdf"))
    assert other.error.status_code == 404
    with raises(SDKError) as other:
        client_of("wrong").ocr.process(model=MODEL, document=document("table.pdf"))
    assert other.error.status_code == 401


if __name__ == "__main__":
    main()
