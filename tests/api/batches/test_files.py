"""/v1/files as OpenAI's client calls it: streamed uploads, and files visible only to their own
tenant.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from api.batches import files as batch_files
from api.batches.names import new_file_id
from api.inputs import storage
from shared.stores.objects import ObjectStore
from tests.api.batches.batching import created
from tests.api.harness import ApiUnderTest, running_api, settings_for
from tests.keys import bearer, key_for, keys_url
from tests.waiting import until

pytestmark = pytest.mark.anyio

LINE = b'{"custom_id": "1", "method": "POST", "url": "/v1/embeddings", "body": {}}\n'
BOUNDARY = "multipart/form-data; boundary=b"
PURPOSE = b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
FILE = b'--b\r\ncontent-disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'


async def uploaded(client: Any, data: bytes = LINE, **given: Any) -> Any:
    return await client.files.create(file=("a.jsonl", data), purpose="batch", **given)


@pytest.fixture
async def tenants(tmp_path: Path) -> AsyncIterator[ApiUnderTest]:
    settings = settings_for(
        tmp_path,
        keys_url=keys_url(tmp_path, a="alice", b="bob"),
        files_max_bytes=1024 * 1024,
        request_max_bytes=100_000,
    )
    async with running_api(settings) as api:
        yield api


async def test_file_goes_in_and_comes_out(api: ApiUnderTest) -> None:
    client = api.openai()
    made = await uploaded(client, LINE * 3)
    assert (made.bytes, made.filename, made.purpose) == (3 * len(LINE), "a.jsonl", "batch")
    assert (made.object, made.status) == ("file", "processed")
    assert made.expires_at - made.created_at == 30 * 24 * 3600
    assert await client.files.retrieve(made.id) == made
    assert (await client.files.content(made.id)).content == LINE * 3
    assert (await client.files.delete(made.id)).deleted
    with pytest.raises(openai.NotFoundError):
        await client.files.retrieve(made.id)
    with pytest.raises(openai.NotFoundError):
        await client.files.content(made.id)
    assert [one async for one in client.files.list()] == []


async def test_upload_larger_than_any_other_body_is_streamed(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, request_max_bytes=64 * 1024, bodies_max_bytes=32 * 1024**2)
    async with running_api(settings) as api:
        data = LINE * (40 * 1024 * 1024 // len(LINE))
        made = await uploaded(api.openai(), data)
        assert made.bytes == len(data)
        parts = [
            (await api.http.get(f"/v1/files/{made.id}/content", headers={"range": range_})).content
            for range_ in ("bytes=0-99", f"bytes={len(data) - 100}-", "bytes=100-199")
        ]
        assert parts == [data[:100], data[-100:], data[100:200]]


@pytest.mark.parametrize(
    ("form", "entries"),
    [
        ({"files": {"content": b"x"}}, "results"),
        ({"files": {"file": LINE}, "data": {"purpose": "batch"}}, "data"),
    ],
    ids=["Replicate's file", "OpenAI's file"],
)
async def test_a_damaged_file_is_left_out_of_the_list_and_can_be_deleted(
    api: ApiUnderTest, tmp_path: Path, form: dict[str, Any], entries: str
) -> None:
    made = (await api.http.post("/v1/files", **form)).json()["id"]
    (damaged,) = (tmp_path / "objects").rglob("file.json")
    damaged.write_bytes(damaged.read_bytes()[:20])
    intact = (await api.http.post("/v1/files", **form)).json()["id"]
    listed = (await api.http.get("/v1/files")).json()
    assert [file["id"] for file in listed[entries]] == [intact]
    for file_id in (made, intact):
        (await api.http.delete(f"/v1/files/{file_id}")).raise_for_status()
    assert [path for path in (tmp_path / "objects").rglob("*") if path.is_file()] == []
    assert (await api.http.delete(f"/v1/files/{made}")).status_code == 404


async def test_a_damaged_open_batch_keeps_no_file(api: ApiUnderTest, tmp_path: Path) -> None:
    client = api.openai()
    damaged, intact = [await created(client, LINE) for _ in range(2)]
    (document,) = (tmp_path / "objects").rglob(f"{damaged.id}/created.json")
    document.write_bytes(document.read_bytes()[:20])
    deleted = await api.http.delete(f"/v1/files/{damaged.input_file_id}")
    assert (deleted.status_code, deleted.json()["deleted"]) == (200, True)
    refused = await api.http.delete(f"/v1/files/{intact.input_file_id}")
    assert refused.status_code == 400
    assert intact.id in refused.json()["error"]["message"]


async def test_ranges(api: ApiUnderTest) -> None:
    made = await uploaded(api.openai())
    url = f"/v1/files/{made.id}/content"
    part = await api.http.get(url, headers={"range": "bytes=5-9"})
    assert (part.status_code, part.content) == (206, LINE[5:10])
    assert part.headers["content-range"] == f"bytes 5-9/{len(LINE)}"
    for ignored in ("bytes=-5", "bytes=9-5", f"bytes={len(LINE)}-", "lines=1-2", "bytes=0-1,3-4"):
        whole = await api.http.get(url, headers={"range": ignored})
        assert (whole.status_code, whole.content) == (200, LINE), ignored
    head = await api.http.head(url)
    assert (head.status_code, head.content) == (200, b"")


async def test_field_order_does_not_matter(api: ApiUnderTest) -> None:
    body = FILE + LINE + b"\r\n" + PURPOSE + b"--b--\r\n"
    answer = await api.http.post("/v1/files", content=body, headers={"content-type": BOUNDARY})
    assert (answer.status_code, answer.json()["bytes"]) == (200, len(LINE))


async def test_pages_are_complete_and_in_order(
    api: ApiUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, made = api.openai(), []
    for _ in range(5):
        made.append((await uploaded(client)).id)
        await asyncio.sleep(0.002)  # ids sort by millisecond
    assert [one.id async for one in client.files.list(limit=2)] == made[::-1]
    assert [one.id async for one in client.files.list(limit=2, order="asc")] == made
    page = await client.files.list(limit=2)
    assert (len(page.data), page.has_more) == (2, True)
    assert [one.id async for one in client.files.list(purpose="batch_output")] == []
    assert [one.id async for one in client.files.list(purpose="batch")] == made[::-1]
    monkeypatch.setattr(batch_files, "PAGE", 3)
    assert [one.id async for one in client.files.list()] == made[::-1]
    for wrong in ({"limit": 0}, {"order": "up"}):
        with pytest.raises(openai.BadRequestError):
            await client.files.list(extra_query=wrong)


class CountingStore(ObjectStore):
    """Counts the documents that are read, and the rounds of reads."""

    reads = rounds = open = 0

    async def get(self, key: str, max_bytes: int) -> bytes:
        self.rounds += not self.open
        self.reads += 1
        self.open += 1
        try:
            return await super().get(key, max_bytes)
        finally:
            self.open -= 1


async def test_a_listing_reads_what_it_leaves_out_in_few_rounds_and_once() -> None:
    """With one file per round, listing 10,000 files took 5,000 rounds every time."""
    store = CountingStore("memory://")
    files = batch_files.BatchFiles(store, storage.Storage(store))
    now_s = time.time()
    first = batch_files.BatchFile(
        id=new_file_id(now_s - 1),
        tenant="a",
        filename="a",
        purpose="batch",
        size_bytes=1,
        created_at_s=now_s - 1,
        expires_at_s=now_s + 60,
    )
    await files.add(first)
    others = [
        msgspec.structs.replace(first, id=new_file_id(now_s), purpose="user_data")
        for _ in range(250)
    ]
    for one in others:
        await files.add(one)

    async def listed(purpose: str = "batch") -> list[str]:
        page = await files.page("a", after="", limit=1, is_ascending=False, purpose=purpose)
        return [one.id for one in page.files]

    assert await listed() == [first.id]
    assert store.rounds < 10
    store.reads = 0
    assert await listed() == [first.id]
    assert store.reads == 1
    # A file that has been rewritten is read again.
    changed = msgspec.structs.replace(others[0], purpose="batch", filename="b")
    await files.add(changed)
    assert await listed() == [changed.id]
    assert len(await listed("user_data")) == 1


async def test_another_tenants_file_does_not_exist(tenants: ApiUnderTest) -> None:
    alice, bob = tenants.openai(api_key=key_for("a")), tenants.openai(api_key=key_for("b"))
    made = await uploaded(alice)
    for call in (bob.files.retrieve, bob.files.content, bob.files.delete):
        with pytest.raises(openai.NotFoundError):
            await call(made.id)
    assert [one async for one in bob.files.list()] == []
    assert [one.id async for one in alice.files.list()] == [made.id]
    with pytest.raises(openai.AuthenticationError):
        await tenants.openai(api_key=key_for("c")).files.retrieve(made.id)


@pytest.mark.parametrize("strange", ["file-", "file-../x", "file-" + "0" * 32, "x" * 600, "%00"])
async def test_ids_that_are_none(api: ApiUnderTest, strange: str) -> None:
    for path in (f"/v1/files/{strange}", f"/v1/files/{strange}/content"):
        assert (await api.http.get(path)).status_code == 404


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty"),
        (b"\r\n\n  ", "empty"),
        (b"\xef\xbb\xbf", "empty"),
        (b"id,text\n1,a cat\n", "JSONL"),
        (b"[" + b" " * 5000, "JSONL"),
        (b"\xff\xfe{\0", "JSONL"),
    ],
)
async def test_files_that_are_no_jsonl(api: ApiUnderTest, data: bytes, reason: str) -> None:
    with pytest.raises(openai.BadRequestError, match=reason) as caught:
        await uploaded(api.openai(), data)
    assert caught.value.param == "file"
    assert [one async for one in api.openai().files.list()] == []


async def test_file_may_begin_with_a_mark_and_blank_lines(api: ApiUnderTest) -> None:
    assert (await uploaded(api.openai(), b"\xef\xbb\xbf\r\n\n" + LINE)).bytes


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (PURPOSE + b"--b--\r\n", "file: a file is required"),
        (FILE + LINE + b"\r\n--b--\r\n", "purpose"),
        (PURPOSE.replace(b"batch", b"fine-tune") + FILE + LINE + b"\r\n--b--\r\n", "purpose"),
        (PURPOSE + FILE + LINE, "ends before"),
        (PURPOSE + FILE + LINE + b"\r\n" + FILE + LINE + b"\r\n--b--\r\n", "exactly one"),
        (PURPOSE + PURPOSE + FILE + LINE + b"\r\n--b--\r\n", "repeated"),
        (PURPOSE + PURPOSE.replace(b"purpose", b"color") + FILE + LINE + b"\r\n--b--\r\n", "color"),
        (PURPOSE.replace(b"batch", b"x" * 5000) + b"--b--\r\n", "must be at most"),
        (b"no form", "can't be read|ends before"),
    ],
)
async def test_forms_that_are_refused(api: ApiUnderTest, body: bytes, reason: str) -> None:
    answer = await api.http.post("/v1/files", content=body, headers={"content-type": BOUNDARY})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert any(word in error["message"] for word in reason.split("|")), error
    assert (await api.http.get("/v1/files")).json()["data"] == []


async def test_expiry_is_the_callers(api: ApiUnderTest) -> None:
    client = api.openai()
    made = await uploaded(client, expires_after={"anchor": "created_at", "seconds": 3600})
    assert made.expires_at - made.created_at == 3600
    for wrong in (
        {"anchor": "created_at", "seconds": 3599},
        {"anchor": "created_at"},
        {"anchor": "last_active_at", "seconds": 3600},
    ):
        with pytest.raises(openai.BadRequestError, match=r"expires_after|anchor"):
            await uploaded(client, expires_after=wrong)


async def expire(api: ApiUnderTest, tenant: str, file_id: str) -> None:
    """Rewrites a file's metadata so that the file has expired."""
    files = api.dependencies.batch_files
    file = await files.find(tenant, file_id)
    await files.add(msgspec.structs.replace(file, expires_at_s=1.0))


