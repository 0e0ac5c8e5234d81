"""Shared code for all Python client scripts.

Provides URLs, plain HTTP requests for comparison, and reports of each check's outcome. A script
runs in its client's environment, so this module may import only the standard library.
"""

from __future__ import annotations

import asyncio
import base64
import inspect
import json
import math
import os
import struct
import threading
import traceback
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Generic, TypeVar
from uuid import uuid4

URL = os.environ["PENSTOCK_CLIENTS_URL"]
KEY = os.environ["PENSTOCK_CLIENTS_KEY"]
EMBEDDER = os.environ["PENSTOCK_CLIENTS_EMBEDDER"]
PAINTER = os.environ["PENSTOCK_CLIENTS_PAINTER"]
WRITER = os.environ["PENSTOCK_CLIENTS_WRITER"]
BIGQUERY = os.environ["PENSTOCK_CLIENTS_BIGQUERY"]
EXPECTED = os.environ["PENSTOCK_CLIENTS_EXPECTED"]
AUDIO = os.environ["PENSTOCK_CLIENTS_AUDIO"]
WRONG_KEY = "wrong-" + "0" * 40
LIMIT_S = float(os.environ["PENSTOCK_CLIENTS_LIMIT_S"])
"""Limit for one response: it usually takes well under a second, or a few seconds to draw images or
generate text.
"""
MIN_COSINE = 0.9999
"""Minimum cosine similarity between two bf16 vectors for the same text, which may come from batches
of different lengths.
"""
PNG = b"\x89PNG\r\n"
PROMPT = "a large red circle on a white background"

E = TypeVar("E", bound=Exception)
_checks: list[Callable[[], Any]] = []


class Skip(Exception):
    """A check does not apply here. The message explains why."""


def check(function: Callable[[], Any]) -> Callable[[], Any]:
    """Registers a function, async or not, for `main` to run. Its name describes the check."""
    _checks.append(function)
    return function


def main() -> None:
    """Runs all checks in order and prints one line of JSON for each."""
    for function in _checks:
        name, outcome, reason = function.__name__.strip("_").replace("_", " "), "passed", ""
        try:
            made = function()
            if inspect.isawaitable(made):
                asyncio.run(_awaited(made))
        except Skip as skip:
            outcome, reason = "skipped", str(skip)
        except Exception as error:
            outcome, reason = "failed", _reason(error, function.__name__)
        print(json.dumps({"check": name, "outcome": outcome, "reason": reason[:2000]}), flush=True)


def _reason(error: Exception, name: str) -> str:
    """The error, with the line of the check that raised it."""
    frames = [one for one in traceback.extract_tb(error.__traceback__) if one.name == name]
    where = f"line {frames[-1].lineno}: " if frames else ""
    what = str(error) or (frames[-1].line if frames else "")
    return f"{where}{type(error).__name__}: {what}"


async def _awaited(made: Any) -> None:
    await made


class Raised(Generic[E]):
    """The error raised in a block."""

    error: E


@contextmanager
def raises(kind: type[E]) -> Iterator[Raised[E]]:
    """Fails unless the block raises an error of this kind."""
    caught: Raised[E] = Raised()
    try:
        yield caught
    except kind as error:
        caught.error = error
        return
    raise AssertionError(f"no {kind.__name__} was raised")


def post(path: str, body: dict[str, Any]) -> Any:
    """The service's decoded response to a request made without any client."""
    return json.loads(_answer(path, KEY, json.dumps(body).encode()))


def needs_keys() -> None:
    """Skips a check about keys if the service accepts any key.

    Raises:
        Skip: the service accepts any key.
    """
    try:
        _answer("/v1/models", WRONG_KEY, None)
    except urllib.error.HTTPError:
        return
    raise Skip("this service takes any key")


def needs_text() -> str:
    """Returns the text model.

    Raises:
        Skip: the service does not have one.
    """
    if not WRITER:
        raise Skip("this service has no text model: the extra `text` is not installed")
    return WRITER


