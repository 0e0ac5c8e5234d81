"""The noisy tenant: on each surface, the worst that a caller with a valid key can do.

It is a separate process with a lower priority, because in reality it would call from another
machine. It prepares its requests, and sends a message when it is ready. The next message starts it.
At the end, it sends its results.
"""

from __future__ import annotations

import asyncio
import random
import re
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from multiprocessing.connection import Connection
from statistics import median
from typing import Any
from zoneinfo import available_timezones

import aiohttp
import msgspec
import uvloop

from bench.bad_neighbor.cpu_load import step_back
from bench.bad_neighbor.inputs import (
    BAD,
    EMBEDDER,
    MAX_TOKENS,
    PAINTER,
    SPENT,
    WRITER,
    batch_file,
    chat,
    edit,
    plain_image,
    text,
)
from tests.keys import bearer

AFTER_REFUSAL_S = 0.1
"""How long each connection waits after a rejection, instead of the time in `Retry-After`.
"""
TIDY_LIMIT_S = 20.0
KEY = bearer(BAD)
SPENT_KEY = bearer(SPENT)
DAYS = 400
"""The largest range that a usage query may cover."""
MAX_COST_DAYS = 180
DAY_S = 86_400
MIB = 1024 * 1024
PATIENT = {"x-penstock-deadline-ms": "300000"}
"""The longest deadline, so that a lot of work can be waiting."""
BATCH_PRIORITY = PATIENT | {"x-penstock-lane": "batch"}
MAX_REASONS = 6
REFUSALS = {400, 413, 422, 429, 503, 504}

Call = Callable[[], Coroutine[Any, Any, int]]
"""Sends one request. Returns the response status."""
_ZONES = sorted(zone for zone in available_timezones() if zone.startswith("America/"))
_NUMBER = re.compile(r"[0-9]+(\.[0-9]+)?")


class BadOrder(msgspec.Struct):
    """The load on a surface, with silent webhook `receivers` and slowly read `streams`."""

    url: str
    surface: str
    seconds: float
    receivers: int
    streams: int


class BadReport(msgspec.Struct):
    """The noisy tenant's results. Times are medians."""

    sent: int
    refused: int
    """Number of 4xx, 503, or 504 responses."""
    statuses: dict[int, int]
    """Number of responses by status. 0 means no response or that the connection was closed."""
    reasons: dict[str, int]
    batch_ms: float
    step_ms: float
    """Time per token of a text."""