async def test_expired_file_is_gone(api: ApiUnderTest) -> None:
    client = api.openai()
    made = await uploaded(client)
    await expire(api, "default", made.id)
    with pytest.raises(openai.NotFoundError):
        await client.files.retrieve(made.id)
    assert [one async for one in client.files.list()] == []


async def test_tenant_has_a_bound_of_bytes_and_others_have_theirs(tenants: ApiUnderTest) -> None:
    alice, bob = tenants.openai(api_key=key_for("a")), tenants.openai(api_key=key_for("b"))
    data = LINE * (600 * 1024 // len(LINE))
    first = await uploaded(alice, data)
    with pytest.raises(openai.BadRequestError, match=r"you have \d+ bytes stored"):
        await uploaded(alice, data)
    assert len([one async for one in alice.files.list()]) == 1
    await uploaded(bob, data)
    await alice.files.delete(first.id)
    await uploaded(alice, data)


async def test_expired_files_make_room(tenants: ApiUnderTest) -> None:
    alice, data = tenants.openai(api_key=key_for("a")), LINE * (600 * 1024 // len(LINE))
    made = await uploaded(alice, data)
    await expire(tenants, "alice", made.id)
    second = await uploaded(alice, data)
    assert [one.id async for one in alice.files.list()] == [second.id]


async def test_tenant_has_a_bound_of_files(
    api: ApiUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "MAX_FILES", 2)
    client = api.openai()
    for _ in range(2):
        await uploaded(client)
    with pytest.raises(openai.BadRequestError, match=r"2 files stored, which is the maximum"):
        await uploaded(client)


async def test_file_above_its_bound_leaves_nothing(
    api: ApiUnderTest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(batch_files, "FILE_MAX_BYTES", 1_500_000)
    with pytest.raises(openai.BadRequestError, match="must be at most 1500000 bytes"):
        await uploaded(api.openai(), LINE * (3_000_000 // len(LINE)))
    assert [path for path in (tmp_path / "objects").rglob("*") if path.is_file()] == []


async def test_body_above_all_bounds_is_refused_by_its_length(api: ApiUnderTest) -> None:
    headers = {"content-type": BOUNDARY, "content-length": str(300 * 1024 * 1024)}
    reader, writer = await asyncio.open_connection("127.0.0.1", int(api.url.rpartition(":")[2]))
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    writer.write(f"POST /v1/files HTTP/1.1\r\nhost: localhost\r\n{head}\r\n".encode())
    assert b" 413 " in await reader.readline()
    writer.close()


async def test_upload_that_breaks_off_leaves_no_file(api: ApiUnderTest, tmp_path: Path) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", int(api.url.rpartition(":")[2]))
    head = f"POST /v1/files HTTP/1.1\r\nhost: localhost\r\ncontent-type: {BOUNDARY}\r\n"
    writer.write(f"{head}content-length: 9000000\r\n\r\n".encode() + PURPOSE + FILE)
    writer.write(LINE * (4_000_000 // len(LINE)))
    await writer.drain()
    await until(lambda: _open_bodies(api) > 0)
    writer.close()
    await writer.wait_closed()
    await until(lambda: not _open_bodies(api))
    assert [path for path in (tmp_path / "objects").rglob("*") if path.is_file()] == []


def _open_bodies(api: ApiUnderTest) -> int:
    app: Any = api.app
    held: int = app._in_context._bodies.held_bytes
    return held


async def test_replicates_upload_has_its_own_shape_and_bound(tenants: ApiUnderTest) -> None:
    key = bearer("a")
    answer = await tenants.http.post("/v1/files", files={"content": ("a.png", b"x")}, headers=key)
    assert (answer.status_code, answer.json()["id"][:5]) == (201, "file_")
    found = await tenants.http.get(f"/v1/files/{answer.json()['id']}", headers=key)
    assert found.json()["checksums"]
    large = await tenants.http.post(
        "/v1/files", files={"content": ("a.png", b"x" * 200_000)}, headers=key
    )
    assert large.status_code == 413
    assert large.headers["content-type"] == "application/problem+json"
    missing = await tenants.http.get("/v1/files/file_none", headers=key)
    assert missing.headers["content-type"] == "application/problem+json"


async def test_metadata_of_a_listing_is_openais(api: ApiUnderTest) -> None:
    made = await uploaded(api.openai())
    page = json.loads((await api.http.get("/v1/files")).content)
    assert page["object"] == "list"
    assert (page["first_id"], page["last_id"], page["has_more"]) == (made.id, made.id, False)