def bigquery_url() -> str:
    """BigQuery's URL, for a reporting team's clients.

    Raises:
        Skip: the service runs elsewhere, with Google's BigQuery.
    """
    if not BIGQUERY:
        raise Skip("there is no embedded BigQuery at this service")
    return BIGQUERY


def needs_same_machine() -> None:
    """Skips a check in which the service calls back, unless both are on this machine.

    Raises:
        Skip: the service is on another machine, which can't call this one.
    """
    if not URL.startswith("http://127.0.0.1:"):
        raise Skip("a service on another machine can't call this one")


def _answer(path: str, key: str, body: bytes | None) -> bytes:
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    asked = urllib.request.Request(URL + path, data=body, headers=headers)
    with urllib.request.urlopen(asked, timeout=LIMIT_S) as answer:
        found: bytes = answer.read()
    return found


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Runs a server on this machine during the block, and yields its URL."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def relay_that_loses_the_first_answer() -> Iterator[str]:
    """Yields the URL of a relay that forwards to the service but hangs up instead of returning the
    first response.
    """
    received: list[str] = []

    class Relay(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            names = ("authorization", "content-type", "idempotency-key")
            headers = {name: self.headers[name] for name in names}
            asked = urllib.request.Request(URL + self.path, data=body, headers=headers)
            with urllib.request.urlopen(asked, timeout=LIMIT_S) as answer:
                data = answer.read()
                received.append(self.path)
                if len(received) == 1:
                    self.close_connection = True
                    return
                self.send_response(answer.status)
                for name in ("content-type", "content-length", "idempotent-replayed"):
                    if name in answer.headers:
                        self.send_header(name, answer.headers[name])
                self.end_headers()
                self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            """Keeps request logs out of the output."""

    with serving(Relay) as url:
        yield url


def vectors(texts: Sequence[str], **options: Any) -> list[list[float]]:
    """The texts' vectors, requested without a client."""
    answer = post("/v1/embeddings", {"model": EMBEDDER, "input": list(texts), **options})
    return [item["embedding"] for item in answer["data"]]


def decoded(embedding: str) -> list[float]:
    """The floats in a base64 embedding."""
    data = base64.b64decode(embedding)
    return list(struct.unpack(f"<{len(data) // 4}f", data))


def assert_same(got: Sequence[Sequence[float]], expected: Sequence[Sequence[float]]) -> None:
    """Fails unless both have the same unit vectors in the same order."""
    assert len(got) == len(expected), f"{len(got)} vectors, not {len(expected)}"
    for number, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert len(one) == len(other), f"vector {number}: {len(one)} dimensions, not {len(other)}"
        cosine = sum(a * b for a, b in zip(one, other, strict=True))
        assert cosine >= MIN_COSINE, f"vector {number}: cosine {cosine:.4f}"
        assert math.isclose(math.hypot(*one), 1, abs_tol=1e-3), f"vector {number}: not of length 1"


def fresh(count: int = 3) -> list[str]:
    """Texts of different lengths that are not in any cache."""
    return [f"{uuid4().hex} {'flows to the sea ' * (n % 5 + 1)}" for n in range(count)]


def assert_png(data: bytes) -> None:
    """Fails unless `data` begins with a PNG file's signature."""
    assert data.startswith(PNG), data[:20]


def half_png(side: int = 64) -> bytes:
    """A square PNG with `side` pixels per side.

    Its left half is black, and its right half is white and transparent.

    As a mask, it selects the right half, whether the API reads brightness or transparency.
    """

    def chunk(kind: bytes, data: bytes) -> bytes:
        checksum = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", checksum)

    row = b"\0" + b"\0\0\0\xff" * (side // 2) + b"\xff\xff\xff\0" * (side // 2)
    header = struct.pack(">IIBBBBB", side, side, 8, 6, 0, 0, 0)
    chunks = {b"IHDR": header, b"IDAT": zlib.compress(row * side), b"IEND": b""}
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*pair) for pair in chunks.items())
