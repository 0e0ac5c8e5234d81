"""Attacks of bench/attacks.py with work that nobody pays for, and with work that holds others up.

Each function that prepares an attack returns what sends one request. Each check compares what the
attacker got done for nothing with what its plan would let it buy (docs/reference/limits.md).
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
import random
import time
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

import redis

from bench.bad_neighbor.inputs import EMBEDDER, PAINTER, batch_file, edit, noise_image, text
from bench.report import Figure
from shared.tasks.embedding import estimate_tokens
from shared.tenants.plan import Plan
from tests.documents import pages_pdf, stream
from tests.keys import bearer

READER, RACE = "ocr", "race"
"""The class that reads documents (examples/ocr), and a flow of a text and an image."""
WASTEFUL, POOR, RACER = "wasteful", "poor", "racer"
"""Names of keys, and of their tenants."""
PLANS = {
    WASTEFUL: Plan(
        requests_per_min=300, tokens_per_min=2_000_000, work_per_min=2000, budget_usd_per_month=1e6
    ),
    POOR: Plan(budget_usd_per_month=0.2),
    RACER: Plan(requests_per_min=1_000_000, budget_usd_per_month=1e6),
}
PRICE_USD = 10.0
"""Per million tokens of EMBEDDER. A line of LINE_BYTES costs more than the budget of POOR by its
bytes, and a hundredth of it by the tokens that the model reads."""
LINE_BYTES = 60_000
SLOW_PAGES, FILLS = 30, 1000
"""Pages of a slow document, and how often each is filled: 3 s of CPU a page, in 4 KB."""
JUNK, JUNK_BYTES = "/bucket/junk.png", 1024 * 1024
CUT_BYTES = 400_000
CANCELED = "canceled while it ran"
SETTLE_LIMIT_S, POLL_S = 60.0, 0.1
EXACT_USD = 1e-9


class Sender(Protocol):
    """The attacker's client (bench/attacks.py)."""

    reasons: Counter[str]
    statuses: Counter[int]

    async def post(self, path: str, body: object) -> int:
        """Sends a request and counts its answer. Returns the status, 0 without an answer."""

    async def ask(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        """Sends a request that is not counted. Returns the body of its answer, or nothing."""

    async def upload(self, data: bytes) -> dict[str, Any]:
        """Uploads a file of a batch. Returns the body of its answer, or nothing."""

    def url_of(self, path: str) -> str:
        """The URL of a file of the server of files."""


Act = Callable[[Sender], Awaitable[int]]


def slow_document() -> str:
    """A small PDF whose pages take seconds each to draw, as a data: URI."""
    content = stream(b"", b"0 0 612 792 re f\n" * FILLS)
    return _data_uri(pages_pdf([content] * SLOW_PAGES), "application/pdf")


def quick_document() -> str:
    """A PDF of a page with a text layer, as a data: URI. No two are alike."""
    line = b"BT /F1 12 Tf 1 0 0 1 72 700 Tm (%s) Tj ET\n" % text(12).encode()
    return _data_uri(pages_pdf([stream(b"", line)]), "application/pdf")


def _data_uri(data: bytes, media_type: str) -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def document_body(uri: str) -> dict[str, Any]:
    """The body of POST /v1/ocr."""
    return {"model": READER, "document": {"type": "document_url", "document_url": uri}}


# -- 21: runs that are canceled and deleted at the same moment


def race_runs() -> Act:
    """Cancels and deletes a run after its first step, both at once."""

    async def act(sender: Sender) -> int:
        body = {"version": RACE, "input": {"text": text(12)}}
        run = await sender.ask("POST", "/v1/predictions", body)
        path = f"/v1/predictions/{run.get('id')}"
        await asyncio.sleep(random.uniform(0.02, 0.6))
        deleting = asyncio.create_task(sender.ask("DELETE", path))
        status = await sender.post(f"{path}/cancel", {})
        await deleting
        return status

    return act


def check_ledger(redis_url: str, api_url: str) -> Figure:
    """Compares the budget counter of RACER with its rows, once all runs are settled."""
    until_s, difference = time.monotonic() + SETTLE_LIMIT_S, math.inf
    with redis.Redis.from_url(redis_url) as client:
        while difference > EXACT_USD and time.monotonic() < until_s:
            used = float(client.hget(f"penstock:limits:month:t:{RACER}:usd", "used") or 0)
            difference = abs(used - _cost_of_rows_usd(api_url))
            time.sleep(1.0)
    return Figure("budget counter less rows", difference, "USD", "<=", EXACT_USD)


def _cost_of_rows_usd(api_url: str) -> float:
    now_s = int(time.time())
    url = f"{api_url}/v1/usage?from={now_s - 7200 - time.monotonic_ns() % 3600}&to={now_s + 3600}"
    request = urllib.request.Request(url, headers=bearer(RACER))
    with urllib.request.urlopen(request, timeout=30) as answer:
        return float(json.load(answer)["range"]["total"]["cost_usd"])


# -- 25: documents that hold the processes of a class


def read_slow_documents() -> Act:
    """Half of them as requests that wait, half as predictions."""
    document = slow_document()

    async def act(sender: Sender) -> int:
        if random.random() < 0.5:
            return await sender.post("/v1/ocr", document_body(document))
        body = {"version": READER, "input": {"document": document}}
        status = await sender.post("/v1/predictions", body)
        await asyncio.sleep(1.0)
        return status

    return act


# -- 26: work that ends in a refusal or in nothing


def cut_for_nothing() -> Act:
    """Has a worker tokenize a text that has too many windows."""
    long = "a b " * (CUT_BYTES // 4)
    body = {"model": EMBEDDER, "input": long, "chunk": {"tokens": 8}}
    return lambda sender: sender.post("/v1/embeddings", body)


def fetch_for_nothing() -> Act:
    """Has the API fetch a file that is not an image."""

    def act(sender: Sender) -> Awaitable[int]:
        return sender.post("/v1/images/edits", edit(sender.url_of(JUNK), "64x64", 4, model=PAINTER))

    return act


def decode_for_nothing() -> Act:
    """Has a codec process decode an image that ends too early."""
    source = noise_image(1024)
    broken = source[: len(source) // 8 * 4]

    def act(sender: Sender) -> Awaitable[int]:
        return sender.post("/v1/images/edits", edit(broken, "64x64", 4, model=PAINTER))

    return act


def cancel_running_documents() -> Act:
    """Cancels a document once a worker reads it."""
    document = slow_document()

    async def act(sender: Sender) -> int:
        body = {"version": READER, "input": {"document": document}}
        created = await sender.ask("POST", "/v1/predictions", body)
        path = f"/v1/predictions/{created.get('id')}"
        if "id" not in created:
            return await sender.post("/v1/predictions", body)
        for _ in range(100):
            if (await sender.ask("GET", path)).get("status") != "starting":
                sender.reasons[CANCELED] += 1
                break
            await asyncio.sleep(POLL_S)
        return await sender.post(f"{path}/cancel", {})

    return act


def check_cuts(statuses: Mapping[int, int], seconds: float) -> Figure:
    """The tokens that were read of texts that were refused."""
    tokens = statuses.get(400, 0) * estimate_tokens("a b " * (CUT_BYTES // 4))
    return _within("tokens cut for nothing", tokens, PLANS[WASTEFUL].tokens_per_min, seconds)


def check_refused(count: int, seconds: float) -> Figure:
    """The requests that were refused after work was done for them."""
    return _within("requests for nothing", count, PLANS[WASTEFUL].requests_per_min, seconds)


def check_canceled(reasons: Mapping[str, int], seconds: float) -> Figure:
    """The pages of documents that were canceled."""
    pages = reasons.get(CANCELED, 0) * SLOW_PAGES
    return _within("pages canceled", pages, PLANS[WASTEFUL].work_per_min, seconds)


def _within(name: str, used: float, per_min: int | None, seconds: float) -> Figure:
    assert per_min is not None, "the plan has this limit; this is a bug"
    return Figure(name, used, "", "<=", per_min * math.ceil(seconds / 60))


# -- 27: a line of a batch whose bytes cost more than the budget


def line_beyond_the_budget() -> Act:
    """A batch of one line, until it ends."""

    async def act(sender: Sender) -> int:
        line = json.loads(batch_file(1, 12))
        words = text(LINE_BYTES // 7)[:LINE_BYTES]
        line["body"] |= {"input": words, "truncate": "end"}
        file = await sender.upload(json.dumps(line).encode() + b"\n")
        body = {
            "input_file_id": file.get("id"),
            "endpoint": "/v1/embeddings",
            "completion_window": "24h",
        }
        batch = await sender.ask("POST", "/v1/batches", body)
        while batch.get("status") in ("validating", "in_progress", "finalizing"):
            await asyncio.sleep(POLL_S)
            batch = await sender.ask("GET", f"/v1/batches/{batch['id']}")
        ended = f"batch {batch.get('status')}, {batch.get('request_counts')}"
        sender.reasons[ended] += 1
        sender.statuses[200] += 1
        await asyncio.sleep(0.5)
        return 200

    return act


def check_batches(reasons: Mapping[str, int]) -> Figure:
    """The batches whose line was computed, or refused for good."""
    ended = sum(count for reason, count in reasons.items() if reason.startswith("batch completed"))
    return Figure("batches that ended", ended, "", ">=", 1)
