"""A tenant's stored objects share one limit, no matter which endpoint they come through."""

from __future__ import annotations

import base64
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from shared.models.catalog import Catalog
from shared.stores.held_bytes import hold
from shared.tenants.plan import Plan
from tests.api.file_server import serving_files
from tests.api.harness import CATALOG, IMAGE_MODEL, ApiUnderTest, running_api, settings_for
from tests.api.test_codec_pool import PNG
from tests.api.test_inputs_by_url import CLASS
from tests.api.test_slow_and_endless import peer_of
from tests.keys import bearer, keys_url

pytestmark = pytest.mark.anyio
MIB = 1024 * 1024
LINE = b'{"custom_id": "1", "method": "POST", "url": "/v1/embeddings", "body": {}}\n'
PART = LINE * (400 * 1024 // len(LINE))


@pytest.fixture
async def api(tmp_path: Path, redis_url: str) -> AsyncIterator[ApiUnderTest]:
    settings = settings_for(
        tmp_path,
        redis_url=redis_url,
        keys_url=keys_url(tmp_path, a="alice", b="bob"),
        files_max_bytes=MIB,
    )
    async with running_api(settings) as api:
        yield api


async def for_batch(api: ApiUnderTest, data: bytes = PART, key: str = "a") -> httpx.Response:
    return await api.http.post(
        "/v1/files",
        files={"file": ("a.jsonl", data)},
        data={"purpose": "batch"},
        headers=bearer(key),
    )


async def for_prediction(api: ApiUnderTest, data: bytes = PART, key: str = "a") -> httpx.Response:
    return await api.http.post("/v1/files", files={"content": ("a.bin", data)}, headers=bearer(key))


async def predicted(api: ApiUnderTest, image: bytes, key: str = "a") -> httpx.Response:
    uri = "data:image/png;base64," + base64.b64encode(image).decode()
    given = {"prompt": "a cat", "image": uri}
    return await api.http.post(
        "/v1/predictions",
        json={"version": IMAGE_MODEL.name, "input": given},
        headers=bearer(key),
    )


def large_image() -> bytes:
    """A 300 KiB image, most of which comes after its end marker."""
    return PNG + os.urandom(300 * 1024)


def stored_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def says_what_to_do(message: str) -> bool:
    said = ("bytes stored", f"your maximum of {MIB}", "delete files")
    return all(words in message for words in said)


async def test_uploads_of_both_forms_and_images_share_one_bound(
    api: ApiUnderTest, tmp_path: Path
) -> None:
    first = await for_batch(api)
    assert first.status_code == 200
    second = await for_prediction(api)
    assert second.status_code == 201, second.text
    before = stored_bytes(tmp_path / "objects")

    refused = await for_batch(api)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (400, "storage_quota_exceeded")
    assert error["param"] == "file"
    assert says_what_to_do(error["message"])

    for answer, field in (
        (await for_prediction(api), "content"),
        (await predicted(api, large_image()), "input.image"),
    ):
        assert answer.status_code == 422, answer.text
        assert answer.headers["content-type"] == "application/problem+json"
        (wrong,) = answer.json()["invalid_fields"]
        assert wrong["field"] == field
        assert says_what_to_do(wrong["description"])
    assert (
        stored_bytes(tmp_path / "objects" / "batches")
        + stored_bytes(tmp_path / "objects" / "files")
        == before
    ), "what was refused left nothing"

    assert (await for_batch(api, key="b")).status_code == 200, "others have their own bound"
    await api.http.delete(f"/v1/files/{second.json()['id']}", headers=bearer("a"))
    assert (await predicted(api, large_image())).status_code == 201
    assert (await for_batch(api)).status_code == 400, "the image counts"


async def test_deleted_file_leaves_no_bytes(api: ApiUnderTest, tmp_path: Path) -> None:
    made = (await for_prediction(api)).json()["id"]
    assert stored_bytes(tmp_path / "objects") > len(PART)
    deleted = await api.http.delete(f"/v1/files/{made}", headers=bearer("a"))
    assert deleted.status_code == 204
    assert stored_bytes(tmp_path / "objects") == 0


@pytest.mark.parametrize(("field", "status"), [("file", 400), ("content", 422)])
async def test_upload_without_room_is_refused_before_its_body_arrives(
    api: ApiUnderTest, field: str, status: int
) -> None:
    form = (
        "--b\r\n"
        f'content-disposition: form-data; name="{field}"; filename="a"\r\n\r\n'
        '{"custom_id": "1"}'
    ).encode()
    head = (
        "POST /v1/files HTTP/1.1\r\nhost: a\r\n"
        f"authorization: {bearer('a')['authorization']}\r\n"
        "content-type: multipart/form-data; boundary=b\r\n"
        f"content-length: {2 * MIB}\r\n\r\n"
    ).encode()
    async with peer_of(api) as peer:
        await peer.send(head + form)  # and nothing more
        answered, said = await peer.answer()
    assert answered == status
    assert says_what_to_do(said.decode())


@pytest.mark.parametrize(("size_bytes", "status"), [(len(PART), 200), (3 * len(PART), 400)])
async def test_upload_of_unknown_length_counts_as_it_arrives(
    api: ApiUnderTest, tmp_path: Path, size_bytes: int, status: int
) -> None:
    async def body() -> AsyncIterator[bytes]:
        yield b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        yield b'--b\r\ncontent-disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
        for _ in range(size_bytes // len(PART)):
            yield PART
        yield b"\r\n--b--\r\n"

    headers = {"content-type": "multipart/form-data; boundary=b", **bearer("a")}
    answer = await api.http.post("/v1/files", content=body(), headers=headers)
    assert answer.status_code == status, answer.text
    if status == 400:
        assert answer.json()["error"]["code"] == "storage_quota_exceeded"
        assert stored_bytes(tmp_path / "objects") == 0


async def test_files_fetched_by_url_count(tmp_path: Path, redis_url: str) -> None:
    """This includes files that no request refers to anymore: everything stored counts."""
    keys = keys_url(tmp_path, a="alice", b="bob")
    (tmp_path / "server").mkdir()
    async with serving_files(tmp_path / "server") as files:
        urls = [files.add(f"/{n}.bin", os.urandom(PART_BYTES), f"a/b{n}") for n in range(3)]
        settings = settings_for(
            tmp_path, redis_url=redis_url, keys_url=keys, files_max_bytes=MIB, **files.settings
        )
        async with running_api(settings, catalog=Catalog((*CATALOG.models, CLASS))) as api:
            api.worker.is_silent = True
            answers = [await _given_to_class(api, url) for url in urls]
            assert [one.status_code for one in answers] == [201, 201, 422]
            (wrong,) = answers[2].json()["invalid_fields"]
            assert wrong["field"] == "input.file"
            assert says_what_to_do(wrong["description"])
            assert (await for_prediction(api)).status_code == 422, "uploads share the quota"
            assert (await _given_to_class(api, urls[2], key="b")).status_code == 201
    stored = stored_bytes(tmp_path / "objects" / "inputs")
    assert stored == 3 * PART_BYTES, "what was refused left nothing"


PART_BYTES = 400 * 1024


async def _given_to_class(api: ApiUnderTest, url: str, key: str = "a") -> httpx.Response:
    body = {"version": CLASS.name, "input": {"file": url}}
    return await api.http.post("/v1/predictions", json=body, headers=bearer(key))


async def test_quota_error_names_the_input_of_a_class(tmp_path: Path, redis_url: str) -> None:
    settings = settings_for(tmp_path, redis_url=redis_url, files_max_bytes=MIB)
    uri = "data:a/b;base64," + base64.b64encode(bytes(MIB + 1)).decode()
    async with running_api(settings, catalog=Catalog((CLASS,))) as api:
        body = {"version": CLASS.name, "input": {"file": uri}}
        answer = await api.http.post("/v1/predictions", json=body)
    assert answer.status_code == 422, answer.text
    (wrong,) = answer.json()["invalid_fields"]
    assert wrong["field"] == "input.file"


async def test_class_that_returns_files_is_refused_without_room(
    tmp_path: Path, redis_url: str
) -> None:
    """Workers count the size of the class's earlier results."""
    keys = keys_url(tmp_path, a="alice", b="bob")
    settings = settings_for(tmp_path, redis_url=redis_url, keys_url=keys, files_max_bytes=MIB)
    assert CLASS.interface is not None
    interface = CLASS.interface.model_copy(update={"output": {"type": "string", "format": "uri"}})
    painter = CLASS.model_copy(update={"name": "painter", "interface": interface})
    async with running_api(settings, catalog=Catalog((CLASS, painter))) as api:
        api.worker.is_silent = True
        await hold(api.dependencies.objects, "alice", MIB + 1, time.time() + 3600)
        for name, key, status in (
            ("painter", "a", 422),
            ("painter", "b", 201),
            ("mine", "a", 201),
        ):
            body = {"version": name, "input": {}}
            answer = await api.http.post("/v1/predictions", json=body, headers=bearer(key))
            assert answer.status_code == status, answer.text
            if status == 422:
                assert f"your maximum of {MIB}" in answer.text


async def test_plan_says_how_much_is_stored(tmp_path: Path) -> None:
    plans = {"large": Plan(storage_max_bytes=3 * len(PART)), "small": Plan(storage_max_bytes=1)}
    tenants = {"alice": "large", "bob": "small"}
    keys = keys_url(tmp_path, plans=plans, tenants=tenants, a="alice", b="bob")
    settings = settings_for(tmp_path, keys_url=keys, files_max_bytes=MIB)
    async with running_api(settings) as api:
        for status in (201, 201, 422):
            assert (await for_prediction(api)).status_code == status
        assert (await for_batch(api, key="b")).status_code == 400
