"""A key that a caller puts in the wrong place appears in no log, metric, row, error or store."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from shared.stores.key_stores import KeyRedis
from shared.tenants.administration import Administration, KeyRequest
from shared.tenants.api_key import new_key
from shared.tenants.directory import Document
from tests.api.api_process import ApiProcess, api_process
from tests.api.harness import IMAGE_MODEL, TEXT_MODEL
from tests.limits import WAIT_LIMIT_S

pytestmark = [pytest.mark.slow, pytest.mark.anyio]
INPUT = {"input": {"text": "a"}}
PREDICTION = {"version": TEXT_MODEL.name} | INPUT
SOON = {"x-penstock-deadline-ms": "200"}
"""Short, because there is no worker."""


async def test_key_in_wrong_places_is_nowhere_else(
    tmp_path: Path, redis_url: str, pubsub_endpoint: str
) -> None:
    async with KeyRedis(redis_url, timeout_s=WAIT_LIMIT_S) as store:
        admin = Administration(store, actor="user ann", address="desk")
        await admin.start_directory(Document())
        issued = await admin.create_key(KeyRequest("acme", "ci"))
        await admin.rotate_key(issued.key.id, 3600)
    async with (
        api_process(tmp_path, redis_url, pubsub_endpoint, PENSTOCK_LOG_LEVEL="DEBUG") as api,
        httpx.AsyncClient(base_url=api.url, timeout=WAIT_LIMIT_S) as http,
    ):
        seen = []
        for key in (issued.key.text, new_key().text):
            answers = [await http.request(**one) for one in misplaced(key)]
            authorized = {"authorization": f"Bearer {issued.key.text}"}
            for one in misplaced(key):
                headers = authorized | one.pop("headers", {})
                answers.append(await http.request(**one, headers=headers))
            for answer in answers:
                assert answer.status_code >= 400, answer.text
                seen.append(answer.content + str(answer.headers).encode())
            seen.append(await raw(api, f"GET /{key} HTTP/1.1\r\nhost: x\r\n{key}: 1\r\n\r\n"))
            seen.append(await raw(api, f"{key} / HTTP/1.1\r\nhost: x\r\n\r\n"))
            seen.append(await raw(api, f"GET / HTTP/1.1\r\nhost: x\r\n{key}\r\n\r\n"))
        seen.append((await http.get(api.metrics_url)).content)
    seen.append(api.log.read_bytes())
    seen += [path.read_bytes() for path in api.spool.rglob("*") if path.is_file()]
    seen += dump(redis_url)
    assert b"API keys read" in seen[-len(dump(redis_url)) - len(spooled(api)) - 1]
    assert spooled(api), "refused requests leave rows"
    secret = issued.key.text[21:]
    for text in seen:
        # Even eight consecutive characters of a key are too many to reveal.
        for at in range(len(secret) - 8):
            assert secret[at : at + 8].encode() not in text


def spooled(api: ApiProcess) -> list[Path]:
    return [path for path in api.spool.rglob("*") if path.is_file()]


def misplaced(key: str) -> list[dict[str, Any]]:
    """Requests with the key in the wrong place, none of which can succeed."""
    text, drawing = {"model": TEXT_MODEL.name, "input": "a"}, {"model": IMAGE_MODEL.name}
    post = {"method": "POST", "url": "/v1/embeddings"}
    return [
        {"method": "GET", "url": f"/{key}"},
        {"method": "GET", "url": f"/v1/models/{key}"},
        {"method": "GET", "url": f"/v1/models/any/{key}/versions/{key}"},
        {"method": "GET", "url": f"/v1/files/{key}"},
        {"method": "GET", "url": f"/v1/predictions/{key}"},
        {"method": "DELETE", "url": f"/v1/files/{key}"},
        {"method": "PUT", "url": f"/v1/predictions/{key}", "json": {"version": key, "input": {}}},
        {"method": "GET", "url": f"/v1/predictions?cursor={key}"},
        # Their names would be stored with the prediction.
        {"method": "PUT", "url": f"/v1/predictions/{key[:60]}", "json": PREDICTION},
        {"method": "POST", "url": f"/v1/models/{key}/{TEXT_MODEL.name}/predictions", "json": INPUT},
        {
            "method": "POST",
            "url": f"/v1/deployments/{key}/{TEXT_MODEL.name}/predictions",
            "json": INPUT,
        },
        {
            "method": "POST",
            "url": "/v1/predictions",
            "json": {"version": f"{key}/{TEXT_MODEL.name}"} | INPUT,
        },
        {"method": "GET", "url": f"/v1/objects/{key}?type={key}&expires=1&signature={key}"},
        {"method": "GET", "url": f"/v1/nothing?api_key={key}"},
        post | {"content": key},
        post | {"content": f'{{"model": {key}'},
        post | {"json": text | {"model": key}},
        post | {"json": text | {"api_key": key}},
        post | {"json": text | {key: "x"}},
        post | {"json": text | {"encoding_format": key}},
        post | {"json": text | {"dimensions": key}},
        post | {"json": text | {"tokenizer": key, "input": [1]}},
        {"method": "POST", "url": "/v1/images/generations", "json": drawing | {"size": key}},
        {"method": "POST", "url": "/v1/predictions", "json": {"version": key, "input": {}}},
        {
            "method": "POST",
            "url": "/v1/predictions",
            "json": {"version": TEXT_MODEL.name, "input": {key: key}},
        },
        {"method": "POST", "url": "/v1/files", "content": key},
        *(
            post | {"json": text | extra, "headers": SOON | {name: key}}
            for name, extra in (
                ("x-request-id", {}),
                ("x-request-id", {"dimension": 1}),
                ("idempotency-key", {}),
                ("x-penstock-lane", {}),
                ("x-penstock-deadline-ms", {}),
                ("traceparent", {}),
                ("tracestate", {}),
                ("user-agent", {}),
                ("x-anything", {}),
                ("cookie", {}),
            )
        ),
        *(
            post | {"json": text, "headers": {"authorization": value}}
            for value in (f"Basic {key}", f"Bearer {key}x", f"Bearer {key} {key}", key)
        ),
        post | {"json": text, "headers": {"x-api-key": f"{key},{key}"}},
    ]


async def raw(api: ApiProcess, text: str) -> bytes:
    host, port = api.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(text.replace("\r\n\r\n", "\r\nconnection: close\r\n\r\n").encode())
    async with asyncio.timeout(WAIT_LIMIT_S):
        answer = await reader.read()
    writer.close()
    return answer


def dump(redis_url: str) -> list[bytes]:
    """Everything in Redis, names and values, in its on-disk format."""
    with redis.Redis.from_url(redis_url) as client:
        names: Any = client.keys("*")
        values: list[bytes] = []
        for name in names:
            kind: Any = client.type(name)
            read = {
                b"hash": client.hgetall,
                b"string": client.get,
                b"set": client.smembers,
                b"zset": lambda one: client.zrange(one, 0, -1),
                b"list": lambda one: client.lrange(one, 0, -1),
                b"stream": client.xrange,
            }[kind]
            values.append(name + str(read(name)).encode())
    return values
