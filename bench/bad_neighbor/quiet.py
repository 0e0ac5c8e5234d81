"""The quiet tenant: a low, steady rate of small requests on each surface, each of them timed."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import aiohttp
from aiohttp import web

from bench.bad_neighbor.inputs import (
    EMBEDDER,
    PAINTER,
    QUIET,
    WRITER,
    batch_file,
    chat,
    edit,
    noise_image,
    text,
)
from tests.keys import bearer

LIMIT_S = 60.0
"""Time after which a request counts as unanswered."""
BATCH_LINES, POLL_S = 4, 0.1
TOKENS = 16
"""The longest text that the quiet tenant requests."""
UPLOAD_LINES = 200
DAY_S = 86_400
RANGE_DAYS = 30


class RefusedError(Exception):
    """An unexpected response. The first argument is the response's status and text."""


@dataclass
class Noticed:
    """The quiet tenant's results on one surface."""

    sent: int = 0
    """Number of requests started. Each request results in a time or a rejection."""
    took_ms: list[float] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    """Requests that did not get the expected response, by status and reason."""

    def add(self, other: Noticed) -> None:
        self.sent += other.sent
        self.took_ms += other.took_ms
        self.refused += other.refused


class Quiet:
    """The tenant's client and its webhook receiver."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http = http
        self._url = url
        self._image = noise_image(64)
        self._told: dict[str, asyncio.Event] = {}
        self.receiver_url = ""

    async def texts(self) -> None:
        await self.post("/v1/embeddings", {"model": EMBEDDER, "input": text(12)})

    async def images(self) -> None:
        body = edit(self._image, "64x64", 4, model=PAINTER)
        await self.post("/v1/images/edits", body)

    async def generations(self) -> None:
        await self.post("/v1/chat/completions", chat(WRITER, 4, TOKENS))

    async def batches(self) -> None:
        """Uploads a file with a few lines, creates a batch from it, and waits for the batch."""
        file = await self._upload(batch_file(BATCH_LINES, 12))
        body = {
            "input_file_id": file["id"],
            "endpoint": "/v1/embeddings",
            "completion_window": "24h",
        }
        batch = await self.post("/v1/batches", body)
        while batch["status"] != "completed":
            if batch["status"] in ("failed", "expired", "cancelled"):
                raise RefusedError(f"batch {batch['status']}")
            await asyncio.sleep(POLL_S)
            batch = await self._get(f"/v1/batches/{batch['id']}")
        if batch["request_counts"]["failed"]:
            raise RefusedError("some of a batch's lines failed")

    async def uploads(self) -> None:
        """Uploads a file of about 30 KB, which is deleted afterwards."""
        await self._upload(batch_file(UPLOAD_LINES, 4))

    async def reports(self) -> None:
        """Queries usage for a month. A range that starts at a different second is in no cache."""
        now_s = int(time.time())
        start_s = now_s - RANGE_DAYS * DAY_S - time.monotonic_ns() % DAY_S
        await self._get(f"/v1/usage?from={start_s}&to={now_s}")

    async def webhooks(self) -> None:
        """Creates a prediction, and waits for its webhook."""
        name = text(1)
        arrived = self._told[name] = asyncio.Event()
        body = {
            "version": EMBEDDER,
            "input": {"text": text(12)},
            "webhook": f"{self.receiver_url}/{name}",
            "webhook_events_filter": ["completed"],
        }
        await self.post("/v1/predictions", body)
        await arrived.wait()

    async def streams(self) -> None:
        """Reads a chat to the end, streamed token by token."""
        body = chat(WRITER, 4, TOKENS, stream=True)
        async with self._http.post(f"{self._url}/v1/chat/completions", json=body) as answer:
            await _check(answer)
            if not (await answer.read()).rstrip().endswith(b"data: [DONE]"):
                raise RefusedError("a stream was cut off")

    async def tidy(self) -> None:
        for file in (await self._get("/v1/files"))["data"]:
            async with self._http.delete(f"{self._url}/v1/files/{file['id']}"):
                pass

    async def receive(self, request: web.Request) -> web.Response:
        if arrived := self._told.pop(request.match_info["name"], None):
            arrived.set()
        return web.Response(status=204)

    async def _upload(self, data: bytes) -> dict[str, Any]:
        form = aiohttp.FormData()
        form.add_field("purpose", "batch")
        form.add_field("file", data, filename="in.jsonl")
        return await self.post("/v1/files", form=form)

    async def post(
        self, path: str, body: object = None, form: aiohttp.FormData | None = None
    ) -> dict[str, Any]:
        """Sends a request and returns the response body.

        Raises:
            RefusedError: the response is not the expected one.
        """
        async with self._http.post(f"{self._url}{path}", json=body, data=form) as answer:
            return await _json(answer)

    async def _get(self, path: str) -> dict[str, Any]:
        async with self._http.get(f"{self._url}{path}") as answer:
            return await _json(answer)


async def _json(answer: aiohttp.ClientResponse) -> dict[str, Any]:
    await _check(answer)
    body: dict[str, Any] = await answer.json()
    return body


async def _check(answer: aiohttp.ClientResponse) -> None:
    if answer.status not in (200, 201):
        raise RefusedError(f"{answer.status} {(await answer.text())[:200]}")


class Surface(NamedTuple):
    """A part of the API, the quiet tenant's action on it, and how often it acts."""

    name: str
    every_s: float
    act: Callable[[Quiet], Awaitable[None]]


