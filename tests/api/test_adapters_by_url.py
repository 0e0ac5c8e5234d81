"""`lora_weights` as a URL: fetched once, by digest, and only from sources the catalog allows."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from shared.models.catalog import Catalog, Model
from shared.models.image_entry import AdapterUrls
from shared.models.tasks.image import ChosenAdapter
from tests.api.batches.batching import answers, batching, created, jsonl, until
from tests.api.file_server import FileServer, serving_files
from tests.api.harness import (
    CATALOG,
    IMAGE_MODEL,
    ApiUnderTest,
    running_api,
    settings_for,
)
from tests.api.predicting import WAIT
from tests.api.test_images import drawn
from tests.api.test_inputs_by_url import CLASS
from tests.api.test_masks import SOURCE, uri
from tests.keys import bearer, keys_url

pytestmark = pytest.mark.anyio
DATA = bytes(range(256)) * 400
"""Larger than files that are sent inline in messages. Only workers read it."""
SHA256 = hashlib.sha256(DATA).hexdigest()
MAX_BYTES = 200_000


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[FileServer]:
    async with serving_files(tmp_path) as running:
        running.add("/bucket/ink.safetensors", DATA, "application/octet-stream", ETag='"1"')
        yield running


def painter(server: FileServer, **urls: Any) -> Model:
    allowed = AdapterUrls(allowed=(f"{server.url}/bucket/",), max_bytes=MAX_BYTES, **urls)
    image = IMAGE_MODEL.image.model_copy(update={"adapter_urls": allowed})
    update = {"name": "painter", "aliases": (), "image": image}
    return Model.model_validate(IMAGE_MODEL.model_copy(update=update).model_dump())


@pytest.fixture
async def api(server: FileServer, tmp_path: Path, redis_url: str) -> AsyncIterator[ApiUnderTest]:
    settings = settings_for(tmp_path, redis_url=redis_url, secret="s", **server.settings)
    catalog = Catalog((painter(server), CLASS, *CATALOG.models))
    async with running_api(settings, catalog=catalog) as running:
        yield running


def body(url: str, **more: Any) -> dict[str, Any]:
    return {"model": "painter", "prompt": "a", "seed": 1, "lora_weights": url} | more


async def test_every_door_takes_a_url(api: ApiUnderTest, server: FileServer) -> None:
    url = f"{server.url}/bucket/ink.safetensors"
    wish = body(url, lora_scale=0.5)
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/v1/images/generations", wish),
        ("/v1/images/edits", wish | {"images": [{"image_url": uri(SOURCE)}]}),
        (
            "/v1/predictions",
            {
                "version": "painter",
                "input": {"prompt": "a", "lora_weights": url, "lora_scale": 0.5},
            },
        ),
    ]
    for path, sent in asked:
        answer = await api.http.post(path, json=sent, headers=WAIT)
        assert answer.status_code in (200, 201), answer.text
    adapters = [one.adapter for one in drawn(api)]
    assert len(adapters) == 3
    assert len(set(adapters)) == 1
    (chosen,) = set(adapters)
    assert isinstance(chosen, ChosenAdapter)
    assert (chosen.name, chosen.version) == (f"sha256:{SHA256}", f"sha256:{SHA256}")
    assert (chosen.scale, chosen.url) == (0.5, "")
    assert await api.dependencies.objects.get(chosen.object_key, MAX_BYTES) == DATA


async def test_many_requests_load_a_file_once(api: ApiUnderTest, server: FileServer) -> None:
    """Concurrent requests share the download. Later requests check whether the file has changed."""
    path = "/bucket/ink.safetensors"
    url = f"{server.url}{path}"

    async def ask(seed: int) -> None:
        answer = await api.http.post("/v1/images/generations", json=body(url, seed=seed))
        assert answer.status_code == 200, answer.text

    await asyncio.gather(*(ask(seed) for seed in range(5)))
    assert server.asked[path] == 1
    for seed in range(5, 8):
        await ask(seed)
    asked = server.asked[path]
    assert server.headers[path]["if-none-match"] == '"1"', "it is asked for by its tag only"
    # With the digest, there is no need to check.
    await ask_with_digest(api, url)
    assert server.asked[path] == asked
    assert len(drawn(api)) == 9


async def ask_with_digest(api: ApiUnderTest, url: str) -> None:
    pinned = body(f"{url}#sha256={SHA256}", seed=99)
    answer = await api.http.post("/v1/images/generations", json=pinned)
    assert answer.status_code == 200, answer.text


async def test_small_file_counts_and_is_remembered_like_a_large_one(
    server: FileServer, tmp_path: Path, redis_url: str
) -> None:
    """A file that would fit in a message is stored too, because only workers read it."""
    path, data = "/bucket/small.safetensors", DATA[:1000]
    url = server.add(path, data, "application/octet-stream", ETag='"1"')
    settings = settings_for(
        tmp_path, redis_url=redis_url, secret="s", files_max_bytes=1 << 20, **server.settings
    )
    async with running_api(settings, catalog=Catalog((painter(server),))) as api:
        almost_all = {"content": bytes((1 << 20) - 1500)}
        assert (await api.http.post("/v1/files", files=almost_all)).status_code == 201
        pinned = f"{url}#sha256={hashlib.sha256(data).hexdigest()}"
        for seed in range(2):
            sent = body(pinned, seed=seed)
            assert (await api.http.post("/v1/images/generations", json=sent)).status_code == 200
        assert server.asked[path] == 1
        other = server.add("/bucket/other.safetensors", data[::-1], ETag='"1"')
        answer = await api.http.post("/v1/images/generations", json=body(other))
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert (error["param"], error["code"]) == ("lora_weights", "storage_quota_exceeded")


async def test_results_belong_to_the_bytes(api: ApiUnderTest, server: FileServer) -> None:
    path = "/bucket/ink.safetensors"
    other = server.add("/bucket/copy.safetensors", DATA, "binary/octet-stream")
    hits = []
    for change, url in (
        (False, f"{server.url}{path}"),
        (False, f"{server.url}{path}"),
        (False, other),
        (True, f"{server.url}{path}"),
    ):
        if change:
            server.add(path, DATA[::-1], "application/octet-stream", ETag='"2"')
        answer = await api.http.post("/v1/images/generations", json=body(url))
        hits.append(answer.headers["x-penstock-cache"])
    assert hits == ["miss", "hit", "hit", "miss"]
    first, second = (one.adapter for one in drawn(api))
    assert first is not None
    assert second is not None
    assert first.name != second.name


async def test_a_wrong_url_is_refused_by_the_field(api: ApiUnderTest, server: FileServer) -> None:
    inside = f"{server.url}/bucket"
    server.add("/elsewhere/ink.safetensors", DATA)
    server.redirect("/bucket/out.safetensors", f"{server.url}/elsewhere/ink.safetensors")
    server.add("/bucket/large.safetensors", bytes(MAX_BYTES + 1))
    server.add_chunked("/bucket/chunked.safetensors", bytes(MAX_BYTES + 1))
    wrong = {
        f"{server.url}/elsewhere/ink.safetensors": "is not under",
        f"{inside}/../elsewhere/ink.safetensors": "is not under",
        f"{inside}/%2e%2e/elsewhere/ink.safetensors": "is not under",
        f"{inside}/..%2felsewhere/ink.safetensors": "is not under",
        f"{inside}/out.safetensors": "is not under",
        f"{inside}/large.safetensors": f"the file exceeds the maximum of {MAX_BYTES} bytes",
        f"{inside}/chunked.safetensors": f"the file exceeds the maximum of {MAX_BYTES} bytes",
        f"{inside}/gone.safetensors": "returned 404",
        f"{inside}/ink.safetensors#sha256={'0' * 64}": f"is sha256={SHA256}",
        f"{inside}/ink.safetensors#md5=1": "must be sha256=",
        "https://127.0.0.1:1/bucket/ink.safetensors": "is not",
        "https://user:secret@127.0.0.1/bucket/ink.safetensors": "must not contain credentials",
        f"http://{server.url[8:]}/bucket/ink.safetensors": "is not an adapter of painter",
        "gs://bucket/ink.safetensors": f"files by URL under {inside}/",
        "file:///etc/passwd": "is not an adapter of painter",
        "sha256:" + SHA256: "is not an adapter of painter",
    }
    for url, reason in wrong.items():
        answer = await api.http.post("/v1/images/generations", json=body(url))
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "lora_weights"), (url, error)
        assert reason in error["message"], url
        assert "secret" not in error["message"]
        asked = {"version": "painter", "input": {"prompt": "a", "lora_weights": url}}
        answer = await api.http.post("/v1/predictions", json=asked)
        assert answer.status_code == 422, url
        assert "lora_weights" in answer.text
    assert server.asked["/elsewhere/ink.safetensors"] == 0
    assert not api.worker.items


@pytest.mark.parametrize(
    "path",
    ["/elsewhere/ink.safetensors", "/bucket/out.safetensors", "/elsewhere/in.safetensors"],
)
async def test_url_fetched_by_another_model_is_still_refused(
    api: ApiUnderTest, server: FileServer, path: str
) -> None:
    """A custom class may fetch from any folder, but its downloads do not bypass `allowed`."""
    server.add("/elsewhere/ink.safetensors", DATA, "application/octet-stream", ETag='"1"')
    server.redirect("/bucket/out.safetensors", f"{server.url}/elsewhere/ink.safetensors")
    server.redirect("/elsewhere/in.safetensors", f"{server.url}/bucket/ink.safetensors")
    url = f"{server.url}{path}"
    api.worker.is_silent = True
    given = {"version": CLASS.name, "input": {"file": url}}
    assert (await api.http.post("/v1/predictions", json=given)).status_code == 201
    assert server.asked[path] == 1
    sent = body(f"{url}#sha256={SHA256}")
    answer = await api.http.post("/v1/images/generations", json=sent)
    assert answer.status_code == 400, answer.text
    assert "is not under" in answer.json()["error"]["message"]


async def test_models_without_an_allowed_bucket_take_no_url(
    api: ApiUnderTest, server: FileServer
) -> None:
    url = f"{server.url}/bucket/ink.safetensors"
    sent = body(url) | {"model": IMAGE_MODEL.name}
    answer = await api.http.post("/v1/images/generations", json=sent)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "lora_weights")
    assert "does not support adapters" in answer.json()["error"]["message"]
    assert not server.asked


async def test_schema_of_a_model_has_the_bucket(api: ApiUnderTest, server: FileServer) -> None:
    answer = await api.http.get("/v1/models/anyone/painter")
    schemas = answer.json()["latest_version"]["openapi_schema"]["components"]["schemas"]
    kinds = schemas["Input"]["properties"]["lora_weights"]["anyOf"]
    assert [kind.get("format") for kind in kinds] == ["uri", None]
    assert f"{server.port}/bucket/" in kinds[0]["pattern"]


async def test_what_a_tenant_has_fetched_is_of_no_use_to_others(
    server: FileServer, tmp_path: Path, redis_url: str
) -> None:
    """By then, the URL is no longer accessible.

    The digest is not a secret and does not unlock anything.
    """
    keys = keys_url(tmp_path, one="acme", two="globex")
    settings = settings_for(
        tmp_path, redis_url=redis_url, secret="s", keys_url=keys, **server.settings
    )
    pinned = f"{server.url}/bucket/ink.safetensors#sha256={SHA256}"
    statuses = []
    async with running_api(settings, catalog=Catalog((painter(server),))) as api:
        for number, key in enumerate(("one", "two", "one")):
            if number == 1:
                server.files.clear()
            sent = body(pinned, seed=number)
            answer = await api.http.post("/v1/images/generations", json=sent, headers=bearer(key))
            statuses.append(answer.status_code)
            if key == "two":
                assert "returned 404" in answer.json()["error"]["message"]
        assert statuses == [200, 400, 200]
        assert len({one.adapter for one in drawn(api)}) == 1


async def test_lines_of_batches_take_a_url(
    server: FileServer, tmp_path: Path, redis_url: str
) -> None:
    """If an adapter's file is gone, only that adapter's line fails."""
    catalog = Catalog((painter(server),))
    url, gone = (f"{server.url}/bucket/{name}.safetensors" for name in ("ink", "gone"))
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/images/generations", "body": sent}
        for name, sent in (("a", body(url, n=2)), ("b", body(gone)), ("c", body(url)))
    ]
    async with batching(tmp_path, redis_url, catalog=catalog, **server.settings) as (api, _):
        client = api.openai()
        batch = await created(client, jsonl(lines), "/v1/images/generations")
        done = await until(client, batch)
        assert done.status == "completed", done
        found = await answers(client, done.output_file_id)
        assert [one["custom_id"] for one in found] == ["a", "c"]
        (error,) = await answers(client, done.error_file_id)
        assert error["response"]["body"]["error"]["param"] == "lora_weights"
        names = {one.adapter and one.adapter.name for one in drawn(api)}
        assert names == {f"sha256:{SHA256}"}
