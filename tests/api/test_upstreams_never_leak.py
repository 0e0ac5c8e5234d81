"""Error details from BigQuery, Redis, the broker and the object store never reach a caller."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web
from grpc import StatusCode
from grpc.aio import AioRpcError, Metadata

from api.errors import error_response
from shared.broker.pubsub.channel import translate
from shared.broker.rabbitmq.connection import translate as translate_amqp
from shared.errors import PenstockError, error_for_code
from shared.messages import failure, reason_of
from tests.api.harness import (
    IMAGE_MODEL,
    TEXT_MODEL,
    WRITER,
    ApiUnderTest,
    running_api,
    settings_for,
)
from tests.api.routes import routes_of
from tests.keys import bearer, keys_url, stored

pytestmark = pytest.mark.anyio
SECRET = "s3cr3t"
WORDS = f"http://10.9.8.7:9050/projects/{SECRET}/jobs/1 refused {SECRET}@iam"
BODIES: dict[str, Any] = {
    "/v1/embeddings": {"model": TEXT_MODEL.name, "input": ["a"]},
    "/v1/images/generations": {"model": IMAGE_MODEL.name, "prompt": "a", "n": 1},
    "/v1/chat/completions": {
        "model": WRITER.name,
        "messages": [{"role": "user", "content": "a"}],
        "stream": True,
    },
    "/v1/responses": {"model": WRITER.name, "input": "a", "stream": True},
    "/v1/predictions": {"version": TEXT_MODEL.name, "input": {"text": "a"}},
    "/v1/batches": {
        "input_file_id": "file-a",
        "endpoint": "/v1/embeddings",
        "completion_window": "24h",
    },
}
QUERIES = {"/v1/organization/costs": {"start_time": "2026-01-01"}}


async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A Redis that rejects every command with its own message."""
    try:
        while head := await reader.readline():
            for _ in range(int(head[1:])):
                length = int((await reader.readline())[1:])
                await reader.readexactly(length + 2)
            writer.write(f"-ERR {WORDS}\r\n".encode())
    except (ValueError, ConnectionError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.close()


@asynccontextmanager
async def refusing_bigquery(status: int) -> AsyncIterator[str]:
    async def refuse_query(_: web.Request) -> web.Response:
        detail = {"message": WORDS, "reason": "invalidQuery", "domain": "global"}
        body = {"error": {"code": status, "message": WORDS, "errors": [detail]}}
        return web.json_response(body, status=status)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", refuse_query)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def broken_world(tmp_path: Path, status: int) -> AsyncIterator[ApiUnderTest]:
    """An API whose upstreams all fail with detailed errors."""
    redis = await asyncio.start_server(refuse, "127.0.0.1", 0)
    async with redis, refusing_bigquery(status) as endpoint:
        settings = settings_for(
            tmp_path,
            redis_url=f"redis://127.0.0.1:{redis.sockets[0].getsockname()[1]}/0",
            objects_url=f"file://{tmp_path}/{SECRET}/objects",
            bigquery_endpoint=endpoint,
            project="p",
            secret="s",
            keys_url=keys_url(tmp_path, keys=[stored("boss", "house", scopes=("all", "admin"))]),
        )
        async with running_api(settings) as api:
            shutil.rmtree(tmp_path / SECRET)
            (tmp_path / SECRET).write_text("no directory")
            yield api


def refusals() -> list[PenstockError]:
    """Exceptions raised by both brokers' clients."""
    codes = [code for code in StatusCode if code is not StatusCode.OK]
    found = [
        translate(
            AioRpcError(code, Metadata(), Metadata(), details=WORDS, debug_error_string=""), WORDS
        )
        for code in codes
    ]
    return [*found, translate_amqp(ConnectionError(WORDS), WORDS)]


def path_of(pattern: str) -> str:
    named = pattern.replace("{name}", "usage").replace("{key_id}", "k1")
    return "/".join("x" if part.startswith("{") else part for part in named.split("/"))


def check(response: httpx.Response) -> None:
    assert SECRET not in response.text + str(response.headers), response.text
    assert "10.9.8.7" not in response.text, response.text


@pytest.mark.parametrize("status", [400, 403])
async def test_no_route_repeats_what_an_upstream_said(tmp_path: Path, status: int) -> None:
    async with broken_world(tmp_path, status) as api:
        api.broker.outage = translate(
            AioRpcError(
                StatusCode.UNAVAILABLE, Metadata(), Metadata(), details=WORDS, debug_error_string=""
            ),
            WORDS,
        )
        api.http.headers.update(bearer("boss") | {"x-penstock-deadline-ms": "2000"})
        statuses = set()
        for method, pattern in routes_of(api.app):
            if pattern.startswith(("/docs", "/console")) or method in ("HEAD", "OPTIONS"):
                continue
            response = await api.http.request(
                method, path_of(pattern), json=BODIES.get(pattern, {}), params=QUERIES.get(pattern)
            )
            check(response)
            statuses.add(response.status_code)
        assert 503 in statuses
        upload = await api.http.post(
            "/v1/files",
            data={"purpose": "batch"},
            files={"file": ("a.jsonl", json.dumps(BODIES["/v1/embeddings"]))},
        )
        assert upload.status_code == 503
        check(upload)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/images/generations"])
async def test_no_refusal_of_a_broker_reaches_a_caller(tmp_path: Path, path: str) -> None:
    async with running_api(settings_for(tmp_path)) as api:
        for error in refusals():
            api.broker.outage = error
            response = await api.http.post(path, json=BODIES[path])
            assert response.status_code >= 429, response.text
            check(response)
            check(await api.http.get("/readyz"))


def test_no_refusal_gets_into_a_message_or_a_record() -> None:
    for error in refusals():
        outcome = failure(0, error)
        assert outcome.error is not None
        assert SECRET not in outcome.error.message
        again = error_for_code(outcome.error.code, reason_of(outcome))
        assert SECRET not in bytes(error_response(again).body).decode()
        assert SECRET in error.message, "our logs lack the reason"


async def test_the_log_says_what_callers_are_not_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_api(settings_for(tmp_path)) as api:
        api.broker.outage = refusals()[0]
        response = await api.http.post("/v1/embeddings", json=BODIES["/v1/embeddings"])
    (record,) = [one for one in caplog.records if one.message == "request failed"]
    assert SECRET in record.__dict__["reason"]
    assert record.__dict__["request_id"] == response.headers["x-request-id"]