SURFACES = (
    Surface("texts", 0.1, Quiet.texts),
    Surface("images", 0.5, Quiet.images),
    Surface("generations", 0.1, Quiet.generations),
    Surface("batches", 0.5, Quiet.batches),
    Surface("uploads", 0.1, Quiet.uploads),
    Surface("reports", 0.5, Quiet.reports),
    Surface("streams", 0.1, Quiet.streams),
    Surface("webhooks", 0.2, Quiet.webhooks),
)
"""In this order. The noisy tenant's remaining webhooks are redelivered later, so webhooks come
last.

Each surface is used often enough to reach MIN_SAMPLES over all rounds of a full measurement.
"""
MIN_SAMPLES = 100
"""With fewer requests, the 99th percentile is simply the slowest request."""


@asynccontextmanager
async def quiet_tenant(url: str) -> AsyncIterator[Quiet]:
    """Yields the tenant with its webhook receiver on this machine."""
    timeout = aiohttp.ClientTimeout(total=LIMIT_S)
    async with aiohttp.ClientSession(
        headers=bearer(QUIET), timeout=timeout, connector=aiohttp.TCPConnector(limit=0)
    ) as http:
        quiet = Quiet(http, url)
        app = web.Application()
        app.router.add_post("/{name}", quiet.receive)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            quiet.receiver_url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            yield quiet
        finally:
            await runner.cleanup()


async def notice(quiet: Quiet, surface: Surface, seconds: float) -> Noticed:
    """Uses a surface at its rate for `seconds`, and waits for all of the requests it started.

    A request's time is measured from when it was due.
    """
    noticed, began_s = Noticed(), time.monotonic()
    async with asyncio.TaskGroup() as requests:
        for number in range(max(1, round(seconds / surface.every_s))):
            due_s = began_s + number * surface.every_s
            await asyncio.sleep(due_s - time.monotonic())
            requests.create_task(_one(quiet, surface, due_s, noticed))
    return noticed


async def _one(quiet: Quiet, surface: Surface, due_s: float, noticed: Noticed) -> None:
    noticed.sent += 1
    try:
        async with asyncio.timeout(LIMIT_S):
            await surface.act(quiet)
    except RefusedError as error:
        noticed.refused[str(error)] += 1
    except (TimeoutError, aiohttp.ClientError) as error:
        noticed.refused[f"no answer: {type(error).__name__}"] += 1
    else:
        noticed.took_ms.append(1000 * (time.monotonic() - due_s))
