"""Batch lines that read documents."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from shared.models.catalog import Catalog
from tests.api.batches.batching import Running, answers, batching, created, jsonl, until
from tests.api.file_server import FileServer, serving_files
from tests.api.harness import CATALOG, ApiUnderTest
from tests.api.test_audio import entry
from tests.api.test_ocr import READS, TEXT, TEXT_URI

pytestmark = pytest.mark.anyio
URL = "/v1/ocr"


@pytest.fixture
async def files(tmp_path: Path) -> AsyncIterator[FileServer]:
    async with serving_files(tmp_path) as server:
        yield server


@pytest.fixture
async def both(
    tmp_path: Path, redis_url: str, files: FileServer
) -> AsyncIterator[tuple[ApiUnderTest, Running]]:
    catalog = Catalog((*CATALOG.models, entry("eyes", "ocr", READS, deterministic=True)))
    async with batching(
        tmp_path, redis_url, catalog=catalog, secret="s", **files.settings
    ) as running:
        yield running


def line(custom_id: str, document: dict[str, Any], **fields: Any) -> dict[str, Any]:
    body = {"model": "eyes", "document": document} | fields
    return {"custom_id": custom_id, "method": "POST", "url": URL, "body": body}


async def test_lines_are_answered_as_the_route_answers(
    both: tuple[ApiUnderTest, Running], files: FileServer
) -> None:
    api, _ = both
    client = api.openai()
    upload = {"content": ("a.pdf", TEXT, "application/pdf")}
    mine = (await api.http.post("/v1/files", files=upload)).json()
    lines = [
        line("a", {"document_url": TEXT_URI}, pages="0"),
        line("b", {"document_url": files.add("/far.pdf", TEXT, "application/pdf")}, pages=[1]),
        line("c", {"file_id": mine["id"]}, pages="2", include_image_base64=True),
        line("d", {"document_url": f"{files.url}/none"}),
    ]
    done = await until(client, await created(client, jsonl(lines), endpoint=URL))
    assert (done.status, done.request_counts.completed) == ("completed", 3), done
    replies = {
        one["custom_id"]: one["response"]["body"]
        for one in await answers(client, done.output_file_id)
    }
    assert [replies[one]["pages"][0]["markdown"] for one in "ab"] == ["first", "second"]
    assert done.usage.pages == sum(one["usage_info"]["pages_processed"] for one in replies.values())
    assert done.usage.pages >= 3
    assert replies["b"]["usage_info"] == {"pages_processed": 1, "doc_size_bytes": len(TEXT)}
    jpeg = base64.b64encode(b"jpeg").decode()
    (image,) = replies["c"]["pages"][0]["images"]
    assert image["image_base64"] == f"data:image/jpeg;base64,{jpeg}"
    (failed,) = await answers(client, done.error_file_id)
    assert failed["custom_id"] == "d"
    assert "returned 404" in failed["response"]["body"]["error"]["message"]


@pytest.mark.parametrize(
    ("wrong", "param", "reason"),
    [
        (line("a", {"document_url": "a.pdf"}), "body.document", "must be a data: URI"),
        (line("a", {"document_url": TEXT_URI}, pages="x"), "body.pages", "as 0-3,5"),
        (line("a", {"document_url": TEXT_URI}, extract_header=True), "body.extract_header", "eyes"),
    ],
)
async def test_a_wrong_line_is_named_before_any_runs(
    both: tuple[ApiUnderTest, Running], wrong: dict[str, Any], param: str, reason: str
) -> None:
    api, _ = both
    client = api.openai()
    right = line("b", {"document_url": TEXT_URI})
    done = await until(client, await created(client, jsonl([right, wrong]), endpoint=URL))
    assert done.status == "failed"
    (error,) = done.errors.data
    assert (error.line, error.param) == (2, param)
    assert reason in error.message
    assert not api.worker.jobs
