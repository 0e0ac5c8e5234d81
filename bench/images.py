"""Responses from the cache while images are being decoded, and edits whose deadlines pass.

16 callers repeatedly send a PNG file with 25 megapixels of 16-bit RGBA. No image worker is running,
because the edits request less than one step and are therefore rejected as soon as the image is
decoded. Quiet and busy periods are measured alternately on one API.
"""

from __future__ import annotations

import struct
import time
import zlib
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil

from bench.load.generator import LoadOrder, drive, embedding_bodies, percentiles
from bench.pipeline import MODEL, Part, repeating, running
from bench.report import Figure, Outcome

CALLERS = 16
SIDE = 5000
CONNECTIONS = 1000
SECONDS = 10.0
ROUNDS = 3
RATE = 50.0
"""Number of requests per second served from the cache."""
DEADLINE_S = 2.0
TEXTS = 50
TOO_FEW_STEPS = {"prompt": "a circle", "num_inference_steps": "1", "strength": "0.5"}
LOOK_S = 0.02
MB = 1_000_000


def run() -> Outcome:
    png, figures = _png(), []
    with (
        running() as pipeline,
        pipeline.another_api() as api,
        httpx.Client(base_url=f"http://127.0.0.1:{api.port}", timeout=120) as client,
    ):
        bodies = embedding_bodies(MODEL, pipeline.texts.short(TEXTS))
        drive(LoadOrder(api.port, bodies, 8))
        quiet_ms: list[float] = []
        busy_ms: list[float] = []
        before_bytes = api.rss_bytes()
        statuses: list[int] = []
        used_bytes: list[tuple[int, int]] = []
        for _ in range(ROUNDS):
            quiet_ms += _hits_ms(api, bodies)
            with (
                repeating(1, lambda: _read_memory(api)) as looks,
                repeating(CALLERS, lambda: _edit(client, png)) as answered,
            ):
                busy_ms += _hits_ms(api, bodies)
            statuses += answered
            used_bytes += looks
        late_s = _with_deadline(client, png)
    if set(statuses) != {400}:
        raise RuntimeError(f"only images that were decoded were expected, not {set(statuses)}")
    api_bytes, image_bytes = (max(values) for values in zip(*used_bytes, strict=True))
    quiet, busy = percentiles(quiet_ms), percentiles(busy_ms)
    figures += [
        Figure("cache hit, quiet, p50", quiet["p50"], "ms"),
        Figure("cache hit, quiet, p95", quiet["p95"], "ms"),
        Figure("cache hit while 16 images are decoded, p50", busy["p50"], "ms"),
        Figure("cache hit while 16 images are decoded, p95", busy["p95"], "ms", "<=", 50.0),
        Figure("the same, p99", busy["p99"], "ms"),
        Figure("p95 over quiet", busy["p95"] / quiet["p95"], "times"),
        Figure("images decoded", len(statuses) / (ROUNDS * SECONDS), "/s"),
        Figure("API, resident before", before_bytes / MB, "MB"),
        Figure("API, resident at most", api_bytes / MB, "MB"),
        Figure("API and image processes, resident at most", (api_bytes + image_bytes) / MB, "MB"),
        Figure(
            f"latest answer of 16 with a deadline of {DEADLINE_S:g} s",
            max(late_s),
            "s",
            "<=",
            DEADLINE_S + 1,
        ),
    ]
    return Outcome(figures)


def _hits_ms(api: Part, bodies: list[str]) -> list[float]:
    order = LoadOrder(
        api.port, bodies, CONNECTIONS, send_s=SECONDS, is_cycled=True, rate_per_s=RATE
    )
    report = drive(order)
    if report.failures:
        raise RuntimeError(f"expected only successful responses, got {report.failures}")
    return report.round_trip_ms


def _edit(client: httpx.Client, png: bytes, **headers: str) -> int:
    files = {"image": ("a.png", png, "image/png")}
    return client.post(
        "/v1/images/edits", files=files, data=TOO_FEW_STEPS, headers=headers
    ).status_code


def _with_deadline(client: httpx.Client, png: bytes) -> list[float]:
    """Returns the seconds until each of 16 edits with a deadline got a response."""

    def call() -> float:
        began_s = time.monotonic()
        status = _edit(client, png, **{"x-penstock-deadline-ms": f"{1000 * DEADLINE_S:.0f}"})
        if status not in (400, 429, 504):
            raise RuntimeError(f"an edit returned {status}")
        return time.monotonic() - began_s

    with ThreadPoolExecutor(CALLERS) as threads:
        return [future.result() for future in [threads.submit(call) for _ in range(CALLERS)]]


def _read_memory(api: Part) -> tuple[int, int]:
    """Returns the memory used by the API, and by its image processes, after a short pause."""
    time.sleep(LOOK_S)
    try:
        return api.rss_bytes(), sum(api.image_rss_bytes())
    except psutil.NoSuchProcess:
        return api.rss_bytes(), 0


def _png() -> bytes:
    """Returns a 25-megapixel, 16-bit RGBA image whose file size is 194 kB."""
    row = b"\0" + bytes(8 * SIDE)
    deflate = zlib.compressobj()
    pixels = b"".join([*(deflate.compress(row) for _ in range(SIDE)), deflate.flush()])
    header = struct.pack(">IIBBBBB", SIDE, SIDE, 16, 6, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", pixels), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )
