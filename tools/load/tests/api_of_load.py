"""An API for `penstock load`: it lists two models, and responds as the test specifies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

FOREIGN = "x-of-a-proxy"
"""A header on responses that don't come from Penstock."""
Answer = Callable[[dict[str, Any]], Awaitable[web.StreamResponse]]
MODELS = {
    "data": [
        {"id": "mini", "task": "embedding", "aliases": ["text-embedding-ada-002"]},
        {"id": "tiny", "task": "image"},
        {"id": "pairs", "task": "similarity"},
        {"id": "spell", "task": "custom"},
    ]
}


async def answer_texts(body: dict[str, Any]) -> web.StreamResponse:
    """Responds like the API: tokens in the body, cost in a header."""
    reply = {"data": [], "usage": {"total_tokens": 7}}
    headers = {"x-penstock-cost-usd": "0.00000007", "x-penstock-cache": "miss"}
    return web.json_response(reply, headers=headers)


@dataclass
class FakeApi:
    """The requests received."""

    url: str = ""
    requests: list[tuple[str, dict[str, str], dict[str, Any]]] = field(default_factory=list)
    """Path, headers and body of each request."""
    seen: asyncio.Event = field(default_factory=asyncio.Event)
    """Set with each request."""
    reads: list[dict[str, Any]] = field(default_factory=list)
    """A prediction's states, in the order polling returns them. The last one repeats."""
    read_headers: list[dict[str, str]] = field(default_factory=list)


@asynccontextmanager
async def serving(answer: Answer = answer_texts) -> AsyncIterator[FakeApi]:
    """Runs the API until the context ends."""
    api = FakeApi()

    async def handle(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        headers = {name.lower(): value for name, value in request.headers.items()}
        api.requests.append((request.path, headers, body))
        api.seen.set()
        response = await answer(body)
        if FOREIGN not in response.headers:
            response.headers["x-request-id"] = headers["x-request-id"]
        return response

    async def models(request: web.Request) -> web.StreamResponse:
        return web.json_response(MODELS)

    async def prediction(request: web.Request) -> web.StreamResponse:
        assert request.match_info["id"] == "p1"
        headers = {name.lower(): value for name, value in request.headers.items()}
        api.read_headers.append(headers)
        api.seen.set()
        run = api.reads.pop(0) if len(api.reads) > 1 else api.reads[0]
        return web.json_response(run, headers={"x-request-id": headers["x-request-id"]})

    app = web.Application()
    app.router.add_post("/v1/predictions", handle)
    app.router.add_get("/v1/predictions/{id}", prediction)
    app.router.add_get("/v1/models", models)
    app.router.add_post("/v1/embeddings", handle)
    app.router.add_post("/v1/images/generations", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        api.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield api
    finally:
        await runner.cleanup()