class Bad:
    """The tenant's client. Each method acts once, or keeps acting until it is canceled."""

    def __init__(self, order: BadOrder, http: aiohttp.ClientSession) -> None:
        self._order = order
        self._http = http
        self._large = plain_image(4096) if order.surface == "images" else ""
        self._upload = batch_file(1, 12) + b" " * (8 * MIB)
        self._receivers: list[str] = []
        self._is_over = False
        self.sent = 0
        self.statuses: Counter[int] = Counter()
        self.reasons: Counter[str] = Counter()
        self.batch_ms: list[float] = []
        self.step_ms: list[float] = []

    async def time_alone(self) -> None:
        """Requests the work once, so its time is known even if no response comes later."""
        kinds: dict[str, Call] = {
            "texts": self._pages,
            "images": self._images,
            "generations": self._long_text,
            "batches": self._patient_page,
            "streams": self._long_text,
            "webhooks": self._short_text,
        }
        if act := kinds.get(self._order.surface):
            await act()

    async def run(self) -> None:
        """Sends its load for the duration of the order, then abandons any unfinished requests."""
        async with AsyncExitStack() as undo:
            if self._order.surface == "webhooks":
                self._receivers = await undo.enter_async_context(_hanging(self._order.receivers))
            tasks = [asyncio.create_task(self._again(act)) for act in self._worst()]
            await asyncio.sleep(self._order.seconds)
            # An aiohttp timeout that fires at the same time swallows the cancellation.
            self._is_over = True
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        with suppress(TimeoutError, aiohttp.ClientError):
            async with asyncio.timeout(TIDY_LIMIT_S):
                await self._tidy()

    def _worst(self) -> Sequence[Call]:
        """Returns the calls that are repeated concurrently on the surface."""
        worst: dict[str, list[Call]] = {
            "texts": [self._pages] * 28 + [self._hang_up] * 2,
            "images": [self._late_edit] * 16 + [self._images] * 2 + [self._image] * 4,
            "generations": [self._long_text] * 24 + [self._choices] * 8,
            "batches": [self._send_over_budget_batch] * 4
            + [self._large_batch] * 2
            + [self._patient_page],
            "uploads": [self._file] * 4 + [self._content] * 4 + [self._trickle] * 16,
            "reports": [self._usage] * 8 + [self._costs] * 8 + [self._report] * 8,
            "streams": [self._slow_reader] * self._order.streams + [self._long_text],
            "webhooks": [self._unheard] * 8 + [self._short_text],
        }
        return worst[self._order.surface]

    async def _again(self, act: Call) -> None:
        while not self._is_over:
            self.sent += 1
            try:
                status = await act()
            except (aiohttp.ClientError, TimeoutError, OSError):
                status = 0
            self.statuses[status] += 1
            if status in REFUSALS or not status:
                await asyncio.sleep(AFTER_REFUSAL_S)

    async def _post(
        self, path: str, body: object, headers: dict[str, str] | None = None, limit_s: float = 60.0
    ) -> int:
        url, timeout = f"{self._order.url}{path}", aiohttp.ClientTimeout(total=limit_s)
        async with self._http.post(url, json=body, headers=headers, timeout=timeout) as answer:
            await self._note(answer)
            return answer.status

    async def _note(self, answer: aiohttp.ClientResponse) -> None:
        body = await answer.read()
        if answer.status >= 400:
            self.reasons[f"{answer.status} {_message(body)}"] += 1
        elif inference_ms := float(answer.headers.get("x-penstock-inference-ms", 0.0)):
            self.batch_ms.append(inference_ms)
            usage = msgspec.json.decode(body, type=_Usage).usage
            if usage.get("completion_tokens"):
                self.step_ms.append(inference_ms / usage["completion_tokens"])

    async def _pages(self) -> int:
        body = {"model": EMBEDDER, "input": [text(200) for _ in range(32)]}
        return await self._post("/v1/embeddings", body, PATIENT, limit_s=300.0)

    async def _patient_page(self) -> int:
        """Requests work at batch priority; the responses show how long a batch takes."""
        body = {"model": EMBEDDER, "input": [text(200) for _ in range(8)]}
        return await self._post("/v1/embeddings", body, BATCH_PRIORITY, limit_s=300.0)

    async def _short_text(self) -> int:
        """Requests a text like those in its predictions.

        The response shows how long batches of them take.
        """
        status = await self._post("/v1/embeddings", {"model": EMBEDDER, "input": text(4)}, PATIENT)
        await asyncio.sleep(AFTER_REFUSAL_S)
        return status

    async def _hang_up(self) -> int:
        body = {"model": EMBEDDER, "input": [text(20) for _ in range(16)]}
        return await self._post("/v1/embeddings", body, limit_s=0.2)

    async def _late_edit(self) -> int:
        """Sends large source images whose deadlines often pass while they wait to be decoded."""
        deadline = {"x-penstock-deadline-ms": str(random.randrange(150, 1500))}
        body = edit(self._large, "256x256", 20, model=PAINTER)
        return await self._post("/v1/images/edits", body, deadline)

    async def _images(self) -> int:
        body = {"prompt": text(4), "size": "256x256", "n": 4, "model": PAINTER}
        return await self._post("/v1/images/generations", body, PATIENT, limit_s=300.0)

    async def _image(self) -> int:
        body = {"prompt": text(4), "size": "256x256", "model": PAINTER}
        return await self._post("/v1/images/generations", body, PATIENT, limit_s=300.0)

    async def _long_text(self) -> int:
        return await self._post("/v1/chat/completions", chat(WRITER, 4, MAX_TOKENS))

    async def _choices(self) -> int:
        return await self._post("/v1/chat/completions", chat(WRITER, 4, MAX_TOKENS, n=8))

    async def _send_over_budget_batch(self) -> int:
        return await self._batch(SPENT_KEY, lines=200, words=12)

    async def _large_batch(self) -> int:
        return await self._batch(KEY, lines=2000, words=200)

    async def _batch(self, key: dict[str, str], lines: int, words: int) -> int:
        form = aiohttp.FormData()
        form.add_field("purpose", "batch")
        form.add_field("file", batch_file(lines, words), filename="in.jsonl")
        url = self._order.url
        async with self._http.post(f"{url}/v1/files", data=form, headers=key) as answer:
            await self._note(answer)
            if answer.status != 200:
                return answer.status
            file = (await answer.json())["id"]
        body = {"input_file_id": file, "endpoint": "/v1/embeddings", "completion_window": "24h"}
        return await self._post("/v1/batches", body, key)

    async def _file(self) -> int:
        form = aiohttp.FormData()
        form.add_field("purpose", "batch")
        form.add_field("file", self._upload, filename="in.jsonl")
        return await self._send_form(form)

    async def _content(self) -> int:
        form = aiohttp.FormData()
        form.add_field("content", self._upload, filename="in.bin")
        return await self._send_form(form)

    async def _send_form(self, form: aiohttp.FormData) -> int:
        """Uploads a form.

        Once the quota is full, occasionally deletes something so it can continue.
        """
        async with self._http.post(f"{self._order.url}/v1/files", data=form) as answer:
            await self._note(answer)
        if answer.status >= 400 and random.random() < 0.1:
            await self._delete_files(4)
        return answer.status

    async def _trickle(self) -> int:
        """Uploads a file whose bytes arrive slowly."""

        async def slowly() -> AsyncIterator[bytes]:
            for _ in range(100):
                yield b"{}" * 32
                await asyncio.sleep(0.1)

        form = aiohttp.FormData()
        form.add_field("purpose", "batch")
        form.add_field("file", slowly(), filename="in.jsonl")
        return await self._send_form(form)

    async def _usage(self) -> int:
        start_s, end_s = _largest_range()
        return await self._get(f"/v1/usage?from={start_s}&to={end_s}")

    async def _costs(self) -> int:
        end_s = int(time.time()) - random.randrange(DAY_S)
        start_s = end_s - (MAX_COST_DAYS - 1) * DAY_S
        groups = "&group_by=project_id&group_by=api_key_id&group_by=line_item"
        return await self._get(
            f"/v1/organization/costs?start_time={start_s}&end_time={end_s}&limit={MAX_COST_DAYS}{groups}"
        )

    async def _report(self) -> int:
        days = random.randrange(DAYS // 2, DAYS)
        since = time.strftime("%Y-%m-%d", time.gmtime(time.time() - days * DAY_S))
        until = time.strftime("%Y-%m-%d", time.gmtime())
        return await self._get(
            f"/v1/reports/usage?from={since}&to={until}&tz={random.choice(_ZONES)}"
        )

    async def _get(self, path: str) -> int:
        async with self._http.get(f"{self._order.url}{path}") as answer:
            await self._note(answer)
            return answer.status

    async def _slow_reader(self) -> int:
        """Reads a stream a few bytes at a time."""
        body = chat(WRITER, 4, MAX_TOKENS, stream=True)
        url = f"{self._order.url}/v1/chat/completions"
        async with (
            aiohttp.ClientSession(
                headers=KEY, connector=aiohttp.TCPConnector(socket_factory=_small_socket)
            ) as http,
            http.post(url, json=body, read_bufsize=64) as answer,
        ):
            async for _ in answer.content.iter_chunked(64):
                await asyncio.sleep(0.1)
            return answer.status

    async def _unheard(self) -> int:
        """Creates a prediction whose webhook goes to a receiver that doesn't respond."""
        body = {
            "version": EMBEDDER,
            "input": {"text": text(4)},
            "webhook": random.choice(self._receivers),
            "webhook_events_filter": ["start", "completed"],
        }
        status = await self._post("/v1/predictions", body)
        await asyncio.sleep(AFTER_REFUSAL_S)
        return status

    async def _tidy(self) -> None:
        """Cancels its batches and deletes its files, so the next drive starts like the first."""
        if self._order.surface == "batches":
            await self._cancel_batches()
        if self._order.surface in ("batches", "uploads"):
            await self._delete_files(1000)

    async def _cancel_batches(self) -> None:
        url = f"{self._order.url}/v1/batches"
        async with self._http.get(url, params={"limit": "100"}) as answer:
            batches = (await answer.json()).get("data", [])
        for batch in batches:
            if batch["status"] in ("validating", "in_progress"):
                async with self._http.post(f"{url}/{batch['id']}/cancel"):
                    pass

    async def _delete_files(self, most: int) -> None:
        url = f"{self._order.url}/v1/files"
        while most > 0:
            async with self._http.get(url) as answer:
                page: dict[str, Any] = await answer.json() if answer.status == 200 else {}
            files = [*page.get("data", ()), *page.get("results", ())][:most]
            most = most - len(files) if files else 0
            for file in files:
                async with self._http.delete(f"{url}/{file['id']}"):
                    pass


class _Usage(msgspec.Struct):
    """The token usage reported in a response."""

    usage: dict[str, Any] = {}


def _small_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """Opens a socket with a small receive buffer, so that its peer soon has to wait."""
    family, kind, protocol, *_ = address
    connection = socket.socket(family, kind, protocol)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    return connection


def _message(said: bytes) -> str:
    """Returns an error's text with all numbers set to 0, so similar errors are counted together."""
    with suppress(msgspec.DecodeError, AttributeError):
        reply = msgspec.json.decode(said)
        said = str(reply.get("detail") or reply["error"]["message"]).encode()
    return _NUMBER.sub("0", said.decode(errors="replace"))[:120]


def _largest_range() -> tuple[int, int]:
    """Returns a time range that no cached response covers."""
    end_s = int(time.time()) - random.randrange(DAY_S)
    return end_s - (DAYS - 2) * DAY_S + random.randrange(DAY_S), end_s


@asynccontextmanager
async def _hanging(count: int) -> AsyncIterator[list[str]]:
    """Yields URLs of receivers that accept a request and never respond."""

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.CancelledError):
            while await reader.read(MIB):
                pass
        writer.close()

    async with AsyncExitStack() as undo:
        urls = []
        for _ in range(count):
            server = await asyncio.start_server(hang, "127.0.0.1", 0)
            undo.callback(server.close)
            urls.append(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/")
        yield urls


def do_worst(order: BadOrder, pipe: Connection) -> None:
    """Runs the noisy tenant in this process until it has sent its report."""
    step_back()
    uvloop.run(_carry_out(order, pipe))


async def _carry_out(order: BadOrder, pipe: Connection) -> None:
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=120.0)
    async with aiohttp.ClientSession(headers=KEY, connector=connector, timeout=timeout) as http:
        bad = Bad(order, http)
        await bad.time_alone()
        pipe.send("ready")
        pipe.recv()
        await bad.run()
    report = BadReport(
        bad.sent,
        sum(count for status, count in bad.statuses.items() if status >= 400),
        dict(sorted(bad.statuses.items())),
        dict(bad.reasons.most_common(MAX_REASONS)),
        median(bad.batch_ms or [0.0]),
        median(bad.step_ms or [0.0]),
    )
    pipe.send(report)
